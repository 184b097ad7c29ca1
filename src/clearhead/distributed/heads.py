"""Attention by heads: an all-to-all gives each rank some heads of the whole sequence, and another one undoes it.

Each rank computes its heads as one process would, with the same bits. A rank gets whole groups of query heads, those of
some key heads, so ``kv_heads`` must be at least the number of ranks.

Jacobs et al. 2023, "DeepSpeed Ulysses", section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clearhead.cut import Region
from clearhead.distributed.call import ShardedCall
from clearhead.distributed.exchange import Exchange
from clearhead.distributed.layout import ShardLayout
from clearhead.distributed.parts import cut, joined, lengths_of
from clearhead.distributed.statistics import AXES
from clearhead.problem import Problem
from clearhead.statistics import Observation, Want

__all__ = ["observe_by_heads", "split_heads"]


def split_heads(heads: int, ranks: int) -> list[range]:
    """The heads of each rank; the first ranks get one more if they do not divide.

    >>> split_heads(5, 2)
    [range(0, 3), range(3, 5)]
    """
    size, longer = divmod(heads, ranks)
    starts = [rank * size + min(rank, longer) for rank in range(ranks)]
    return [range(start, start + size + (rank < longer)) for rank, start in enumerate(starts)]


def observe_by_heads(call: ShardedCall, query: Tensor, key: Tensor, value: Tensor) -> Observation:
    """This rank's rows of the output, and statistics: of rows those of this rank, of keys those of this rank's keys.

    Args:
        call: the call.
        query: this rank's part, as ``key`` and ``value``.
    """
    whole, exchange = call.whole, call.exchange
    kv_heads = split_heads(whole.num_kv_heads, exchange.ranks)
    group = whole.num_heads // whole.num_kv_heads
    heads = [range(part.start * group, part.stop * group) for part in kv_heads]
    mine = heads[exchange.rank]
    routes = (_Route(call.queries, heads), _Route(call.keys, kv_heads), _Route(call.keys, kv_heads))
    tensors = _ToHeads.apply(exchange, routes, query, key, value)  # type: ignore[no-untyped-call]
    want = call.want
    if want.row_weights is not None and want.row_weights.shape[1] > 1:
        want = replace(want, row_weights=want.row_weights[:, mine.start : mine.stop])
    region = Region(mine, range(whole.q_len), range(whole.k_len))
    done = _run(call, call.part(region, *tensors), want)
    given = {name: getattr(done, name) for name in AXES if getattr(done, name) is not None}
    sharded = {name: tensor for name, tensor in given.items() if AXES[name].sharded}
    back = [_Route(call.queries if AXES[name].sharded == "queries" else call.keys, heads) for name in sharded]
    shaped = [AXES[name].tokens_first(tensor) for name, tensor in sharded.items()]
    returned = _ToTokens.apply(exchange, back, *shaped)  # type: ignore[no-untyped-call]
    results = {name: AXES[name].restored(part) for name, part in zip(sharded, returned, strict=True)}
    lengths = [len(part) for part in heads]
    for name in given.keys() - sharded.keys():
        results[name] = torch.cat(exchange.gather(given[name].detach().contiguous(), 1, lengths), dim=1)
    return Observation(**results)


def _run(call: ShardedCall, problem: Problem, want: Want) -> Observation:
    """Output and statistics of this rank's heads; gradients of rules' tensors are summed over ranks."""
    learned = call.whole.rule_parameters
    if not (learned and torch.is_grad_enabled()):
        return call.run(problem, want)
    names: list[str] = []
    tensors = (problem.query, problem.key, problem.value)
    results = _Summed.apply(call, problem, want, names, *tensors, *learned)  # type: ignore[no-untyped-call]
    return Observation(**dict(zip(names, results, strict=True)))


class _Summed(torch.autograd.Function):
    """A call whose rules' gradients are summed over ranks. Its graph is kept alive by this function's."""

    @staticmethod
    def forward(
        ctx: Any, call: ShardedCall, problem: Problem, want: Want, names: list[str], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
        with torch.enable_grad():
            done = call.run(problem.with_tensors(*leaves), want)
        given = {field.name: getattr(done, field.name) for field in fields(done)}
        results = {name: tensor for name, tensor in given.items() if tensor is not None}
        names.extend(results)
        ctx.exchange, ctx.results, ctx.inputs = call.exchange, [*results.values()], [*leaves, *inputs[3:]]
        detached = [tensor.detach() for tensor in ctx.results]
        ctx.mark_non_differentiable(
            *(one for one, tensor in zip(detached, ctx.results, strict=True) if not tensor.requires_grad)
        )
        ctx.set_materialize_grads(False)
        return tuple(detached)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = [(one, grad) for one, grad in zip(ctx.results, grads, strict=True) if grad is not None]
        outputs, arrived = zip(*pairs, strict=True)
        computed = torch.autograd.grad(outputs, ctx.inputs, arrived, allow_unused=True, retain_graph=True)
        pairs_of_inputs = zip(ctx.inputs, computed, strict=True)
        filled = [torch.zeros_like(one) if grad is None else grad for one, grad in pairs_of_inputs]
        ctx.exchange.sum(filled[3:])
        return None, None, None, None, *filled


#: What a rank sends to another one, and the shape of what it receives.
_Sent: TypeAlias = tuple[Tensor, Sequence[int]]


@dataclass(frozen=True)
class _Route:
    """A tensor's way between tokens and heads: where its tokens are, and which heads each rank gets."""

    layout: ShardLayout
    heads: list[range]

    def by_heads(self, part: Tensor, rank: int) -> list[_Sent]:
        """This rank's tokens for each rank, of its heads; ``joined`` makes ``[batch, my heads, len, channels]``."""
        mine = len(self.heads[rank])
        shapes = [(part.shape[0], mine, length, part.shape[3]) for length in lengths_of(self.layout)]
        return [(part[:, one.start : one.stop], shape) for one, shape in zip(self.heads, shapes, strict=True)]

    def by_tokens(self, whole: Tensor, rank: int) -> list[_Sent]:
        """This rank's heads for each rank, of its tokens; heads side by side are ``[batch, heads, len, channels]``."""
        mine = lengths_of(self.layout)[rank]
        shapes = [(whole.shape[0], len(one), mine, whole.shape[3]) for one in self.heads]
        return [(cut(self.layout, whole, other), shape) for other, shape in enumerate(shapes)]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, routes: Sequence[_Route], *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.routes = exchange, routes
        pairs = zip(routes, parts, strict=True)
        every = exchange.swap([route.by_heads(part, exchange.rank) for route, part in pairs])
        return tuple(joined(route.layout, received) for route, received in zip(routes, every, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_ToTokens.apply(ctx.exchange, ctx.routes, *grads)  # type: ignore[no-untyped-call]


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, routes: Sequence[_Route], *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.routes = exchange, routes
        pairs = zip(routes, wholes, strict=True)
        every = exchange.swap([route.by_tokens(whole, exchange.rank) for route, whole in pairs])
        return tuple(torch.cat(received, dim=1) for received in every)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_ToHeads.apply(ctx.exchange, ctx.routes, *grads)  # type: ignore[no-untyped-call]
