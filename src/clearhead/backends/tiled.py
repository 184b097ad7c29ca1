"""Attention over tiles in plain torch operations: every feature, forward and backward, memory O(T).

Forward is the online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022, algorithm 1):
a strip of queries walks over tiles of keys with a running maximum and sum, and tiles that the mask empties
are never computed. Backward recomputes each tile's weights from the saved log-sum-exp (ibid., algorithm 4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.backends.capability import Backend, Capability
from clearhead.backends.containment import all_finite, clean_rows
from clearhead.backends.documents import Group, documents_in, groups
from clearhead.backends.dropout import keep_scale
from clearhead.backends.once import once
from clearhead.masks.tile_map import EMPTY, FULL, tile_map
from clearhead.problem import Problem
from clearhead.statistics import Observation, Want

__all__ = ["BACKEND"]

#: Scores per tile over all its batches and heads: large enough to hide Python, small enough for the cache.
_TILE_SCORES: Final = 2**20
_Q_TILE: Final = 128
_K_TILE: Final = 512

_Indices = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class _Layout:
    """A batch of rows to work on, in the working dtype, with the absolute place of each token.

    Tokens that are not finite are 0 in ``query``, ``key`` and ``value``; the ``*_bad`` say which those were.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    indices: _Indices
    valid: Tensor | None
    bad: tuple[Tensor, Tensor, Tensor] | None
    group: Group | None


@dataclass(frozen=True)
class _Tile:
    """One tile: its key range, and which of its places may be attended to (None: all)."""

    keys: slice
    indices: _Indices
    allowed: Tensor | None


def _layouts(problem: Problem) -> Iterator[_Layout]:
    """The whole call as one batch, or a packed call as groups of documents."""
    if problem.q_len == 0:
        return
    documents = documents_in(problem)
    tensors = tuple(tensor.detach() for tensor in (problem.query, problem.key, problem.value))
    if documents is None:
        yield _layout(problem, tensors, problem.indices(), None)
        return
    batch, head, _, _ = problem.indices()
    for group in groups(documents):
        indices = (batch, head, group.slots[:, None, :, None], group.slots[:, None, None, :])
        yield _layout(problem, tuple(group.take(tensor) for tensor in tensors), indices, group)


def _layout(problem: Problem, tensors: tuple[Tensor, ...], indices: _Indices, group: Group | None) -> _Layout:
    query, key, value = (tensor.to(problem.work_dtype) for tensor in tensors)
    valid = None if group is None or bool(group.valid.all()) else group.valid
    bad = None
    if not all_finite(query, key, value):
        (query, query_bad), (key, key_bad), (value, value_bad) = (clean_rows(x) for x in (query, key, value))
        bad = (query_bad, key_bad, value_bad)
    return _Layout(query, key, value, indices, valid, bad, group)


def _batches(layout: _Layout) -> Iterator[tuple[slice, _Layout]]:
    """The layout in runs of batches small enough that a tile of them stays near ``_TILE_SCORES``."""
    size, heads, q_len, _ = layout.query.shape
    per_batch = heads * min(q_len, _Q_TILE) * min(layout.key.shape[2], _K_TILE)
    step = max(1, _TILE_SCORES // max(1, per_batch))
    for start in range(0, size, step):
        part = slice(start, start + step)
        cut = tuple(index[part] if index.shape[0] > 1 else index for index in layout.indices)
        yield part, _Layout(
            layout.query[part], layout.key[part], layout.value[part], (cut[0], cut[1], cut[2], cut[3]),
            None if layout.valid is None else layout.valid[part],
            None if layout.bad is None else (layout.bad[0][part], layout.bad[1][part], layout.bad[2][part]),
            layout.group,
        )  # fmt: skip


def _strips(problem: Problem, layout: _Layout) -> Iterator[tuple[slice, list[_Tile]]]:
    """Each strip of queries with the tiles of keys that it has to visit."""
    q_len, k_len = layout.query.shape[2], layout.key.shape[2]
    q_tile, k_tile = _tile_sides(layout)
    kinds = None
    if problem.mask is not None:
        found = tile_map(problem.mask, layout.indices, q_tile, k_tile, whole=layout.group is None)
        # One visit serves all batches and heads: empty where all are, full where all are.
        low, high = found.amin(dim=(0, 1)), found.amax(dim=(0, 1))
        kinds = torch.where(low == FULL, FULL, (high != EMPTY).to(torch.int8)).tolist()
    for row, q_start in enumerate(range(0, q_len, q_tile)):
        queries = slice(q_start, min(q_start + q_tile, q_len))
        tiles = []
        for column, k_start in enumerate(range(0, k_len, k_tile)):
            kind = FULL if kinds is None else kinds[row][column]
            if kind != EMPTY:
                keys = slice(k_start, min(k_start + k_tile, k_len))
                tiles.append(_tile(problem, layout, queries, keys, kind == FULL))
        yield queries, tiles


def _tile_sides(layout: _Layout) -> tuple[int, int]:
    """Narrow the tile where many heads would make it large."""
    size, heads = layout.query.shape[:2]
    room = max(32 * 32, _TILE_SCORES // max(1, size * heads))
    k_tile = _K_TILE
    while k_tile > 64 and _Q_TILE * k_tile > room:
        k_tile //= 2
    return _Q_TILE, k_tile


def _tile(problem: Problem, layout: _Layout, queries: slice, keys: slice, full: bool) -> _Tile:
    batch, head, q_pos, k_pos = layout.indices
    indices = (batch, head, q_pos[:, :, queries], k_pos[:, :, :, keys])
    allowed = None
    if not full and problem.mask is not None:
        allowed = problem.mask.allows(*indices)
    if layout.valid is not None:
        real = layout.valid[:, None, None, keys]
        allowed = real if allowed is None else allowed & real
    return _Tile(keys, indices, allowed)


def _grouped(tensor: Tensor, kv_heads: int) -> Tensor:
    """``[b, heads, rows, x]`` as ``[b, kv_heads, group * rows, x]``, so that keys are read once a group."""
    return tensor.reshape(tensor.shape[0], kv_heads, -1, tensor.shape[3])


def _raw_scores(problem: Problem, layout: _Layout, queries: slice, tile: _Tile) -> Tensor:
    """Scaled scores of a tile, ``[b, heads, rows, keys]``; 0 where the mask forbids, for the rules' sake."""
    query = layout.query[:, :, queries]
    key = layout.key[:, :, tile.keys]
    scores = (_grouped(query, problem.num_kv_heads) @ key.transpose(-2, -1)).view(*query.shape[:3], key.shape[2])
    scores = scores * problem.scale
    if layout.bad is not None:
        group = problem.num_heads // problem.num_kv_heads
        key_bad = layout.bad[1][:, :, tile.keys].repeat_interleave(group, dim=1)
        scores = scores.masked_fill(layout.bad[0][:, :, queries, None] | key_bad[:, :, None, :], torch.nan)
    if tile.allowed is not None and (problem.elementwise or layout.bad is not None):
        scores = scores.masked_fill(~tile.allowed, 0.0)
    return scores


def _ruled(problem: Problem, scores: Tensor, tile: _Tile) -> Tensor:
    for rule in problem.elementwise:
        scores = rule.apply(scores, *tile.indices)
    return scores


def _masked(scores: Tensor, tile: _Tile) -> Tensor:
    return scores if tile.allowed is None else scores.masked_fill(~tile.allowed, -torch.inf)


def _finite(largest: Tensor) -> Tensor:
    """A running maximum to subtract: 0 where a row has seen no key yet."""
    return largest.masked_fill(largest == -torch.inf, 0.0)


def _forward_strip(
    problem: Problem, layout: _Layout, queries: slice, tiles: list[_Tile]
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and largest score of one strip of queries."""
    size, heads = layout.query.shape[:2]
    rows = queries.stop - queries.start
    new = layout.query.new_full
    largest, total = new((size, heads, rows), -torch.inf), new((size, heads, rows), 0.0)
    output = new((size, heads, rows, problem.value_dim), 0.0)
    for tile in tiles:
        scores = _masked(_ruled(problem, _raw_scores(problem, layout, queries, tile), tile), tile)
        higher = torch.maximum(largest, scores.amax(dim=-1))
        base = _finite(higher)
        weights = torch.exp(scores - base[..., None])
        shrink = torch.exp(largest - base)
        total = total * shrink + weights.sum(dim=-1)
        if problem.dropout > 0.0:
            weights = weights * keep_scale(problem.seed, problem.dropout, tile.indices, weights.dtype)
        value = layout.value[:, :, tile.keys]
        part = (_grouped(weights, problem.num_kv_heads) @ value).view(*output.shape)
        output = output * shrink[..., None] + _with_bad_values(problem, layout, tile, part)
        largest = higher
    max_score = largest
    if problem.sink is not None:
        logits = problem.sink.logits.detach().to(total.dtype).view(1, -1, 1)
        largest = torch.maximum(largest, logits.expand_as(largest))
        shrink = torch.exp(max_score - largest)
        total, output = total * shrink + torch.exp(logits - largest), output * shrink[..., None]
    empty = total == 0.0
    lse = (_finite(largest) + torch.log(total)).masked_fill(empty, -torch.inf)
    return output / total.masked_fill(empty, 1.0)[..., None], lse, max_score


def _with_bad_values(problem: Problem, layout: _Layout, tile: _Tile, part: Tensor) -> Tensor:
    """NaN in the rows that may attend to a value that is not finite."""
    if layout.bad is None or not bool(layout.bad[2].any()):
        return part
    group = problem.num_heads // problem.num_kv_heads
    bad = layout.bad[2][:, :, None, tile.keys].repeat_interleave(group, dim=1)
    touched = bad if tile.allowed is None else bad & tile.allowed
    return part.masked_fill(touched.any(dim=-1, keepdim=True), torch.nan)


class _Tiled(torch.autograd.Function):
    """Output, log-sum-exp and largest scores; rule parameters ride along so that autograd knows them."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query = problem.query
        rows = (problem.batch, problem.num_heads, problem.q_len)
        # Backward needs the unrounded output: delta is a difference of two large sums in it.
        output = query.new_zeros((*rows, problem.value_dim), dtype=problem.work_dtype)
        lse = query.new_full(rows, -torch.inf, dtype=problem.work_dtype)
        max_score = lse.clone()
        with torch.no_grad():
            for whole in _layouts(problem):
                results = [torch.empty(0)] * 3
                for part, layout in _batches(whole):
                    strips = [_forward_strip(problem, layout, *strip) for strip in _strips(problem, layout)]
                    for place, pieces in enumerate(zip(*strips, strict=True)):
                        joined = torch.cat(pieces, dim=2)
                        if part.start == 0:
                            results[place] = joined.new_empty((whole.query.shape[0], *joined.shape[1:]))
                        results[place][part] = joined
                _store(whole.group, (output, lse, max_score), results)
        ctx.problem, ctx.parameters = problem, len(tensors) - 3
        ctx.save_for_backward(*tensors[:3], output, lse)
        ctx.mark_non_differentiable(max_score)
        return output.to(query.dtype), lse, max_score

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_lse: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        # Backward may be called within autocast, which would round the products to 16 bits.
        saved = ctx.saved_tensors
        with torch.no_grad(), torch.autocast(grad_output.device.type, enabled=False):
            grads = _gradients(ctx.problem, saved, grad_output, grad_lse, bool(ctx.parameters))
        return None, *once(grads, (*saved[:3], grad_output))


def _gradients(
    problem: Problem, saved: tuple[Tensor, ...], grad_output: Tensor, grad_lse: Tensor | None, rules: bool
) -> list[Tensor]:
    """Gradients of query, key, value and the rules' parameters."""
    query, key, value, output, lse = saved
    problem = problem.with_tensors(query, key, value)
    # delta is a row's sum of weight times weight-gradient; a gradient of lse enters at the same place.
    delta = (grad_output.to(problem.work_dtype) * output).sum(dim=-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    grads = [torch.zeros_like(tensor, dtype=problem.work_dtype) for tensor in (query, key, value)]
    parameters = problem.rule_parameters if rules else []
    rule_grads = [torch.zeros_like(tensor, dtype=problem.work_dtype) for tensor in parameters]
    for whole in _layouts(problem):
        rows = _taken(whole.group, grad_output.to(problem.work_dtype), delta, lse)
        found = [torch.zeros_like(tensor) for tensor in (whole.query, whole.key, whole.value)]
        for part, layout in _batches(whole):
            cut = (rows[0][part], rows[1][part], rows[2][part])
            for queries, tiles in _strips(problem, layout):
                into = [grad[part] for grad in found]
                _backward_strip(problem, layout, queries, tiles, cut, into, parameters, rule_grads)
        _store(whole.group, tuple(grads), found)
    _sink_gradient(problem, parameters, rule_grads, delta, lse)
    cast = [grad.to(tensor.dtype) for grad, tensor in zip(grads, (query, key, value), strict=True)]
    cast += [grad.to(tensor.dtype) for grad, tensor in zip(rule_grads, parameters, strict=True)]
    return cast


def _taken(group: Group | None, grad_output: Tensor, delta: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What backward needs of each row, in the layout's order; padding has gradient 0."""
    if group is None:
        return grad_output, delta, lse
    padding = ~group.valid[:, None, :]
    return (
        group.take(grad_output).masked_fill(padding[..., None], 0.0),
        group.take_rows(delta).masked_fill(padding, 0.0),
        group.take_rows(lse),
    )


def _store(group: Group | None, into: tuple[Tensor, ...], results: list[Tensor]) -> None:
    """Write a layout's results to their places in the call's tensors."""
    for whole, result in zip(into, results, strict=True):
        if group is None:
            whole.copy_(result)
        elif whole.ndim == 4:
            group.put(whole, result)
        else:
            group.put(whole[..., None], result[..., None])


def _backward_strip(
    problem: Problem, layout: _Layout, queries: slice, tiles: list[_Tile], rows: tuple[Tensor, Tensor, Tensor],
    into: list[Tensor], parameters: list[Tensor], rule_grads: list[Tensor],
) -> None:  # fmt: skip
    """Add one strip's part to the gradients of query, key, value and the rules' parameters."""
    kv_heads = problem.num_kv_heads
    grad_output, delta, lse = (row[:, :, queries] for row in rows)
    query = _grouped(layout.query[:, :, queries], kv_heads)
    grad_grouped = _grouped(grad_output, kv_heads)
    base = _finite(lse)[..., None]
    for tile in tiles:
        key, value = layout.key[:, :, tile.keys], layout.value[:, :, tile.keys]
        scores = _raw_scores(problem, layout, queries, tile)
        if problem.elementwise:
            scores.requires_grad_()
            with torch.enable_grad():
                ruled = _ruled(problem, scores, tile)
        else:
            ruled = scores
        weights = torch.exp(_masked(ruled.detach(), tile) - base)
        grad_weights = (grad_grouped @ value.transpose(-2, -1)).view_as(weights)
        dropped = weights
        if problem.dropout > 0.0:
            keep = keep_scale(problem.seed, problem.dropout, tile.indices, weights.dtype)
            dropped, grad_weights = weights * keep, grad_weights * keep
        into[2][:, :, tile.keys] += _grouped(dropped, kv_heads).transpose(-2, -1) @ grad_grouped
        grad_scores = weights * (grad_weights - delta[..., None])
        if problem.elementwise:
            grad_scores = _through_rules(ruled, scores, grad_scores, tile, parameters, rule_grads)
        grad_scores = _grouped(grad_scores * problem.scale, kv_heads)
        into[0][:, :, queries] += (grad_scores @ key).view(*grad_output.shape[:3], key.shape[3])
        into[1][:, :, tile.keys] += grad_scores.transpose(-2, -1) @ query


def _through_rules(
    ruled: Tensor,
    scores: Tensor,
    grad: Tensor,
    tile: _Tile,
    parameters: list[Tensor],
    rule_grads: list[Tensor],
) -> Tensor:
    """The gradient before the rules, and the rules' own gradients added to ``rule_grads``."""
    if not ruled.requires_grad:
        return torch.zeros_like(grad)
    found = torch.autograd.grad(ruled, [scores, *parameters], grad, allow_unused=True)
    for total, own in zip(rule_grads, found[1:], strict=True):
        if own is not None:
            total += own
    before = torch.zeros_like(grad) if found[0] is None else found[0]
    return before if tile.allowed is None else before.masked_fill(~tile.allowed, 0.0)


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
    """Output, and the statistics that ride along."""
    output, lse, max_score = _Tiled.apply(  # type: ignore[no-untyped-call]
        problem, problem.query, problem.key, problem.value, *problem.rule_parameters
    )
    asked = want.names
    return Observation(
        output=output,
        lse=lse if "lse" in asked else None,
        max_score=max_score if "max_score" in asked else None,
    )


BACKEND = Backend(
    name="tiled",
    summary="tiles of torch operations, O(T) memory, every mask and rule",
    capability=Capability(statistics=frozenset({"lse", "max_score"})),
    run=run,
)
