"""swap and unswap: an existing model, made to compute with our attention, in place, and back.

One of torch's modules changes its class and nothing else. Parameters, buffers, hooks, names and every reference to it
stay, so optimizers and checkpoints never notice. A model of Hugging Face transformers is told by its config which
attention to call, and only its linear layers, feedforwards and dropouts change their class.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Final

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from clearhead.arguments import flag
from clearhead.bridges.torch_attention import SwappedMultiheadAttention
from clearhead.bridges.torch_layers import (
    ATTENTIONS,
    SwappedTransformerDecoder,
    SwappedTransformerDecoderLayer,
    SwappedTransformerEncoder,
    SwappedTransformerEncoderLayer,
)
from clearhead.bridges.torch_parts import SwappedDropout, SwappedLinear
from clearhead.errors import UnsupportedError

__all__ = ["Part", "SwapReport", "swap", "unswap"]

#: torch's classes and ours for them; parts come before what is made of them.
_REPLACEMENTS: Final[Mapping[type[nn.Module], type[nn.Module]]] = {
    nn.MultiheadAttention: SwappedMultiheadAttention,
    nn.TransformerEncoderLayer: SwappedTransformerEncoderLayer,
    nn.TransformerDecoderLayer: SwappedTransformerDecoderLayer,
    nn.TransformerEncoder: SwappedTransformerEncoder,
    nn.TransformerDecoder: SwappedTransformerDecoder,
}
#: What is replaced with a layer, where it is one of the layer's own parts and not in the report.
_SMALL_PARTS: Final[Mapping[type[nn.Module], type[nn.Module]]] = {nn.Linear: SwappedLinear, nn.Dropout: SwappedDropout}
_ORIGINALS: Final = {ours: theirs for theirs, ours in (*_REPLACEMENTS.items(), *_SMALL_PARTS.items())}
_LOCK: Final = threading.Lock()
_SHOWN: Final = 4


@dataclass(frozen=True)
class Part:
    """A module of the model.

    Attributes:
        name: its path, as in ``named_modules``; empty for the model itself.
        kind: the name of its class before.
        why: why it was left; empty where it was not.
    """

    name: str
    kind: str
    why: str = ""


@dataclass(frozen=True)
class SwapReport:
    """What ``swap`` or ``unswap`` did; ``str`` of it is a short list.

    Attributes:
        replaced: modules that changed.
        left: modules that attend, or hold some that do, and did not change, each with the reason.
        before: modules that an earlier ``swap`` had replaced.
    """

    replaced: tuple[Part, ...]
    left: tuple[Part, ...] = ()
    before: tuple[Part, ...] = ()

    def __str__(self) -> str:
        lines = []
        for title, parts in (("replaced", self.replaced), ("replaced before", self.before), ("left", self.left)):
            if parts or title == "replaced":
                lines.append(f"{title}: {len(parts)} module{'' if len(parts) == 1 else 's'}")
            groups: dict[tuple[str, str], list[str]] = {}
            for part in parts:
                groups.setdefault((part.kind, part.why), []).append(part.name or "(the model itself)")
            for (kind, why), names in groups.items():
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                lines.append(f"  {kind}: {', '.join(names[:_SHOWN])}{more}" + (f" ({why})" if why else ""))
        return "\n".join(lines)


def swap(model: nn.Module, *, leave_padding_out: bool = True) -> SwapReport:
    """Make the attention of an existing model ours, in place.

    A model of Hugging Face transformers, or one within ``model``, attends through ``bridges.transformers``; its
    linear layers go through the faster product, layers and feedforwards that are known are one step, and dropout is
    ours. Layers that are one step work on real tokens only where nothing is cached: their output at padding is 0.

    Every ``torch.nn.MultiheadAttention`` computes by ``attention``; ``TransformerEncoderLayer``,
    ``TransformerDecoderLayer`` and their stacks go through it in training and in eval mode alike, and a
    ``TransformerEncoder`` with a key padding mask works on real tokens only. Arguments, returns, masks (``True``
    forbids, as in torch), parameters, ``state_dict`` and hooks stay what they were.

    Three things differ, where torch is undefined or disagrees with itself: a query that may attend to nothing gives
    0 and not NaN; the output of a ``TransformerEncoder`` at padding is 0, in training too; and ``is_causal=True``
    without a mask raises in eval mode too. Hooks inside a stack keep its batch padded, to see what torch shows them,
    and so does a ``forward`` that was replaced on an object.

    Quantise first: ``quantize_dynamic`` looks for ``nn.Linear`` itself, and would find none in a swapped layer. Unswap
    before ``torch.jit.script``, which compiles torch's modules only; to ``torch.fx`` swapped modules are leaves.

    Args:
        model: changed in place; swapping again changes what was left before, and ``leave_padding_out``.
        leave_padding_out: whether encoder stacks, and layers of transformers, skip padding, those replaced before among
            them; with False its tokens get what torch gives them while training, and transformers at any time.

    Returns:
        What was replaced, and what was left and why.

    Raises:
        UnsupportedError: ``model`` is not a module, or a model of transformers has attention of its own; nothing is
            changed then.

    Cost: a walk over the modules; no copy.

    >>> import torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> print(swap(torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)))
    replaced: 5 modules
      TransformerEncoder: (the model itself)
      TransformerEncoderLayer: layers.0, layers.1
      MultiheadAttention: layers.0.self_attn, layers.1.self_attn
    """
    _check_model("swap", model)
    leave_padding_out = flag("swap", "leave_padding_out", leave_padding_out)
    with _LOCK:
        handed = _hand_over(model, leave_padding_out)
        named = list(model.named_modules())
        changed = [(name, module) for name, module in named if _is_torchs(module) and _why_left(module) is None]
        before = [(name, module) for name, module in named if _ORIGINALS.get(_kind(module)) in _REPLACEMENTS]
        report = SwapReport(
            replaced=(*(Part(name, _kind(module).__name__) for name, module in changed), *handed.now),
            left=tuple(
                Part(name, type(module).__name__, why)
                for name, module in named
                if module not in handed.within and (why := _why_left(module)) is not None
            ),
            before=(*(Part(name, _ORIGINALS[_kind(module)].__name__) for name, module in before), *handed.before),
        )
        for _, module in changed:
            for part in _small_parts(module):
                _recast(part, _SMALL_PARTS[_kind(part)])
            _recast(module, _REPLACEMENTS[_kind(module)])
        for _, module in (*changed, *before):
            _leave_padding_out(module, leave_padding_out)
    return report


def unswap(model: nn.Module) -> SwapReport:
    """Undo ``swap``, in place: every module is of its own class again, with the parameters it has now.

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
    _check_model("unswap", model)
    restored = []
    with _LOCK:
        handed = _take_back(model)
        for name, module in model.named_modules():
            original = _original(_kind(module))
            if original is None:
                continue
            vars(module).pop("leaves_padding_out", None)
            _recast(module, original)
            if original in _REPLACEMENTS:
                restored.append(Part(name, original.__name__))
    return SwapReport((*restored, *handed))


def _hf() -> ModuleType | None:
    """The bridge to transformers, where a model of its may exist: whoever made one has imported its models."""
    if "transformers.modeling_utils" not in sys.modules:
        return None
    from clearhead.bridges import transformers

    return transformers


def _hf_parts() -> ModuleType | None:
    """What the bridge knows of the parts of such models."""
    if _hf() is None:
        return None
    from clearhead.bridges import transformers_layers

    return transformers_layers


def _original(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class that one of ours is in place of."""
    parts = _hf_parts()
    found: type[nn.Module] | None = _ORIGINALS.get(kind) or (None if parts is None else parts.original(kind))
    return found


@dataclass(frozen=True)
class _Handed:
    """What the bridge to transformers took over: attention now, and before; and the modules of its models."""

    now: list[Part] = field(default_factory=list)
    before: list[Part] = field(default_factory=list)
    within: set[nn.Module] = field(default_factory=set)


def _hand_over(model: nn.Module, leave_padding_out: bool) -> _Handed:
    """Hand the models of transformers within ``model`` to the bridge."""
    hf, parts_known, handed = _hf(), _hf_parts(), _Handed()
    if hf is None or parts_known is None:
        return handed
    found = list(hf.models(model))
    for _, each in found:
        hf.check("swap", each)
    for path, each in found:
        parts = _attentions(path, each)
        (handed.now if hf.hand_over(each) else handed.before).extend(parts)
        for part in each.modules():
            ours = parts_known.faster(_kind(part))
            if ours is not None and "forward" not in vars(part):
                _recast(part, ours)
            _leave_padding_out(part, leave_padding_out)
            if type(part).__module__.startswith("transformers."):
                handed.within.add(part)
    return handed


def _leave_padding_out(module: nn.Module, wanted: bool) -> None:
    """Say so to one of ours that may: it does, unless it is told not to."""
    vars(module).pop("leaves_padding_out", None)
    if not wanted and hasattr(type(module), "leaves_padding_out"):
        vars(module)["leaves_padding_out"] = False


def _attentions(path: str, model: nn.Module) -> list[Part]:
    hf = _hf()
    assert hf is not None
    return [Part(f"{path}.{name}".strip("."), type(part).__name__) for name, part in hf.attentions(model)]


def _take_back(model: nn.Module) -> list[Part]:
    """Undo ``_hand_over``, but for linear layers."""
    hf = _hf()
    if hf is None or not hf.take_back(model):
        return []
    return [part for path, each in hf.models(model) for part in _attentions(path, each)]


def _check_model(function: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise UnsupportedError.about(
            function, "model", must="be a torch.nn.Module", got=type(model).__name__, then="Pass the model itself."
        )


def _kind(module: nn.Module) -> type[nn.Module]:
    """The module's class, without what ``torch.nn.utils.parametrize`` put around it."""
    kind: type[nn.Module] = type_before_parametrizations(module)
    return kind


def _is_torchs(module: nn.Module) -> bool:
    return _kind(module) in _REPLACEMENTS


def _why_left(module: nn.Module) -> str | None:
    """Why a module that attends, or holds some that do, stays as it is; None where it is or becomes ours, or is
    nothing of that sort."""
    if _is_torchs(module):
        if "forward" in vars(module):
            return "its forward was replaced on the object"
        for name, part in _attending_parts(module):
            if _kind(part) not in _ORIGINALS and (not _is_torchs(part) or _why_left(part) is not None):
                return f"its {name}, a {type(part).__name__}, is left"
        return None
    if isinstance(module, tuple(_ORIGINALS)):
        return None
    if isinstance(module, tuple(_REPLACEMENTS)):
        return "a subclass may compute something else"
    if isinstance(module, torch.jit.ScriptModule):
        known = any(module.original_name == theirs.__name__ for theirs in _REPLACEMENTS)
        return (
            "compiled by TorchScript, which ours cannot be; swap the model itself and use torch.compile"
            if known
            else None
        )
    if type(module).__module__.startswith("transformers.") and type(module).__name__.endswith("Attention"):
        return "attention of the transformers library, which swap does not know"
    return None


def _attending_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A layer's attentions, or a stack's layers."""
    for name, part in module.named_children():
        if name in ATTENTIONS:
            yield name, part
        elif name == "layers":
            yield from ((f"layers.{place}", layer) for place, layer in part.named_children())


def _small_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Products and dropouts of one of torch's layers; an attention's ``out_proj`` is never called."""
    if _kind(module) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        for part in module.children():
            if _kind(part) in _SMALL_PARTS and "forward" not in vars(part):
                yield part


def _recast(module: nn.Module, kind: type[nn.Module]) -> None:
    """Make the module one of ``kind``; a parametrized one keeps its properties, in a class of its own."""
    if is_parametrized(module):
        own = type(module)
        body = {name: value for name, value in vars(own).items() if name not in ("__dict__", "__weakref__")}
        kind = type(own.__name__, (kind,), body)
    module.__class__ = kind
