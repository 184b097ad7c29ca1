"""swap and unswap: an existing model, made to compute with clearhead's attention, in place, and back.

One of torch's modules changes its class and nothing else: parameters, buffers, hooks, names and every reference to it
stay, so optimizers and checkpoints never notice. In a model of Hugging Face transformers the config selects the
attention function, and layers, feedforwards, norms and dropouts change their class. Plain linear layers change theirs
in any model.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from clearhead.arguments import flag
from clearhead.choices import is_invariant
from clearhead.errors import UnsupportedError
from clearhead.integrations.freeze import unfreeze
from clearhead.integrations.recast import class_of, fast_of, original_of, recast
from clearhead.integrations.report import BEFORE, OUTSIDE, OUTSIDE_IN_TRAINING, SwapReport, SwapRow
from clearhead.integrations.torch.attention import SwappedMultiheadAttention
from clearhead.integrations.torch.layers import (
    ATTENTIONS,
    SwappedTransformerDecoder,
    SwappedTransformerDecoderLayer,
    SwappedTransformerEncoder,
    SwappedTransformerEncoderLayer,
)
from clearhead.integrations.torch.parts import LINEARS, SwappedDropout, SwappedLinear, linear_gains
from clearhead.integrations.torch.quantized import restored_quantized, swap_quantized
from clearhead.nn.checks import check_model
from clearhead.nn.reading import is_frozen
from clearhead.projection import Gain, choice

__all__ = ["swap", "unswap"]

#: torch's classes and ours; parts come before what consists of them.
_REPLACEMENTS: Final[Mapping[type[nn.Module], type[nn.Module]]] = {
    nn.MultiheadAttention: SwappedMultiheadAttention,
    nn.TransformerEncoderLayer: SwappedTransformerEncoderLayer,
    nn.TransformerDecoderLayer: SwappedTransformerDecoderLayer,
    nn.TransformerEncoder: SwappedTransformerEncoder,
    nn.TransformerDecoder: SwappedTransformerDecoder,
}
#: Parts of a layer that are replaced with it.
_SMALL_PARTS: Final[Mapping[type[nn.Module], type[nn.Module]]] = {nn.Linear: SwappedLinear, nn.Dropout: SwappedDropout}
_FUSED: Final = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
#: Why a linear layer is not on the kernels for every call.
_FEW_ROWS: Final = "calls of few rows without gradients; torch's GEMM is as fast for others"
_ATTENDS: Final = re.compile(r"Attention|Attn|MHA")
_LOCK: Final = threading.Lock()


def swap(model: nn.Module, *, leave_padding_out: bool = True) -> SwapReport:
    """Make an existing model compute with clearhead's attention and kernels, in place.

    In a model of Hugging Face transformers, or one within ``model``, attention goes through the implementation
    ``"clearhead"``. Layers, feedforwards and norms whose structure is recognised are tried against the original on
    small random inputs, outputs and gradients, and fused if they agree. A fused layer removes padding where nothing is
    cached; its output at padding is 0. With ``output_attentions=True`` a model returns the weights of eager attention,
    and its layers run unfused.

    Every ``torch.nn.MultiheadAttention`` computes by ``attention``; ``TransformerEncoderLayer``,
    ``TransformerDecoderLayer`` and their stacks use it in training and in eval mode, and a ``TransformerEncoder`` with
    a key padding mask removes padding. Arguments, returns, masks (``True`` forbids, as in torch), parameters,
    ``state_dict``, hooks, class names and ``isinstance`` are unmodified.

    Every plain ``torch.nn.Linear`` of any model, attention or none, computes by clearhead's GEMM, forward and backward,
    where the table of processors names it for float32 or bfloat16 on the CPU. Each call is decided by its size, so
    small ones go to torch. On Intel's processors torch's GEMM is as fast in float32, and calls of 4 to 24 rows without
    gradients alone are clearhead's, by layers of 2^20 weights or more: a batch's tokens that are decoded. Layers with
    fewer than 2^14 weights, subclasses, parametrized layers and layers on other devices or of other dtypes are left;
    swap again after the model has moved.

    Every ``torch.nn.Linear`` whose weight torchao quantised to int8 or int4, and every linear layer that
    ``torch.ao.quantization.quantize_dynamic`` made, computes on the kernels, which read the integers where they lie. A
    layout is known by its public attributes, and a trial compares the layer with its own result. What is not known or
    differs is left, and its row has the reason. Layers of torchao are parts of fused ones in calls without gradients.

    Under ``ch.set_invariant(True)`` linear layers and parts of any size are replaced, and the report has a row for each
    module that torch computes, whose bits may depend on the batch (``report.outside``). Embeddings and norms that torch
    computes keep the bits of their output, and not those of their parameters' gradients; a row says so.

    Three things differ, where torch is undefined or disagrees with itself: a query that may attend to nothing gives
    0 and not NaN; the output of a ``TransformerEncoder`` at padding is 0, in training too; and ``is_causal=True``
    without a mask raises in eval mode too. A hook inside a stack, or a ``forward`` that was replaced on an object,
    keeps the batch padded.

    Quantise before swapping: ``quantize_dynamic`` looks for the class ``nn.Linear`` and does not find a swapped linear
    layer, which warns. Unswap before ``torch.jit.script``, which compiles torch's modules only.

    Args:
        model: changed in place; swapping twice changes what was left before, and ``leave_padding_out``.
        leave_padding_out: whether encoder stacks, and layers of transformers, remove padding, those replaced before
            among them; with False padded tokens get what torch gives them while training, and transformers at any time.

    Returns:
        A row for each module that was replaced, or that attends and was left, with the reason. Linear layers of a
        replaced layer have no row. If the table names torch's GEMM for linear layers, one row says so.

    Raises:
        UnsupportedError: ``model`` is not a module or is frozen, or ``CLEARHEAD_PROJECTION`` names no path; nothing is
            changed then.

    Cost: a walk over the modules, and a trial of less than 50 ms for each class and configuration of transformers.

    >>> import torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> print(swap(torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)))
    fused   2 TransformerEncoderLayer
    native  1 TransformerEncoder
    native  2 MultiheadAttention
    >>> print(swap(torch.nn.Sequential(torch.nn.Linear(8, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))))
    no module of the model attends, or was swapped
    """
    check_model("swap", model)
    if any(map(is_frozen, model.modules())):
        raise UnsupportedError.about(
            "swap", "model", must="not be frozen", got="a frozen part", then="Call ch.unfreeze(model) first."
        )
    leave_padding_out = flag("swap", "leave_padding_out", leave_padding_out)
    with _LOCK:
        # First, since it may raise.
        for module in model.modules():
            linear_gains(module, alone=True)
        before = {module for _, module in _swapped_linears(model)}
        # Before what consists of linear layers.
        quantized = swap_quantized(model)
        rows, within = _swap_transformers(model)
        named = [(name, module) for name, module in model.named_modules() if module not in within]
        changed = [module for _, module in named if class_of(module) in _REPLACEMENTS and _why_left(module) is None]
        rows += [row for name, module in named if (row := _row(name, module)) is not None]
        for module in changed:
            for part in _small_parts(module):
                recast(part, _SMALL_PARTS[class_of(part)])
            recast(module, _REPLACEMENTS[class_of(module)])
        alone = {module for _, module in _outside_layers(model)}
        gains = [(name, module, linear_gains(module, alone=module in alone)) for name, module in model.named_modules()]
        for _, module, gain in gains:
            if gain:
                recast(module, LINEARS[gain])
        rows += [_linear_row(name, module, module in before) for name, module in _swapped_linears(model)]
        rows += quantized
        left = [(name, module) for name, module, gain in gains if gain is Gain.NOTHING and module in alone]
        rows += _left_linears(left)
        if is_invariant():
            rows = _outside_promise(model, rows)
        for module in model.modules():
            if hasattr(type(module), "leaves_padding_out"):
                vars(module).pop("leaves_padding_out", None)
                if not leave_padding_out:
                    vars(module)["leaves_padding_out"] = False
    return SwapReport(tuple(rows))


def unswap(model: nn.Module) -> SwapReport:
    """Undo ``swap``, in place: every module gets its original class, with the parameters it has now. A frozen model is
    unfrozen first.

    Args:
        model: a model, or a part of one; what ``swap`` did not replace is not touched.

    Returns:
        The modules that were restored.

    Raises:
        UnsupportedError: ``model`` is not a module.

    >>> module = nn.MultiheadAttention(8, 2)
    >>> swap(module).replaced == unswap(module).replaced, type(module) is nn.MultiheadAttention
    (True, True)
    """
    check_model("unswap", model)
    unfreeze(model)
    with _LOCK:
        hf = _transformers()
        linears = [_restored(name, nn.Linear) for name, _ in _swapped_linears(model)]
        quantized = [row for name, module in model.named_modules() if (row := restored_quantized(name, module))]
        rows, within = ([], set()) if hf is None else hf.restore(model)
        for name, module in model.named_modules():
            original = original_of(class_of(module))
            if original is None:
                continue
            vars(module).pop("leaves_padding_out", None)
            recast(module, original)
            if module not in within and original not in _SMALL_PARTS:
                rows.append(_restored(name, original))
    return SwapReport((*rows, *linears, *quantized))


def _linear_row(name: str, module: nn.Module, was_swapped: bool) -> SwapRow:
    """The row of a swapped linear layer."""
    reasons = [_FEW_ROWS] if class_of(module) is LINEARS[Gain.FEW_ROWS] else []
    return replace(_restored(name, nn.Linear), reason="; ".join(reasons + [BEFORE] * was_swapped))


def _left_linears(named: Sequence[tuple[str, nn.Module]]) -> list[SwapRow]:
    """One row for all linear layers that the table leaves to torch."""
    left = [(name, module) for name, module in named if type(module) is nn.Linear]
    if not left:
        return []
    name, module = left[0]
    why = choice("forward", module.weight.dtype).reason
    return [SwapRow(name, "Linear", "left", None, f"torch's GEMM is as fast for {len(left)} of them ({why})")]


#: Modules of torch that compute by element, by row or not at all, in one order whatever the batch is.
_ONE_ORDER: Final = (
    *(nn.Identity, nn.Dropout, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.ReLU, nn.Tanh, nn.Flatten, nn.Unflatten),
    *(nn.ModuleList, nn.ModuleDict, nn.Sequential),
)
#: Files of modules that compute without parameters. Torch's GELU, SiLU and others round the last elements of a tensor
#: otherwise than those before them.
_COMPUTE: Final = ("torch.nn.", "transformers.activations")


def _outside_promise(model: nn.Module, rows: Sequence[SwapRow]) -> list[SwapRow]:
    """The rows, and one for each other module that computes by itself and is not replaced: torch decides its bits."""
    named = [_with_order(row, model.get_submodule(row.path)) for row in rows]
    listed = {row.path for row in rows}
    for name, module in _outside_layers(model):
        kind = class_of(module)
        if name in listed or original_of(kind) is not None or kind.__module__.startswith("clearhead."):
            continue
        learns = next(module.parameters(recurse=False), None) is not None
        if next(module.children(), None) is not None:
            # Its own parameters, as positions, are added to those of its modules.
            reason = OUTSIDE_IN_TRAINING if learns else ""
        elif learns:
            reason = OUTSIDE_IN_TRAINING if kind in _ONE_ORDER else OUTSIDE
        else:
            reason = OUTSIDE if kind.__module__.startswith(_COMPUTE) and kind not in _ONE_ORDER else ""
        if reason:
            named.append(SwapRow(name, kind.__name__, "left", None, reason))
    return named


def _with_order(row: SwapRow, module: nn.Module) -> SwapRow:
    """The row of a module, with what its order of sums is where that is torch's."""
    hf = _transformers()
    if row.how == "left":
        order = OUTSIDE
    elif hf is not None and hf.adds_positions(module):
        order = OUTSIDE_IN_TRAINING
    else:
        return row
    return replace(row, reason=f"{order}; {row.reason}" if row.reason else order)


def _swapped_linears(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The swapped linear layers of a model that are not part of a replaced layer."""
    return [(name, module) for name, module in _outside_layers(model) if class_of(module) in LINEARS.values()]


def _outside_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of a model that are neither a replaced layer nor a part of one."""
    layers, outside = set[str](), list[tuple[str, nn.Module]]()
    for name, module in model.named_modules():
        # A module comes before its parts.
        parents = name.split(".")[:-1]
        if any(".".join(parents[:count]) in layers for count in range(len(parents) + 1)):
            continue
        if original_of(class_of(module)) in _REPLACEMENTS or fast_of(module) is not None:
            layers.add(name)
        else:
            outside.append((name, module))
    return outside


def _restored(name: str, original: type[nn.Module]) -> SwapRow:
    return SwapRow(name, original.__name__, "fused" if original in _FUSED else "native")


def _transformers() -> Any:
    """The integration of transformers, if a model of it may exist: its models were imported then."""
    if "transformers.modeling_utils" not in sys.modules:
        return None
    from clearhead.integrations.transformers import replace as models

    return models


def _swap_transformers(model: nn.Module) -> tuple[list[SwapRow], set[nn.Module]]:
    """Swap the models of transformers in ``model``; their rows and their modules."""
    hf = _transformers()
    if hf is None:
        return [], set()
    rows: list[SwapRow] = []
    within: set[nn.Module] = set()
    for path, each in hf.models(model):
        rows += hf.swap_model(path, each)
        within.update(module for module in each.modules() if not _is_torchs(module))
    return rows, within


def _is_torchs(module: nn.Module) -> bool:
    return isinstance(module, tuple(_REPLACEMENTS))


def _row(name: str, module: nn.Module) -> SwapRow | None:
    """The row of a module outside models of transformers, before it is replaced."""
    kind = class_of(module)
    original = original_of(kind)
    if original is not None:
        return replace(_restored(name, original), reason=BEFORE) if original in _REPLACEMENTS else None
    why = _why_left(module)
    if why is not None:
        return SwapRow(name, type(module).__name__, "left", None, why)
    return _restored(name, kind) if kind in _REPLACEMENTS else None


def _why_left(module: nn.Module) -> str | None:
    """Why a module that attends, or contains some that do, is left; None if it is or becomes ours, or does neither."""
    kind = class_of(module)
    if kind in _REPLACEMENTS:
        if "forward" in vars(module):
            return "its forward was replaced on the object"
        for name, part in _attending_parts(module):
            replaced = class_of(part) in _REPLACEMENTS and _why_left(part) is None
            if original_of(class_of(part)) is None and not replaced:
                return f"its {name}, a {type(part).__name__}, is left"
        return None
    if original_of(kind) is not None or kind.__module__.startswith("clearhead."):
        return None
    if _is_torchs(module):
        return "a subclass may compute something else"
    if isinstance(module, torch.jit.ScriptModule):
        has_replacement = any(module.original_name == theirs.__name__ for theirs in _REPLACEMENTS)
        then = "compiled by TorchScript, which ours cannot be; swap the model itself and use torch.compile"
        return then if has_replacement else None
    if kind.__module__.startswith("transformers.") and _ATTENDS.search(kind.__name__):
        return "part of a transformers model outside its PreTrainedModel; swap the model before it is divided"
    if _ATTENDS.search(kind.__name__) and next(module.parameters(), None) is not None:
        return f"attention of {kind.__module__.partition('.')[0]}, which swap does not recognise"
    return None


def _attending_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A layer's attentions, or a stack's layers."""
    for name, part in module.named_children():
        if name in ATTENTIONS:
            yield name, part
        elif name == "layers":
            yield from ((f"layers.{place}", layer) for place, layer in part.named_children())


def _small_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Linear layers and dropouts of one of torch's layers; an attention's ``out_proj`` is never called."""
    if class_of(module) in _FUSED:
        for part in module.children():
            if class_of(part) in _SMALL_PARTS and "forward" not in vars(part):
                yield part
