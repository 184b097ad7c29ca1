"""Ring attention: keys and values pass from rank to rank, and partial results are merged by their log-sum-exp.

At step ``s`` a rank computes with the keys of the rank ``s`` places before it, while those of the next step are on
their way. Only keys that a query of the receiver may attend to are sent. With partial outputs ``o_i`` and log-sum-exps
``l_i`` the result is ``sum_i exp(l_i - l) o_i`` with ``l = log sum_i exp(l_i)``, added up in the order of steps.

Liu et al. 2023, "Ring attention with blockwise transformers for near-infinite context", section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clearhead.cut import Region
from clearhead.dispatch import choose
from clearhead.distributed.call import FinishedRows, ShardedCall
from clearhead.distributed.layout import ShardLayout
from clearhead.distributed.parts import selected, slices_of
from clearhead.distributed.plan import FEW_KEYS, RING_PIECES, plan_of
from clearhead.problem import Problem
from clearhead.scores import Sink
from clearhead.statistics import Want

__all__ = ["Ring", "ring_attention"]

_LSE = Want(lse=True)


def ring_attention(call: ShardedCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's output and log-sum-exp, ``[batch, heads, len, value_dim]`` and ``[batch, heads, len]``."""
    ring = Ring.of(call)
    tensors = (query, key, value)
    output, lse = _RingAttention.apply(ring, *tensors, *call.whole.rule_parameters)  # type: ignore[no-untyped-call]
    return output, lse


@dataclass(frozen=True)
class _Visit:
    """Keys of one rank that pass by another: a third of those that it needs, so that three at a time are one block.

    Attributes:
        step: 0 for the rank's own keys.
        piece: number of the third.
    """

    step: int
    piece: int


@dataclass(frozen=True)
class _KeyBlock:
    """Keys that are here and that a chunk of this rank's queries may need.

    Attributes:
        region: heads, queries and keys by position.
        queries: where the queries are in this rank's part.
        keys: where the keys are among those that are here.
    """

    region: Region
    queries: slice
    keys: slice


@dataclass(frozen=True)
class Ring:
    """A sharded call without a sink, which is added after all keys.

    Attributes:
        call: the call.
        sink: the sink.
        parameters: tensors of the rules and of the sink that learn.
        needed: for each pair of ranks, the positions of the keys of the second that a query of the first needs.
        by_chunk: for each chunk of this rank's queries, the positions of the keys that one of them needs.
    """

    call: ShardedCall
    sink: Sink | None
    parameters: list[Tensor]
    needed: dict[tuple[int, int], tuple[range, ...]]
    by_chunk: dict[range, tuple[range, ...]]

    @classmethod
    def of(cls, call: ShardedCall) -> Ring:
        whole, rank = call.whole, call.exchange.rank
        others = range(call.exchange.ranks)
        chunks = [chunk for part in call.queries.chunks for chunk in part if len(chunk)]
        if whole.q_len == whole.k_len:
            plan = plan_of(whole.mask, call.queries)
            pairs = {*((rank, other) for other in others), *((other, rank) for other in others)}
            needed = {pair: plan.needs(*pair) for pair in pairs}
            # A layout in which each chunk has a rank of its own.
            of_chunks = plan_of(whole.mask, ShardLayout(tuple((chunk,) for chunk in chunks) or ((),))).ranges
        else:
            needed = {(one, other): call.keys.chunks[other] for one in others for other in others}
            of_chunks = ((range(whole.k_len),),) * len(chunks)
        # Every part has a log-sum-exp.
        backend = choose("distributed.attention", whole, _LSE)
        without = replace(call, whole=whole.with_scores(whole.elementwise), backend=backend)
        by_chunk = {
            chunk: keys for chunk, keys in zip(chunks, of_chunks, strict=False) if chunk in call.queries.chunks[rank]
        }
        return cls(without, whole.sink, whole.rule_parameters, needed, by_chunk)

    @property
    def visits(self) -> list[_Visit]:
        """What passes by each rank, in order."""
        steps = range(1, self.call.exchange.ranks)
        return [_Visit(0, 0), *(_Visit(step, piece) for step in steps for piece in range(RING_PIECES))]

    def receiver(self, visit: _Visit) -> int:
        """The rank to which this rank sends."""
        return (self.call.exchange.rank + visit.step) % self.call.exchange.ranks

    def sender(self, visit: _Visit) -> int:
        """The rank from which this rank receives."""
        return (self.call.exchange.rank - visit.step) % self.call.exchange.ranks

    def passed(self, sender: int, receiver: int, visit: _Visit) -> list[tuple[range, slice]]:
        """The positions of the keys that one rank shows another, and where they are in the sender's part."""
        every = [
            (keys, where.start + keys.start - chunk.start)
            for keys in self.needed[receiver, sender]
            for chunk, where in slices_of(self.call.keys, sender)
            if len(keys) and keys.start in chunk
        ]
        count = sum(len(keys) for keys, _ in every)
        pieces = 1 if visit.step == 0 or count < FEW_KEYS else RING_PIECES
        first, last = (count * min(visit.piece + more, pieces) // pieces for more in (0, 1))
        passed, before = [], 0
        for keys, start in every:
            low, high = max(first - before, 0), min(last - before, len(keys))
            if low < high:
                passed.append((keys[low:high], slice(start + low, start + high)))
            before += len(keys)
        return passed

    def mine(self, visit: _Visit) -> list[slice]:
        """Where the keys that this rank sends are in its part."""
        return [where for _, where in self.passed(self.call.exchange.rank, self.receiver(visit), visit)]

    def blocks(self, visit: _Visit) -> list[_KeyBlock]:
        """What this rank computes with the keys that are here: its own part, or what was sent, range after range."""
        blocks: list[_KeyBlock] = []
        start = 0
        for keys, where in self.passed(self.sender(visit), self.call.exchange.rank, visit):
            first = start if visit.step else where.start
            start += len(keys)
            for chunk, queries in slices_of(self.call.queries, self.call.exchange.rank):
                for needed in self.by_chunk[chunk]:
                    both = range(max(keys.start, needed.start), min(keys.stop, needed.stop))
                    if len(both):
                        here = slice(first + both.start - keys.start, first + both.stop - keys.start)
                        blocks.append(_KeyBlock(Region(self.call.heads, chunk, both), queries, here))
        return blocks

    def arrivals(self, *tensors: Tensor) -> Iterator[tuple[_Visit, tuple[Tensor, ...]]]:
        """Each visit with the tensors that are here; those of the next one are on their way meanwhile.

        The caller deletes them before the next visit.
        """
        arriving: tuple[Tensor, ...] = tensors
        works: list[Any] = []
        for visit, upcoming in zip(self.visits, [*self.visits[1:], None], strict=True):
            self.call.exchange.finish(works)
            # What was sent is freed before more is cut, so that three pieces are alive at a time.
            here, arriving, works = arriving, (), []
            if upcoming is not None:
                arriving, works = self.begin(upcoming, tensors)
            yield visit, here

    def begin(self, visit: _Visit, tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], list[Any]]:
        exchange, mine, sender = self.call.exchange, self.mine(visit), self.sender(visit)
        sent = [selected(tensor, mine) for tensor in tensors] if mine else []
        count = sum(len(keys) for keys, _ in self.passed(sender, exchange.rank, visit))
        received = tuple(_rows_like(tensor, count) for tensor in tensors)
        works = self._start(sent, self.receiver(visit), received if count else (), sender)
        # What is sent must live until it has arrived.
        return received, [*works, _Alive(sent)]

    def return_grads(self, visit: _Visit, grads: list[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """Send gradients of keys back to their rank, and receive those of this rank's keys, as they were sent."""
        mine = self.mine(visit)
        received = [_rows_like(tensor, sum(part.stop - part.start for part in mine)) for tensor in like] if mine else []
        sent = [grad for grad in grads if grad.shape[2]]
        self.call.exchange.finish(self._start(sent, self.sender(visit), received, self.receiver(visit)))
        return received

    def _start(self, sent: Sequence[Tensor], receiver: int, received: Sequence[Tensor], sender: int) -> list[Any]:
        """Begin to send tensors to one rank and to receive others from one."""
        ranks = range(self.call.exchange.ranks)
        to = [sent if rank == receiver else () for rank in ranks]
        return self.call.exchange.start(to, [received if rank == sender else () for rank in ranks])


@dataclass(frozen=True)
class _Alive:
    """Keeps tensors alive among messages."""

    tensors: list[Tensor]

    def wait(self) -> None:
        """There is nothing to wait for."""


class _MergedRows:
    """Output and log-sum-exp of this rank's rows, in float32 or float64, to which partial results are added."""

    def __init__(self, call: ShardedCall, query: Tensor, value: Tensor) -> None:
        dtype = call.whole.work_dtype
        self.output = query.new_zeros(*query.shape[:3], value.shape[3], dtype=dtype)
        self.lse = query.new_full(query.shape[:3], -torch.inf, dtype=dtype)
        self._started: set[int] = set()

    def add(self, rows: slice, output: Tensor, lse: Tensor) -> None:
        """Merge the partial output ``[batch, heads, rows, value_dim]`` and log-sum-exp of some rows."""
        here, merged = self.lse[:, :, rows], self.output[:, :, rows]
        if rows.start not in self._started:
            self._started.add(rows.start)
            here.copy_(lse)
            merged.copy_(output)
            return
        total = torch.logaddexp(here, lse)
        merged.mul_(_share(here, total)).addcmul_(output.to(merged.dtype), _share(lse, total))
        here.copy_(total)

    def add_sink(self, sink: Sink) -> None:
        """Add a logit without a value to the sums."""
        logits = sink.logits.detach().to(self.lse.dtype).view(1, -1, 1).expand(self.lse.shape)
        total = torch.logaddexp(self.lse, logits)
        self.output *= _share(self.lse, total)
        self.lse = total


def _share(lse: Tensor, total: Tensor) -> Tensor:
    """A part's share in a row's sum, ``[..., 1]``; 0 if the row has no key."""
    return torch.exp(lse - total).masked_fill(lse == -torch.inf, 0.0)[..., None]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ring: Ring, query: Tensor, key: Tensor, value: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows = _MergedRows(ring.call, query, value)
        for visit, tensors in ring.arrivals(key, value):
            for block in ring.blocks(visit):
                done = ring.call.run(_problem(ring.call, block, query, tensors), _LSE)
                assert done.lse is not None
                rows.add(block.queries, done.output, done.lse)
            del tensors
        if ring.sink is not None:
            rows.add_sink(ring.sink)
        ctx.ring = ring
        ctx.save_for_backward(query, key, value, rows.output, rows.lse)
        ctx.set_materialize_grads(False)
        return rows.output.to(query.dtype), rows.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        if grad_output is None:
            grad_output = torch.zeros_like(output, dtype=query.dtype)
        backward = _RingBackward(ctx.ring, (query, key, value), (output, lse), (grad_output, grad_lse))
        return None, *backward.run()


class _RingBackward:
    """One backward pass of the ring: gradients of queries stay, those of keys return to their rank."""

    def __init__(
        self,
        ring: Ring,
        tensors: tuple[Tensor, Tensor, Tensor],
        rows: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor | None],
    ) -> None:
        self.ring, self.tensors, self.rows, self.grads = ring, tensors, rows, grads
        dtype = ring.call.whole.work_dtype
        #: By the start of a chunk of this rank's queries.
        self.finished: dict[int, FinishedRows] = {}
        self.sums = [torch.zeros_like(tensor, dtype=dtype) for tensor in tensors]
        self.of_parameters = {id(one): torch.zeros_like(one, dtype=dtype) for one in ring.parameters}

    def run(self) -> list[Tensor]:
        """Gradients of query, key, value and the rules' parameters."""
        ring = self.ring
        _, *key_value = self.tensors
        for visit, here in ring.arrivals(*key_value):
            grads: list[Tensor | None] = [*self.sums[1:]] if visit.step == 0 else [None, None]
            for block in ring.blocks(visit):
                self._add_block(block, here, grads)
            if visit.step:
                pairs = zip(grads, here, strict=True)
                narrow = [torch.zeros_like(one) if grad is None else grad.to(one.dtype) for grad, one in pairs]
                self._add_returned(ring.mine(visit), ring.return_grads(visit, narrow, key_value))
                del pairs, narrow
            del here, grads
        self._add_sink()
        ring.call.exchange.sum(list(self.of_parameters.values()))
        summed = [(total, tensor) for total, tensor in zip(self.sums, self.tensors, strict=True)]
        learned = [(self.of_parameters[id(one)], one) for one in ring.parameters]
        return [total.to(like.dtype) for total, like in [*summed, *learned]]

    def _add_block(self, block: _KeyBlock, here: Sequence[Tensor], grads: list[Tensor | None]) -> None:
        """Add a block's gradients of queries, of the keys and values that are here, and of parameters."""
        call, rows = self.ring.call, block.queries
        if rows.start not in self.finished:
            self.finished[rows.start] = self._finished(rows)
        problem = _problem(call, block, self.tensors[0], here)
        computed = call.partial_gradients(problem, self.finished[rows.start], self.ring.parameters)
        of_query, of_key, of_value, *of_learned = computed
        # `x[place] += y` would also copy the sum onto itself.
        self.sums[0][:, :, rows].add_(of_query)
        for place, part in enumerate((of_key, of_value)):
            total = grads[place]
            if total is None and part.shape == here[place].shape:
                # The first block that reads all keys that are here needs no zeros to add to.
                grads[place] = part.to(self.sums[0].dtype)
                continue
            if total is None:
                total = grads[place] = torch.zeros_like(here[place], dtype=self.sums[0].dtype)
            total[:, :, block.keys].add_(part)
        for one, part in zip(self.ring.parameters, of_learned, strict=True):
            self.of_parameters[id(one)] += part

    def _finished(self, rows: slice) -> FinishedRows:
        """A chunk of this rank's rows."""
        output, lse = (part[:, :, rows].contiguous() for part in self.rows)
        grad_output, grad_lse = (None if grad is None else grad[:, :, rows].contiguous() for grad in self.grads)
        assert grad_output is not None
        return FinishedRows(output, lse, grad_output, grad_lse)

    def _add_returned(self, where: list[slice], grads: list[Tensor]) -> None:
        """Add gradients of keys and values that another rank computed."""
        if grads:
            for total, grad in zip(self.sums[1:], grads, strict=True):
                start = 0
                for part in where:
                    count = part.stop - part.start
                    total[:, :, part].add_(grad[:, :, start : start + count])
                    start += count

    def _add_sink(self) -> None:
        """A sink's weight is ``exp(logit - lse)`` and its value 0, so its gradient is ``-weight * delta``."""
        sink = self.ring.sink
        if sink is None or not sink.logits.requires_grad:
            return
        output, lse = self.rows
        grad_output, grad_lse = self.grads
        logits = sink.logits.detach().to(lse.dtype).view(1, -1, 1)
        weight = torch.exp(logits - lse).masked_fill(logits == -torch.inf, 0.0)
        delta = (output * grad_output).sum(dim=-1)
        delta = delta if grad_lse is None else delta - grad_lse
        per_head = -(weight * delta).sum(dim=(0, 2))
        shape = sink.logits.shape
        self.of_parameters[id(sink.logits)] += per_head if per_head.shape == shape else per_head.sum().view(shape)


def _problem(call: ShardedCall, block: _KeyBlock, query: Tensor, key_value: Sequence[Tensor]) -> Problem:
    """A block as a problem; ``key_value`` are the keys and values that are here."""
    key, value = (tensor[:, :, block.keys].detach() for tensor in key_value)
    return call.part(block.region, query[:, :, block.queries].detach(), key, value)


def _rows_like(tensor: Tensor, count: int) -> Tensor:
    """An empty ``[batch, heads, count, channels]``."""
    return tensor.new_empty(*tensor.shape[:2], count, tensor.shape[3])
