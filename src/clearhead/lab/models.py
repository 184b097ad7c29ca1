"""The models that the lab was given, and those of them that are in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from clearhead.errors import UnsupportedError
from clearhead.lab import example, folders
from clearhead.lab.limits import Limits
from clearhead.lab.outlook import Outlook, outlook_of
from clearhead.lab.work import Ticket
from clearhead.readers import reader_of

__all__ = ["Choice", "Loaded", "Models"]

_TURN: Final = 0.05


@dataclass(frozen=True)
class Choice:
    """A model that the page may name by its place; ``named`` None is the example."""

    name: str
    about: str
    named: Path | None = None


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model in memory. Who runs it holds its ``turn``: one at a time, as each run hangs hooks on its modules."""

    choice: Choice
    outlook: Outlook
    turn: threading.Lock = field(default_factory=threading.Lock)


class Models:
    """The example and the folders named on the command line; the last few used are kept in memory.

    Raises:
        DataError: a folder is none, or a file in it leads out of it.
    """

    def __init__(self, named: Sequence[Path], limits: Limits) -> None:
        self._limits = limits
        for path in named:
            folders.check(path, folders.of_folder(path))
        self.choices = (
            Choice(example.NAME, example.ABOUT),
            *(Choice(path.resolve().name, str(path), path) for path in named),
        )
        self._loaded: OrderedDict[int, Loaded] = OrderedDict()
        self._lock, self._loading = threading.Lock(), threading.Lock()

    def get(self, place: int, ticket: Ticket) -> Loaded:
        """A model by its place among the choices, read if it is not in memory; one is read at a time."""
        found = self._kept(place)
        if found is not None:
            return found
        with waited(self._loading, ticket, "waiting for another model to be read"):
            found = self._kept(place)
            if found is None:
                self._forget(self._limits.models - 1)
                ticket.step(0.0, f"reading {self.choices[place].name}")
                found = self._read(self.choices[place], ticket)
                with self._lock:
                    self._loaded[place] = found
            return found

    def _kept(self, place: int) -> Loaded | None:
        with self._lock:
            if place in self._loaded:
                self._loaded.move_to_end(place)
            return self._loaded.get(place)

    def _forget(self, most: int) -> None:
        """Let go of the models that were not used for the longest, until ``most`` are left."""
        with self._lock:
            while len(self._loaded) > most:
                self._loaded.popitem(last=False)

    def _read(self, choice: Choice, ticket: Ticket) -> Loaded:
        if choice.named is None:
            return Loaded(choice, outlook_of(example.made(ticket), None))
        folder = folders.of_folder(choice.named)
        # Once more: what lies in it may have changed since the lab began.
        folders.check(choice.named, folder)
        folders.parameters(folder, self._limits.parameters)
        try:
            reader = reader_of("lab", folder)
            ticket.step(0.5, f"reading {choice.name}")
            return Loaded(choice, outlook_of(reader, folder))
        except ModuleNotFoundError as failure:
            if failure.name not in ("transformers", "tokenizers"):
                raise
            raise UnsupportedError("lab: this model needs the extra 'hf'; install clearhead[hf].") from failure

    def listed(self) -> list[dict[str, Any]]:
        """The choices as the page shows them."""
        return [{"name": choice.name, "about": choice.about} for choice in self.choices]


@contextmanager
def waited(lock: threading.Lock, ticket: Ticket, text: str) -> Iterator[None]:
    """Hold a lock, waiting for it as one that can be told to go."""
    while not lock.acquire(timeout=_TURN):
        ticket.step(0.0, text)
    try:
        yield
    finally:
        lock.release()
