"""A peer: a library that runs a model, the format of its numbers, its threads, and how it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Final

import torch

from clearhead.benchmark.model_peers.work import KINDS, ModelWork
from clearhead.benchmark.peers import Call

__all__ = ["BUDGETS", "CannotRunError", "Peer", "dtype_of", "reason_of"]

BUDGETS: Final[Mapping[str, float]] = {
    **{"float32": 1e-4, "bfloat16": 0.15},
    **{"int8": 0.2, "q8_0": 0.1, "int4": 0.65, "q4_0": 0.65},
}
"""Largest error of each format against float64, relative to the largest exact output. Four bits of the Llama's random
weights are off by 0.40 to 0.57, a Llama without one of its eight layers by 0.76, other weights by 1.5 (measured)."""

_LONGEST_REASON: Final = 160


class CannotRunError(Exception):
    """Raised by a peer that cannot run a row; the text says why."""


def reason_of(error: BaseException) -> str:
    """The first line of an error, for a table."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: {error.name}"
    return text[:_LONGEST_REASON] if isinstance(error, CannotRunError) else f"failed: {text[:_LONGEST_REASON]}"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A contender of the suite ``peers``.

    Args:
        name: the column of the table.
        rows: the format of the rows that it takes part in: ``"float32"``, ``"bfloat16"`` or ``"int8"``.
        number_format: the format of its weights, a key of ``BUDGETS``.
        build: builds its call for a row; the second argument is ``number_format``.
        modules: what it imports.
        excuses: the reason for each kind of work that it cannot run.
        threads: how the number of threads is set.
        spinning: whether its idle threads spin, and what was set against it.
        loaded_last: whether its library exports symbols of others' names, so that these have to be loaded before.
    """

    name: str
    rows: str
    number_format: str
    build: Callable[[ModelWork, str], Call]
    modules: tuple[str, ...] = ()
    excuses: Mapping[str, str] = field(default_factory=dict)
    threads: str = "torch.get_num_threads()"
    spinning: str = ""
    loaded_last: bool = False

    def __post_init__(self) -> None:
        assert set(self.excuses) <= set(KINDS), self.name
        assert self.number_format in BUDGETS, self.name

    @property
    def budget(self) -> float:
        """Largest error against float64, relative to the largest exact output."""
        return BUDGETS[self.number_format]

    def load(self) -> None:
        """Import the library.

        Raises:
            ModuleNotFoundError: a package is not installed.
        """
        for module in self.modules:
            import_module(module)

    def call(self, work: ModelWork) -> Call:
        """Build the call for a row.

        Raises:
            CannotRunError: the peer cannot run this work.
        """
        if work.kind in self.excuses:
            raise CannotRunError(self.excuses[work.kind])
        return self.build(work, self.number_format)


def dtype_of(number_format: str) -> torch.dtype:
    """The dtype of torch for ``"float32"`` or ``"bfloat16"``."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[number_format]
