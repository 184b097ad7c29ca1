"""Where a rank's tokens are in its part of a tensor, and joining the parts ``[..., len, channels]`` of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.distributed.layout import ShardLayout

__all__ = ["cut", "joined", "lengths_of", "slices_of"]


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
    """A rank's part of a whole tensor."""
    pieces = [whole[..., chunk.start : chunk.stop, :] for chunk in layout.chunks[rank]]
    return torch.cat(pieces, dim=-2) if pieces else whole[..., :0, :]
