"""The works of "Your model": look at a text, change something inside, and compare before with after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.errors import ShapeError, UnsupportedError
from clearhead.inspector import view
from clearhead.lab import asked, example
from clearhead.lab.edits import Edit, edits_of, traced
from clearhead.lab.limits import Limits
from clearhead.lab.models import Loaded, Models, waited
from clearhead.lab.outlook import read_out
from clearhead.lab.views import Views
from clearhead.lab.work import Ticket, Work
from clearhead.observe import Trace
from clearhead.observe.points import Points
from clearhead.problem import Problem
from clearhead.readers import read_ids

__all__ = ["works_of"]

_TITLE: Final = 60
#: Reading a large model, or training the small one beside others' work, takes its time.
_SECONDS: Final = 120.0


def works_of(models: Models, views: Views, limits: Limits) -> tuple[Work, ...]:
    """The room's works, over the models that the lab was given."""
    room = _Room(models, views, limits)
    return (
        Work("models", room.models, seconds=5.0),
        Work("look", room.look, _SECONDS),
        Work("edit", room.edit, _SECONDS),
        Work("compare", room.compare, _SECONDS),
    )


@dataclass(frozen=True)
class _Run:
    """One run of a model on a text: each layer's points, and what the model said at a place."""

    kept: Trace
    said: Tensor


@dataclass(frozen=True)
class _Text:
    """A text as a model reads it: the part that is read, what is said of the rest, and the place looked at."""

    written: str
    ids: list[int]
    words: list[str]
    note: str
    place: int


class _Room:
    def __init__(self, models: Models, views: Views, limits: Limits) -> None:
        self._models, self._views, self._limits = models, views, limits

    def models(self, params: Mapping[str, Any], ticket: Ticket) -> Any:
        """What there is to choose from, the text to begin with, and the limits that the page tells."""
        limits = self._limits
        return {
            "models": self._models.listed(),
            "text": example.TEXT,
            "limits": {"characters": limits.characters, "tokens": limits.tokens},
        }

    def look(self, params: Mapping[str, Any], ticket: Ticket) -> Any:
        """A text's tokens, what the model says of it, and a page of all its heads."""
        loaded, text = self._asked(params, ticket)
        run = _run(loaded, text, (), _Part(ticket, 0.0, 0.3), "running the model")
        layers = _layers(params, run.kept)
        page = self._page({"": run}, layers, text, loaded.choice.name, _Part(ticket, 0.3, 1.0))
        return {"view": page, **self._facts(loaded, text, run.kept), "said": _said(loaded, text, run, None)}

    def edit(self, params: Mapping[str, Any], ticket: Ticket) -> Any:
        """What the model says of a text, and what it says under edits."""
        loaded, text = self._asked(params, ticket)
        before, after = self._both(loaded, text, edits_of(params), ticket)
        return {**self._facts(loaded, text, before.kept), "said": _said(loaded, text, before, after)}

    def compare(self, params: Mapping[str, Any], ticket: Ticket) -> Any:
        """As ``edit``, with a page of both runs."""
        loaded, text = self._asked(params, ticket)
        before, after = self._both(loaded, text, edits_of(params), _Part(ticket, 0.0, 0.3))
        layers = _layers(params, before.kept)
        runs = {"before": before, "after": after}
        page = self._page(runs, layers, text, loaded.choice.name, _Part(ticket, 0.3, 1.0))
        return {"view": page, **self._facts(loaded, text, before.kept), "said": _said(loaded, text, before, after)}

    def _asked(self, params: Mapping[str, Any], ticket: Ticket) -> tuple[Loaded, _Text]:
        place = asked.whole(params, "model", 0, len(self._models.choices) - 1)
        written = asked.text(params, "text", self._limits.characters)
        wanted = None if params.get("place") is None else asked.whole(params, "place", 0, self._limits.tokens)
        loaded = self._models.get(place, ticket)
        return loaded, self._read(loaded, written, wanted)

    def _read(self, loaded: Loaded, written: str, wanted: int | None) -> _Text:
        reader = loaded.outlook.reader
        ids = read_ids("lab", reader, written)
        part = reader.framed(ids[: reader.limit])
        if len(part) > self._limits.tokens:
            raise ShapeError.about(
                "lab",
                "text",
                must=f"have at most {self._limits.tokens:,} tokens",
                got=f"{len(part):,}",
                then="Use a shorter one; clearhead view takes any length.",
            )
        note = ""
        if len(ids) > reader.limit:
            note = f"the first {reader.limit:,} of {len(ids):,} tokens, the most that the model reads at once"
        return _Text(written, part, reader.words(part), note, loaded.outlook.place(part, wanted))

    def _both(self, loaded: Loaded, text: _Text, edits: Sequence[Edit], ticket: Ticket) -> tuple[_Run, _Run]:
        before = _run(loaded, text, (), _Part(ticket, 0.0, 0.5), "running it as it is")
        return before, _run(loaded, text, edits, _Part(ticket, 0.5, 1.0), "running it changed")

    def _facts(self, loaded: Loaded, text: _Text, kept: Trace) -> dict[str, Any]:
        outlook = loaded.outlook
        layers = [{"name": name, "heads": kept[name].problem.num_heads} for name in kept]
        return {
            "tokens": text.words,
            "note": text.note,
            "layers": layers,
            "place": text.place,
            "mask": outlook.mask_text,
        }

    def _page(self, runs: Mapping[str, _Run], layers: Sequence[str], text: _Text, name: str, ticket: Ticket) -> str:
        """The name of a page of some layers of the runs."""
        first = next(iter(runs.values())).kept
        sizes = [_numbers(first[layer].padded) for layer in layers]
        if sum(sizes) * len(runs) > self._limits.numbers:
            fit = int(self._limits.numbers / (len(runs) * max(sizes)))
            raise UnsupportedError.about(
                "lab",
                "layers",
                must=f"be at most {fit} of a text of {len(text.ids):,} tokens",
                got=len(layers),
                then="Name those to show, such as 0, 3, or use a shorter text.",
            )
        count = len(layers) * len(runs)

        def begun(place: int) -> None:
            ticket.step(place / count, f"writing the page, layer {place + 1} of {count}")

        shown = {run: _Shown(each.kept, layers, begun, at * len(layers)) for at, (run, each) in enumerate(runs.items())}
        title = f"{name}: {' '.join(text.written.split())[:_TITLE]}"
        page = view(shown[""] if "" in shown else dict(shown), tokens=text.words, title=title)
        return self._views.add(page)


def _run(loaded: Loaded, text: _Text, edits: Sequence[Edit], ticket: Ticket, says: str) -> _Run:
    outlook = loaded.outlook
    turn = waited(loaded.turn, ticket, "waiting for another look at this model")
    with turn, torch.no_grad(), traced(outlook.reader.model, edits, ticket, says) as kept:
        said = outlook.run(torch.tensor([text.ids]), text.place)
    return _Run(kept, said)


def _said(loaded: Loaded, text: _Text, before: _Run, after: _Run | None) -> dict[str, Any]:
    outlook = loaded.outlook
    changed = None if after is None else after.said
    return read_out(outlook, outlook.reader.words, text.ids, text.place, before.said, changed)


def _layers(params: Mapping[str, Any], kept: Trace) -> list[str]:
    """The layers to show, by their numbers; all of them where none is named."""
    names = list(kept)
    return [names[place] for place in sorted(asked.wholes(params, "layers", len(names) - 1))] or names


def _numbers(problem: Problem) -> int:
    """How many numbers a page carries of a layer."""
    return problem.head_dim * (problem.num_heads * problem.q_len + problem.num_kv_heads * problem.k_len)


@dataclass(frozen=True)
class _Part:
    """A ticket for a part of the work."""

    whole: Ticket
    start: float
    stop: float

    def step(self, done: float, text: str = "") -> None:
        self.whole.step(self.start + (self.stop - self.start) * done, text)


class _Shown(Trace):
    """Some layers of a trace, each of which says when the page comes to it: so the work can end between them."""

    def __init__(self, kept: Trace, layers: Sequence[str], begun: Callable[[int], None], first: int) -> None:
        super().__init__(layers, list(kept), "last")
        for place, name in enumerate(layers, first):
            points = {each.name: getattr(kept[name], each.name) for each in fields(Points)}
            self._add(name, _TellingPoints(**points, begun=partial(begun, place)))


@dataclass(frozen=True, kw_only=True, eq=False)
class _TellingPoints(Points):
    begun: Callable[[], None]

    @property
    def padded(self) -> Problem:
        self.begun()
        return super().padded
