"""Layouts with equal tokens and nearly equal work on every rank, for any mask."""

from __future__ import annotations

import heapq
from typing import Final

import torch
from torch import Tensor

from clearhead.arguments import whole
from clearhead.distributed.layout import ShardLayout, chunks_of
from clearhead.distributed.needed_keys import query_work
from clearhead.distributed.plan import check_mask
from clearhead.masks.base import Mask
from clearhead.shapes import Int

__all__ = ["balanced"]

#: The busiest rank's pairs over the mean at which no smaller chunks are tried.
_TARGET: Final = 1.04
#: The fewest tokens of a chunk: kernels compute tiles of 64 queries.
_SMALLEST: Final = 64
#: Exchanges of two chunks that are tried for each rank.
_EXCHANGES: Final = 16


def balanced(mask: Mask | None, length: int, *, ranks: int, chunks: int | None = None) -> ShardLayout:
    """A layout that gives every rank as many tokens, and nearly as many pairs of the mask, as any other rank.

    The sequence is cut into ``ranks * chunks`` equal chunks. The chunk with most allowed (query, key) pairs goes to the
    rank that has fewest pairs so far, then the next one; each rank receives ``chunks`` of them. Chunks are then
    exchanged while that lowers the most pairs of a rank.

    Args:
        mask: the mask of the whole sequence; None allows every key.
        length: tokens of the whole sequence.
        ranks: number of ranks.
        chunks: chunks per rank. By default 1, 2, 4 ... until the busiest rank has at most 1.04 times the mean pairs, or
            chunks have 64 tokens. Few large chunks need fewer keys of other ranks.

    Returns:
        The layout, for ``shard``, ``unshard``, ``plan_attention`` and attention. Every rank computes the same one.

    Raises:
        ShapeError: ``length``, ``ranks`` or ``chunks`` is no whole number.
        MaskError: ``mask`` is no mask, or does not fit ``length``.

    Cost: no communication. O(length) for each batch entry and head that the mask distinguishes, and
    O(ranks * chunks * log(ranks)).

    Paper: Graham 1969, "Bounds on multiprocessing timing anomalies" (largest first).

    >>> from clearhead import Causal
    >>> balanced(Causal(), 512, ranks=2).chunks
    ((range(0, 128), range(384, 512)), (range(128, 384),))
    """
    length = whole("balanced", "length", length, low=0)
    ranks = whole("balanced", "ranks", ranks, low=1)
    work = query_work(check_mask("balanced", mask, length), length)
    if chunks is not None:
        return _dealt(work, ranks, whole("balanced", "chunks", chunks, low=1))[0]
    best, lowest, count = _dealt(work, ranks, 1)[0], float("inf"), 1
    while True:
        layout, most = _dealt(work, ranks, count)
        if most < lowest:
            best, lowest = layout, most
        if lowest * ranks <= _TARGET * int(work.sum()) or length < 2 * count * ranks * _SMALLEST:
            return best
        count *= 2


def _dealt(work: Int[Tensor, " length"], ranks: int, chunks: int) -> tuple[ShardLayout, int]:
    """A layout of some chunks per rank, and the most pairs of a rank."""
    pieces = [chunks_of(len(work), ranks * chunks, place, "contiguous")[0] for place in range(ranks * chunks)]
    total = torch.nn.functional.pad(work.cumsum(0), (1, 0))
    loads = total[[piece.stop for piece in pieces]] - total[[piece.start for piece in pieces]]
    owner = _exchanged(loads, _largest_first(loads, ranks, chunks), ranks)
    parts: list[list[range]] = [[] for _ in range(ranks)]
    for piece, rank in zip(pieces, owner.tolist(), strict=True):
        if parts[rank] and parts[rank][-1].stop == piece.start:
            parts[rank][-1] = range(parts[rank][-1].start, piece.stop)
        else:
            parts[rank].append(piece)
    parts.sort(key=lambda part: part[0].start)
    most = torch.zeros(ranks, dtype=torch.int64).index_add_(0, owner, loads).amax()
    return ShardLayout(tuple(map(tuple, parts))), int(most)


def _largest_first(loads: Int[Tensor, " pieces"], ranks: int, chunks: int) -> Int[Tensor, " pieces"]:
    """The rank of each piece: the largest piece goes to the rank that has least, if it has fewer than ``chunks``."""
    owner, sizes = torch.empty_like(loads), loads.tolist()
    open_ranks = [(0, rank, chunks) for rank in range(ranks)]
    for piece in loads.argsort(descending=True, stable=True).tolist():
        load, rank, left = heapq.heappop(open_ranks)
        owner[piece] = rank
        if left > 1:
            heapq.heappush(open_ranks, (load + sizes[piece], rank, left - 1))
    return owner


def _exchanged(loads: Int[Tensor, " pieces"], owner: Int[Tensor, " pieces"], ranks: int) -> Int[Tensor, " pieces"]:
    """The owners after exchanges of two pieces, each of which lowers the load of the rank that has most."""
    sums = torch.zeros(ranks, dtype=torch.int64).index_add_(0, owner, loads)
    mean = int(loads.sum()) / ranks
    for _ in range(_EXCHANGES * ranks):
        busiest = int(sums.argmax())
        if int(sums[busiest]) <= _TARGET * mean:
            break
        mine = (owner == busiest).nonzero().flatten()
        gain = loads[mine][:, None] - loads
        # The larger load of the two ranks after the exchange.
        larger = torch.maximum(sums[busiest] - gain, sums[owner] + gain)
        lowest = int(larger.argmin())
        if int(larger.flatten()[lowest]) >= int(sums[busiest]):
            break
        row, other = divmod(lowest, len(loads))
        piece = int(mine[row])
        moved = int(gain[row, other])
        sums[busiest] -= moved
        sums[owner[other]] += moved
        owner[piece], owner[other] = int(owner[other]), busiest
    return owner
