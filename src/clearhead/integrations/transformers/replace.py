"""Swap of the modules of one transformers model, and the rows that report it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Final

from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from clearhead.choices import is_invariant
from clearhead.integrations.recast import class_of, fast_of, original_of, recast, replacement
from clearhead.integrations.report import BEFORE, How, SwapRow
from clearhead.integrations.torch.quantized import has_unfused
from clearhead.integrations.transformers.forwards import AttendingForward, LayerForward
from clearhead.integrations.transformers.interface import attends, hand_over, is_marked, models, passes_by, take_back
from clearhead.integrations.transformers.match import LayerMatch, at, layer_matches
from clearhead.integrations.transformers.parts import REPLACEMENTS, FusedFeedForward, NormForward
from clearhead.integrations.transformers.probe import attempt
from clearhead.projection import layer_gains
from clearhead.watch import recognise

__all__ = ["adds_positions", "models", "restore", "swap_model"]

_FUSED: Final = (AttendingForward, FusedFeedForward)
#: Elements of a weight, and of a norm's, from which a feedforward and a norm gain by themselves. Small parts are left
#: unmodified: calling a replacement takes longer than it saves.
_LEAST_WEIGHTS = 2**20
_LEAST_WIDTH = 2**10
#: A file of transformers whose model's ``generate`` would select eager attention, and ours.
_WHISPER: Final = "transformers.models.whisper.modeling_whisper"
_QUANTIZED: Final = "a quantised linear layer of it runs by itself: op by op"
_OURS: Final = "clearhead.integrations.transformers.whisper"


@dataclass(frozen=True)
class AttendingInLayer:
    """The forward of an attention without transformers' interface, which its layer computes: the original's, where the
    layer does not. Observers know the attention by it."""

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Leave the call to the original code."""


recognise(lambda module: isinstance(fast_of(module), AttendingInLayer))


def swap_model(path: str, model: PreTrainedModel) -> list[SwapRow]:
    """Swap a model of transformers in place.

    Returns:
        A row for each layer, attention, feedforward and norm; of what was not replaced, those that attend.
    """
    before = {module for module in model.modules() if passes_by(module)}
    reason = hand_over(model)
    interface = reason is None
    rows: list[SwapRow] = []
    # Submodules first: a layer's trial uses the formulas of its norms.
    for name, module in reversed([*model.named_modules()]):
        row = _swap_module(f"{path}.{name}".strip("."), module, interface, reason)
        if row is not None:
            rows.append(row if module not in before or row.how == "fused" else replace(row, reason=BEFORE))
    layers = {name for name, module in model.named_modules() if isinstance(fast_of(module), LayerForward)}
    layers = {f"{path}.{name}".strip(".") for name in layers}
    return [row for row in rows[::-1] if row.how != "left" or not _is_within(row.path, layers)]


def _is_within(path: str, layers: Set[str]) -> bool:
    """Whether a module is part of one of the layers."""
    names = path.split(".")
    return any(".".join(names[:count]) in layers for count in range(1, len(names)))


def _how(fast: object) -> How:
    """A replaced module's calls are one operation, or several."""
    return "fused" if isinstance(fast, _FUSED) and not _is_disentangled(fast) else "native"


def _is_disentangled(fast: object) -> bool:
    return isinstance(fast, LayerForward) and fast.match.is_disentangled


def adds_positions(module: nn.Module) -> bool:
    """Whether a replaced layer projects positions, which all sequences share: torch adds their gradients."""
    return _is_disentangled(fast_of(module))


def _swap_module(path: str, module: nn.Module, interface: bool, reason: str | None) -> SwapRow | None:
    kind = class_of(module)
    original = original_of(kind)
    if original is not None:
        fast = fast_of(module)
        if fast is None or isinstance(fast, AttendingInLayer):
            return None
        if isinstance(fast, LayerForward) and has_unfused(module):
            return SwapRow(path, original.__name__, "left", None, _QUANTIZED)
        return SwapRow(path, original.__name__, _how(fast), None, BEFORE)
    attending = attends(kind)
    if "forward" in vars(module):
        return (
            SwapRow(path, kind.__name__, "left", None, "its forward was replaced on the object") if attending else None
        )
    if interface and (generating := _generating(kind)) is not None:
        recast(module, generating)
        return None
    if kind in REPLACEMENTS:
        if kind is not Conv1D or layer_gains(module.weight, alone=False):  # type: ignore[arg-type]
            recast(module, REPLACEMENTS[kind])
        return None
    if has_unfused(module):
        if attending == "by interface" and interface:
            return SwapRow(path, kind.__name__, "native", None, "by transformers' attention interface")
        if not attending and next(layer_matches(module), None) is None:
            return None
        return SwapRow(path, kind.__name__, "left", None, (reason if attending else None) or _QUANTIZED)
    trial = attempt(module, interface=interface)
    if trial is not None and trial.fast is not None and not isinstance(trial.fast, LayerForward):
        least = _LEAST_WIDTH if isinstance(trial.fast, NormForward) else _LEAST_WEIGHTS
        if _weights(module) < least and not is_invariant():
            native = SwapRow(path, kind.__name__, "native", trial.difference, "by transformers' attention interface")
            return native if attending == "by interface" and interface else None
    if trial is not None and trial.fast is not None:
        attributes = {"leaves_padding_out": True} if isinstance(trial.fast, LayerForward) else {}
        recast(module, replacement(kind, trial.fast, **attributes))
        if isinstance(trial.fast, LayerForward) and not interface:
            _mark_attentions(trial.fast.match, module)
        return SwapRow(path, kind.__name__, _how(trial.fast), trial.difference)
    if attending == "by interface" and interface:
        return SwapRow(path, kind.__name__, "native", None, "by transformers' attention interface")
    if trial is not None:
        return SwapRow(path, kind.__name__, "left", trial.difference, trial.reason)
    return SwapRow(path, kind.__name__, "left", None, reason or "") if attending else None


def _mark_attentions(match: LayerMatch, layer: nn.Module) -> None:
    """Let observers know the attentions of a layer that computes them itself."""
    for path, row in zip(match.row.attentions, match.attentions, strict=True):
        core: nn.Module = at(at(layer, path), row.core)
        if "forward" not in vars(core) and original_of(class_of(core)) is None:
            recast(core, replacement(class_of(core), AttendingInLayer()))


def _generating(kind: type[nn.Module] | None) -> type[nn.Module] | None:
    """Ours of a model whose ``generate`` selects eager attention; its file is imported after transformers' own."""
    if kind is None or kind.__module__ != _WHISPER or kind.__name__ != "WhisperForConditionalGeneration":
        return None
    ours: Any = import_module(_OURS)
    return ours.SwappedWhisper  # type: ignore[no-any-return]


def _weights(module: nn.Module) -> int:
    """Elements of the largest parameter."""
    return max((parameter.numel() for parameter in module.parameters()), default=0)


def restore(model: nn.Module) -> tuple[list[SwapRow], set[nn.Module]]:
    """Restore the attention implementations of a model, or of parts of one, before ``unswap`` restores its classes.

    Returns:
        A row for each module of transformers that ``swap`` had replaced, and these modules.
    """
    rows: list[SwapRow] = []
    within: set[nn.Module] = set()
    for name, module in model.named_modules():
        fast, original = fast_of(module), original_of(class_of(module))
        if isinstance(fast, AttendingInLayer):
            pass
        elif fast is not None and original is not None:
            rows.append(SwapRow(name, original.__name__, _how(fast)))
        elif passes_by(module) and is_marked(module):
            rows.append(SwapRow(name, type(module).__name__, "native"))
        elif class_of(module) not in REPLACEMENTS.values() and _generating(original) is None:
            continue
        within.add(module)
    take_back(model)
    return rows, within
