"""The page's edits of a running model: heads switched off, temperatures and masks, by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from clearhead.lab import asked
from clearhead.lab.work import Ticket
from clearhead.masks import Causal, Mask, Window
from clearhead.observe import Trace, attention_layers, trace
from clearhead.statistics import Observation, Want
from clearhead.watch import Attend, Call, watching

__all__ = ["MASKS", "LayerEdit", "edits_of", "traced"]

_MOST: Final = 1000
_FARTHEST: Final = 10**6
_TEMPERATURES: Final = (0.05, 20.0)

#: Edits of a layer's mask (None for no mask): functions of the mask and the window's size.
MASKS: Final[Mapping[str, Callable[[Mask | None, int], Mask | None]]] = {
    "own": lambda model_mask, _: model_mask,
    "none": lambda model_mask, _: None,
    "causal": lambda model_mask, _: _both(model_mask, Causal()),
    "window": lambda model_mask, reach: _both(model_mask, Window(reach, reach)),
}


def _both(model_mask: Mask | None, other: Mask) -> Mask:
    return other if model_mask is None else model_mask & other


@dataclass(frozen=True)
class LayerEdit:
    """The edits of one layer.

    Attributes:
        layer: index among the model's attention layers.
        off: heads whose output becomes 0.
        temperature: divisor of the scores.
        mask: one of ``MASKS``.
        reach: for ``"window"``, the largest distance of a key in tokens.
    """

    layer: int
    off: tuple[int, ...] = ()
    temperature: float = 1.0
    mask: str = "own"
    reach: int = 0


@contextmanager
def traced(model: nn.Module, edits: Sequence[LayerEdit], ticket: Ticket, text: str) -> Iterator[Trace]:
    """``trace`` a model with edits; each layer reports progress, so the job can be cancelled between layers."""
    layers = list(attention_layers(model).values())
    for edit in edits:
        asked.whole({"layer": edit.layer}, "layer", 0, len(layers) - 1)
    masks = {layers[edit.layer]: edit for edit in edits if edit.mask != "own"}
    # The newest watcher is the outermost, so the trace records the edited mask.
    with trace(model) as record, watching(_Watched(masks, len(layers), ticket, text)):
        for edit in edits:
            if edit.temperature != 1.0:
                record.temperature(edit.temperature, layers=edit.layer)
            if edit.off:
                record.switch_off(edit.off, layers=edit.layer)
        yield record


class _Watched:
    """Replaces masks and reports the current layer."""

    def __init__(self, masks: Mapping[nn.Module, LayerEdit], count: int, ticket: Ticket, text: str) -> None:
        self._masks, self._count, self._ticket, self._text = masks, count, ticket, text
        self._called = 0

    def attend(self, owner: object, call: Call, want: Want, inner: Attend) -> Observation:
        """Compute the call with its layer's edited mask."""
        self._ticket.step(min(1.0, self._called / self._count), f"{self._text}, layer {self._called + 1}")
        self._called += 1
        edit = self._masks.get(owner) if isinstance(owner, nn.Module) else None
        if edit is not None:
            call = call.with_options(mask=MASKS[edit.mask](call.options.get("mask"), edit.reach))
        return inner(call, want)


def edits_of(params: Mapping[str, Any]) -> list[LayerEdit]:
    """The edits of a request."""
    return [
        LayerEdit(
            layer=asked.whole(record, "layer", 0, _MOST),
            off=asked.wholes(record, "off", _MOST),
            temperature=asked.number(record, "temperature", *_TEMPERATURES, 1.0),
            mask=asked.choice(record, "mask", MASKS, "own"),
            reach=asked.whole(record, "reach", 0, _FARTHEST, 0),
        )
        for record in asked.records(params, "edits", _MOST)
    ]
