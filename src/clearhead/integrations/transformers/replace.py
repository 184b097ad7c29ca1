"""Swap of the modules of one transformers model, and the rows that report it."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any, Final

from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from clearhead.integrations.recast import class_of, fast_of, original_of, recast, replacement
from clearhead.integrations.report import BEFORE, How, SwapRow
from clearhead.integrations.transformers.forwards import AttendingForward, LayerForward
from clearhead.integrations.transformers.interface import attends, hand_over, is_marked, models, passes_by, take_back
from clearhead.integrations.transformers.parts import REPLACEMENTS, FusedFeedForward, NormForward
from clearhead.integrations.transformers.probe import attempt

__all__ = ["models", "restore", "swap_model"]

_FUSED: Final = (AttendingForward, FusedFeedForward)
#: Elements of a weight, and of a norm's, from which a part of a layer gains by itself. Small parts are left
#: unmodified: calling a replacement takes longer than it saves.
_LEAST_WEIGHTS = 2**20
_LEAST_WIDTH = 2**10
#: A file of transformers whose model's ``generate`` would select eager attention, and ours.
_WHISPER: Final = "transformers.models.whisper.modeling_whisper"
_OURS: Final = "clearhead.integrations.transformers.whisper"


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
    return rows[::-1]


def _swap_module(path: str, module: nn.Module, interface: bool, reason: str | None) -> SwapRow | None:
    kind = class_of(module)
    original = original_of(kind)
    if original is not None:
        fast = fast_of(module)
        if fast is None:
            return None
        return SwapRow(path, original.__name__, "fused" if isinstance(fast, _FUSED) else "native", None, BEFORE)
    attending = attends(kind)
    if "forward" in vars(module):
        return (
            SwapRow(path, kind.__name__, "left", None, "its forward was replaced on the object") if attending else None
        )
    if interface and (generating := _generating(kind)) is not None:
        recast(module, generating)
        return None
    if kind in REPLACEMENTS:
        if _weights(module) >= _LEAST_WEIGHTS or not isinstance(module, nn.Linear | Conv1D):
            recast(module, REPLACEMENTS[kind])
        return None
    trial = attempt(module, interface=interface)
    if trial is not None and trial.fast is not None and not isinstance(trial.fast, LayerForward):
        least = _LEAST_WIDTH if isinstance(trial.fast, NormForward) else _LEAST_WEIGHTS
        if _weights(module) < least:
            native = SwapRow(path, kind.__name__, "native", trial.difference, "by transformers' attention interface")
            return native if attending == "by interface" and interface else None
    if trial is not None and trial.fast is not None:
        attributes = {"leaves_padding_out": True} if isinstance(trial.fast, LayerForward) else {}
        recast(module, replacement(kind, trial.fast, **attributes))
        how: How = "fused" if isinstance(trial.fast, _FUSED) else "native"
        return SwapRow(path, kind.__name__, how, trial.difference)
    if attending == "by interface" and interface:
        return SwapRow(path, kind.__name__, "native", None, "by transformers' attention interface")
    if trial is not None:
        return SwapRow(path, kind.__name__, "left", trial.difference, trial.reason)
    return SwapRow(path, kind.__name__, "left", None, reason or "") if attending else None


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
        if fast is not None and original is not None:
            rows.append(SwapRow(name, original.__name__, "fused" if isinstance(fast, _FUSED) else "native"))
        elif passes_by(module) and is_marked(module):
            rows.append(SwapRow(name, type(module).__name__, "native"))
        elif class_of(module) not in REPLACEMENTS.values() and _generating(original) is None:
            continue
        within.add(module)
    take_back(model)
    return rows, within
