"""Row intervals: for each query, the few runs of keys ``[start, stop)`` that it may attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

__all__ = ["MAX_INTERVALS", "Intervals"]

#: More runs per row than this are not worth keeping as integers: a kernel reads them in its inner loop.
MAX_INTERVALS: Final = 4


@dataclass(frozen=True)
class Intervals:
    """Disjoint, ascending runs of keys per query; a run with ``stop <= start`` is empty.

    ``start`` and ``stop`` are int64 ``[batch | 1, heads | 1, q_len | 1, runs]``.
    """

    start: Tensor
    stop: Tensor

    @classmethod
    def single(cls, start: Tensor, stop: Tensor, k_len: int) -> Intervals:
        """One run per row, from tensors that broadcast to ``[batch, heads, q_len, 1]``."""
        start, stop = torch.broadcast_tensors(start, stop)
        return cls(start.clamp(0, k_len), stop.clamp(0, k_len))

    @property
    def runs(self) -> int:
        return self.start.shape[-1]

    def intersect(self, other: Intervals) -> Intervals | None:
        """Keys in both; None when that would take more than ``MAX_INTERVALS`` runs."""
        start = torch.maximum(self.start[..., :, None], other.start[..., None, :]).flatten(-2)
        stop = torch.minimum(self.stop[..., :, None], other.stop[..., None, :]).flatten(-2)
        return Intervals(start, stop).bounded()

    def union(self, other: Intervals) -> Intervals | None:
        """Keys in either, merged where runs overlap."""
        shape = torch.broadcast_shapes(self.start.shape[:-1], other.start.shape[:-1])
        start = torch.cat([part.start.expand(*shape, part.runs) for part in (self, other)], dim=-1)
        stop = torch.cat([part.stop.expand(*shape, part.runs) for part in (self, other)], dim=-1)
        return Intervals(start, stop)._ordered().bounded()

    def complement(self, k_len: int) -> Intervals | None:
        """Keys of ``[0, k_len)`` in none of the runs."""
        ordered = self._ordered()
        edge = torch.zeros_like(ordered.start[..., :1])
        # An empty run is parked at the far end by _ordered, where it bounds nothing.
        gap_start = torch.cat([edge, ordered.stop.clamp(max=k_len)], dim=-1)
        gap_stop = torch.cat([ordered.start.clamp(max=k_len), edge + k_len], dim=-1)
        return Intervals(gap_start, gap_stop).bounded()

    def _ordered(self) -> Intervals:
        empty = self.stop <= self.start
        far = torch.iinfo(torch.int64).max
        start, order = self.start.masked_fill(empty, far).sort(dim=-1)
        stop = self.stop.masked_fill(empty, far).gather(-1, order)
        reached = torch.cat([torch.zeros_like(stop[..., :1]), stop.cummax(dim=-1).values[..., :-1]], dim=-1)
        return Intervals(torch.maximum(start, reached), stop)

    def bounded(self) -> Intervals | None:
        """The same rows in as few columns as they need, or None where that is too many."""
        used = (self.stop > self.start).flatten(0, -2).any(dim=0)
        keep = [run for run, filled in enumerate(used.tolist()) if filled] or [0]
        if len(keep) > MAX_INTERVALS:
            return None
        return Intervals(self.start[..., keep], self.stop[..., keep])

    def count_in_tiles(self, tile_starts: Tensor, tile_stops: Tensor) -> Tensor:
        """How many keys of each tile a row reaches: ``[batch | 1, heads | 1, q_len, tiles]``."""
        low = torch.maximum(self.start[..., None], tile_starts)
        high = torch.minimum(self.stop[..., None], tile_stops)
        return (high - low).clamp(min=0).sum(dim=-2)
