"""The models of the lab, and a cache of loaded ones."""

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

__all__ = ["Loaded", "ModelChoice", "Models"]

_TURN: Final = 0.05


@dataclass(frozen=True)
class ModelChoice:
    """A model that the page can select by index; ``named`` is its folder, or None for the example."""

    name: str
    about: str
    named: Path | None = None


@dataclass(frozen=True, eq=False)
class Loaded:
    """A loaded model. A run holds the lock ``turn``, as each run registers hooks on the modules."""

    choice: ModelChoice
    outlook: Outlook
    turn: threading.Lock = field(default_factory=threading.Lock)


class Models:
    """The example and the folders of the command line; the most recently used models stay in memory.

    Raises:
        DataError: a folder does not exist, or one of its files is outside of it.
    """

    def __init__(self, named: Sequence[Path], limits: Limits) -> None:
        self._limits = limits
        for path in named:
            folders.check(path, folders.of_folder(path))
        self.choices = (
            ModelChoice(example.NAME, example.ABOUT),
            *(ModelChoice(path.resolve().name, str(path), path) for path in named),
        )
        self._loaded: OrderedDict[int, Loaded] = OrderedDict()
        self._lock, self._loading = threading.Lock(), threading.Lock()

    def get(self, place: int, ticket: Ticket) -> Loaded:
        """A model by index, loaded if it is not in memory; one model is loaded at a time."""
        loaded = self._cached(place)
        if loaded is not None:
            return loaded
        with waited(self._loading, ticket, "waiting for another model to be read"):
            loaded = self._cached(place)
            if loaded is None:
                self._forget(self._limits.models - 1)
                ticket.step(0.0, f"reading {self.choices[place].name}")
                loaded = self._read(self.choices[place], ticket)
                with self._lock:
                    self._loaded[place] = loaded
            return loaded

    def _cached(self, place: int) -> Loaded | None:
        with self._lock:
            if place in self._loaded:
                self._loaded.move_to_end(place)
            return self._loaded.get(place)

    def _forget(self, most: int) -> None:
        """Drop the least recently used models until ``most`` are left."""
        with self._lock:
            while len(self._loaded) > most:
                self._loaded.popitem(last=False)

    def _read(self, choice: ModelChoice, ticket: Ticket) -> Loaded:
        if choice.named is None:
            return Loaded(choice, outlook_of(example.made(ticket), None))
        folder = folders.of_folder(choice.named)
        # Check again, as the folder may have changed since the start of the lab.
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
    """Hold a lock; the wait for it can be cancelled by the ticket."""
    while not lock.acquire(timeout=_TURN):
        ticket.step(0.0, text)
    try:
        yield
    finally:
        lock.release()
