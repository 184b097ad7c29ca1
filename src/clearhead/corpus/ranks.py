"""The ranks of a job: steps that fail on all of them together, and signs of life."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from clearhead.errors import ClearheadError

__all__ = ["CorpusRanks"]

_Value = TypeVar("_Value")
#: Seconds between signs of life, and without one until a rank is given up.
_EVERY: Final = 0.5
_LOST_AFTER: Final = 30.0


class _OtherRankFailedError(Exception):
    """Another rank has an error, which the ranks exchange next."""


@dataclass(frozen=True)
class _Failure:
    """The error of a rank, as it is sent to the others."""

    kind: type[Exception]
    text: str

    @classmethod
    def of(cls, error: Exception) -> Self:
        return cls(
            type(error) if isinstance(error, (ClearheadError, _OtherRankFailedError)) else RuntimeError, str(error)
        )


class CorpusRanks:
    """The processes of torch's default process group, or this process alone without one; a context manager.

    Every method but ``report``, ``check`` and ``texts`` is collective: all ranks call it in the same order.
    """

    def __init__(self, function: str) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        self._function = function
        self._signs = _Signs(self) if self.size > 1 else None
        self._texts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._signs is not None:
            self._signs.close()

    def gather(self, value: _Value) -> list[_Value]:
        """The values of all ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value)
        except RuntimeError as error:
            # The connection to a rank is gone; its signs of life say which one.
            raise self._lost_rank() or error from error
        return values

    def together(self, step: Callable[[], _Value], *, only: int | None = None) -> _Value:
        """Run a step on every rank, or on one rank whose result all ranks get; an error is raised on all ranks."""
        result: Any = None
        failure, raised = None, None
        try:
            result = step() if only in (None, self.rank) else None
        except Exception as error:
            if self.size == 1:
                raise
            failure, raised = _Failure.of(error), error
            assert self._signs is not None
            self._signs.failed = True
        if self.size > 1:
            self._agree(failure, raised)
        if only is not None and self.size > 1:
            result = self.gather(result)[only]
        shared: _Value = result
        return shared

    def _agree(self, failure: _Failure | None, raised: Exception | None) -> None:
        """Raise the same error on all ranks: that of the first rank that has one of its own."""
        for rank, each in enumerate(self.gather(failure)):
            if each is None or each.kind is _OtherRankFailedError:
                continue
            if rank == self.rank and raised is not None:
                raise raised
            if issubclass(each.kind, ClearheadError):
                raise each.kind(each.text)
            raise RuntimeError(f"rank {rank}: {each.text}")

    @property
    def speaks(self) -> bool:
        """Whether this rank is the first that lives."""
        return self.rank == (1 if self._signs is not None and self._signs.lost == 0 else 0)

    def report(self, texts: int) -> None:
        """Say how many texts this rank has finished."""
        self._texts = texts
        if self._signs is not None:
            self._signs.texts = texts

    def texts(self) -> int:
        """How many texts all ranks have finished, as far as this rank knows."""
        return self._texts if self._signs is None else self._signs.total()

    def check(self) -> None:
        """Raise if another rank has failed or died."""
        if self._signs is not None:
            self._signs.check()

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Wait until all ranks wait, however long their work takes; ``meanwhile`` is called every half second."""
        if self._signs is None:
            return
        self._signs.waiting = True
        while not self._signs.all_wait():
            self._signs.check()
            meanwhile()
            time.sleep(_EVERY / 5)

    def died(self, rank: int) -> ClearheadError:
        """The error for a rank that died."""
        must, got = "run to the end", "no sign of life"
        then = "Start the same command again: it goes on from the texts that are saved."
        return ClearheadError.about(self._function, f"rank {rank}", must=must, got=got, then=then)

    def _lost_rank(self) -> ClearheadError | None:
        """The error for the rank that died, once its signs of life have stopped for long enough."""
        assert self._signs is not None
        end = time.monotonic() + _LOST_AFTER + 4 * _EVERY
        while time.monotonic() < end and self._signs.lost is None:
            time.sleep(_EVERY)
        return None if self._signs.lost is None else self.died(self._signs.lost)


class _Signs:
    """Signs of life of all ranks: a thread writes this rank's and reads the others', in a store of rank 0.

    The store is not that of the process group, whose time limits are for its collectives.
    """

    def __init__(self, ranks: CorpusRanks) -> None:
        self._ranks = ranks
        self.texts, self.failed, self.waiting = 0, False, False
        self.lost: int | None = None
        self._read = [(0, 0, "") for _ in range(ranks.size)]
        self._changed = [time.monotonic()] * ranks.size
        host, limit = os.environ.get("MASTER_ADDR", "127.0.0.1"), timedelta(seconds=_LOST_AFTER)
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit) if ranks.rank == 0 else None
        port = ranks.gather(None if store is None else store.port)[0]
        assert port is not None
        self._store = TCPStore(host, port, is_master=False, timeout=limit) if store is None else store
        self._count = 0
        self._write()
        ranks.gather(None)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="signs of life", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        self._count += 1
        state = "failed" if self.failed else "waiting" if self.waiting else "running"
        self._store.set(f"rank {self._ranks.rank}", f"{self._count} {self.texts} {state}")

    def _run(self) -> None:
        while not self._end.wait(_EVERY):
            try:
                self._write()
                values = self._store.multi_get([f"rank {rank}" for rank in range(self._ranks.size)])
            except RuntimeError:
                # The store is in rank 0.
                self.lost = None if self._end.is_set() else 0
                return
            self._update([bytes(value).decode().split() for value in values])

    def _update(self, values: list[list[str]]) -> None:
        now = time.monotonic()
        for rank, (count, texts, state) in enumerate(values):
            read = (int(count), int(texts), state)
            if read[0] != self._read[rank][0]:
                self._changed[rank] = now
            elif now - self._changed[rank] > _LOST_AFTER and self.lost is None:
                self.lost = rank
            self._read[rank] = read

    def total(self) -> int:
        this = self._ranks.rank
        return sum(self.texts if rank == this else texts for rank, (_, texts, _) in enumerate(self._read))

    def all_wait(self) -> bool:
        return all(state == "waiting" for _, _, state in self._read)

    def check(self) -> None:
        if self.lost is not None:
            raise self._ranks.died(self.lost)
        if any(state == "failed" for _, _, state in self._read):
            raise _OtherRankFailedError

    def close(self) -> None:
        self._end.set()
        self._thread.join()
