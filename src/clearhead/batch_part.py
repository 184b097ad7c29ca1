"""The part of a batch that a process computes, so that dropout drops what one process would drop of the whole batch.

Dropout draws by place (``backends.dropout``): a weight's is its batch entry, head, query and key, an activation's its
row and column. Where several processes share a batch, the places of a process's part start at those of its first
sequence. Under ``set_invariant(True)`` the number of a row consists of the sequence's index in the batch, in its upper
32 bits, and of the position in the sequence, so that padding and packing do not change it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from clearhead.choices import is_invariant
from clearhead.shapes import Int

__all__ = [
    "BatchPart",
    "batch_part",
    "current",
    "drawn_for_part",
    "first_row",
    "number_of",
    "origin_of",
    "packed_rows",
    "row_numbers",
    "rows_of_whole",
]


@dataclass(frozen=True)
class BatchPart:
    """Some consecutive sequences of a batch.

    Attributes:
        first: index of the first sequence in the whole batch.
        count: number of sequences.
        whole: number of sequences of the whole batch.
        packed: whether models remove the padding of the whole batch, because it has some.
        tokens_before: real tokens of the sequences before the first one.
        tokens: real tokens of the whole batch.
        starts: for each sequence the whole batch's row of activations that is that of its first token, where tokens
            are not packed but those of the whole batch are; by default all sequences have as many rows.
        length: tokens of a padded sequence, where this process has some of them.
        positions: positions of this process's tokens; by default it has all.
    """

    first: int
    count: int
    whole: int
    packed: bool
    tokens_before: int
    tokens: int
    starts: tuple[int, ...] | None = None
    length: int = 0
    positions: tuple[int, ...] | None = None


_PART: ContextVar[BatchPart | None] = ContextVar("clearhead_batch_part", default=None)


@contextmanager
def batch_part(part: BatchPart | None) -> Iterator[None]:
    """Let dropout in a ``with`` block draw for a part of a batch; with None for a whole batch.

    Backward passes that recompute a forward pass belong in the block too.

    >>> import torch
    >>> from clearhead.nn.dropout import Dropout
    >>> drop = Dropout(0.5)
    >>> whole = torch.manual_seed(0) and drop(torch.ones(4, 64))
    >>> with batch_part(BatchPart(2, 2, 4, packed=False, tokens_before=0, tokens=0)):
    ...     part = torch.manual_seed(0) and drop(torch.ones(2, 64))
    >>> torch.equal(part, whole[2:])
    True
    """
    token = _PART.set(part)
    try:
        yield
    finally:
        _PART.reset(token)


def current() -> BatchPart | None:
    """The part that this process computes; None for a whole batch, and in graphs, whose dropout is torch's."""
    return None if torch.compiler.is_compiling() else _PART.get()


def drawn_for_part(shape: Sequence[int], device: torch.device) -> Tensor:
    """Uniform numbers of ``shape``, ``[batch, ...]``, from torch's generator: the part's rows of the whole batch's."""
    part = current()
    if part is None:
        return torch.rand(*shape, device=device)
    rows = slice(part.first, part.first + part.count)
    if part.positions is None:
        return torch.rand(part.whole, *shape[1:], device=device)[rows]
    # Padding that makes a sequence long enough for all processes has no numbers.
    columns = torch.tensor(part.positions, device=device).clamp(max=part.length - 1)
    return torch.rand(part.whole, part.length, device=device)[rows][:, columns]


def first_row(shape: Sequence[int]) -> int:
    """The row in the whole batch of the first row of activations ``[*batch, width]``; 0 without a part.

    Activations are those of sequences, ``[batch, width]``, or of tokens, with a row for each token.
    """
    part = current()
    if part is None or len(shape) < 2:
        return 0
    if _is_packed(part, shape):
        return part.tokens_before
    return part.first * (math.prod(shape[:-1]) // part.count)


def number_of(sequence: Int[Tensor, "*batch"] | int, position: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
    """Dropout's number of the row of a token under ``set_invariant(True)``.

    >>> number_of(2, torch.tensor([0, 5])).tolist() == [2 * 2**32, 2 * 2**32 + 5]
    True
    """
    return (sequence << 32) + position


_PACKED: ContextVar[Tensor | None] = ContextVar("clearhead_packed_rows", default=None)


@contextmanager
def packed_rows(numbers: Int[Tensor, " total"] | None) -> Iterator[None]:
    """Let dropout of packed tokens ``[1, total, width]`` in a ``with`` block draw by these numbers of their rows.

    Args:
        numbers: those that ``number_of`` gives, the index of a sequence being that in the packed tokens; None for
            tokens that are not packed.
    """
    token = _PACKED.set(numbers)
    try:
        yield
    finally:
        _PACKED.reset(token)


def row_numbers(shape: Sequence[int]) -> Int[Tensor, " rows"] | int:
    """Dropout's numbers of the rows of activations ``[*batch, len, width]``; the first one where they are consecutive.

    Under ``set_invariant(True)`` activations are those of sequences, ``[batch, len, width]``, or of one sequence.
    """
    if not is_invariant() or len(shape) < 2 or torch.compiler.is_compiling():
        return first_row(shape)
    part, packed = current(), _PACKED.get()
    first = 0 if part is None else part.first
    if packed is not None and len(shape) == 3 and (shape[0], shape[1]) == (1, len(packed)):
        return packed + number_of(first, torch.zeros_like(packed))
    return _numbers(first, math.prod(shape[:-2]), shape[-2])


@lru_cache(maxsize=64)
def _numbers(first: int, sequences: int, length: int) -> Tensor:
    return number_of(torch.arange(first, first + sequences)[:, None], torch.arange(length)).flatten()


def rows_of_whole(shape: Sequence[int]) -> int:
    """How many rows activations ``[*batch, width]`` of this shape have in the whole batch."""
    part = current()
    assert part is not None
    if _is_packed(part, shape):
        return part.tokens
    return part.whole * (math.prod(shape[:-1]) // part.count)


def origin_of(size: Sequence[int]) -> tuple[int, int, int]:
    """The first batch entry, head and key, in the whole batch, of attention over ``[batch, ...]``."""
    part = current()
    if part is None:
        return 0, 0, 0
    return (0, 0, part.tokens_before) if part.packed and size[0] == 1 else (part.first, 0, 0)


def _is_packed(part: BatchPart, shape: Sequence[int]) -> bool:
    """Whether activations are those of packed tokens, ``[1, total, width]``."""
    return part.packed and len(shape) > 2 and shape[0] == 1
