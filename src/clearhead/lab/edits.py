"""What the page changes in a model while it runs: heads off, temperatures, masks, by layer."""

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

__all__ = ["MASKS", "Edit", "edits_of", "traced"]

_MOST: Final = 1000
_FARTHEST: Final = 10**6
_TEMPERATURES: Final = (0.05, 20.0)

#: What may be done with a layer's mask, which None is where all may attend to all: a function of it and of the number.
MASKS: Final[Mapping[str, Callable[[Mask | None, int], Mask | None]]] = {
    "own": lambda own, _: own,
    "none": lambda own, _: None,
    "causal": lambda own, _: _both(own, Causal()),
    "window": lambda own, reach: _both(own, Window(reach, reach)),
}


def _both(own: Mask | None, other: Mask) -> Mask:
    return other if own is None else own & other


@dataclass(frozen=True)
class Edit:
    """The edits of one layer.

    Attributes:
        layer: its number among the model's attention layers.
        off: heads whose output is 0.
        temperature: scores are divided by it.
        mask: one of ``MASKS``.
        reach: for ``"window"``, how many tokens away a key may be.
    """

    layer: int
    off: tuple[int, ...] = ()
    temperature: float = 1.0
    mask: str = "own"
    reach: int = 0


@contextmanager
def traced(model: nn.Module, edits: Sequence[Edit], ticket: Ticket, text: str) -> Iterator[Trace]:
    """``trace`` of a model under edits; each layer tells the ticket, and so can be where the work ends."""
    layers = list(attention_layers(model).values())
    for edit in edits:
        asked.whole({"layer": edit.layer}, "layer", 0, len(layers) - 1)
    masks = {layers[edit.layer]: edit for edit in edits if edit.mask != "own"}
    # The newest watcher stands around the others: the trace sees, and a page shows, the mask that was put in.
    with trace(model) as kept, watching(_Watched(masks, len(layers), ticket, text)):
        for edit in edits:
            if edit.temperature != 1.0:
                kept.temperature(edit.temperature, layers=edit.layer)
            if edit.off:
                kept.switch_off(edit.off, layers=edit.layer)
        yield kept


class _Watched:
    """Puts masks in, and says which layer it is at."""

    def __init__(self, masks: Mapping[nn.Module, Edit], count: int, ticket: Ticket, text: str) -> None:
        self._masks, self._count, self._ticket, self._text = masks, count, ticket, text
        self._called = 0

    def attend(self, owner: object, call: Call, want: Want, inner: Attend) -> Observation:
        """The call under its layer's mask."""
        self._ticket.step(min(1.0, self._called / self._count), f"{self._text}, layer {self._called + 1}")
        self._called += 1
        edit = self._masks.get(owner) if isinstance(owner, nn.Module) else None
        if edit is not None:
            call = call.with_options(mask=MASKS[edit.mask](call.options.get("mask"), edit.reach))
        return inner(call, want)


def edits_of(params: Mapping[str, Any]) -> list[Edit]:
    """The edits that a page has sent."""
    return [
        Edit(
            layer=asked.whole(record, "layer", 0, _MOST),
            off=asked.wholes(record, "off", _MOST),
            temperature=asked.number(record, "temperature", *_TEMPERATURES, 1.0),
            mask=asked.choice(record, "mask", MASKS, "own"),
            reach=asked.whole(record, "reach", 0, _FARTHEST, 0),
        )
        for record in asked.records(params, "edits", _MOST)
    ]
