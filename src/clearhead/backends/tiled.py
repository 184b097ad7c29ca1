"""Attention over tiles in plain torch operations: every feature, forward and backward, memory O(T).

Forward is the online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022, algorithm 1):
a strip of queries walks over tiles of keys with a running maximum and sum, and tiles that the mask empties
are never computed. Statistics are a second walk over the strip's tiles, when its log-sum-exp is known. Backward
recomputes each tile's weights from the saved log-sum-exp (ibid., algorithm 4).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from clearhead.backends.capability import Backend, Capability
from clearhead.backends.dropout import keep_scale
from clearhead.backends.once import once
from clearhead.backends.tiled_statistics import UNDIFFERENTIABLE, Pulls, Sweep, result_names, weigh
from clearhead.backends.tiles import Layout, Tile, finite, grouped, layouts, masked, raw_scores, ruled, strips
from clearhead.problem import Problem
from clearhead.statistics import Observation, Want

__all__ = ["BACKEND"]


def _forward_strip(
    problem: Problem, layout: Layout, queries: slice, tiles: list[Tile]
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and largest score of one strip of queries."""
    size, heads = layout.query.shape[:2]
    rows = queries.stop - queries.start
    new = layout.query.new_full
    largest, total = new((size, heads, rows), -torch.inf), new((size, heads, rows), 0.0)
    output = new((size, heads, rows, problem.value_dim), 0.0)
    for tile in tiles:
        scores = masked(ruled(problem, raw_scores(problem, layout, queries, tile), tile), tile)
        higher = torch.maximum(largest, scores.amax(dim=-1))
        base = finite(higher)
        weights = torch.exp(scores - base[..., None])
        shrink = torch.exp(largest - base)
        total = total * shrink + weights.sum(dim=-1)
        if problem.dropout > 0.0:
            weights = weights * keep_scale(problem.seed, problem.dropout, tile.indices, weights.dtype)
        value = layout.value[:, :, tile.keys]
        part = (grouped(weights, problem.num_kv_heads) @ value).view(*output.shape)
        output = output * shrink[..., None] + _with_bad_values(problem, layout, tile, part)
        largest = higher
    max_score = largest
    if problem.sink is not None:
        logits = problem.sink.logits.detach().to(total.dtype).view(1, -1, 1)
        largest = torch.maximum(largest, logits.expand_as(largest))
        shrink = torch.exp(max_score - largest)
        total, output = total * shrink + torch.exp(logits - largest), output * shrink[..., None]
    empty = total == 0.0
    lse = (finite(largest) + torch.log(total)).masked_fill(empty, -torch.inf)
    return output / total.masked_fill(empty, 1.0)[..., None], lse, max_score


def _with_bad_values(problem: Problem, layout: Layout, tile: Tile, part: Tensor) -> Tensor:
    """NaN in the rows that may attend to a value that is not finite."""
    if layout.bad is None or not bool(layout.bad[2].any()):
        return part
    group = problem.num_heads // problem.num_kv_heads
    bad = layout.bad[2][:, :, None, tile.keys].repeat_interleave(group, dim=1)
    touched = bad if tile.allowed is None else bad & tile.allowed
    return part.masked_fill(touched.any(dim=-1, keepdim=True), torch.nan)


class _Tiled(torch.autograd.Function):
    """Output, log-sum-exp, largest scores and statistics; rule parameters ride along so that autograd knows them."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, want: Want, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        query = problem.query
        rows = (problem.batch, problem.num_heads, problem.q_len)
        # Backward needs the unrounded output: delta is a difference of two large sums in it.
        output = query.new_zeros((*rows, problem.value_dim), dtype=problem.work_dtype)
        lse = query.new_full(rows, -torch.inf, dtype=problem.work_dtype)
        max_score = lse.clone()
        if problem.sink is not None:
            # Tokens outside every document are in no layout; their softmax holds the sink alone.
            lse.copy_(problem.sink.logits.detach().view(1, -1, 1))
        with torch.no_grad():
            sweep = Sweep(problem, want)
            for layout in layouts(problem):
                for queries, tiles in strips(problem, layout):
                    pieces = _forward_strip(problem, layout, queries, tiles)
                    for into, piece in zip((output, lse, max_score), pieces, strict=True):
                        layout.put(into, queries, piece)
                    if sweep.found:
                        sweep.strip(layout, queries, tiles, pieces[1])
            found = sweep.finished()
        ctx.problem, ctx.want, ctx.found = problem, want, tuple(found)
        ctx.save_for_backward(*tensors[:4], output, lse, max_score)
        ctx.rules = len(tensors) > 4
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(found[name] for name in UNDIFFERENTIABLE if name in found))
        return output.to(query.dtype), lse, max_score, *found.values()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, mixing, output, lse, max_score = ctx.saved_tensors
        problem = ctx.problem.with_tensors(query, key, value)
        given = [grad for grad in grads if grad is not None]
        # Backward may be called within autocast, which would round the products to 16 bits.
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            asked = {name: grad for name, grad in zip(ctx.found, grads[3:], strict=True) if grad is not None}
            gather = ctx.needs_input_grad[5] and "row_weights" in asked
            pulls = Pulls.of(problem, ctx.want, (max_score, grads[2]), asked, mixing, gather=gather)
            results = _gradients(problem, (output, lse), (grads[0], grads[1]), pulls, ctx.rules)
            if pulls.grad_mixing is not None:
                results.append(pulls.grad_mixing.mT.sum_to_size(mixing.shape).to(mixing.dtype))
        own = once(results, (query, key, value, *given))
        grad_mixing = own.pop() if pulls.grad_mixing is not None else None
        return None, None, *own[:3], grad_mixing, *own[3:]


def _gradients(
    problem: Problem, saved: tuple[Tensor, Tensor], grads: tuple[Tensor | None, Tensor | None], pulls: Pulls,
    rules: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of query, key, value and the rules' parameters."""
    output, lse = saved
    grad_output = torch.zeros_like(output) if grads[0] is None else grads[0].to(output.dtype)
    # delta is a row's sum of weight times weight-gradient; a gradient of lse enters at the same place.
    delta = (grad_output * output).sum(dim=-1)
    if grads[1] is not None:
        delta = delta - grads[1]
    inputs = (problem.query, problem.key, problem.value)
    found = [torch.zeros_like(tensor, dtype=problem.work_dtype) for tensor in inputs]
    parameters = problem.rule_parameters if rules else []
    rule_grads = [torch.zeros_like(tensor, dtype=problem.work_dtype) for tensor in parameters]
    everything = slice(None)
    for layout in layouts(problem):
        rows = _Rows(layout.take(grad_output), layout.take(delta), layout.take(lse, padding=torch.inf))
        own, own_pulls = (torch.zeros_like(layout.key), torch.zeros_like(layout.value)), pulls.within(layout)
        for queries, tiles in strips(problem, layout):
            strip = rows.cut(queries)
            if own_pulls.any:
                extra, share = own_pulls.walk(problem, layout, queries, tiles, strip.lse)
                strip = replace(strip, delta=strip.delta + extra, share=share)
                layout.add(delta, queries, extra)
            grad_query = _backward_strip(problem, layout, queries, tiles, strip, own_pulls, own, parameters, rule_grads)
            layout.put(found[0], queries, grad_query)
        for into, grad in zip(found[1:], own, strict=True):
            layout.put(into, everything, grad)
    _sink_gradient(problem, parameters, rule_grads, delta, lse)
    cast = [grad.to(tensor.dtype) for grad, tensor in zip(found, inputs, strict=True)]
    return cast + [grad.to(tensor.dtype) for grad, tensor in zip(rule_grads, parameters, strict=True)]


@dataclass(frozen=True)
class _Rows:
    """What backward needs of each row; ``share`` is what each of its largest scores gets of their gradient."""

    grad_output: Tensor
    delta: Tensor
    lse: Tensor
    share: Tensor | None = None

    def cut(self, queries: slice) -> _Rows:
        return _Rows(self.grad_output[:, :, queries], self.delta[:, :, queries], self.lse[:, :, queries])


def _backward_strip(
    problem: Problem, layout: Layout, queries: slice, tiles: list[Tile], rows: _Rows, pulls: Pulls,
    into: tuple[Tensor, Tensor], parameters: list[Tensor], rule_grads: list[Tensor],
) -> Tensor:  # fmt: skip
    """One strip's query gradient; its part of key, value and rule gradients is added where those are gathered."""
    kv_heads = problem.num_kv_heads
    query = grouped(layout.query[:, :, queries], kv_heads)
    grad_grouped = grouped(rows.grad_output, kv_heads)
    grad_query = torch.zeros_like(layout.query[:, :, queries])
    base = finite(rows.lse)
    # Zero weight times NaN is NaN: rows that are not finite must not reach keys that they may not attend to.
    spoiled = not bool(torch.isfinite(rows.delta).all())
    for tile in tiles:
        key, value = layout.key[:, :, tile.keys], layout.value[:, :, tile.keys]
        scores = raw_scores(problem, layout, queries, tile)
        if problem.elementwise:
            scores.requires_grad_()
            with torch.enable_grad():
                after = ruled(problem, scores, tile)
        else:
            after = scores
        seen = weigh(after.detach(), tile, base, spoiled)
        grad_weights = (grad_grouped @ value.transpose(-2, -1)).view_as(seen.weights)
        dropped = seen.weights
        if problem.dropout > 0.0:
            keep = keep_scale(problem.seed, problem.dropout, tile.indices, dropped.dtype)
            dropped, grad_weights = dropped * keep, grad_weights * keep
        into[1][:, :, tile.keys] += grouped(dropped, kv_heads).transpose(-2, -1) @ grad_grouped
        if pulls.any:
            grad_weights = grad_weights + pulls.on_weights(layout, queries, tile, seen)
        grad_scores = seen.weights * (grad_weights - rows.delta[..., None])
        grad_scores = pulls.on_scores(grad_scores, queries, seen, rows.share)
        if spoiled:
            grad_scores = masked(grad_scores, tile, 0.0)
        if problem.elementwise:
            grad_scores = _through_rules(after, scores, grad_scores, tile, parameters, rule_grads)
        grad_scores = grouped(grad_scores * problem.scale, kv_heads)
        grad_query += (grad_scores @ key).view(*grad_query.shape)
        into[0][:, :, tile.keys] += grad_scores.transpose(-2, -1) @ query
    return grad_query


def _through_rules(
    after: Tensor,
    scores: Tensor,
    grad: Tensor,
    tile: Tile,
    parameters: list[Tensor],
    rule_grads: list[Tensor],
) -> Tensor:
    """The gradient before the rules, and the rules' own gradients added to ``rule_grads``."""
    if not after.requires_grad:
        return torch.zeros_like(grad)
    found = torch.autograd.grad(after, [scores, *parameters], grad, allow_unused=True)
    for total, own in zip(rule_grads, found[1:], strict=True):
        if own is not None:
            total += own
    before = torch.zeros_like(grad) if found[0] is None else found[0]
    return masked(before, tile, 0.0)


def _sink_gradient(
    problem: Problem, parameters: list[Tensor], rule_grads: list[Tensor], delta: Tensor, lse: Tensor
) -> None:
    """A sink's weight is ``exp(logit - lse)`` and its value nothing, so its gradient is ``-weight * delta``."""
    if problem.sink is None:
        return
    for parameter, grad in zip(parameters, rule_grads, strict=True):
        if parameter is problem.sink.logits:
            logits = parameter.detach().to(lse.dtype).view(1, -1, 1)
            # A logit of -inf beside an empty row is -inf less -inf.
            weight = torch.exp(logits - lse).masked_fill(logits == -torch.inf, 0.0)
            per_head = -(weight * delta).sum(dim=(0, 2))
            grad += per_head if grad.shape == per_head.shape else per_head.sum()


def run(problem: Problem, want: Want) -> Observation:
    """Output and statistics."""
    output, lse, max_score, *others = _Tiled.apply(  # type: ignore[no-untyped-call]
        problem, want, problem.query, problem.key, problem.value, want.row_weights, *problem.rule_parameters
    )
    asked = want.names
    return Observation(
        output=output,
        lse=lse if "lse" in asked else None,
        max_score=max_score if "max_score" in asked else None,
        **dict(zip(result_names(want), others, strict=True)),
    )


BACKEND = Backend(
    name="tiled",
    summary="tiles of torch operations, O(T) memory, every mask, rule and statistic",
    capability=Capability(),
    run=run,
)
