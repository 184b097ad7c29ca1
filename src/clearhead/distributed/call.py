"""A call of attention over a sharded sequence: validated as the whole call that it stands for, equal on all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from clearhead.backends.capability import Backend
from clearhead.backends.containment import without_autocast
from clearhead.cut import Extent, part_of
from clearhead.dispatch import choose
from clearhead.distributed.exchange import Exchange
from clearhead.distributed.layout import LayoutName, ShardLayout, check_layout, layout_of
from clearhead.distributed.parts import lengths_of
from clearhead.errors import ClearheadError, ShapeError
from clearhead.problem import Problem
from clearhead.statistics import Observation, Want

__all__ = ["Call", "add_learned"]

#: What ranks compare before a call, in this order.
_COMPARED: Final = ("shapes, dtypes and numbers", "masks and rules", "seeds")


@dataclass(frozen=True)
class Call:
    """A sharded call.

    Attributes:
        whole: the whole call, with tensors that have its shapes but one element.
        backend: the backend, which all ranks use for all parts.
        exchange: the ranks.
        queries: where queries and outputs are.
        keys: where keys and values are.
    """

    whole: Problem
    backend: Backend
    exchange: Exchange
    queries: ShardLayout
    keys: ShardLayout

    @classmethod
    def of(
        cls,
        function: str,
        tensors: tuple[Tensor, Tensor, Tensor],
        group: ProcessGroup | None,
        layout: LayoutName | ShardLayout,
        method: str,
        want: Want,
        **options: Any,
    ) -> Call:
        """Validate a call on this rank and hold it against the others'; all ranks raise if one of them does."""
        exchange = Exchange.of(group)
        error: ClearheadError | None = None
        call = None
        lengths = _lengths(function, tensors, exchange)
        try:
            check_layout(function, layout)
            call = cls._validated(function, tensors, exchange, layout, lengths, want, options)
        except ClearheadError as raised:
            error = raised
        facts = [0] * len(_COMPARED) if call is None else _facts(call, method, layout, options["seed"])
        exchange.agree(function, _COMPARED, facts, error)
        assert call is not None
        if call.whole.dropout > 0.0 and options["seed"] is None:
            return replace(call, whole=call.whole.with_seed(exchange.first(call.whole.seed)))
        return call

    @classmethod
    def _validated(
        cls,
        function: str,
        tensors: tuple[Tensor, Tensor, Tensor],
        exchange: Exchange,
        layout: LayoutName | ShardLayout,
        lengths: list[tuple[int, int]],
        want: Want,
        options: dict[str, Any],
    ) -> Call:
        q_len, k_len = (sum(part) for part in zip(*lengths, strict=True))
        queries, keys = (layout_of(length, exchange.ranks, layout) for length in (q_len, k_len))
        for name, place, given in (("query", queries, 0), ("key", keys, 1)):
            given_lengths, expected = [part[given] for part in lengths], lengths_of(place)
            if given_lengths != expected:
                raise ShapeError.about(
                    function,
                    name,
                    must=f"have parts of the lengths {expected} of layout {layout!r}",
                    got=f"lengths {given_lengths}",
                    then="Cut the whole sequence by ch.distributed.shard.",
                )
        # The parts are checked first, then the whole, which has their shapes but for the lengths.
        query, key, value = tensors
        Problem.of(function, query, key, value, scale=options["scale"])
        hollow = (_hollow(query, q_len), _hollow(key, k_len), _hollow(value, k_len))
        whole = Problem.of(function, *hollow, **options)
        return cls(whole, choose(function, whole, want), exchange, queries, keys)

    def part(self, extent: Extent, query: Tensor, key: Tensor, value: Tensor) -> Problem:
        """The problem of some heads, queries and keys."""
        return part_of(self.whole, extent, query, key, value)

    def run(self, problem: Problem, want: Want) -> Observation:
        """A part's output and statistics."""
        with without_autocast(problem.query.device.type):
            return self.backend.run(problem, want)

    def partial_gradients(
        self,
        problem: Problem,
        rows: tuple[Tensor, Tensor],
        grad_output: Tensor,
        grad_lse: Tensor | None,
    ) -> list[Tensor]:
        """Gradients of a problem with some keys of its rows, in query, key, value and the rules' parameters.

        Args:
            problem: the problem.
            rows: output and log-sum-exp of the whole rows, float32 or float64.
            grad_output: gradient of the whole rows' output.
            grad_lse: gradient of their log-sum-exp, or None.
        """
        output, lse = rows
        if (by_rows := self.backend.by_rows) is not None:
            return by_rows.backward(problem, by_rows.rows(problem, output, lse), grad_output, grad_lse, partial=True)
        leaves = [tensor.detach().requires_grad_() for tensor in (problem.query, problem.key, problem.value)]
        inputs = [*leaves, *problem.rule_parameters]
        with torch.enable_grad():
            done = self.run(problem.with_tensors(*leaves), Want(lse=True))
        assert done.lse is not None
        share = torch.exp(done.lse.detach() - lse).masked_fill(done.lse.detach() == -torch.inf, 0.0)
        pull = (grad_output * (done.output.detach() - output)).sum(dim=-1) + (0.0 if grad_lse is None else grad_lse)
        grads = (share[..., None] * grad_output).to(done.output.dtype), share * pull
        computed = torch.autograd.grad([done.output, done.lse], inputs, grads, allow_unused=True)
        return [torch.zeros_like(one) if grad is None else grad for one, grad in zip(inputs, computed, strict=True)]

    @property
    def heads(self) -> range:
        return range(self.whole.num_heads)


def add_learned(
    totals: Sequence[Tensor], learned: Sequence[Tensor], sliced: Sequence[Tensor], grads: Sequence[Tensor]
) -> None:
    """Add gradients of slices of parameters to the totals of the parameters.

    Args:
        totals: one for each of ``learned``.
        learned: parameters of the whole call.
        sliced: parameters of a part: views of these, or some of these themselves.
        grads: one for each of ``sliced``.
    """
    if sliced:
        computed = torch.autograd.grad(sliced, learned, grads, allow_unused=True)
        for total, grad in zip(totals, computed, strict=True):
            if grad is not None:
                total += grad


def _hollow(part: Tensor, length: int) -> Tensor:
    """A tensor of a part's shape but for the length, of one element."""
    shape = (*part.shape[:-2], length, part.shape[-1])
    return part.detach().new_zeros(()).expand(shape).requires_grad_(part.requires_grad)


def _lengths(function: str, tensors: tuple[Tensor, Tensor, Tensor], exchange: Exchange) -> list[tuple[int, int]]:
    """The lengths of queries and keys of each rank; a rank whose tensors are none at all says -1."""
    fits = [isinstance(tensor, Tensor) and 2 <= tensor.ndim <= 4 for tensor in tensors]
    every = exchange.numbers([tensors[i].shape[-2] if fits[i] else -1 for i in (0, 1)])
    listed = [(q_len, k_len) for q_len, k_len in every]
    for rank, part in enumerate(listed):
        if min(part) < 0:
            raise ShapeError.about(
                function,
                "query and key",
                must="be tensors with axes [batch, heads, len, head_dim], leading ones optional",
                got=f"something else on rank {rank}",
                then="Pass each rank's part of the sequence.",
            )
    return listed


def _facts(call: Call, method: str, layout: LayoutName | ShardLayout, seed: int | None) -> list[int]:
    """Numbers that must be equal on all ranks."""
    whole = call.whole
    shapes = [tuple(tensor.shape) for tensor in (whole.query, whole.key, whole.value)]
    plain = (shapes, whole.query.dtype, whole.scale, whole.dropout, method, layout, call.backend.name)
    records = [[], *whole.scores] if whole.mask is None else [whole.mask, *whole.scores]
    return [_digest(repr(plain)), _digest(repr(records)), -1 if seed is None else _digest(repr(seed))]


def _digest(text: str) -> int:
    return zlib.crc32(text.encode())
