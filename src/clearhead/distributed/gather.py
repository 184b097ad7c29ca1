"""Attention with gathered keys and values: each rank computes its queries as one process would, with the same bits.

Backward gathers the queries' rows too, and computes the gradients of this rank's queries over all keys and those of
this rank's keys over all queries, each in the order of one process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clearhead.cut import Region
from clearhead.distributed.call import ShardedCall, are_finite
from clearhead.distributed.layout import ShardLayout
from clearhead.distributed.parts import cut, joined, lengths_of, slices_of
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
    done = call.run(call.part(region, *(_whole(call, layout, part) for layout, part in tensors)), call.want)
    results: dict[str, Any] = {}
    for name, axes in AXES.items():
        field: Tensor | None = getattr(done, name)
        if field is not None and axes.sharded is not None:
            layout = call.queries if axes.sharded == "queries" else call.keys
            field = axes.restored(cut(layout, axes.tokens_first(field), call.exchange.rank))
        results[name] = field
    return Observation(**results)


def _whole(call: ShardedCall, layout: ShardLayout, part: Tensor) -> Tensor:
    """A tensor of all ranks, in the order of positions."""
    return joined(layout, call.exchange.gather(part.detach(), 2, lengths_of(layout)))


class _QueryBlocks:
    """A chunk of this rank's queries, within the blocks of queries that the kernels would process in one process.

    A row's sums are taken in an order that depends on the number of rows of its block. Queries of other ranks in these
    blocks are 0.
    """

    def __init__(self, call: ShardedCall, chunk: range, part: slice) -> None:
        self._call, self._part = call, part
        start, stop = chunk.start // QUERY_BLOCK * QUERY_BLOCK, -(-chunk.stop // QUERY_BLOCK) * QUERY_BLOCK
        self._block = range(start, min(stop, call.whole.q_len)) if len(chunk) else chunk
        self._mine = slice(chunk.start - self._block.start, chunk.stop - self._block.start)

    @classmethod
    def of(cls, call: ShardedCall) -> list[_QueryBlocks]:
        """The chunks of this rank; one without queries if it has none, whose rows the others gather."""
        chunks = slices_of(call.queries, call.exchange.rank) or [(range(0), slice(0, 0))]
        return [cls(call, chunk, part) for chunk, part in chunks]

    def problem(self, query: Tensor, key: Tensor, value: Tensor) -> Problem:
        """These queries of this rank's part, with all keys."""
        region = Region(self._call.heads, self._block, range(self._call.whole.k_len))
        return self._call.part(region, self.placed(query.detach(), 0.0), key, value)

    def placed(self, part: Tensor, other: Tensor | float) -> Tensor:
        """Rows of this rank's part ``[batch, heads, len, ...]``, and ``other`` for those of other ranks."""
        rows = part.new_empty(*part.shape[:2], len(self._block), *part.shape[3:])
        rows[...] = other
        rows[:, :, self._mine] = part[:, :, self._part]
        return rows

    def write(self, part: Tensor, rows: Tensor) -> None:
        """Write this rank's rows into its part."""
        part[:, :, self._part] = rows[:, :, self._mine]

    def mine(self, rows: Tensor) -> Tensor:
        """This rank's rows."""
        return rows[:, :, self._mine]


class _GatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: ShardedCall, query: Tensor, key: Tensor, value: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        whole_key, whole_value = _whole(call, call.keys, key), _whole(call, call.keys, value)
        output = query.new_empty(*query.shape[:3], value.shape[3])
        lse = query.new_empty(query.shape[:3], dtype=call.whole.work_dtype)
        saved: list[list[Tensor]] = []
        for rows in _QueryBlocks.of(call):
            problem = rows.problem(query, whole_key, whole_value)
            if call.backend.by_rows is not None and any(ctx.needs_input_grad):
                done, lse_of_rows, for_backward = call.backend.by_rows.forward(problem)
                saved.append([rows.mine(one) for one in for_backward])
                rows.write(lse, lse_of_rows)
            else:
                observation = call.run(problem, call.want)
                done = observation.output
                if observation.lse is not None:
                    rows.write(lse, observation.lse)
            rows.write(output, done)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, *(torch.cat(parts, dim=2) for parts in zip(*saved, strict=True)))
        return output, lse if call.want.lse else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        call: ShardedCall = ctx.call
        query, key, value, *rows = ctx.saved_tensors
        if grad_output is None:
            grad_output = query.new_zeros(*query.shape[:3], value.shape[3])
        backward = _GatheredBackward(call, (query, key, value), rows, grad_output, grad_lse)
        grads = backward.by_rows() if call.backend.by_rows is not None else backward.at_once()
        return None, *(grad.to(like.dtype) for grad, like in zip(grads, backward.inputs, strict=True))


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
        self.inputs = [*tensors, *call.whole.rule_parameters]
        layouts = (call.queries, call.keys, call.keys)
        self.whole = [_whole(call, layout, tensor) for layout, tensor in zip(layouts, tensors, strict=True)]
        self.whole_grad = _whole(call, call.queries, grad_output)
        self.whole_grad_lse = _whole(call, call.queries, self.grad_lse[..., None])[..., 0]

    def at_once(self) -> list[Tensor]:
        """Gradients by autograd of the whole call, on each rank."""
        call = self.call
        leaves = [tensor.requires_grad_() for tensor in self.whole]
        inputs = [*leaves, *call.whole.rule_parameters]
        with torch.enable_grad():
            done = call.run(self._part(range(call.whole.q_len), range(call.whole.k_len), *leaves), call.want)
        ends = [(done.output, self.whole_grad)]
        if done.lse is not None:
            ends.append((done.lse, self.whole_grad_lse.to(done.lse.dtype)))
        outputs, arrived = zip(*ends, strict=True)
        computed = torch.autograd.grad(outputs, inputs, arrived, allow_unused=True)
        filled = [torch.zeros_like(one) if grad is None else grad for one, grad in zip(inputs, computed, strict=True)]
        layouts = (call.queries, call.keys, call.keys)
        mine = [cut(layout, grad, call.exchange.rank) for layout, grad in zip(layouts, filled, strict=False)]
        return [*mine, *filled[3:]]

    def by_rows(self) -> list[Tensor]:
        """Gradients of this rank's queries and the rules over all keys, and of its keys over all queries."""
        call, rank = self.call, self.call.exchange.rank
        by_rows = call.backend.by_rows
        assert by_rows is not None
        # All messages come first: ranks that have more queries to compute have fewer keys, or the reverse.
        whole_rows = [self._whole_rows(part) for part in self.rows]
        if not are_finite(*whole_rows[:2]):
            return self.at_once()
        learned = call.whole.rule_parameters
        of_query, of_key, of_value = (torch.zeros_like(tensor) for tensor in self.tensors)
        of_learned = [torch.zeros_like(one, dtype=call.whole.work_dtype) for one in learned]
        keys = range(call.whole.k_len)
        for rows in _QueryBlocks.of(call):
            problem = rows.problem(self.tensors[0], *self.whole[1:])
            output, lse = (torch.zeros_like(rows.placed(part, 0.0)) for part in self.rows[:2])
            # Rows of other ranks have no weights. Their log-sum-exp makes that of a sink 0 too.
            output, _, *others = by_rows.rows(problem, output, lse - torch.inf)
            empty = [output, lse + torch.inf, *others]
            saved = [rows.placed(part, other) for part, other in zip(self.rows, empty, strict=True)]
            grads = rows.placed(self.grad_output, 0.0), rows.placed(self.grad_lse, 0.0)
            computed = by_rows.backward(problem, saved, grads, partial=False, learned=learned)
            rows.write(of_query, computed[0])
            for total, grad in zip(of_learned, computed[3:], strict=True):
                total += grad
        queries = range(call.whole.q_len)
        for chunk, where in slices_of(call.keys, rank):
            part = chunk if len(keys) > KEY_TILE else keys
            key, value = (tensor[:, :, part.start : part.stop] for tensor in self.whole[1:])
            problem = self._part(queries, part, self.whole[0], key, value)
            partial = len(part) < len(keys)
            grads = self.whole_grad, self.whole_grad_lse
            _, *both = by_rows.backward(problem, whole_rows, grads, partial=partial, learned=[])
            mine = slice(chunk.start - part.start, chunk.stop - part.start)
            of_key[:, :, where], of_value[:, :, where] = (grad[:, :, mine] for grad in both)
        call.exchange.sum(of_learned)
        return [of_query, of_key, of_value, *of_learned]

    def _whole_rows(self, part: Tensor) -> Tensor:
        if part.ndim == 3:
            return _whole(self.call, self.call.queries, part[..., None])[..., 0].contiguous()
        return _whole(self.call, self.call.queries, part)

    def _part(self, queries: range, keys: range, query: Tensor, key: Tensor, value: Tensor) -> Problem:
        return self.call.part(Region(self.call.heads, queries, keys), query, key, value)
