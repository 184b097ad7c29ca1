"""Row intervals: for each query, the few intervals of keys ``[start, stop)`` that it may attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

__all__ = ["MAX_INTERVALS", "Intervals"]

#: The largest number of intervals per row: a kernel reads all of them in its inner loop.
MAX_INTERVALS: Final = 4


@dataclass(frozen=True)
class Intervals:
    """Disjoint, ascending intervals of keys per query; an interval with ``stop <= start`` is empty.

    ``start`` and ``stop`` are int64 ``[batch | 1, heads | 1, q_len | 1, count]``.
    """

    start: Tensor
    stop: Tensor

    @classmethod
    def single(cls, start: Tensor, stop: Tensor, k_len: int) -> Intervals:
        """One interval per row, from tensors that broadcast to ``[batch, heads, q_len, 1]``."""
        start, stop = torch.broadcast_tensors(start, stop)
        return cls(start.clamp(0, k_len), stop.clamp(0, k_len))

    @property
    def count(self) -> int:
        return self.start.shape[-1]

    def intersect(self, other: Intervals) -> Intervals | None:
        """Keys in both; None if that takes more than ``MAX_INTERVALS`` intervals."""
        start = torch.maximum(self.start[..., :, None], other.start[..., None, :]).flatten(-2)
        stop = torch.minimum(self.stop[..., :, None], other.stop[..., None, :]).flatten(-2)
        return Intervals(start, stop).bounded()

    def union(self, other: Intervals) -> Intervals | None:
        """Keys in at least one of the two; overlapping intervals are merged."""
        shape = torch.broadcast_shapes(self.start.shape[:-1], other.start.shape[:-1])
        start = torch.cat([part.start.expand(*shape, part.count) for part in (self, other)], dim=-1)
        stop = torch.cat([part.stop.expand(*shape, part.count) for part in (self, other)], dim=-1)
        return Intervals(start, stop)._ordered().bounded()

    def complement(self, k_len: int) -> Intervals | None:
        """Keys of ``[0, k_len)`` in none of the intervals."""
        ordered = self._ordered()
        origin = torch.zeros_like(ordered.start[..., :1])
        # _ordered moves empty intervals behind all keys, where they bound nothing.
        gap_start = torch.cat([origin, ordered.stop.clamp(max=k_len)], dim=-1)
        gap_stop = torch.cat([ordered.start.clamp(max=k_len), origin + k_len], dim=-1)
        return Intervals(gap_start, gap_stop).bounded()

    def _ordered(self) -> Intervals:
        empty = self.stop <= self.start
        far = torch.iinfo(torch.int64).max
        start, order = self.start.masked_fill(empty, far).sort(dim=-1)
        stop = self.stop.masked_fill(empty, far).gather(-1, order)
        reached = torch.cat([torch.zeros_like(stop[..., :1]), stop.cummax(dim=-1).values[..., :-1]], dim=-1)
        return Intervals(torch.maximum(start, reached), stop)

    def bounded(self) -> Intervals | None:
        """The same intervals in as few columns as the fullest row needs, empty ones last; None if too many."""
        empty = self.stop <= self.start
        count = int((~empty).sum(dim=-1).max()) if empty.numel() else 0
        if count > MAX_INTERVALS:
            return None
        if count == self.count:
            return self
        columns = empty.to(torch.int8).argsort(dim=-1, stable=True)[..., : max(count, 1)]
        return Intervals(self.start.gather(-1, columns), self.stop.gather(-1, columns))

    def count_in_tiles(self, tile_starts: Tensor, tile_stops: Tensor) -> Tensor:
        """How many keys of each tile a row reaches: ``[batch | 1, heads | 1, q_len, tiles]``."""
        low = torch.maximum(self.start[..., None], tile_starts)
        high = torch.minimum(self.stop[..., None], tile_stops)
        return (high - low).clamp(min=0).sum(dim=-2)
