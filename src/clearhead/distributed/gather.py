"""Attention with gathered keys and values: each rank computes its queries as one process would, with the same bits.

A rank gathers the keys that one of its queries may attend to. Backward computes the gradients of this rank's queries
over these keys, and those of this rank's keys over the gathered queries that may attend to them, each in the order of
one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clearhead.cut import Region
from clearhead.distributed.call import ShardedCall, are_finite
from clearhead.distributed.layout import ShardLayout, finish
from clearhead.distributed.parts import Needs, cut, slices_of
from clearhead.distributed.plan import Plan, joined_ranges, plan_of
from clearhead.distributed.statistics import AXES
from clearhead.ops.kinds import KEY_TILE, QUERY_BLOCK
from clearhead.problem import Problem
from clearhead.statistics import Observation

__all__ = ["gather_attention", "observe_gathered"]


def gather_attention(call: ShardedCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
    """This rank's output ``[batch, heads, len, value_dim]``, and its log-sum-exp ``[batch, heads, len]`` if wanted."""
    results: tuple[Tensor, Tensor | None] = _GatherAttention.apply(  # type: ignore[no-untyped-call]
        call, query, key, value, *call.whole.rule_parameters
    )
    return results


def observe_gathered(call: ShardedCall, query: Tensor, key: Tensor, value: Tensor) -> Observation:
    """This rank's part of the output and of statistics without a gradient; each rank computes the whole call."""
    tensors = zip((call.queries, call.keys, call.keys), (query, key, value), strict=True)
    region = Region(call.heads, range(call.whole.q_len), range(call.whole.k_len))
    done = call.run(call.part(region, *(_whole(call, layout, part)[0] for layout, part in tensors)), call.want)
    results: dict[str, Any] = {}
    for name, axes in AXES.items():
        field: Tensor | None = getattr(done, name)
        if field is not None and axes.sharded is not None:
            layout = call.queries if axes.sharded == "queries" else call.keys
            field = axes.restored(cut(layout, axes.tokens_first(field), call.exchange.rank).contiguous())
        results[name] = field
    return Observation(**results)


class _Arriving:
    """Tensors of this rank of which parts are on their way from and to the others."""

    def __init__(self, call: ShardedCall, needs: Needs, tensors: Sequence[Tensor]) -> None:
        self._needs, self._tensors = needs, [tensor.detach() for tensor in tensors]
        others = [rank != call.exchange.rank for rank in range(call.exchange.ranks)]
        self._sent = [needs.parts_for(rank, self._tensors) if other else [] for rank, other in enumerate(others)]
        self._received = [needs.empty_from(rank, self._tensors) if other else [] for rank, other in enumerate(others)]
        self._works = call.exchange.start(self._sent, self._received)

    def wait(self) -> None:
        """Wait until everything has arrived."""
        finish(self._works)
        # What was sent must live until it has arrived.
        self._sent.clear()

    def over(self, span: range) -> list[Tensor]:
        """The tensors of some positions, with what this rank needs of all ranks and 0 elsewhere."""
        return [
            self._needs.spanned(span, tensor, [received[place] if received else None for received in self._received])
            for place, tensor in enumerate(self._tensors)
        ]


def _whole(call: ShardedCall, layout: ShardLayout, *parts: Tensor) -> list[Tensor]:
    """Tensors of all ranks, in the order of positions."""
    arriving = _Arriving(call, Needs.whole(layout, call.exchange.rank), parts)
    arriving.wait()
    return arriving.over(range(layout.length))


def _needed_keys(call: ShardedCall) -> Needs:
    """The keys that one of a rank's queries may attend to."""
    rank, others = call.exchange.rank, range(call.exchange.ranks)
    if (plan := _plan(call)) is None:
        return Needs.whole(call.keys, rank)
    received, sent = (plan.needs(rank, other) for other in others), (plan.needs(other, rank) for other in others)
    return Needs(call.keys, rank, tuple(received), tuple(sent))


def _needed_queries(call: ShardedCall) -> Needs:
    """The blocks of queries of which one may attend to one of a rank's keys."""
    rank, others = call.exchange.rank, range(call.exchange.ranks)
    if (plan := _plan(call)) is None:
        return Needs.whole(call.queries, rank)
    received, sent = (plan.asked_by(rank, other) for other in others), (plan.asked_by(other, rank) for other in others)
    return Needs(call.queries, rank, tuple(received), tuple(sent))


def _queries_of(call: ShardedCall, chunk: range) -> range:
    """The queries with which gradients of a chunk of keys are computed, in the blocks that one process has."""
    plan = _plan(call)
    needed = range(call.whole.q_len) if plan is None else plan.queries_of(chunk)
    return range(call.whole.q_len) if len(needed) and _in_segments(call) else needed


def _keys_of(call: ShardedCall, chunk: range) -> range:
    """The keys that the forward pass of a chunk of queries reads, in the tiles that one process has."""
    plan = _plan(call)
    if plan is None or not len(chunk) or call.backend.by_rows is None or _in_segments(call):
        return range(call.whole.k_len)
    return plan.keys_of(chunk)


def _in_segments(call: ShardedCall) -> bool:
    """Whether blocks and tiles begin at the first token of a document, or of another part with keys of its own."""
    return call.whole.mask is not None and call.whole.mask_parts.intervals is not None


def _plan(call: ShardedCall) -> Plan | None:
    """The plan of a call of equally many queries and keys, whose places are those of the plan."""
    return plan_of(call.whole.mask, call.queries) if call.whole.q_len == call.whole.k_len else None


class _QueryBlocks:
    """A chunk of this rank's queries, within the blocks of queries that the kernels would process in one process.

    A row's sums are taken in an order that depends on the number of rows of its block. Queries of other ranks in these
    blocks are 0.
    """

    def __init__(self, call: ShardedCall, chunk: range, part: slice) -> None:
        self._call, self._part, self.chunk = call, part, chunk
        start, stop = chunk.start // QUERY_BLOCK * QUERY_BLOCK, -(-chunk.stop // QUERY_BLOCK) * QUERY_BLOCK
        self._block = range(start, min(stop, call.whole.q_len)) if len(chunk) else chunk
        self._mine = slice(chunk.start - self._block.start, chunk.stop - self._block.start)

    @classmethod
    def of(cls, call: ShardedCall) -> list[_QueryBlocks]:
        """The chunks of this rank; one without queries if it has none, whose rows the others gather."""
        chunks = slices_of(call.queries, call.exchange.rank) or [(range(0), slice(0, 0))]
        return [cls(call, chunk, part) for chunk, part in chunks]

    def problem(self, query: Tensor, key: Tensor, value: Tensor, keys: range) -> Problem:
        """These queries of this rank's part, with some keys."""
        region = Region(self._call.heads, self._block, keys)
        return self._call.part(region, self.placed(query.detach(), 0.0), key, value)

    def placed(self, part: Tensor, other: Tensor | float) -> Tensor:
        """Rows of this rank's part ``[batch, heads, len, ...]``, and ``other`` for those of other ranks."""
        if len(self._block) == self._part.stop - self._part.start:
            return part[:, :, self._part]
        rows = part.new_empty(*part.shape[:2], len(self._block), *part.shape[3:])
        for border in (slice(0, self._mine.start), slice(self._mine.stop, None)):
            rows[:, :, border] = other
        rows[:, :, self._mine] = part[:, :, self._part]
        return rows

    def write(self, part: Tensor, rows: Tensor) -> None:
        """Write this rank's rows into its part."""
        part[:, :, self._part] = rows[:, :, self._mine]

    def mine(self, rows: Tensor) -> Tensor:
        """This rank's rows."""
        return rows[:, :, self._mine]


def _gathered(call: ShardedCall, key: Tensor, value: Tensor) -> list[tuple[_QueryBlocks, range, list[Tensor]]]:
    """Each chunk of this rank's queries with the positions of the keys that it reads, and these keys and values."""
    arriving = _Arriving(call, _needed_keys(call), (key, value))
    arriving.wait()
    every = [(rows, _keys_of(call, rows.chunk)) for rows in _QueryBlocks.of(call)]
    spans = joined_ranges([keys for _, keys in every])
    tensors = [arriving.over(span) for span in spans]
    gathered = []
    for rows, keys in every:
        place = next((place for place, span in enumerate(spans) if len(keys) and keys.start in span), None)
        if place is None:
            gathered.append((rows, keys, arriving.over(keys)))
            continue
        here = slice(keys.start - spans[place].start, keys.stop - spans[place].start)
        gathered.append((rows, keys, [tensor[:, :, here] for tensor in tensors[place]]))
    return gathered


class _GatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: ShardedCall, query: Tensor, key: Tensor, value: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        output = query.new_empty(*query.shape[:3], value.shape[3])
        lse = query.new_empty(query.shape[:3], dtype=call.whole.work_dtype)
        saved: list[list[Tensor]] = []
        # The first of the rows for backward is the output itself.
        exact = output.dtype is torch.float32
        for rows, keys, (near_key, near_value) in _gathered(call, key, value):
            problem = rows.problem(query, near_key, near_value, keys)
            if call.backend.by_rows is not None and any(ctx.needs_input_grad):
                done, lse_of_rows, for_backward = call.backend.by_rows.forward(problem)
                saved.append([rows.mine(one) for one in for_backward[exact:]])
                rows.write(lse, lse_of_rows)
            else:
                observation = call.run(problem, call.want)
                done = observation.output
                if observation.lse is not None:
                    rows.write(lse, observation.lse)
            rows.write(output, done)
        ctx.call = call
        ctx.set_materialize_grads(False)
        every = zip(*saved, strict=True)
        rows_of_all = [one[0].contiguous() if len(one) == 1 else torch.cat(one, dim=2) for one in every]
        ctx.save_for_backward(query, key, value, *([output] if saved and exact else []), *rows_of_all)
        return output, lse if call.want.lse else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        call: ShardedCall = ctx.call
        query, key, value, *rows = ctx.saved_tensors
        if grad_output is None:
            grad_output = query.new_zeros(*query.shape[:3], value.shape[3])
        backward = _GatheredBackward(call, (query, key, value), rows, grad_output, grad_lse)
        grads = backward.by_rows() if backward.is_finite() else backward.at_once()
        inputs = [query, key, value, *call.whole.rule_parameters]
        return None, *(grad.to(like.dtype) for grad, like in zip(grads, inputs, strict=True))


class _GatheredBackward:
    """One backward pass: all tensors are gathered again, since saved ones would take the memory of the whole."""

    def __init__(
        self,
        call: ShardedCall,
        tensors: tuple[Tensor, Tensor, Tensor],
        rows: list[Tensor],
        grad_output: Tensor,
        grad_lse: Tensor | None,
    ) -> None:
        self.call, self.tensors, self.rows, self.grad_output = call, tensors, rows, grad_output
        self.grad_lse = torch.zeros_like(tensors[0][..., 0]) if grad_lse is None else grad_lse
        #: What gradients of keys read of this rank's rows; None if that needs the gradients of queries.
        self.sums: Tensor | None = None
        by_rows = call.backend.by_rows
        if by_rows is not None and call.whole.k_len > KEY_TILE:
            self.sums = by_rows.row_sums(self.rows, (grad_output, self.grad_lse))

    def is_finite(self) -> bool:
        """Whether the backend has passes by rows, and no rank has a NaN or an infinity; all ranks agree."""
        if self.call.backend.by_rows is None:
            return False
        read = [*self.tensors, self.rows[0], self.grad_output, self.grad_lse]
        read += [] if self.sums is None else [self.sums]
        return self.call.exchange.all_hold(are_finite(self.rows[1], *read))

    def at_once(self) -> list[Tensor]:
        """Gradients by autograd of the whole call, on each rank."""
        call, (query, key, value) = self.call, self.tensors
        rows = _whole(call, call.queries, query, self.grad_output, self.grad_lse[..., None])
        whole_query, whole_grad, whole_grad_lse = rows
        leaves = [one.requires_grad_() for one in (whole_query, *_whole(call, call.keys, key, value))]
        inputs = [*leaves, *call.whole.rule_parameters]
        region = Region(call.heads, range(call.whole.q_len), range(call.whole.k_len))
        with torch.enable_grad():
            done = call.run(call.part(region, *leaves), call.want)
        ends = [(done.output, whole_grad)]
        if done.lse is not None:
            ends.append((done.lse, whole_grad_lse[..., 0].to(done.lse.dtype)))
        outputs, arrived = zip(*ends, strict=True)
        computed = torch.autograd.grad(outputs, inputs, arrived, allow_unused=True)
        filled = [torch.zeros_like(one) if grad is None else grad for one, grad in zip(inputs, computed, strict=True)]
        pairs = zip((call.queries, call.keys, call.keys), filled, strict=False)
        return [*(cut(layout, grad, call.exchange.rank).contiguous() for layout, grad in pairs), *filled[3:]]

    def by_rows(self) -> list[Tensor]:
        """Gradients of this rank's queries and the rules over its keys, and of its keys over queries of all ranks."""
        # Messages come first where they can: ranks that have more queries to compute have fewer keys, or the reverse.
        keys = _Arriving(self.call, _needed_keys(self.call), self.tensors[1:])
        rows = None if self.sums is None else self._send_rows(self.sums)
        keys.wait()
        whole_keys = keys.over(range(self.call.whole.k_len))
        del keys
        of_query, of_learned, sums = self._query_gradients(*whole_keys)
        del whole_keys
        rows = self._send_rows(sums) if rows is None else rows
        rows.wait()
        of_keys = self._key_gradients(rows)
        self.call.exchange.sum(of_learned)
        return [of_query, *of_keys, *of_learned]

    def _send_rows(self, sums: Tensor) -> _Arriving:
        """This rank's queries, gradients of outputs, and three numbers for each row."""
        numbers = torch.cat([self.rows[2], sums[..., None]], dim=3)
        return _Arriving(self.call, _needed_queries(self.call), (self.tensors[0], self.grad_output, numbers))

    def _query_gradients(self, key: Tensor, value: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        """Gradients of this rank's queries and of the rules' tensors, and the sums of its rows."""
        call, by_rows, learned = self.call, self.call.backend.by_rows, self.call.whole.rule_parameters
        assert by_rows is not None
        of_query, sums = torch.empty_like(self.tensors[0]), torch.empty_like(self.rows[1])
        of_learned = [torch.zeros_like(one, dtype=call.whole.work_dtype) for one in learned]
        # Rows of other ranks have no weights. Their log-sum-exp makes that of a sink 0 too.
        others: tuple[Tensor | float, ...] = (0.0, torch.inf, self.rows[2].new_tensor([torch.inf, 0.0]))
        for rows in _QueryBlocks.of(call):
            problem = rows.problem(self.tensors[0], key, value, range(call.whole.k_len))
            saved = [rows.placed(part, other) for part, other in zip(self.rows, others, strict=True)]
            grads = rows.placed(self.grad_output, 0.0), rows.placed(self.grad_lse, 0.0)
            grad, of_rules, sums_of_rows = by_rows.query_gradients(problem, saved, grads, learned)
            rows.write(of_query, grad)
            rows.write(sums, sums_of_rows)
            for total, one in zip(of_learned, of_rules, strict=True):
                total += one
        return of_query, of_learned, sums

    def _key_gradients(self, rows: _Arriving) -> list[Tensor]:
        """Gradients of this rank's keys and values over the queries that were gathered."""
        call, by_rows = self.call, self.call.backend.by_rows
        assert by_rows is not None
        grads = [torch.zeros_like(one) for one in self.tensors[1:]]
        chunks = [(_queries_of(call, chunk), chunk, where) for chunk, where in slices_of(call.keys, call.exchange.rank)]
        for span in joined_ranges([queries for queries, *_ in chunks]):
            query, grad_output, numbers = rows.over(span)
            for queries, chunk, where in chunks:
                if queries.start not in span or not len(queries):
                    continue
                place = slice(queries.start - span.start, queries.stop - span.start)
                tensors = (query[:, :, place], *(one[:, :, where] for one in self.tensors[1:]))
                problem = call.part(Region(call.heads, queries, chunk), *(one.detach() for one in tensors))
                softmax, sums = numbers[:, :, place, :2].contiguous(), numbers[:, :, place, 2].contiguous()
                computed = by_rows.key_gradients(problem, softmax, sums, grad_output[:, :, place])
                for total, grad in zip(grads, computed, strict=True):
                    total[:, :, where] = grad
        return grads
