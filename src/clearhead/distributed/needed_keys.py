"""Which keys the queries of each rank may attend to, and how many pairs they are, from the intervals of a mask.

No tensor has queries x keys elements: the keys of a query are a few intervals, and the intervals of all queries are
sorted by rank and key. Cost: O(length * log(length) + ranks * chunks) for each batch entry and head that the mask
distinguishes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from clearhead.distributed.layout import ShardLayout
from clearhead.masks.base import Mask, carried_sizes, conjuncts, does_as
from clearhead.masks.tables import Blocks, Dense
from clearhead.shapes import Bool, Int

__all__ = [
    "BLOCK",
    "STRIP",
    "BlockedQueries",
    "KeyIntervals",
    "count_keys",
    "key_intervals",
    "query_work",
    "rank_of_positions",
    "runs",
]

#: Queries times batch entries times heads whose intervals are computed at once.
BLOCK: Final = 2**20
#: Places of a boolean tensor that are read at once.
STRIP: Final = 2**22


@dataclass(frozen=True)
class KeyIntervals:
    """Intervals of keys, each not empty, that queries attend to.

    Attributes:
        owner: the query, or the rank that has it; int64 ``[intervals]``.
        start: the first key.
        stop: the key after the last.
        exact: whether they are all that the mask allows and nothing else; otherwise they contain more.
    """

    owner: Int[Tensor, " intervals"]
    start: Int[Tensor, " intervals"]
    stop: Int[Tensor, " intervals"]
    exact: bool = True

    @classmethod
    def joined(cls, parts: list[KeyIntervals]) -> KeyIntervals:
        """The intervals of all parts, of which there may be none."""
        empty = torch.empty(0, dtype=torch.int64)
        owner, start, stop = (
            torch.cat([empty, *(getattr(part, name) for part in parts)]) for name in ("owner", "start", "stop")
        )
        return cls(owner, start, stop, all(part.exact for part in parts))

    def owned_by(self, owners: Int[Tensor, " owners"]) -> KeyIntervals:
        """The same intervals with ``owners[owner]`` as their owner."""
        return replace(self, owner=owners[self.owner])

    def union(self, k_len: int) -> KeyIntervals:
        """The same keys of each owner as disjoint intervals that do not touch, ordered by owner and key."""
        # No interval of one owner touches the first key of the next owner.
        origin = self.owner * (k_len + 1)
        first, order = (origin + self.start).sort()
        last = (origin + self.stop)[order].cummax(dim=0).values
        begins, ends = torch.ones_like(first, dtype=torch.bool), torch.ones_like(first, dtype=torch.bool)
        begins[1:] = first[1:] > last[:-1]
        ends[:-1] = begins[1:]
        shift = origin[order][begins]
        return KeyIntervals(self.owner[order][begins], first[begins] - shift, last[ends] - shift, self.exact)


def key_intervals(mask: Mask | None, length: int) -> Iterator[KeyIntervals]:
    """The intervals of keys of each query, for every batch entry and head that the mask distinguishes.

    Args:
        mask: a mask on the CPU, placed at 0; None allows every key. A part without intervals is ignored.
        length: number of queries and keys.

    Returns:
        Intervals of consecutive blocks of queries.
    """
    batch, heads = (1, 1) if mask is None else carried_sizes(mask)
    parts = [] if mask is None else conjuncts(mask)
    tables = [part for part in parts if does_as(part, Dense)]
    size = max(1, BLOCK // max(1, batch * heads))
    if tables:
        size = max(1, min(size, STRIP // max(1, batch * heads * length)))
    for first in range(0, length, size):
        queries = torch.arange(first, min(length, first + size))
        index = (
            torch.arange(batch).view(-1, 1, 1, 1),
            torch.arange(heads).view(1, -1, 1, 1),
            queries.view(1, 1, -1, 1),
        )
        rows = _QueryIntervals.of(parts, index, length)
        yield rows.within(tables, index, length) if tables else rows.flat(queries, length)


def query_work(mask: Mask | None, length: int) -> Int[Tensor, " length"]:
    """How many keys each query may attend to, summed over the batch entries and heads that the mask distinguishes."""
    work = torch.zeros(length, dtype=torch.int64)
    for part in key_intervals(mask, length):
        work.index_add_(0, part.owner, part.stop - part.start)
    return work


def count_keys(
    intervals: KeyIntervals, owners: int, bounds: Int[Tensor, " bounds"]
) -> Int[Tensor, "owners bounds - 1"]:
    """How many keys of each chunk the intervals of each owner contain; a key in two intervals counts twice.

    Args:
        intervals: in any order.
        owners: number of owners.
        bounds: the first key of each chunk, ascending, and the number of keys.
    """
    # Keys of an interval before a bound: max(bound - start, 0) - max(bound - stop, 0).
    starts, stops = (
        _sums_before(values, intervals.owner, owners, bounds) for values in (intervals.start, intervals.stop)
    )
    return (starts - stops).diff(dim=1)


class BlockedQueries:
    """Which blocks of queries attend to a key of which chunk, collected from intervals of their keys.

    Args:
        blocks: number of blocks.
        size: queries of a block.
        bounds: the first key of each chunk, ascending, and the number of keys.
    """

    def __init__(self, blocks: int, size: int, bounds: Int[Tensor, " bounds"]) -> None:
        self._size, self._bounds = size, bounds
        #: By how many the intervals that reach a chunk are more than those that reach the chunk before it.
        self._more = torch.zeros(blocks, len(bounds), dtype=torch.int64)

    def add(self, intervals: KeyIntervals) -> None:
        """Add intervals whose owners are queries."""
        first = torch.searchsorted(self._bounds, intervals.start, right=True) - 1
        end = torch.searchsorted(self._bounds, intervals.stop)
        row = intervals.owner // self._size * len(self._bounds)
        more, one = self._more.view(-1), torch.ones_like(row)
        more.index_add_(0, row + first, one).index_add_(0, row + end, -one)

    @property
    def table(self) -> Bool[Tensor, "blocks chunks"]:
        """Whether a query of a block attends to a key of a chunk."""
        return self._more.cumsum(dim=1)[:, :-1] > 0


def rank_of_positions(layout: ShardLayout) -> Int[Tensor, " length"]:
    """The rank that has each position."""
    rank_of = torch.empty(layout.length, dtype=torch.int64)
    for rank, chunks in enumerate(layout.chunks):
        for chunk in chunks:
            rank_of[chunk.start : chunk.stop] = rank
    return rank_of


def _sums_before(values: Tensor, owner: Tensor, owners: int, bounds: Tensor) -> Int[Tensor, "owners bounds"]:
    """The sum of ``max(bound - value, 0)`` over each owner's values."""
    stride = int(bounds[-1]) + 1
    origin = torch.arange(owners)[:, None] * stride
    places, order = (values + owner * stride).sort()
    total = torch.nn.functional.pad(values[order].cumsum(0), (1, 0))
    first, before = torch.searchsorted(places, origin), torch.searchsorted(places, origin + bounds)
    return bounds * (before - first) - (total[before] - total[first])


@dataclass(frozen=True)
class _QueryIntervals:
    """Any number of intervals per query, int64 ``[batch | 1, heads | 1, queries | 1, count]``, which may be empty.

    ``exact`` is False if a part of the mask has no intervals and is not a table.
    """

    start: Tensor
    stop: Tensor
    exact: bool = True

    @classmethod
    def of(cls, parts: list[Mask], index: tuple[Tensor, Tensor, Tensor], k_len: int) -> _QueryIntervals:
        """The intersection of the intervals of all parts that have them."""
        rows = cls(torch.zeros(1, 1, 1, 1, dtype=torch.int64), torch.full((1, 1, 1, 1), k_len))
        for part in parts:
            if isinstance(part, Blocks) and does_as(part, Blocks):
                rows = rows._intersected(_rows_of_blocks(part, index))
            elif does_as(part, Dense):
                continue
            elif (intervals := part.intervals(*index, k_len)) is not None:
                rows = rows._intersected(cls(intervals.start, intervals.stop))
            else:
                rows = replace(rows, exact=False)
        return replace(rows, start=rows.start.clamp(0, k_len), stop=rows.stop.clamp(0, k_len))

    def _intersected(self, other: _QueryIntervals) -> _QueryIntervals:
        start = torch.maximum(self.start[..., :, None], other.start[..., None, :]).flatten(-2)
        stop = torch.minimum(self.stop[..., :, None], other.stop[..., None, :]).flatten(-2)
        return replace(self, start=start, stop=stop)

    def flat(self, queries: Int[Tensor, " queries"], k_len: int) -> KeyIntervals:
        """The intervals that are not empty."""
        start, stop, owner = torch.broadcast_tensors(self.start, self.stop, queries.view(1, 1, -1, 1))
        filled = start < stop
        return KeyIntervals(owner[filled], start[filled], stop[filled], self.exact)

    def within(self, tables: list[Mask], index: tuple[Tensor, Tensor, Tensor], k_len: int) -> KeyIntervals:
        """The intervals of the keys that boolean tensors allow too."""
        batch, head, q_pos = index
        k_pos = torch.arange(k_len).view(1, 1, 1, -1)
        allowed = ((k_pos[..., None, :] >= self.start[..., None]) & (k_pos[..., None, :] < self.stop[..., None])).any(
            -2
        )
        for table in tables:
            allowed = allowed & table.allows(batch, head, q_pos, k_pos)
        row, start, stop = runs(allowed.expand(*allowed.shape[:2], q_pos.shape[2], k_len))
        return KeyIntervals(q_pos.flatten()[row % q_pos.shape[2]], start, stop, self.exact)


def runs(allowed: Bool[Tensor, "*rows k_len"]) -> tuple[Tensor, Tensor, Tensor]:
    """The runs of True in each row: the row's number, and the run's start and stop."""
    changes = torch.nn.functional.pad(allowed.flatten(0, -2).to(torch.int8), (1, 1)).diff(dim=1)
    row, start = (changes == 1).nonzero(as_tuple=True)
    return row, start, (changes == -1).nonzero(as_tuple=True)[1]


def _rows_of_blocks(mask: Blocks, index: tuple[Tensor, Tensor, Tensor]) -> _QueryIntervals:
    """The intervals of keys of each query under a table of blocks."""
    leading = mask.table.shape[:3]
    row, start, stop = runs(mask.table)
    counts = row.bincount(minlength=leading.numel())
    place = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    most = max(1, int(counts.amax())) if counts.numel() else 1
    bounds = torch.zeros(2, leading.numel(), most, dtype=torch.int64)
    bounds[:, row, place] = torch.stack([start, stop]) * mask.size
    start, stop = bounds.view(2, *leading, most)[..., index[2].flatten() // mask.size, :]
    return _QueryIntervals(start, stop)
