"""A call of attention over a sharded sequence: validated as the whole call that it stands for, equal on all ranks."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from clearhead.backends.capability import Backend
from clearhead.backends.containment import without_autocast
from clearhead.cut import Region, part_of
from clearhead.dispatch import choose
from clearhead.distributed.exchange import Exchange
from clearhead.distributed.layout import LayoutName, ShardLayout, check_layout, layout_of
from clearhead.distributed.parts import joined, lengths_of
from clearhead.errors import ShapeError
from clearhead.problem import Problem
from clearhead.statistics import Observation, Want

__all__ = ["FinishedRows", "Request", "ShardedCall", "are_finite"]

#: What ranks compare before a call, in this order.
_COMPARED: Final = ("shapes, dtypes and numbers", "masks and rules", "seeds")


@dataclass(frozen=True)
class Request:
    """What a rank asks for.

    Attributes:
        function: the public function's name.
        tensors: this rank's parts of query, key and value.
        group: the process group; None for all ranks.
        layout: which tokens the ranks have.
        method: the method's name, whatever the user passed.
        want: statistics, of which ``row_weights`` is this rank's part.
        options: keyword arguments of ``Problem.of``.
    """

    function: str
    tensors: tuple[Tensor, Tensor, Tensor]
    group: ProcessGroup | None
    layout: LayoutName | ShardLayout
    method: str
    want: Want
    options: dict[str, Any]


@dataclass
class FinishedRows:
    """Rows over all keys, for backward with some of the keys at a time.

    Attributes:
        output: the output, float32 or float64, contiguous.
        lse: the log-sum-exp.
        grad_output: the output's gradient, contiguous.
        grad_lse: that of the log-sum-exp, or None.
        saved: what the backend reads of the rows, once a block has been computed.
    """

    output: Tensor
    lse: Tensor
    grad_output: Tensor
    grad_lse: Tensor | None
    saved: list[Tensor] | None = None

    @cached_property
    def finite(self) -> bool:
        """Whether no row contains NaN or infinity."""
        return are_finite(self.lse, self.output)


@dataclass(frozen=True)
class ShardedCall:
    """A sharded call.

    Attributes:
        whole: the whole call, with tensors that have its shapes but one element.
        want: statistics of the whole call.
        backend: the backend, which all ranks use for all parts.
        exchange: the ranks.
        queries: where queries and outputs are.
        keys: where keys and values are.
    """

    whole: Problem
    want: Want
    backend: Backend
    exchange: Exchange
    queries: ShardLayout
    keys: ShardLayout

    @classmethod
    def of(cls, request: Request) -> ShardedCall:
        """Validate a call on this rank and hold it against the others'; all ranks raise if one of them does."""
        exchange = Exchange.of(request.function, request.group)
        lengths, want = _lengths(request, exchange)
        error: Exception | None = None
        call = None
        try:
            call = cls._validated(request, exchange, lengths, want)
        except Exception as raised:  # Whatever it is, the other ranks must hear of it.
            error = raised
        exchange.agree(request.function, _COMPARED, _facts(call, request), error)
        assert call is not None
        if call.whole.dropout > 0.0 and request.options["seed"] is None:
            return replace(call, whole=call.whole.with_seed(exchange.first(call.whole.seed)))
        return call

    @classmethod
    def _validated(
        cls, request: Request, exchange: Exchange, lengths: tuple[list[int], list[int]], want: Want
    ) -> ShardedCall:
        function, layout = request.function, request.layout
        check_layout(function, layout)
        queries, keys = (layout_of(sum(given), exchange.ranks, layout) for given in lengths)
        for name, place, given in (("query", queries, lengths[0]), ("key", keys, lengths[1])):
            if given != (expected := lengths_of(place)):
                raise ShapeError.about(
                    function,
                    name,
                    must=f"have parts of the lengths {expected} of layout {layout!r}",
                    got=f"lengths {given}",
                    then="Cut the whole sequence by ch.distributed.shard.",
                )
        # The parts are checked first, then the whole, which has their shapes but for the lengths.
        query, key, value = request.tensors
        Problem.of(function, query, key, value, scale=request.options["scale"])
        hollow = (_hollow(query, queries.length), _hollow(key, keys.length), _hollow(value, keys.length))
        whole = Problem.of(function, *hollow, **request.options)
        want.check(function, (whole.batch, whole.num_heads, whole.q_len, whole.k_len))
        return cls(whole, want, choose(function, whole, want), exchange, queries, keys)

    def part(self, region: Region, query: Tensor, key: Tensor, value: Tensor) -> Problem:
        """The problem of some heads, queries and keys."""
        return part_of(self.whole, region, query, key, value)

    def run(self, problem: Problem, want: Want) -> Observation:
        """A part's output and statistics."""
        with without_autocast(problem.query.device.type):
            return self.backend.run(problem, want)

    def partial_gradients(self, problem: Problem, rows: FinishedRows, learned: list[Tensor]) -> list[Tensor]:
        """Gradients of a problem with some keys of its rows, in query, key, value and parameters of the whole call.

        Args:
            problem: the problem.
            rows: the whole rows.
            learned: the parameters.
        """
        grads = grad_output, grad_lse = rows.grad_output, rows.grad_lse
        output, lse = rows.output, rows.lse
        if (by_rows := self.backend.by_rows) is not None and rows.finite:
            if rows.saved is None:
                rows.saved = by_rows.rows(problem, output, lse)
            return by_rows.backward(problem, rows.saved, grads, partial=True, learned=learned)
        leaves = [tensor.detach().requires_grad_() for tensor in (problem.query, problem.key, problem.value)]
        inputs = [*leaves, *learned]
        with torch.enable_grad():
            done = self.run(problem.with_tensors(*leaves), Want(lse=True))
        assert done.lse is not None
        share = torch.exp(done.lse.detach() - lse).masked_fill(done.lse.detach() == -torch.inf, 0.0)
        pull = (grad_output * (done.output.detach() - output)).sum(dim=-1) + (0.0 if grad_lse is None else grad_lse)
        arrived = (share[..., None] * grad_output).to(done.output.dtype), share * pull
        computed = torch.autograd.grad([done.output, done.lse], inputs, arrived, allow_unused=True)
        return [torch.zeros_like(one) if grad is None else grad for one, grad in zip(inputs, computed, strict=True)]

    @property
    def heads(self) -> range:
        return range(self.whole.num_heads)


def are_finite(lse: Tensor, *tensors: Tensor) -> bool:
    """Whether tensors contain no NaN and no infinity, but for the log-sum-exp of empty rows, which is -infinity.

    False too where values add up to more than their dtype, or float32 for smaller ones, can represent.
    """
    # A sum reads memory once; isfinite writes temporaries of the tensor's size.
    widest = (torch.promote_types(tensor.dtype, torch.float32) for tensor in tensors)
    sums = [tensor.sum(dtype=dtype) for tensor, dtype in zip(tensors, widest, strict=True)]
    return bool((lse < torch.inf).all()) and all(bool(torch.isfinite(one)) for one in sums)


def _hollow(part: Tensor, length: int) -> Tensor:
    """A tensor of a part's shape but for the length, of one element."""
    shape = (*part.shape[:-2], length, part.shape[-1])
    return part.detach().new_zeros(()).expand(shape).requires_grad_(part.requires_grad)


def _lengths(request: Request, exchange: Exchange) -> tuple[tuple[list[int], list[int]], Want]:
    """The lengths of queries and keys of all ranks, and the statistics with all ranks' row weights."""
    fits = [isinstance(tensor, Tensor) and 2 <= tensor.ndim <= 4 for tensor in request.tensors]
    length, keys, _ = (tensor.shape[-2] if fit else -1 for tensor, fit in zip(request.tensors, fits, strict=True))
    weights = request.want.row_weights
    weighted = isinstance(weights, Tensor) and weights.ndim == 4 and weights.shape[3] == length
    every = exchange.numbers([length, keys, 2 if weights is None else int(weighted)])
    for rank, (q_len, k_len, has_weights) in enumerate(every):
        if min(q_len, k_len) < 0:
            raise ShapeError.about(
                request.function,
                "query and key",
                must="be tensors with axes [batch, heads, len, head_dim], leading ones optional",
                got=f"something else on rank {rank}",
                then="Pass each rank's part of the sequence.",
            )
        if has_weights == 0 or has_weights != every[0][2]:
            raise ShapeError.about(
                request.function,
                "want.row_weights",
                must="be [batch | 1, heads | 1, n, queries of the rank] on every rank, or None on every rank",
                got=f"something else on rank {rank}",
                then="Cut the whole by ch.distributed.shard(weights, dim=-1).",
            )
    lengths = [one[0] for one in every], [one[1] for one in every]
    if weights is None:
        return lengths, request.want
    queries = layout_of(sum(lengths[0]), exchange.ranks, request.layout)
    parts = exchange.gather(weights.detach().transpose(2, 3).contiguous(), 2, lengths[0])
    return lengths, replace(request.want, row_weights=joined(queries, parts).transpose(2, 3))


def _facts(call: ShardedCall | None, request: Request) -> list[int]:
    """Numbers that must be equal on all ranks."""
    if call is None:
        return [0] * len(_COMPARED)
    whole = call.whole
    tensors = (whole.query, whole.key, whole.value)
    shapes = [(tuple(tensor.shape), tensor.requires_grad) for tensor in tensors]
    plain = (shapes, whole.query.dtype, whole.scale, whole.dropout, request.method, request.layout, call.backend.name)
    records = (whole.mask, whole.scores, sorted(call.want.names))
    seed = request.options["seed"]
    return [_digest(repr(plain)), _digest(repr(records)), -1 if seed is None else _digest(repr(seed))]


def _digest(text: str) -> int:
    return zlib.crc32(text.encode())
