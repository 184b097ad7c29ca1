"""freeze and unfreeze: a model for inference, read once, whose layers are one operator."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch import nn

from clearhead.arguments import flag
from clearhead.errors import UnsupportedError
from clearhead.integrations.recast import class_of, original_of
from clearhead.integrations.report import SwapReport, SwapRow
from clearhead.nn.checks import check_model
from clearhead.nn.reading import is_frozen, set_frozen
from clearhead.nn.stacks import Decoder, Encoder
from clearhead.nn.weight_packing import linear_weights, pack_weights, unpack_weights

__all__ = ["freeze", "unfreeze"]

#: The parameters of each frozen module that took gradients before.
_LEARNED: Final[WeakKeyDictionary[nn.Module, Sequence[str]]] = WeakKeyDictionary()
#: Stacks of layers, and the attribute that has these.
_STACKS: Final = {
    Decoder: "blocks",
    Encoder: "blocks",
    nn.TransformerEncoder: "layers",
    nn.TransformerDecoder: "layers",
}
_MODULES: Final = "clearhead.nn."


def freeze(model: nn.Module, *, pack: bool = False) -> SwapReport:
    """Read a model once, for inference: a call no longer looks for what may have changed since the last one.

    All layers of a decoder or an encoder become one operator for calls of up to 2^17 elements (tokens times width), as
    in decoding: of ``ch.nn.Encoder``, ``ch.nn.Decoder`` and what is made of them, of torch's stacks that were swapped,
    and in a swapped model of transformers of each list of layers, or of the most in a row that consist of the same
    parts. Sizes, masks and positions of these may differ, as where windowed and full attention alternate. There a trial
    compares the layers as one with the layers one by one, bitwise. Calls that ask for hidden states or attention
    weights, calls with tensors besides tokens, masks and positions, observers and hooks get the layers one by one, with
    the same bits.

    With ``pack`` the weights of these layers are stored as the GEMM reads them, where otherwise each call lays them
    out: faster up to some hundred rows, in the same memory. The sums then have the order of
    ``ch.set_invariant(True)``, whatever the number of rows. ``state_dict`` and ``unfreeze`` give the original bits.
    Calls layer by layer read the panels too; torch's own operators, as under autocast or a compiler, read a copy that
    is made for the call. Quantised layers that round their inputs get panels beside their integers, a byte more for
    each weight, and keep their bits; weights alone in int8 or int4 are read as they are.

    Values of parameters may still change in place, as by ``load_state_dict``; but what is written through a view,
    ``.data`` or a NumPy array of a packed weight is written to a copy and lost. A frozen model raises in training mode
    and where a submodule or a parameter was replaced, as by quantising or an adapter, or with ``pack`` by ``.to``;
    other attributes count as constant. Its parameters take no gradients until ``unfreeze``. A deep copy and a pickle
    of a packed model have ordinary parameters.

    Args:
        model: a model in eval mode with modules of ``ch.nn``, or swapped; changed in place. Freezing again replaces the
            first time.
        pack: whether the weights of stacks and lists of layers are stored in the kernels' panels.

    Returns:
        A row for each list of layers: ``how`` is ``"fused"`` where it is one operator, with the number of its layers,
        and ``"left"`` with the reason where its layers run one by one.

    Raises:
        UnsupportedError: ``model`` is not a module, is in training mode, or has nothing to freeze.

    Cost: a walk over the modules, and a trial of three short calls for each list of layers; with ``pack`` a copy of
    each weight, one at a time.

    >>> import torch
    >>> import clearhead as ch
    >>> model = ch.nn.LanguageModel(vocab_size=50, embed_dim=8, num_heads=2, num_layers=2, max_len=32).eval()
    >>> print(ch.freeze(model))
    fused  1 Decoder  2 blocks are one operator
    >>> model.generate(torch.tensor([[1, 2, 3]]), 5).shape
    torch.Size([1, 8])
    """
    check_model("freeze", model)
    pack = flag("freeze", "pack", pack)
    if any(part.training for part in model.modules()):
        raise UnsupportedError.about(
            "freeze", "model", must="be in eval mode", got="a part in training mode", then="Call model.eval() first."
        )
    if not any(map(_is_ours, model.modules())):
        raise UnsupportedError.about(
            "freeze", "model", must="have modules of ch.nn, or some that ch.swap replaced", got=type(model).__name__,
            then="Call ch.swap(model) first, and look at its report.",
        )  # fmt: skip
    unfreeze(model)
    for module in model.modules():
        learned = {name: each for name, each in module.named_parameters(recurse=False) if each.requires_grad}
        _LEARNED[module] = [*learned]
        for parameter in learned.values():
            parameter.requires_grad_(False)
    set_frozen(model.modules(), True)
    hf, quantized = _transformers(), _quantized()
    rows = [*_stacks(model), *([] if hf is None else hf.freeze_layers(model))]
    if pack:
        # After the trials, which compare bits: packed weights change them.
        stacks = [linear_weights(model.get_submodule(row.path)) for row in _stacks(model)]
        pack_weights(model, chain(*stacks, () if hf is None else hf.linear_weights(model)))
        if quantized is not None:
            quantized.pack_quantized(model.modules())
        set_frozen(model.modules(), True)
    return SwapReport(tuple(rows))


def unfreeze(model: nn.Module) -> SwapReport:
    """Undo ``freeze``, in place: the model may change again, and its parameters take gradients as before.

    Args:
        model: a model, or a part of one; what is not frozen is not touched.

    Returns:
        A row for each module of a frozen list of layers.

    Raises:
        UnsupportedError: ``model`` is not a module.

    >>> import clearhead as ch
    >>> model = ch.nn.Encoder(8, num_heads=2, num_layers=2).eval()
    >>> ch.freeze(model) == ch.unfreeze(model), all(p.requires_grad for p in model.parameters())
    (True, True)
    """
    check_model("unfreeze", model)
    frozen = [module for module in model.modules() if is_frozen(module)]
    hf, quantized = _transformers(), _quantized()
    rows = [*(_stacks(model) if frozen else []), *([] if hf is None else hf.unfreeze_layers(model))]
    set_frozen(frozen, False)
    unpack_weights(model.modules())
    if quantized is not None:
        quantized.unpack_quantized(model.modules())
    for module in frozen:
        for name in _LEARNED.pop(module, ()):
            getattr(module, name).requires_grad_(True)
    return SwapReport(tuple(rows))


def _stacks(model: nn.Module) -> list[SwapRow]:
    """A row for each stack of clearhead's blocks, and of torch's layers that were swapped."""
    rows = []
    for path, module in model.named_modules():
        name = _STACKS.get(original_of(class_of(module)) or type(module))
        if name is not None and _is_ours(module):
            reason = f"{len(getattr(module, name))} {name} are one operator"
            rows.append(SwapRow(path, type(module).__name__, "fused", None, reason))
    return rows


def _is_ours(module: nn.Module) -> bool:
    """Whether a module is clearhead's, or was swapped."""
    return type(module).__module__.startswith(_MODULES) or original_of(class_of(module)) is not None


def _transformers() -> Any:
    """The part for models of transformers, where a program has imported them."""
    if "transformers.modeling_utils" not in sys.modules:
        return None
    from clearhead.integrations.transformers import freeze as hf

    return hf


def _quantized() -> Any:
    """The part for quantised layers, where ``swap`` has loaded it."""
    return sys.modules.get("clearhead.integrations.torch.quantized")
