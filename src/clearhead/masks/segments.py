"""Segments of a packed call: the sequences that its queries and keys form, each a separate attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import torch

from clearhead.masks.base import Mask, conjuncts, does_as
from clearhead.masks.positional import Causal
from clearhead.masks.sequences import Documents, Ragged
from clearhead.tensors import has_memory, is_hollow

__all__ = ["Order", "Segment", "Segments", "segments_of"]

#: Which keys of its segment a query attends to: all, those up to its own place, or those that masks allow.
Order = Literal["all", "causal", "masked"]


class Segment(NamedTuple):
    """The queries and the keys of one sequence, each a range of packed tokens."""

    q_start: int
    q_len: int
    k_start: int
    k_len: int


@dataclass(frozen=True, eq=False)
class Segments:
    """The sequences of a packed call that have a query and a key, in order.

    Attributes:
        segments: one for each of them.
        rest: masks that hold within each segment too.
    """

    segments: tuple[Segment, ...]
    rest: tuple[Mask, ...] = ()

    @cached_property
    def orders(self) -> tuple[Order, ...]:
        """Which keys the queries of each segment attend to."""
        return tuple(map(self._order, self.segments))

    @property
    def asks_flags(self) -> bool:
        """Whether no segment needs a mask of its queries and keys."""
        return "masked" not in self.orders

    @property
    def sees_all(self) -> bool:
        """Whether each query attends to every key of its segment."""
        return all(order == "all" for order in self.orders)

    @property
    def scores(self) -> int:
        """Pairs of a query and a key of one segment."""
        return sum(segment.q_len * segment.k_len for segment in self.segments)

    @property
    def mean_lengths(self) -> tuple[int, int]:
        """Mean number of queries that share a key, and of keys of a query: the lengths of most of the work."""
        queries, keys = (sum(lengths) for lengths in self.lengths)
        return self.scores // max(1, keys), self.scores // max(1, queries)

    @property
    def lengths(self) -> tuple[list[int], list[int]]:
        """The numbers of queries and of keys."""
        return [segment.q_len for segment in self.segments], [segment.k_len for segment in self.segments]

    def equal(self) -> Iterator[list[int]]:
        """Places in ``segments`` of those with equal lengths and order, each group once."""
        groups: dict[tuple[int, int, Order], list[int]] = {}
        for place, (segment, order) in enumerate(zip(self.segments, self.orders, strict=True)):
            groups.setdefault((segment.q_len, segment.k_len, order), []).append(place)
        yield from groups.values()

    def _order(self, segment: Segment) -> Order:
        order: Order = "all"
        for part in self.rest:
            after = _keys_after(part, segment)
            if after is None or (after != 0 and after < segment.k_len - 1):
                return "masked"
            if after < segment.k_len - 1:
                order = "causal"
        return order


def segments_of(mask: Mask, q_len: int, k_len: int) -> Segments | None:
    """The segments of a call with a batch of 1 whose first query is at position 0; None if the mask has none.

    >>> segments_of(Documents([2, 1]) & Causal(), 3, 3).segments
    (Segment(q_start=0, q_len=2, k_start=0, k_len=2), Segment(q_start=2, q_len=1, k_start=2, k_len=1))
    """
    parts = conjuncts(mask)
    for part in parts:
        if not all(has_memory(tensor) and not is_hollow(tensor) for tensor in part.tensors()):
            continue
        rest = tuple(other for other in parts if other is not part)
        if isinstance(part, Documents) and does_as(part, Documents):
            if part.contiguous and part.ids.shape == (1, q_len) and q_len == k_len:
                return Segments(tuple(_of_documents(part)), rest)
        elif isinstance(part, Ragged) and does_as(part, Ragged):
            banded = part.before is not None or part.after is not None
            return Segments(tuple(_of_ragged(part)), (part, *rest) if banded else rest)
    return None


def _of_documents(documents: Documents) -> Iterator[Segment]:
    ids, counts = torch.unique_consecutive(documents.ids[0], return_counts=True)
    start = 0
    for document, length in zip(ids.tolist(), counts.tolist(), strict=True):
        if document >= 0:
            yield Segment(start, length, start, length)
        start += length


def _of_ragged(ragged: Ragged) -> Iterator[Segment]:
    queries = _ranges(ragged.cu_seq_q.tolist())
    keys = _ranges(ragged.cu_seq_k.tolist())
    used = [length for _, length in keys] if ragged.used_k is None else ragged.used_k.tolist()
    for (q_start, q_len), (k_start, _), k_len in zip(queries, keys, used, strict=True):
        if q_len > 0 and k_len > 0:
            yield Segment(q_start, q_len, k_start, k_len)


def _ranges(boundaries: Sequence[int]) -> list[tuple[int, int]]:
    """Starts and lengths."""
    return [(start, stop - start) for start, stop in pairwise(boundaries)]


def _keys_after(part: Mask, segment: Segment) -> int | None:
    """How many keys after its own place in the segment a query attends to, if the mask asks nothing else; else None."""
    if does_as(part, Causal):
        return segment.q_start - segment.k_start
    if isinstance(part, Ragged) and does_as(part, Ragged) and part.before is None and part.after is not None:
        return part.after + segment.k_len - segment.q_len
    return None
