"""Tile maps: which tiles of the scores are empty, partial or full under a mask, without a tensor T x T."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from clearhead.masks.base import Mask
from clearhead.shapes import Int

__all__ = ["EMPTY", "FULL", "PARTIAL", "tile_map"]

EMPTY: Final = 0
PARTIAL: Final = 1
FULL: Final = 2


def tile_map(
    mask: Mask, indices: tuple[Tensor, Tensor, Tensor, Tensor], q_tile: int, k_tile: int, *, whole: bool = True
) -> Int[Tensor, "batch heads q_tiles k_tiles"]:
    """For each tile, ``EMPTY`` (0), ``PARTIAL`` (1) or ``FULL`` (2), exactly.

    Args:
        mask: a mask placed for the call.
        indices: batch, head, q_pos and k_pos, as returned by ``Problem.indices``.
        q_tile: queries per tile.
        k_tile: keys per tile.
        whole: whether the keys are positions 0 to ``k_len - 1``, so that row intervals can be used.

    Returns:
        int8 ``[batch | 1, heads | 1, ceil(q_len / q_tile), ceil(k_len / k_tile)]``; an axis is 1 if all its entries are
        equal.

    Cost: with row intervals ``q_len * k_tiles`` time; otherwise the predicate is evaluated in strips of ``q_tile``
    queries, which takes ``q_len * k_len`` time and ``q_tile * k_len`` memory.
    """
    batch, head, q_pos, k_pos = indices
    k_len = k_pos.shape[-1]
    device = q_pos.device
    tile_starts = torch.arange(0, k_len, k_tile, device=device)
    tile_stops = (tile_starts + k_tile).clamp(max=k_len)
    rows = mask.intervals(batch, head, q_pos, k_len) if whole else None
    strips = []
    for start in range(0, q_pos.shape[2], q_tile):
        if rows is not None:
            part = slice(start, start + q_tile) if rows.start.shape[2] > 1 else slice(None)
            strip_rows = type(rows)(rows.start[:, :, part], rows.stop[:, :, part])
            counts = strip_rows.count_in_tiles(tile_starts, tile_stops)
        else:
            allowed = mask.allows(batch, head, q_pos[:, :, start : start + q_tile], k_pos)
            counts = _count(allowed, k_len, k_tile)
        strips.append(_kinds(counts, tile_stops - tile_starts))
    if not strips:
        return torch.zeros(1, 1, 0, tile_starts.shape[0], dtype=torch.int8, device=device)
    return torch.cat(strips, dim=2)


def _count(allowed: Tensor, k_len: int, k_tile: int) -> Tensor:
    """Allowed keys per row and tile, from booleans ``[batch | 1, heads | 1, rows | 1, k_len | 1]``."""
    allowed = allowed.expand(*allowed.shape[:3], k_len)
    padded = torch.nn.functional.pad(allowed, (0, -k_len % k_tile))
    counts: Tensor = padded.unflatten(-1, (-1, k_tile)).sum(dim=-1)
    return counts


def _kinds(counts: Tensor, widths: Tensor) -> Tensor:
    """One row of tiles from the counts of its queries."""
    any_key = (counts > 0).any(dim=2, keepdim=True)
    every_key = (counts == widths).all(dim=2, keepdim=True)
    return any_key.to(torch.int8) + every_key.to(torch.int8)
