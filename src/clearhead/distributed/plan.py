"""The exchange of attention over ranks: which keys each rank needs from each other, and how much each computes.

A plan is computed from the mask and the layout alone, without a process group: every rank computes the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Final

import torch
from torch import Tensor

from clearhead.arguments import repr_of, whole
from clearhead.distributed.layout import LayoutName, ShardLayout, check_layout, layout_of
from clearhead.distributed.needed_keys import (
    BlockedQueries,
    KeyIntervals,
    count_keys,
    key_intervals,
    rank_of_positions,
    runs,
)
from clearhead.errors import MaskError
from clearhead.masks.base import Mask, carried_sizes
from clearhead.ops.kinds import FORWARD_TILE, KEY_TILE, QUERY_BLOCK
from clearhead.record import decode
from clearhead.shapes import Bool, Int

__all__ = ["FEW_KEYS", "RING_PIECES", "Plan", "check_mask", "computed", "joined_ranges", "plan_attention", "plan_of"]

#: A ring passes a block of keys on in so many pieces: one is computed with, one arrives and one is sent.
RING_PIECES: Final = 3
#: Fewer keys are not cut.
FEW_KEYS: Final = 512


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What each rank computes and receives in an attention over a sharded sequence; made by ``plan_attention``.

    ``str`` is a table of the ranks.

    Attributes:
        layout: the chunks of every rank.
        work: int64 ``[ranks, ranks]``: the (query, key) pairs that the mask allows between the queries of the first
            rank and the keys of the second, summed over the batch entries and heads that the mask distinguishes.
        tokens: int64 ``[ranks, ranks]``: how many keys of the second rank a query of the first may attend to, in any
            batch entry and head.
        variants: batch entries times heads that the mask distinguishes; 1 for a mask without such tensors.
        exact: whether the mask states its intervals or a table. Otherwise pairs that the mask forbids are counted, and
            keys that no query may attend to are sent.
        ranges: for each rank, the positions of the keys that its queries may attend to.
        attending: bool ``[blocks, chunks]``: whether a query of a block of ``QUERY_BLOCK`` may attend to a key of a
            chunk, of which those that are not empty count, in the order of positions.
        meeting: bool ``[chunks, chunks]``: whether a query of the first chunk may attend to a key of the second.
        spans: int64 ``[chunks, 2]``: the first key that a query of a chunk may attend to, and the one after the last.
    """

    layout: ShardLayout
    work: Int[Tensor, "ranks ranks"] = field(compare=False)
    tokens: Int[Tensor, "ranks ranks"] = field(compare=False)
    variants: int
    exact: bool
    ranges: tuple[tuple[range, ...], ...] = field(repr=False)
    attending: Bool[Tensor, "blocks chunks"] = field(compare=False, repr=False)
    meeting: Bool[Tensor, "chunks chunks"] = field(compare=False, repr=False)
    spans: Int[Tensor, "chunks 2"] = field(compare=False, repr=False)

    def needs(self, query_rank: int, key_rank: int) -> tuple[range, ...]:
        """The positions of the keys of one rank that a query of another rank may attend to.

        Args:
            query_rank: the rank whose queries attend.
            key_rank: the rank that has the keys.

        Returns:
            Disjoint ranges in the order in which the key rank's part contains them; a range is within one chunk.
        """
        needed = self.ranges[query_rank]
        return tuple(
            range(max(chunk.start, keys.start), min(chunk.stop, keys.stop))
            for chunk in self.layout.chunks[key_rank]
            for keys in needed
            if max(chunk.start, keys.start) < min(chunk.stop, keys.stop)
        )

    def asked_by(self, key_rank: int, query_rank: int) -> tuple[range, ...]:
        """The positions of the queries of one rank that the gradients of another rank's keys need.

        Args:
            key_rank: the rank that has the keys.
            query_rank: the rank that has the queries.

        Returns:
            Disjoint ranges in the order in which the query rank's part contains them; a range is within one chunk.
            Where a query of a block of ``QUERY_BLOCK`` may attend to a key, all queries of the block are needed.
        """
        wanted = self._blocks_of(key_rank)
        return tuple(
            range(max(chunk.start, rows.start), min(chunk.stop, rows.stop))
            for chunk in self.layout.chunks[query_rank]
            for rows in wanted
            if max(chunk.start, rows.start) < min(chunk.stop, rows.stop)
        )

    def queries_of(self, chunk: range) -> range:
        """The queries from the first to the last block that may attend to a key of a chunk of the layout."""
        blocks = self.attending[:, self._chunks.index((chunk.start, chunk.stop))].nonzero().flatten()
        if not len(blocks):
            return range(0)
        return range(int(blocks[0]) * QUERY_BLOCK, min((int(blocks[-1]) + 1) * QUERY_BLOCK, self.layout.length))

    def keys_of(self, chunk: range) -> range:
        """The keys from the first to the last tile of forward that a query of a chunk of the layout may attend to."""
        start, stop = self.spans[self._chunks.index((chunk.start, chunk.stop))].tolist()
        if start >= stop:
            return range(0)
        # A call of fewer keys than a tile of backward saves other rows.
        first = min(start, max(0, self.layout.length - KEY_TILE - 1)) // FORWARD_TILE * FORWARD_TILE
        return range(first, min(-(-stop // FORWARD_TILE) * FORWARD_TILE, self.layout.length))

    @cached_property
    def rows(self) -> Int[Tensor, "ranks ranks"]:
        """How many queries of the second rank the gradients of the first rank's keys need: sizes of ``asked_by``."""
        ranks, blocks = self.ranks, self.attending.shape[0]
        asked = torch.zeros(blocks, ranks, dtype=torch.float64)
        asked = asked.index_add_(1, self.chunk_ranks, self.attending.double()) > 0
        place = torch.arange(self.layout.length) // QUERY_BLOCK * ranks + rank_of_positions(self.layout)
        tokens = place.bincount(minlength=blocks * ranks).view(blocks, ranks)
        return (asked.double().T @ tokens.double()).round().long()

    @cached_property
    def chunk_ranks(self) -> Int[Tensor, " chunks"]:
        """The rank of each chunk that is not empty, in the order of positions."""
        return torch.tensor([self._rank_of[chunk] for chunk in self._chunks], dtype=torch.int64)

    @cached_property
    def chunk_sizes(self) -> Int[Tensor, " chunks"]:
        """The tokens of each chunk that is not empty, in the order of positions."""
        return torch.tensor([stop - start for start, stop in self._chunks], dtype=torch.int64)

    @cached_property
    def _rank_of(self) -> dict[tuple[int, int], int]:
        """The rank of each chunk that is not empty, by its first position and the one after its last."""
        pieces = enumerate(self.layout.chunks)
        return {(chunk.start, chunk.stop): rank for rank, chunks in pieces for chunk in chunks if len(chunk)}

    @cached_property
    def _chunks(self) -> list[tuple[int, int]]:
        return sorted(self._rank_of)

    def _blocks_of(self, key_rank: int) -> list[range]:
        """Runs of queries whose blocks may attend to a key of a rank."""
        mine = [place for place, chunk in enumerate(self._chunks) if self._rank_of[chunk] == key_rank]
        wanted = self.attending[:, mine].any(dim=1)
        _, starts, stops = runs(wanted[None])
        length = self.layout.length
        pairs = zip(starts.tolist(), stops.tolist(), strict=True)
        return [range(start * QUERY_BLOCK, min(stop * QUERY_BLOCK, length)) for start, stop in pairs]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.layout.ranks

    @cached_property
    def balance(self) -> float:
        """Pairs of the rank that has most, divided by the mean; 1.0 is the best."""
        per_rank = self.work.sum(dim=1).double()
        mean = float(per_rank.mean())
        return float(per_rank.amax()) / mean if mean else 1.0

    @property
    def received(self) -> Int[Tensor, " ranks"]:
        """How many keys each rank needs from other ranks."""
        return self.tokens.sum(dim=1) - self.tokens.diagonal()

    @property
    def share(self) -> float:
        """Keys that are needed from other ranks, as a share of the full exchange, in which each rank receives all."""
        full = (self.ranks - 1) * self.layout.length
        return int(self.received.sum()) / full if full else 0.0

    def __str__(self) -> str:
        length, per_rank = self.layout.length, self.work.sum(dim=1)
        lines = [
            f"{length} tokens on {self.ranks} ranks",
            f"balance {self.balance:.3f} (pairs of the busiest rank over the mean), "
            f"keys sent {100 * self.share:.1f} % of the full exchange",
            f"{'rank':>4}{'tokens':>12}{'pairs':>18}{'of the mean':>13}{'keys received':>15}",
        ]
        if not self.exact:
            lines.insert(2, "upper bounds: a part of the mask states no intervals")
        mean = max(float(per_rank.double().mean()), 1.0)
        shown = range(self.ranks) if self.ranks <= 16 else [*range(8), *range(self.ranks - 8, self.ranks)]
        received = self.received
        for rank in shown:
            if rank == self.ranks - 8 and self.ranks > 16:
                lines.append(" ...")
            tokens, pairs = sum(map(len, self.layout.chunks[rank])), int(per_rank[rank])
            lines.append(f"{rank:>4}{tokens:>12}{pairs:>18}{pairs / mean:>13.3f}{int(received[rank]):>15}")
        return "\n".join(lines)


def plan_attention(
    mask: Mask | None, length: int, *, ranks: int, layout: LayoutName | ShardLayout = "contiguous"
) -> Plan:
    """What each rank computes and receives in an attention over a sharded sequence, known from the mask alone.

    A rank that has the queries ``Q`` needs the keys ``{k : mask allows (q, k) for a q in Q}``.

    Args:
        mask: the mask of the whole sequence; None allows every key.
        length: tokens of the whole sequence.
        ranks: number of ranks.
        layout: ``"contiguous"``, ``"zigzag"`` or a ``ShardLayout``.

    Returns:
        The plan, whose ``str`` is a table: pairs of each rank, balance, and keys that are sent.

    Raises:
        ShapeError: ``length`` or ``ranks`` is no whole number, or ``layout`` does not fit them.
        MaskError: ``mask`` is no mask, or does not fit ``length``.

    Cost: no communication and no process group. O(length * log(length)) time and O(length) memory for each batch entry
    and head that the mask distinguishes; ``Dense`` takes the time of reading its tensor. A mask without intervals
    (``MaskFunction`` that is not recognised, ``Strided``) is taken to allow every key.

    >>> from clearhead import Causal, Window
    >>> plan = plan_attention(Causal() & Window(255), 65536, ranks=8)
    >>> plan.needs(3, 2), plan.needs(3, 1)
    ((range(24321, 24576),), ())
    >>> round(plan.share, 4), round(plan_attention(Causal(), 65536, ranks=8, layout="zigzag").balance, 3)
    (0.0039, 1.0)
    """
    length = whole("plan_attention", "length", length, low=0)
    ranks = whole("plan_attention", "ranks", ranks, low=1)
    check_layout("plan_attention", layout)
    return plan_of(check_mask("plan_attention", mask, length), layout_of(length, ranks, layout))


def check_mask(function: str, mask: Mask | None, length: int) -> Mask | None:
    """A mask on the CPU and placed at 0; raises ``MaskError`` unless it fits a sequence of ``length`` tokens."""
    if mask is None:
        return None
    if not isinstance(mask, Mask):
        raise MaskError.about(
            function,
            "mask",
            must="be a mask or None",
            got=repr_of(mask),
            then="Wrap a boolean tensor in ch.Dense and a function in ch.MaskFunction.",
        )
    placed = mask.to(torch.device("cpu")).placed(0)
    placed.check(function, *carried_sizes(placed), range(length), length)
    return placed


def plan_of(mask: Mask | None, layout: ShardLayout) -> Plan:
    """The plan of a mask that has been checked against the layout's length."""
    if mask is None or _is_of_numbers(mask):
        # The layers of a model share a mask.
        return _plan_of_text("None" if mask is None else mask.encode([]), layout)
    return computed(mask.to(torch.device("cpu")).placed(0), layout)


def _is_of_numbers(mask: Mask) -> bool:
    """Whether the mask is one of the library's without tensors or functions, so that its text describes it."""
    fields = [getattr(mask, name) for name in mask.fields]
    return type(mask).__module__.startswith("clearhead.masks.") and all(
        _is_of_numbers(value) if isinstance(value, Mask) else isinstance(value, int) for value in fields
    )


@lru_cache(maxsize=64)
def _plan_of_text(text: str, layout: ShardLayout) -> Plan:
    return computed(decode(text, ()), layout)


def computed(mask: Mask | None, layout: ShardLayout) -> Plan:
    """The plan of a mask that is on the CPU and placed at 0."""
    length, ranks = layout.length, layout.ranks
    rank_of = rank_of_positions(layout)
    pieces = sorted((chunk.start, rank) for rank, chunks in enumerate(layout.chunks) for chunk in chunks if len(chunk))
    bounds = torch.tensor([*(start for start, _ in pieces), length])
    key_rank = torch.tensor([rank for _, rank in pieces], dtype=torch.int64)

    def by_rank(intervals: KeyIntervals) -> Tensor:
        counts = count_keys(intervals, ranks, bounds)
        return torch.zeros(ranks, ranks, dtype=torch.int64).index_add_(1, key_rank, counts)

    work, unions = torch.zeros(ranks, ranks, dtype=torch.int64), []
    attending = BlockedQueries(-(-length // QUERY_BLOCK), QUERY_BLOCK, bounds)
    meeting, chunk_of = BlockedQueries(len(pieces), 1, bounds), _chunk_of_positions(bounds)
    first, last = torch.full((len(pieces),), length), torch.zeros(len(pieces), dtype=torch.int64)
    for block in key_intervals(mask, length):
        attending.add(block)
        by_chunk = block.owned_by(chunk_of)
        meeting.add(by_chunk)
        first.scatter_reduce_(0, by_chunk.owner, by_chunk.start, "amin")
        last.scatter_reduce_(0, by_chunk.owner, by_chunk.stop, "amax")
        intervals = block.owned_by(rank_of)
        work += by_rank(intervals)
        unions.append(intervals.union(length))
    needed = KeyIntervals.joined(unions).union(length)
    ranges: list[list[range]] = [[] for _ in range(ranks)]
    for rank, start, stop in zip(needed.owner.tolist(), needed.start.tolist(), needed.stop.tolist(), strict=True):
        ranges[rank].append(range(start, stop))
    batch, heads = (1, 1) if mask is None else carried_sizes(mask)
    return Plan(
        layout=layout,
        work=work,
        tokens=by_rank(needed),
        variants=batch * heads,
        exact=needed.exact,
        ranges=tuple(map(tuple, ranges)),
        attending=attending.table,
        meeting=meeting.table,
        spans=torch.stack([first, last], dim=1),
    )


def joined_ranges(ranges: Sequence[range]) -> list[range]:
    """Ranges that overlap or touch as one, ascending, without empty ones.

    >>> joined_ranges([range(4, 6), range(0, 2), range(1, 3), range(0)])
    [range(0, 3), range(4, 6)]
    """
    joined: list[range] = []
    for one in sorted((one for one in ranges if len(one)), key=lambda one: one.start):
        if joined and one.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, one.stop))
        else:
            joined.append(one)
    return joined


def _chunk_of_positions(bounds: Int[Tensor, " bounds"]) -> Int[Tensor, " length"]:
    """The chunk of each position, from the first positions of all chunks and the length."""
    return torch.arange(len(bounds) - 1).repeat_interleave(bounds.diff())
