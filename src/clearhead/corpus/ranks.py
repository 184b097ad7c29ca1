"""The ranks of a job: steps that fail on all of them together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

import torch.distributed as dist

from clearhead.distributed.liveness import Liveness
from clearhead.errors import ClearheadError

__all__ = ["AFTER_A_DEATH", "CorpusRanks"]

#: What the user can do when a rank has died.
AFTER_A_DEATH: Final = "Start the same command again: it goes on from the texts that are saved."

_Value = TypeVar("_Value")
#: Seconds between two looks at the other ranks.
_EVERY: Final = 0.1


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
    """The processes of torch's default process group, or this process alone.

    Every method but ``report``, ``check`` and ``texts`` is collective: all ranks call it in the same order.

    Args:
        liveness: the signs of life of the ranks; None for this process alone.
    """

    def __init__(self, liveness: Liveness | None) -> None:
        self.rank, self.size = (0, 1) if liveness is None else (liveness.rank, liveness.size)
        self._store = None if liveness is None else liveness.store
        self.report(0)

    def gather(self, value: _Value) -> list[_Value]:
        """The values of all ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def together(self, step: Callable[[], _Value], *, only: int | None = None) -> _Value:
        """Run a step on every rank, or on one rank whose result all ranks get; an error is raised on all ranks."""
        result: Any = None
        failure, raised = None, None
        try:
            result = step() if only in (None, self.rank) else None
        except Exception as error:
            if self._store is None:
                raise
            failure, raised = _Failure.of(error), error
            self._store.set("failed", "")
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

    def report(self, texts: int) -> None:
        """Say how many texts this rank has finished."""
        self._texts = texts
        if self._store is not None:
            self._store.set(f"texts/{self.rank}", str(texts))

    def texts(self) -> int:
        """How many texts all ranks have finished."""
        if self._store is None:
            return self._texts
        return sum(map(int, self._store.multi_get([f"texts/{rank}" for rank in range(self.size)])))

    def check(self) -> None:
        """Raise if another rank has failed."""
        if self._store is not None and self._store.check(["failed"]):
            raise _OtherRankFailedError

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Wait until all ranks wait, however long that takes, and call ``meanwhile`` again and again; once a job."""
        if self._store is None:
            return
        self._store.set(f"waiting/{self.rank}", "")
        while not self._store.check([f"waiting/{rank}" for rank in range(self.size)]):
            self.check()
            meanwhile()
            time.sleep(_EVERY)
