"""What each rank computes, moves in memory and sends in an attention over ranks: counts, without seconds.

The counts follow the implementation: the work of ``gather.py``, ``heads.py`` and ``ring.py`` between two messages is a
``RankWork``, and the messages that a rank waits for together are a ``Transfer``. A byte that is read and written counts
twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from clearhead.distributed.machine import AttentionSizes
from clearhead.distributed.plan import FEW_KEYS, RING_PIECES, Plan, joined_ranges
from clearhead.ops.kinds import QUERY_BLOCK
from clearhead.shapes import Float

__all__ = ["OPERATIONS", "GatherCosts", "HeadsCosts", "Kernel", "RankWork", "RingCosts", "RingStep", "Transfer"]

Kernel: TypeAlias = Literal["forward", "backward", "queries", "keys"]
#: Floating-point operations per pair and channel, of products that multiply and add: ``Q K^T`` and ``P V`` forward; in
#: backward ``Q K^T``, ``dO V^T``, ``dS K``, ``dS^T Q`` and ``P^T dO``, of which gradients of queries alone need three
#: and those of keys alone four.
OPERATIONS: Final[dict[Kernel, int]] = {"forward": 4, "backward": 10, "queries": 6, "keys": 8}
#: Bytes of a float32, in which rows and partial results are.
_FLOAT32: Final = 4
#: How often a row's log-sum-exp, or a share computed from it, is read or written when two outputs are merged.
_MERGED: Final = 22
_NONE: Final = torch.zeros(1, dtype=torch.float64)


@dataclass(frozen=True)
class RankWork:
    """What every rank does between messages; tensors are float64 ``[ranks]``.

    Attributes:
        kernel: which pass of attention.
        pairs: pairs of query and key that the mask allows, summed over what the mask distinguishes.
        calls: calls of the kernel.
        rows: queries of all calls, of a head.
        keys: keys of all calls, of a key head.
        moved: bytes that are read and written besides: copies, fills and sums.
        fresh: bytes of memory that the process returned to the system before, and gets again.
    """

    kernel: Kernel = "forward"
    pairs: Float[Tensor, " ranks"] = field(default=_NONE)
    calls: Float[Tensor, " ranks"] = field(default=_NONE)
    rows: Float[Tensor, " ranks"] = field(default=_NONE)
    keys: Float[Tensor, " ranks"] = field(default=_NONE)
    moved: Float[Tensor, " ranks"] = field(default=_NONE)
    fresh: Float[Tensor, " ranks"] = field(default=_NONE)


@dataclass(frozen=True)
class Transfer:
    """Messages that begin together.

    Attributes:
        sent: bytes from each rank to each other, float64 ``[ranks, ranks]``.
        tensors: messages from a rank to another one that gets bytes.
    """

    sent: Float[Tensor, "ranks ranks"]
    tensors: int


@dataclass(frozen=True)
class _Counts:
    """A plan and sizes, and what counts of all methods are made of."""

    plan: Plan
    sizes: AttentionSizes

    @cached_property
    def tokens(self) -> Float[Tensor, " ranks"]:
        """Tokens of each rank."""
        return torch.tensor([sum(map(len, chunks)) for chunks in self.plan.layout.chunks], dtype=torch.float64)

    @cached_property
    def chunks(self) -> Float[Tensor, " ranks"]:
        """Chunks of each rank that are not empty."""
        return torch.tensor([sum(map(bool, chunks)) for chunks in self.plan.layout.chunks], dtype=torch.float64)

    @property
    def queries(self) -> int:
        """Bytes of a query."""
        return self.sizes.query_bytes

    @property
    def keys(self) -> int:
        """Bytes of a key and its value."""
        return self.sizes.key_value_bytes

    @property
    def outputs(self) -> int:
        """Bytes of an output in float32."""
        return self.sizes.batch * self.sizes.heads * self.sizes.head_dim * _FLOAT32

    @property
    def sums(self) -> int:
        """Bytes of a key's and a value's gradient in float32."""
        return self.keys // self.sizes.dtype.itemsize * _FLOAT32

    @property
    def cast(self) -> bool:
        """Whether partial results have another dtype than the tensors."""
        return self.sizes.dtype.itemsize != _FLOAT32

    def row_numbers(self, count: int) -> int:
        """Bytes of some float32 numbers for each head's row."""
        return self.sizes.batch * self.sizes.heads * count * _FLOAT32


@dataclass(frozen=True)
class GatherCosts(_Counts):
    """Counts of ``method="gather"``."""

    @property
    def key_transfer(self) -> Transfer:
        """Keys and values that queries of other ranks may attend to."""
        return Transfer(self.plan.tokens.double().T * self.keys, 2)

    @property
    def row_transfer(self) -> Transfer:
        """Queries, gradients of outputs, and three numbers of each row, that gradients of other ranks' keys need."""
        return Transfer(self.plan.rows.double().T * (2 * self.queries + self.row_numbers(3)), 3)

    def forward(self) -> tuple[RankWork, RankWork]:
        """What is done before and after the transfer of keys."""
        rows = self.tokens * self.queries
        # Queries in whole blocks, the output of each chunk, and that in float32 if the tensors are not.
        written = 2 * rows * self._in_blocks + 2 * rows + self.cast * 2 * self.tokens * self.outputs
        joined, given = self._key_spans
        moved = self._joined(self.plan.tokens, self.keys, joined) + written
        pairs = self.plan.work.sum(dim=1).double() * self._block_share
        before = RankWork(moved=self._cut(self.plan.tokens, self.keys))
        rows_of_blocks = self.tokens * self._block_share
        after = RankWork(
            "forward", pairs, self.chunks, rows=rows_of_blocks, keys=given, moved=moved, fresh=joined * self.keys
        )
        return before, after

    def backward(self) -> tuple[RankWork, RankWork, RankWork]:
        """What is done before the transfers, after that of keys, and after that of rows."""
        rows, keys = self.tokens * self.queries, self.tokens * self.keys
        exact = self.tokens * self.outputs
        # The rows' sums, and a look for NaN and infinity in inputs, outputs and gradients.
        looked = (rows + exact) + (2 * rows + exact + keys)
        of_row = 2 * self.queries + self.row_numbers(3)
        numbers = self.tokens * self.row_numbers(6)
        cut = self._cut(self.plan.tokens, self.keys) + self._cut(self.plan.rows, of_row) + numbers
        in_blocks = 2 * (2 * rows + exact) * self._in_blocks
        queries = self._joined(self.plan.tokens, self.keys, self.plan.layout.length) + in_blocks + 2 * rows
        # Gradients of keys are filled with 0 and written; numbers of rows are split.
        of_keys = 3 * keys + 2 * self.plan.rows.sum(dim=1) * self.row_numbers(3)
        gathered = self._joined(self.plan.rows, of_row, self._spans)
        work, calls = self.plan.work.double(), self.chunks
        return (
            RankWork(moved=looked + cut),
            RankWork("queries", work.sum(dim=1) * self._block_share, calls, moved=queries, fresh=self._new_keys),
            RankWork("keys", work.sum(dim=0), calls, moved=gathered + of_keys, fresh=self._spans * of_row),
        )

    @property
    def _new_keys(self) -> Float[Tensor, " ranks"]:
        """Bytes of new memory for all keys and values: such an allocation is not kept for the next pass."""
        return torch.full_like(self.tokens, self.plan.layout.length * self.keys)

    @property
    def _block_share(self) -> Float[Tensor, " ranks"]:
        """Queries that a rank computes over those that it has: a chunk is extended to whole blocks."""
        length, rows = self.plan.layout.length, []
        for chunks in self.plan.layout.chunks:
            blocks = [(chunk.start // QUERY_BLOCK, -(-chunk.stop // QUERY_BLOCK)) for chunk in chunks if len(chunk)]
            rows.append(sum(min(last * QUERY_BLOCK, length) - first * QUERY_BLOCK for first, last in blocks))
        return torch.tensor(rows, dtype=torch.float64) / self.tokens.clamp(min=1.0)

    @property
    def _in_blocks(self) -> Float[Tensor, " ranks"]:
        """The share of each rank's rows that are copied since their chunk is not one of whole blocks."""
        length, shares = self.plan.layout.length, []
        for chunks in self.plan.layout.chunks:
            ends = (QUERY_BLOCK, 1)
            uneven = [
                len(chunk) for chunk in chunks if chunk.start % QUERY_BLOCK or chunk.stop % ends[chunk.stop == length]
            ]
            shares.append(sum(uneven) / max(1, sum(map(len, chunks))))
        return torch.tensor(shares, dtype=torch.float64)

    @property
    def _key_spans(self) -> tuple[Float[Tensor, " ranks"], Float[Tensor, " ranks"]]:
        """Keys of the joined spans that a rank's chunks of queries read forward, and keys of all chunks' calls."""
        every = [[self.plan.keys_of(chunk) for chunk in chunks if len(chunk)] for chunks in self.plan.layout.chunks]
        joined = [sum(map(len, joined_ranges(spans))) for spans in every]
        given = [sum(map(len, spans)) for spans in every]
        return torch.tensor(joined, dtype=torch.float64), torch.tensor(given, dtype=torch.float64)

    @property
    def _spans(self) -> Float[Tensor, " ranks"]:
        """Queries from the first to the last that the gradients of a chunk of keys need, of all chunks of a rank."""
        spans = []
        for chunks in self.plan.layout.chunks:
            queries = joined_ranges([self.plan.queries_of(chunk) for chunk in chunks if len(chunk)])
            spans.append(sum(map(len, queries)))
        return torch.tensor(spans, dtype=torch.float64)

    def _cut(self, needed: Tensor, size: int) -> Float[Tensor, " ranks"]:
        """Bytes moved to cut ``needed[receiver, sender]`` tokens of which a receiver does not need the whole part."""
        others = ~torch.eye(self.plan.ranks, dtype=torch.bool)
        copied = needed.double() * others * (needed < self.tokens)
        return 2 * copied.sum(dim=0) * size

    def _joined(self, needed: Tensor, size: int, span: Float[Tensor, " ranks"] | int) -> Float[Tensor, " ranks"]:
        """Bytes moved to read what a rank needs, and to write it and 0 elsewhere in the span."""
        return (needed.double().sum(dim=1) + span) * size


@dataclass(frozen=True)
class HeadsCosts(_Counts):
    """Counts of ``method="heads"``."""

    @property
    def share(self) -> Float[Tensor, " ranks"]:
        """The share of all heads that each rank computes."""
        kv_heads, count = self.sizes.kv_heads or self.sizes.heads, self.plan.ranks
        mine = kv_heads // count + (torch.arange(count) < kv_heads % count)
        return mine.double() / kv_heads

    def transfers(self, backward: bool) -> tuple[Transfer, Transfer]:
        """To heads each rank sends other ranks' heads of its tokens; back it sends other ranks' tokens of its heads."""
        inputs, outputs = (
            torch.outer(self.tokens, self.share) * size for size in (self.queries + self.keys, self.queries)
        )
        if backward:
            return Transfer(outputs, 1), Transfer(inputs.T, 3)
        return Transfer(inputs, 3), Transfer(outputs.T, 1)

    def work(self, backward: bool) -> tuple[RankWork, RankWork, RankWork]:
        """What is done before the first transfer, between the two, and after the second."""
        there, back = self.queries + self.keys, self.queries
        there, back = (back, there) if backward else (there, back)
        length = self.plan.layout.length
        # Heads of several batch entries are not contiguous; neither are tokens of several heads.
        cut_heads = 2 * self.tokens * (1 - self.share) * there * (self.sizes.batch > 1)
        joined = 2 * length * self.share * there
        mine = self.tokens * (self.chunks < 2)
        cut_tokens = 2 * (length - mine) * self.share * back
        pairs = self.plan.work.sum().double() * self.share
        calls = (self.share > 0).double()
        # Every rank has some of the heads of all tokens.
        tokens = length * self.share
        kernel: Kernel = "backward" if backward else "forward"
        return (
            RankWork(moved=cut_heads),
            RankWork(kernel, pairs, calls, rows=tokens, keys=tokens, moved=joined + cut_tokens),
            RankWork(moved=2 * self.tokens * back),
        )


@dataclass(frozen=True)
class RingStep:
    """A step of a ring, for its first piece and for each other one, which are equal.

    Attributes:
        received: keys that each rank receives.
        sent: keys that each rank sends.
        work: what each rank computes with the keys that it has received.
        cut: bytes moved to cut what is sent.
        returned: what is done with gradients of keys that come back.
    """

    received: tuple[Tensor, Tensor]
    sent: tuple[Tensor, Tensor]
    work: tuple[RankWork, RankWork]
    cut: tuple[RankWork, RankWork]
    returned: tuple[RankWork, RankWork]


@dataclass(frozen=True)
class RingCosts(_Counts):
    """Counts of ``method="ring"``."""

    def ends(self, backward: bool) -> tuple[RankWork, RankWork]:
        """What is done before the first and after the last step."""
        rows, exact, sums = self.tokens * self.queries, self.tokens * self.outputs, self.tokens * self.sums
        if not backward:
            return RankWork(moved=exact), RankWork(moved=self.cast * (rows + exact))
        # Sums are filled with 0; rows of several chunks are cut, and looked at.
        cut = 2 * (exact + rows) * (self.chunks > 1)
        narrow = self.cast * (exact + rows + sums + self.tokens * self.keys)
        return RankWork(moved=exact + sums + cut + exact), RankWork(moved=narrow)

    def step(self, step: int, backward: bool) -> RingStep:
        """What the ranks do with keys that are ``step`` places away."""
        plan, rank = self.plan, torch.arange(self.plan.ranks)
        pieces = RING_PIECES if step else 1
        owner, receiver = (rank - step) % plan.ranks, (rank + step) % plan.ranks
        needed, given = plan.tokens[rank, owner], plan.tokens[receiver, rank]
        received, sent = _in_pieces(needed, needed, pieces), _in_pieces(given, given, pieces)
        meetings = self._meetings
        # A chunk of queries meets chunks of keys, and once more for each cut between two pieces.
        cuts = torch.where(needed >= FEW_KEYS, pieces, 1) - 1.0
        calls, rows = (
            (pairs[rank, owner] + cuts * active[rank, owner]) / (cuts + 1.0)
            for pairs, active in ((meetings.chunks, meetings.active), (meetings.rows, meetings.active_rows))
        )
        pairs = _in_pieces(plan.work[rank, owner], needed, pieces)
        works = []
        for place in (0, 1):
            exact, present = rows * self.outputs, (pairs[place] > 0).double()
            if backward:
                # Gradients of queries are added up. Those of keys are the rank's own sums, or begin with a block's.
                more = (meetings.active[rank, owner] - 1) * received[place]
                added = meetings.keys[rank, owner] if step == 0 else more
                moved = 3 * exact + 3 * self.sums * added.clamp(min=0.0)
                moved = moved + self.cast * received[place] * (self.sums + self.keys) * (step > 0)
            else:
                # Outputs of a block are merged, with their log-sum-exps; those of a row's first one are copied.
                moved = 5 * exact + rows * self.row_numbers(_MERGED) + self.cast * rows * (self.queries + self.outputs)
                copied = self.tokens * (3 * self.outputs + self.row_numbers(_MERGED))
                moved = moved - (copied if step == 0 else 0.0)
            kernel: Kernel = "backward" if backward else "forward"
            works.append(
                RankWork(
                    kernel,
                    pairs[place],
                    calls * present,
                    rows=rows * present,
                    keys=self._given(step, received[place]) * present,
                    moved=moved.clamp(min=0.0) * present,
                )
            )
        cut = [RankWork(moved=2 * one * self.keys * (one < self.tokens)) for one in sent]
        back = [RankWork(moved=one * (2 * self.sums + self.keys)) for one in sent]
        return RingStep(received, sent, (works[0], works[1]), (cut[0], cut[1]), (back[0], back[1]))

    def _given(self, step: int, received: Tensor) -> Tensor:
        """Keys of all calls with those that a rank received: of each chunk of queries, those that it needs."""
        meetings, rank = self._meetings, torch.arange(self.plan.ranks)
        owner = (rank - step) % self.plan.ranks
        most = meetings.keys[rank, owner]
        return torch.minimum(most, meetings.active[rank, owner] * received) if step else most

    @cached_property
    def _meetings(self) -> _Meetings:
        plan = self.plan
        meeting, owner, sizes = plan.meeting.double(), plan.chunk_ranks, plan.chunk_sizes.double()

        def summed(values: Tensor, axis: int) -> Tensor:
            shape = (plan.ranks, values.shape[1]) if axis == 0 else (values.shape[0], plan.ranks)
            return torch.zeros(shape, dtype=torch.float64).index_add_(axis, owner, values)

        by_owner = summed(meeting, 1)
        active = (by_owner > 0).double()
        return _Meetings(
            chunks=summed(by_owner, 0),
            active=summed(active, 0),
            rows=summed(by_owner * sizes[:, None], 0),
            active_rows=summed(active * sizes[:, None], 0),
            keys=summed(summed(meeting * sizes, 1), 0),
        )


@dataclass(frozen=True)
class _Meetings:
    """How chunks of queries of one rank meet chunks of keys of another, float64 ``[ranks, ranks]``.

    Attributes:
        chunks: pairs of chunks that meet.
        active: chunks of queries that meet one.
        rows: queries of the pairs.
        active_rows: queries of the chunks that meet one.
        keys: keys of the pairs.
    """

    chunks: Tensor
    active: Tensor
    rows: Tensor
    active_rows: Tensor
    keys: Tensor


def _in_pieces(values: Tensor, tokens: Tensor, pieces: int) -> tuple[Tensor, Tensor]:
    """How much of some values is in the first piece of a step, and in each other piece; few keys are not cut."""
    whole, part = values.double(), values.double() / pieces
    cut = tokens >= FEW_KEYS
    return torch.where(cut, part, whole), part * cut
