"""Attention over tiles in plain torch operations: every feature, forward and backward, memory O(T).

Forward is the online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022, algorithm 1): a strip of
queries iterates over tiles of keys with a running maximum and sum, and skips tiles that the mask empties. Statistics
take a second pass over the strip's tiles, with its log-sum-exp. Backward recomputes each tile's weights from the saved
log-sum-exp (ibid., algorithm 4).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.backends.backward_reads import BackwardReads, backward_reads
from clearhead.backends.capability import Backend, Capability
from clearhead.backends.containment import all_finite, is_readable, only_finite, without_autocast
from clearhead.backends.dropout import keep_scale
from clearhead.backends.recorded import is_recorded, recorded_attention
from clearhead.backends.tiled_statistics import Base, Pulls, Sweep, result_names, weigh
from clearhead.backends.tiles import (
    Layout,
    Tile,
    add_not_finite,
    add_product,
    exponential,
    finite,
    layouts,
    masked,
    raw_scores,
    ruled,
    stacked,
    strips,
)
from clearhead.problem import Problem
from clearhead.scores import check_reached, differentiated
from clearhead.shapes import Float
from clearhead.statistics import UNDIFFERENTIABLE, Observation, Want
from clearhead.torch_private import differentiates_forward, transforms

__all__ = ["BACKEND"]

#: Elements of the temporary product in a sum of products.
_PRODUCTS: Final = 2**17


def _forward_strip(
    problem: Problem, layout: Layout, queries: slice, tiles: list[Tile]
) -> tuple[Tensor, Tensor, Tensor, Base]:
    """Output, log-sum-exp, largest score and the log-sum-exp's parts of one strip of queries."""
    size, heads = layout.query.shape[:2]
    rows = queries.stop - queries.start
    new = layout.query.new_full
    largest, total = new((size, heads, rows), -torch.inf), new((size, heads, rows), 0.0)
    output = new((size, heads, rows, problem.value_dim), 0.0)
    for tile in tiles:
        largest = _forward_tile(problem, layout, queries, tile, largest, total, output)
    max_score = largest
    if problem.sink is not None:
        logits = problem.sink.logits.detach().to(total.dtype).view(1, -1, 1)
        largest = torch.maximum(largest, logits.expand_as(largest))
        shrink = torch.exp(max_score - largest)
        total, output = total * shrink + torch.exp(logits - largest), output * shrink[..., None]
    empty = total == 0.0
    base = Base(finite(largest), total.masked_fill(empty, 1.0))
    lse = (base.largest + torch.log(base.total)).masked_fill(empty, -torch.inf)
    # A row whose maximum is infinite is NaN, in its statistics too.
    max_score = max_score.masked_fill(max_score == torch.inf, torch.nan)
    return output / base.total[..., None], lse, max_score, base


def _forward_tile(
    problem: Problem, layout: Layout, queries: slice, tile: Tile, largest: Tensor, total: Tensor, output: Tensor
) -> Tensor:
    """Add a tile to a strip's sums and output, in place; returns the new row maxima."""
    scores = masked(ruled(problem, raw_scores(problem, layout, queries, tile), tile), tile)
    higher = torch.maximum(largest, scores.amax(dim=-1))
    base = finite(higher)
    weights = exponential(scores - base[..., None])
    shrink = exponential(largest - base)
    total.mul_(shrink).add_(weights.sum(dim=-1))
    if problem.dropout > 0.0:
        weights *= keep_scale(problem.seed, problem.dropout, problem.drawn_at(tile.indices), weights.dtype)
    output *= shrink[..., None]
    kv_heads, value = problem.num_kv_heads, layout.clean[2][:, :, tile.keys].flatten(0, 1)
    stacked(output, kv_heads).baddbmm_(stacked(weights, kv_heads), value)
    if not layout.is_finite:
        add_not_finite(output, weights, layout.value[:, :, tile.keys], tile.allowed)
    return higher


class _Tiled(torch.autograd.Function):
    """Output, log-sum-exp, row maxima and statistics; rule parameters are inputs so that autograd knows them."""

    @staticmethod
    def forward(
        ctx: Any, problem: Problem, want: Want, read: BackwardReads, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        query = problem.query
        rows = (problem.batch, problem.num_heads, problem.q_len)
        # Backward needs the unrounded output: delta is a difference of two large sums in it.
        output = query.new_zeros((*rows, problem.value_dim), dtype=problem.work_dtype)
        lse = query.new_full(rows, -torch.inf, dtype=problem.work_dtype)
        max_score, base = lse.clone(), Base(torch.zeros_like(lse), torch.ones_like(lse))
        if problem.sink is not None:
            # Tokens outside every document are in no layout; their softmax contains the sink alone.
            lse.copy_(problem.sink.logits.detach().view(1, -1, 1))
            base.largest.copy_(finite(lse))
        with torch.no_grad():
            sweep = Sweep(problem, want)
            for layout in layouts(problem):
                for queries, tiles in strips(problem, layout):
                    *pieces, strip_base = _forward_strip(problem, layout, queries, tiles)
                    pieces += [strip_base.largest, strip_base.total]
                    for into, piece in zip((output, lse, max_score, base.largest, base.total), pieces, strict=True):
                        layout.put(into, queries, piece)
                    if sweep.results:
                        sweep.strip(layout, queries, tiles, strip_base)
            statistics = sweep.finished()
        ctx.problem, ctx.want, ctx.statistics = problem, want, tuple(statistics)
        # Tensors that backward reads without a copy are saved too, so that autograd raises if one was written into.
        ctx.save_for_backward(*tensors[:4], output, base.largest, base.total, max_score, *read.tensors)
        ctx.reached = [any(parameter is tensor for tensor in read.learned) for parameter in tensors[4:]]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(statistics[name] for name in UNDIFFERENTIABLE if name in statistics))
        return output.to(query.dtype), lse, max_score, *statistics.values()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, mixing, output, largest, total, max_score, *_ = ctx.saved_tensors
        problem = ctx.problem.with_tensors(query, key, value)
        if is_recorded(*grads):
            names = ("output", "lse", "max_score", *ctx.statistics)
            given = {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}
            want = replace(ctx.want, lse=True, max_score=True)
            return None, None, None, *recorded_attention(problem, want, given, ctx.needs_input_grad[3:])
        with without_autocast(query.device.type):
            asked = {name: grad for name, grad in zip(ctx.statistics, grads[3:], strict=True) if grad is not None}
            gather = ctx.needs_input_grad[6] and "row_weights" in asked
            pulls = Pulls.of(problem, ctx.want, (max_score, grads[2]), asked, mixing, gather=gather)
            results = _gradients(problem, (output, Base(largest, total)), (grads[0], grads[1]), pulls, ctx.reached)
            if pulls.grad_mixing is not None:
                results.append(pulls.grad_mixing.mT.sum_to_size(mixing.shape).to(mixing.dtype))
        grad_mixing = results.pop() if pulls.grad_mixing is not None else None
        return None, None, None, *results[:3], grad_mixing, *results[3:]


def _gradients(
    problem: Problem,
    saved: tuple[Tensor, Base],
    grads: tuple[Tensor | None, Tensor | None],
    pulls: Pulls,
    reached: list[bool],
) -> list[Tensor | None]:
    """Gradients of query, key, value and the rules' parameters; None for those that no tile read.

    ``reached`` says for each parameter whether it is known to be read.
    """
    output, base = saved
    grad_output = torch.zeros_like(output) if grads[0] is None else grads[0].to(output.dtype)
    # delta is a row's sum of weight times weight gradient; a gradient of lse is subtracted from it.
    delta = _row_products(grad_output, output)
    arrived = None
    if not all_finite(grad_output):
        arrived, grad_output = grad_output, only_finite(grad_output)
    if grads[1] is not None:
        delta = delta - grads[1]
    inputs = (problem.query, problem.key, problem.value)
    totals = [torch.zeros_like(tensor, dtype=problem.work_dtype) for tensor in inputs]
    learned = _Learned.of(problem, reached)
    everything = slice(None)
    for layout in layouts(problem):
        rows = _BackwardRows(
            layout.take(grad_output),
            layout.take(delta),
            Base(layout.take(base.largest, padding=torch.inf), layout.take(base.total, padding=1.0)),
            arrived=None if arrived is None else layout.take(arrived),
        )
        layout_grads, layout_pulls = (layout.gathered(totals[1]), layout.gathered(totals[2])), pulls.within(layout)
        for queries, tiles in strips(problem, layout):
            strip = rows.cut(queries)
            if layout_pulls.any:
                extra, share = layout_pulls.walk(problem, layout, queries, tiles, strip.base)
                strip = replace(strip, delta=strip.delta + extra, share=share)
                layout.add(delta, queries, extra)
            layout.put(
                totals[0],
                queries,
                _BackwardStrip(problem, layout, queries, strip, layout_pulls, *layout_grads, learned).walk(tiles),
            )
        if layout.group is not None:
            for into, grad in zip(totals[1:], layout_grads, strict=True):
                layout.put(into, everything, grad)
    _sink_gradient(problem, learned, delta, base)
    pairs = zip([*totals, *learned.grads], [*inputs, *learned.parameters], strict=True)
    return [None if grad is None else grad.to(tensor.dtype) for grad, tensor in pairs]


def _row_products(one: Float[Tensor, "*rows q_len dim"], other: Float[Tensor, "*rows q_len dim"]) -> Tensor:
    """``(one * other).sum(-1)`` in parts, without a third tensor of that size."""
    step = max(1, _PRODUCTS // max(1, one[..., :1, :].numel()))
    sums = one.new_empty(one.shape[:-1])
    for start in range(0, one.shape[-2], step):
        part = slice(start, start + step)
        torch.sum(one[..., part, :] * other[..., part, :], dim=-1, out=sums[..., part])
    return sums


@dataclass(frozen=True)
class _BackwardRows:
    """What backward needs of each row.

    Attributes:
        grad_output: gradient of the output, with 0 for NaN and infinity.
        delta: sum of weight times weight gradient; not finite if the gradient or the output is not.
        base: the parts of the log-sum-exp.
        share: the gradient of the row maximum for each of its ties.
        arrived: the gradient with NaN and infinity; None if it has none.
    """

    grad_output: Tensor
    delta: Tensor
    base: Base
    share: Tensor | None = None
    arrived: Tensor | None = None

    def cut(self, queries: slice) -> _BackwardRows:
        return _BackwardRows(
            self.grad_output[:, :, queries],
            self.delta[:, :, queries],
            self.base.cut(queries),
            arrived=None if self.arrived is None else self.arrived[:, :, queries],
        )


@dataclass(frozen=True)
class _BackwardStrip:
    """One strip of queries in backward, and the sums of gradients that it contributes to."""

    problem: Problem
    layout: Layout
    queries: slice
    rows: _BackwardRows
    pulls: Pulls
    grad_key: Tensor
    grad_value: Tensor
    learned: _Learned

    def walk(self, tiles: list[Tile]) -> Tensor:
        """The gradient of the strip's queries; other gradients are added to their sums."""
        layout, query = self.layout, self.layout.clean[0][:, :, self.queries]
        grad_query = torch.zeros_like(query, memory_format=torch.contiguous_format)
        kv_heads = self.problem.num_kv_heads
        flat_query, flat_grad = stacked(query, kv_heads), stacked(grad_query, kv_heads)
        # A weight of 0 times NaN is NaN: a row with NaN must not affect keys that it may not attend to.
        of_rows = [self.rows.delta] if self.rows.share is None else [self.rows.delta, self.rows.share]
        spoiled = not all(bool(torch.isfinite(values).all()) for values in of_rows)
        for tile in tiles:
            grad_scores = self._tile(tile, spoiled)
            grad, grad_key = stacked(grad_scores, kv_heads), self.grad_key[:, :, tile.keys]
            flat_grad.baddbmm_(grad, layout.clean[1][:, :, tile.keys].flatten(0, 1), alpha=self.problem.scale)
            add_product(grad_key, grad.mT, flat_query, self.problem.scale)
            if not layout.is_finite:
                add_not_finite(grad_query, grad_scores, layout.key[:, :, tile.keys], tile.allowed)
                add_not_finite(
                    grad_key,
                    grad_scores.mT,
                    layout.query[:, :, self.queries],
                    tile.allowed_by_key,
                )
        return grad_query

    def _tile(self, tile: Tile, spoiled: bool) -> Tensor:
        """The gradient of a tile's scaled scores; the gradient of its values is added to ``grad_value``."""
        problem, layout, rows, pulls = self.problem, self.layout, self.rows, self.pulls
        scores_in = raw_scores(problem, layout, self.queries, tile)
        scores_out = scores_in
        if problem.elementwise:
            with torch.enable_grad():
                scores_out = ruled(problem, scores_in.requires_grad_(), tile)
        weighed = weigh(scores_out.detach(), tile, rows.base, spoiled)
        upstream = stacked(rows.grad_output, problem.num_kv_heads)
        grad = torch.bmm(upstream, layout.clean[2][:, :, tile.keys].flatten(0, 1).mT).view(weighed.weights.shape)
        dropped = weighed.weights
        if problem.dropout > 0.0:
            keep = keep_scale(problem.seed, problem.dropout, problem.drawn_at(tile.indices), dropped.dtype)
            dropped, grad = dropped * keep, grad.mul_(keep)
        add_product(self.grad_value[:, :, tile.keys], stacked(dropped, problem.num_kv_heads).mT, upstream)
        if rows.arrived is not None:
            add_not_finite(
                self.grad_value[:, :, tile.keys],
                dropped.mT,
                rows.arrived,
                tile.allowed_by_key,
            )
        if pulls.any:
            grad += pulls.on_weights(layout, self.queries, tile, weighed)
        grad = pulls.on_scores(
            grad.sub_(rows.delta[..., None]).mul_(weighed.weights), self.queries, weighed, rows.share
        )
        if spoiled:
            grad = masked(grad, tile, 0.0)
        return self.learned.pulled(problem, scores_in, scores_out, grad, tile) if problem.elementwise else grad


@dataclass(frozen=True)
class _Learned:
    """The rules' parameters and the sums of their gradients, None before the first."""

    parameters: list[Tensor]
    grads: list[Tensor | None]
    dtype: torch.dtype
    #: Not empty after the check that a tile depends on no other learned tensor.
    complete: list[bool] = field(default_factory=list)

    @classmethod
    def of(cls, problem: Problem, reached: list[bool]) -> _Learned:
        """No gradients so far; 0 for parameters that are known to be read."""
        parameters, dtype = problem.rule_parameters if reached else [], problem.work_dtype
        pairs = zip(parameters, reached, strict=True)
        return cls(
            parameters,
            [torch.zeros_like(parameter, dtype=dtype) if is_reached else None for parameter, is_reached in pairs],
            dtype,
        )

    def add(self, place: int, grad: Tensor) -> None:
        """Add to one parameter's gradient."""
        total = self.grads[place]
        if total is None:
            total = self.grads[place] = torch.zeros_like(self.parameters[place], dtype=self.dtype)
        total += grad

    def pulled(self, problem: Problem, scores_in: Tensor, scores_out: Tensor, grad: Tensor, tile: Tile) -> Tensor:
        """The gradient of the scores before the rules; the parameters' gradients are added to their sums."""
        if not scores_out.requires_grad:
            return torch.zeros_like(grad)
        if not self.complete:
            check_reached(problem.elementwise, scores_out, scores_in, self.parameters)
            self.complete.append(True)
        grads = differentiated(problem.elementwise, scores_out, scores_in, self.parameters, grad, tile.indices)
        for place, parameter_grad in enumerate(grads[1:]):
            if parameter_grad is not None:
                self.add(place, parameter_grad)
        return torch.zeros_like(grad) if grads[0] is None else masked(grads[0], tile, 0.0)


def _sink_gradient(problem: Problem, learned: _Learned, delta: Tensor, base: Base) -> None:
    """The gradient of a sink's logit: its value is 0, so it is ``-weight * delta`` with the sink's weight."""
    if problem.sink is None:
        return
    for place, parameter in enumerate(learned.parameters):
        if parameter is problem.sink.logits:
            logits = parameter.detach().to(delta.dtype).view(1, -1, 1)
            weight = torch.exp(logits - base.largest) / base.total
            per_head = -(weight * delta).sum(dim=(0, 2))
            learned.add(place, per_head if parameter.shape == per_head.shape else per_head.sum())


def run(problem: Problem, want: Want) -> Observation:
    """Output and statistics."""
    problem = problem.dequantized
    if problem.value_dim == 0:
        wider = problem.with_tensors(problem.query, problem.key, F.pad(problem.value, (0, 1)))
        observation = run(wider, want)
        return replace(observation, output=observation.output[..., :0])
    read = backward_reads(problem) if torch.is_grad_enabled() else BackwardReads([], [])
    output, lse, max_score, *others = _Tiled.apply(  # type: ignore[no-untyped-call]
        problem, want, read, problem.query, problem.key, problem.value, want.row_weights, *problem.rule_parameters
    )
    asked = want.names
    return Observation(
        output=output,
        lse=lse if "lse" in asked else None,
        max_score=max_score if "max_score" in asked else None,
        **dict(zip(result_names(want), others, strict=True)),
    )


def _also(problem: Problem) -> list[str]:
    if transforms() or differentiates_forward():
        return ["does not support torch.func and forward-mode differentiation"]
    return [] if is_readable(problem.query) else ["reads elements, which meta and fake tensors do not have"]


BACKEND = Backend(
    name="tiled",
    summary="tiles of torch operations, O(T) memory, every mask, rule and statistic",
    capability=Capability(quantized=True, also=_also),
    run=run,
)
