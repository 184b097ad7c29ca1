"""The jobs of the tab "Your model": show a text, edit the model, and compare before with after."""

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
from clearhead.lab.edits import LayerEdit, edits_of, traced
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
#: Time limit: a large model must be read, or the example trained beside other jobs.
_SECONDS: Final = 120.0


def works_of(models: Models, views: Views, limits: Limits) -> tuple[Work, ...]:
    """The jobs of the tab, for the lab's models."""
    tab = _ModelTab(models, views, limits)
    return (
        Work("models", tab.models, seconds=5.0),
        Work("look", tab.look, _SECONDS),
        Work("edit", tab.edit, _SECONDS),
        Work("compare", tab.compare, _SECONDS),
    )


@dataclass(frozen=True)
class _Run:
    """One run of a model on a text: each layer's points, and the model's output at one token."""

    record: Trace
    said: Tensor


@dataclass(frozen=True)
class _Text:
    """A tokenized text: its ids and words, a note if it was truncated, and the token whose prediction is shown."""

    written: str
    ids: list[int]
    words: list[str]
    note: str
    place: int


class _ModelTab:
    def __init__(self, models: Models, views: Views, limits: Limits) -> None:
        self._models, self._views, self._limits = models, views, limits

    def models(self, params: Mapping[str, Any], ticket: Ticket) -> Any:
        """The models, the initial text, and the limits that the page shows."""
        limits = self._limits
        return {
            "models": self._models.listed(),
            "text": example.TEXT,
            "limits": {"characters": limits.characters, "tokens": limits.tokens},
        }

    def look(self, params: Mapping[str, Any], ticket: Ticket) -> Any:
        """A text's tokens, the model's prediction, and a page of all heads."""
        loaded, text = self._asked(params, ticket)
        run = _run(loaded, text, (), _Part(ticket, 0.0, 0.3), "running the model")
        layers = _layers(params, run.record)
        page = self._page({"": run}, layers, text, loaded.choice.name, _Part(ticket, 0.3, 1.0))
        return {"view": page, **self._facts(loaded, text, run.record), "said": _said(loaded, text, run, None)}

    def edit(self, params: Mapping[str, Any], ticket: Ticket) -> Any:
        """The model's prediction for a text, without and with edits."""
        loaded, text = self._asked(params, ticket)
        original, edited = self._both(loaded, text, edits_of(params), ticket)
        return {**self._facts(loaded, text, original.record), "said": _said(loaded, text, original, edited)}

    def compare(self, params: Mapping[str, Any], ticket: Ticket) -> Any:
        """The model's prediction for a text, without and with edits, and a page of both runs."""
        loaded, text = self._asked(params, ticket)
        original, edited = self._both(loaded, text, edits_of(params), _Part(ticket, 0.0, 0.3))
        layers = _layers(params, original.record)
        runs = {"before": original, "after": edited}
        page = self._page(runs, layers, text, loaded.choice.name, _Part(ticket, 0.3, 1.0))
        return {
            "view": page,
            **self._facts(loaded, text, original.record),
            "said": _said(loaded, text, original, edited),
        }

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
                then="Use a shorter one; clearhead view has no limit.",
            )
        note = ""
        if len(ids) > reader.limit:
            note = f"the first {reader.limit:,} of {len(ids):,} tokens, the model's context length"
        return _Text(written, part, reader.words(part), note, loaded.outlook.place(part, wanted))

    def _both(self, loaded: Loaded, text: _Text, edits: Sequence[LayerEdit], ticket: Ticket) -> tuple[_Run, _Run]:
        original = _run(loaded, text, (), _Part(ticket, 0.0, 0.5), "running the unedited model")
        return original, _run(loaded, text, edits, _Part(ticket, 0.5, 1.0), "running the edited model")

    def _facts(self, loaded: Loaded, text: _Text, record: Trace) -> dict[str, Any]:
        outlook = loaded.outlook
        layers = [{"name": name, "heads": record[name].problem.num_heads} for name in record]
        return {
            "tokens": text.words,
            "note": text.note,
            "layers": layers,
            "place": text.place,
            "mask": outlook.mask_text,
        }

    def _page(self, runs: Mapping[str, _Run], layers: Sequence[str], text: _Text, name: str, ticket: Ticket) -> str:
        """Store a page of some layers of the runs, and return its name."""
        first = next(iter(runs.values())).record
        sizes = [_numbers(first[layer].padded) for layer in layers]
        if sum(sizes) * len(runs) > self._limits.numbers:
            fit = int(self._limits.numbers / (len(runs) * max(sizes)))
            raise UnsupportedError.about(
                "lab",
                "layers",
                must=f"be at most {fit} for a text of {len(text.ids):,} tokens",
                got=len(layers),
                then="Choose some, such as 0, 3, or use a shorter text.",
            )
        count = len(layers) * len(runs)

        def begun(place: int) -> None:
            ticket.step(place / count, f"writing the page, layer {place + 1} of {count}")

        shown = {
            run: _Shown(each.record, layers, begun, at * len(layers)) for at, (run, each) in enumerate(runs.items())
        }
        title = f"{name}: {' '.join(text.written.split())[:_TITLE]}"
        page = view(shown[""] if "" in shown else dict(shown), tokens=text.words, title=title)
        return self._views.add(page)


def _run(loaded: Loaded, text: _Text, edits: Sequence[LayerEdit], ticket: Ticket, says: str) -> _Run:
    outlook = loaded.outlook
    turn = waited(loaded.turn, ticket, "waiting for another job with this model")
    with turn, torch.no_grad(), traced(outlook.reader.model, edits, ticket, says) as record:
        said = outlook.run(torch.tensor([text.ids]), text.place)
    return _Run(record, said)


def _said(loaded: Loaded, text: _Text, original: _Run, edited: _Run | None) -> dict[str, Any]:
    outlook = loaded.outlook
    changed = None if edited is None else edited.said
    return read_out(outlook, outlook.reader.words, text.ids, text.place, original.said, changed)


def _layers(params: Mapping[str, Any], record: Trace) -> list[str]:
    """The layers to show, by number; all of them if none is given."""
    names = list(record)
    return [names[place] for place in sorted(asked.wholes(params, "layers", len(names) - 1))] or names


def _numbers(problem: Problem) -> int:
    """The number of elements that a page stores for a layer."""
    return problem.head_dim * (problem.num_heads * problem.q_len + problem.num_kv_heads * problem.k_len)


@dataclass(frozen=True)
class _Part:
    """A ticket for a part of a job."""

    whole: Ticket
    start: float
    stop: float

    def step(self, done: float, text: str = "") -> None:
        self.whole.step(self.start + (self.stop - self.start) * done, text)


class _Shown(Trace):
    """Some layers of a trace, each of which reports progress when it is read, so the job can end between them."""

    def __init__(self, record: Trace, layers: Sequence[str], begun: Callable[[int], None], first: int) -> None:
        super().__init__(layers, list(record), "last")
        for place, name in enumerate(layers, first):
            points = {each.name: getattr(record[name], each.name) for each in fields(Points)}
            self._add(name, _TellingPoints(**points, begun=partial(begun, place)))


@dataclass(frozen=True, kw_only=True, eq=False)
class _TellingPoints(Points):
    begun: Callable[[], None]

    @property
    def padded(self) -> Problem:
        self.begun()
        return super().padded
