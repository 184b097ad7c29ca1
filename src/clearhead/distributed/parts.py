"""Where a rank's tokens are in its part of a tensor, and joining the parts ``[..., len, channels]`` of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.distributed.layout import ShardLayout

__all__ = ["Needs", "cut", "joined", "lengths_of", "selected", "slices_of"]


def lengths_of(layout: ShardLayout) -> list[int]:
    """The number of tokens of each rank."""
    return [sum(map(len, chunks)) for chunks in layout.chunks]


def slices_of(layout: ShardLayout, rank: int) -> list[tuple[range, slice]]:
    """A rank's chunks that are not empty, with where they are in its part of a tensor."""
    slices, start = [], 0
    for chunk in layout.chunks[rank]:
        if len(chunk):
            slices.append((chunk, slice(start, start + len(chunk))))
        start += len(chunk)
    return slices


def joined(layout: ShardLayout, parts: list[Tensor]) -> Tensor:
    """The whole tensor of all ranks' parts, in the order of positions."""
    pieces = {
        chunk.start: parts[rank][..., where, :]
        for rank in range(layout.ranks)
        for chunk, where in slices_of(layout, rank)
    }
    return torch.cat([pieces[start] for start in sorted(pieces)], dim=-2) if pieces else parts[0]


def cut(layout: ShardLayout, whole: Tensor, rank: int) -> Tensor:
    """A rank's part of a whole tensor; a view of it if that is one chunk."""
    pieces = [whole[..., chunk.start : chunk.stop, :] for chunk in layout.chunks[rank]] or [whole[..., :0, :]]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-2)


def selected(tensor: Tensor, parts: Sequence[slice]) -> Tensor:
    """Some tokens of a tensor ``[batch, heads, len, channels]``, contiguous; the tensor itself where that is all."""
    if len(parts) == 1:
        return tensor[:, :, parts[0]].contiguous()
    return torch.cat([tensor[:, :, part] for part in parts or (slice(0, 0),)], dim=2)


@dataclass(frozen=True)
class Needs:
    """The tokens that this rank needs of each rank, and those that each needs of it; all ranges are positions.

    Attributes:
        layout: which tokens the ranks have.
        rank: this rank.
        received: for each rank, what this rank needs of it, in the order of its part; a range is within one chunk.
        sent: for each rank, what it needs of this one.
    """

    layout: ShardLayout
    rank: int
    received: tuple[tuple[range, ...], ...]
    sent: tuple[tuple[range, ...], ...]

    @classmethod
    def whole(cls, layout: ShardLayout, rank: int) -> Needs:
        """Every rank needs all tokens."""
        mine = tuple(chunk for chunk in layout.chunks[rank] if len(chunk))
        received = tuple(tuple(chunk for chunk in chunks if len(chunk)) for chunks in layout.chunks)
        return cls(layout, rank, received, (mine,) * layout.ranks)

    def parts_for(self, rank: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What a rank needs of this rank's tensors ``[batch, heads, len, channels]``."""
        parts = _merged(self._places(self.sent[rank]))
        return [selected(tensor, parts) for tensor in tensors] if parts else []

    def empty_from(self, rank: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Empty tensors for what this rank needs of another one."""
        count = sum(map(len, self.received[rank]))
        return [tensor.new_empty(*tensor.shape[:2], count, tensor.shape[3]) for tensor in tensors] if count else []

    def spanned(self, span: range, mine: Tensor, arrived: Sequence[Tensor | None]) -> Tensor:
        """``[batch, heads, span, channels]``: what this rank needs in the order of positions, and 0 elsewhere.

        Args:
            span: the positions; what the rank needs is within the span or outside.
            mine: this rank's part.
            arrived: what came from each other rank.
        """
        pieces = [
            (positions, mine[:, :, where])
            for positions, where in zip(self.received[self.rank], self._places(self.received[self.rank]), strict=True)
        ]
        for ranges, tensor in zip(self.received, arrived, strict=True):
            if tensor is not None:
                pieces += zip(ranges, tensor.split([len(one) for one in ranges], dim=2), strict=True)
        pieces = [(positions, piece) for positions, piece in pieces if positions.start in span]
        whole = mine.new_empty(*mine.shape[:2], len(span), mine.shape[3])
        end = 0
        for positions, piece in sorted(pieces, key=lambda one: one[0].start):
            start = positions.start - span.start
            whole[:, :, end:start] = 0.0
            end = start + len(positions)
            whole[:, :, start:end] = piece
        whole[:, :, end:] = 0.0
        return whole

    def _places(self, ranges: Sequence[range]) -> list[slice]:
        """Where positions of this rank are in its part."""
        chunks = slices_of(self.layout, self.rank)
        return [
            slice(where.start + one.start - chunk.start, where.start + one.stop - chunk.start)
            for one in ranges
            for chunk, where in chunks
            if one.start in chunk
        ]


def _merged(parts: Sequence[slice]) -> list[slice]:
    """Slices of which one begins where another ends as one."""
    merged: list[slice] = []
    for part in parts:
        if merged and merged[-1].stop == part.start:
            merged[-1] = slice(merged[-1].start, part.stop)
        else:
            merged.append(part)
    return merged
