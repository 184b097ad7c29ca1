"""The specification: the formula, line by line, in any dtype, with every feature; memory grows with T x T."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.backends.capability import Backend, Capability
from clearhead.backends.containment import matmul, scores_of
from clearhead.backends.dropout import keep_scale
from clearhead.problem import Problem
from clearhead.statistics import Observation, Want

__all__ = ["BACKEND", "Steps", "steps"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """Every step of the formula; all but the last two are ``[batch, heads, q_len, k_len]``.

    ``logs`` are logarithms of the weights: ``masked - lse``, without the rounding error of this difference.
    """

    raw: Tensor
    scaled: Tensor
    ruled: Tensor
    allowed: Tensor
    masked: Tensor
    logs: Tensor
    weights: Tensor
    lse: Tensor
    output: Tensor


def steps(problem: Problem) -> Steps:
    """Compute every step of the formula."""
    dtype, problem = problem.work_dtype, problem.dequantized
    group = problem.num_heads // problem.num_kv_heads
    query = problem.query.to(dtype)
    key, value = (tensor.to(dtype).repeat_interleave(group, dim=1) for tensor in (problem.key, problem.value))
    indices = problem.indices()
    shape = (problem.batch, problem.num_heads, problem.q_len, problem.k_len)

    allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=query.device)
    if problem.mask is not None:
        allowed = problem.mask.allows(*indices)
    allowed = allowed.expand(shape)

    raw = scores_of(query, key, allowed)
    scaled = raw * problem.scale
    # Rules get 0 for masked keys: the derivative of a rule at NaN would pass the mask.
    ruled = scaled.masked_fill(~allowed, 0.0)
    for rule in problem.elementwise:
        ruled = rule.apply(ruled, *indices)
    masked = ruled.masked_fill(~allowed, -torch.inf)

    largest, logarithm = _sums(masked, problem)
    # In this order: added to scores of -1e9 first, the logarithm would be rounded away. An empty row remains -inf.
    logs = (masked - largest) - logarithm.masked_fill(logarithm == -torch.inf, 0.0)
    # In a row of NaN the weights of forbidden keys are 0.
    weights = torch.exp(logs).masked_fill(~allowed, 0.0)
    dropped = weights
    if problem.dropout > 0.0:
        dropped = weights * keep_scale(problem.seed, problem.dropout, problem.drawn_at(indices), dtype)
    output = matmul(dropped, value, allowed)
    return Steps(
        raw=raw,
        scaled=scaled,
        ruled=ruled,
        allowed=allowed,
        masked=masked,
        logs=logs,
        weights=weights,
        lse=(largest + logarithm)[..., 0],
        output=output.to(problem.query.dtype),
    )


def _sums(masked: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """The two parts of each row's log-sum-exp, including a sink's logit: the row maximum, without a gradient, and the
    logarithm of the sum of exponentials relative to it, which is -inf for an empty row."""
    if problem.sink is not None:
        logits = problem.sink.logits.to(masked.dtype).view(1, -1, 1, 1)
        masked = torch.cat([masked, logits.expand(*masked.shape[:2], masked.shape[2], 1)], dim=-1)
    if masked.shape[-1] == 0:
        nothing = masked.new_full((*masked.shape[:-1], 1), -torch.inf)
        return torch.zeros_like(nothing), nothing
    largest = masked.detach().amax(dim=-1, keepdim=True)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    total = torch.exp(masked - largest).sum(dim=-1, keepdim=True)
    # log(0) has an infinite derivative, and 0 * inf is NaN, so empty rows bypass the logarithm.
    empty = total == 0.0
    return largest, torch.log(total.masked_fill(empty, 1.0)).masked_fill(empty, -torch.inf)


def run(problem: Problem, want: Want) -> Observation:
    """Output and statistics, from the steps of the formula."""
    done = steps(problem)
    weights = done.weights
    statistics: dict[str, Tensor] = {}
    asked = want.names
    if "lse" in asked:
        statistics["lse"] = done.lse
    if "max_score" in asked:
        statistics["max_score"] = _largest(done.masked)
    if "entropy" in asked:
        statistics["entropy"] = _entropy(done)
    if "top_k" in asked:
        statistics["top_indices"], statistics["top_weights"] = _top(weights.detach(), want.top_k)
    if "received" in asked:
        statistics["received"] = weights.sum(dim=-2)
    if want.row_weights is not None:
        mixing = want.row_weights.to(weights)
        statistics["row_weights"] = matmul(mixing.expand(*weights.shape[:2], *mixing.shape[2:]), weights)
    if "heatmap" in asked:
        statistics["heatmap_max"], statistics["heatmap_mean"] = _pooled(weights.detach(), want.heatmap)
    if "sink" in asked:
        statistics["sink"] = weights[..., : want.sink].sum(dim=-1)
    if "distance" in asked:
        _, _, q_pos, k_pos = problem.indices()
        statistics["distance"] = (weights * (q_pos - k_pos).abs()).sum(dim=-1)
    if want.rows is not None:
        statistics["rows"] = weights[:, :, want.rows_on(weights.device)]
    return Observation(output=done.output, **statistics)


def _largest(masked: Tensor) -> Tensor:
    """The largest score of each row, NaN if it is infinite; ties share its gradient, and an empty row has none."""
    if masked.shape[-1] == 0:
        return masked.new_full(masked.shape[:-1], -torch.inf)
    largest = masked.amax(dim=-1)
    return largest.masked_fill(largest == -torch.inf, -torch.inf).masked_fill(largest == torch.inf, torch.nan)


def _entropy(done: Steps) -> Tensor:
    """``-sum p log p`` over keys, without a sink's weight."""
    # 0 log 0 counts as 0, in the gradient too.
    logs = done.logs.masked_fill(done.weights == 0.0, 0.0)
    return -(done.weights * logs).sum(dim=-1)


def _top(weights: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest weights of each row; equal weights, zeros included, in the order of their keys."""
    ordered, indices = weights.sort(dim=-1, descending=True, stable=True)
    return indices[..., :k], ordered[..., :k]


def _pooled(weights: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Largest and mean weight of each square tile; tiles at the end have fewer places, and forbidden places count."""
    # A tile is at most as large as the weights.
    sides = [min(side, max(1, length)) for length in weights.shape[-2:]]
    cells = [-(-length // tile) for length, tile in zip(weights.shape[-2:], sides, strict=True)]
    padding = (0, cells[1] * sides[1] - weights.shape[-1], 0, cells[0] * sides[0] - weights.shape[-2])

    def tiles(places: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(places, padding)
        split: Tensor = padded.unflatten(-1, (cells[1], sides[1])).unflatten(-3, (cells[0], sides[0]))
        return split.transpose(-3, -2)

    counts = tiles(torch.ones_like(weights[:1, :1])).sum(dim=(-2, -1))
    return tiles(weights).amax(dim=(-2, -1)), tiles(weights).sum(dim=(-2, -1)) / counts


BACKEND = Backend(
    name="reference",
    summary="the formula line by line, T x T memory",
    capability=Capability(max_scores=2**28, quantized=True),
    run=run,
)
