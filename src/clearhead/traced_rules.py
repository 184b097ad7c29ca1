"""Converts a user's score function to rules of the CPU kernels, by tracing: a cap of the score, a bias, or both.

A bias of the head and the distance is a table ``[heads, distances]``, a bias of the key alone is a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.errors import ClearheadError
from clearhead.scores import DenseBias, RelativeBias, ScoreFunction, ScoreRule, SoftCap
from clearhead.tracing import BATCH, HEAD, INDICES, MOST_POSITIONS, QUERY, SCORE, StandIn, evaluated, few, trace

__all__ = ["Extent", "traced_rules"]


@dataclass(frozen=True, kw_only=True)
class Extent:
    """The places of a call: sizes, and the absolute position of its first query."""

    batch: int
    heads: int
    q_len: int
    k_len: int
    query_offset: int


def traced_rules(rule: ScoreFunction, extent: Extent, like: Tensor) -> tuple[ScoreRule, ...] | None:
    """A score function as equal rules: a ``SoftCap``, a bias (``RelativeBias``, or ``DenseBias`` of one row), or both.

    Args:
        rule: the function.
        extent: the call's places.
        like: a tensor of the scores' dtype and device.

    Returns:
        The rules, with biases that are differentiable in the tensors that the function closes over; None if the
        function does something else, or tracing cannot show what it does.

    Cost: one call of the function on one place and one on a few, and its operations on ``heads * (q_len + k_len)``
    places or on ``batch * heads * k_len``.
    """
    lengths = (extent.query_offset + extent.q_len, extent.k_len - extent.query_offset, extent.k_len)
    if min(extent.batch, extent.q_len, extent.k_len) == 0 or max(lengths) >= MOST_POSITIONS:
        return None
    last = (extent.batch - 1, extent.heads - 1, extent.query_offset + extent.q_len - 1, extent.k_len - 1)
    place = [torch.full((1, 1, 1, 1), index, device=like.device) for index in last]
    result = trace(rule.fn, [(like.new_zeros(1, 1, 1, 1), SCORE), *zip(place, INDICES, strict=True)])
    if result is None or result.facts.score != "score" or result.dtype != like.dtype:
        return None
    rules: list[ScoreRule] = [] if result.facts.cap is None else [SoftCap(result.facts.cap)]
    if result.facts.added:
        bias = _bias(result, extent, like)
        if bias is None:
            return None
        rules.append(bias)
    return tuple(rules) if _holds(rule, rules, extent, like) else None


def _holds(rule: ScoreFunction, rules: Sequence[ScoreRule], extent: Extent, like: Tensor) -> bool:
    """Whether rules give the function's scores at a few places: tracing misses a constant made from a stand-in."""
    q_pos = few(extent.q_len) + extent.query_offset
    places = _indices(like, few(extent.batch), torch.arange(extent.heads), q_pos, few(extent.k_len))
    score = torch.linspace(-3.0, 3.0, math.prod(index.numel() for index in places)).to(like)
    score = score.view([index.numel() for index in places])
    with torch.no_grad():
        try:
            right = rule.apply(score, *places)
        except ClearheadError:
            return False
        for one in rules:
            score = one.apply(score, *places)
    # Functions may convert positions to float32 before they subtract them.
    near = 1e-6 * (extent.query_offset + extent.q_len + extent.k_len) + 1e-5
    return torch.allclose(score, right, rtol=1e-4, atol=near, equal_nan=True)


def _bias(result: StandIn, extent: Extent, like: Tensor) -> ScoreRule | None:
    """The bias that a function adds, as a table of the indices that it depends on; None if these are all four."""
    zero, facts = torch.zeros(1, dtype=torch.int64), result.facts
    batch, head = (
        torch.arange(size) if axis in facts.axes else zero
        for axis, size in ((BATCH, extent.batch), (HEAD, extent.heads))
    )
    if facts.shift == 0.0 and BATCH not in facts.axes:
        # Distances that do not occur are not evaluated: the function may fail there.
        low, high = extent.query_offset - extent.k_len + 1, extent.query_offset + extent.q_len - 1
        reach = max(-low, high)
        # Queries far from all keys: most of the table would be unused.
        if reach > 2 * (extent.q_len + extent.k_len):
            return None
        bias = _added(result, like, zero, head, torch.arange(low, high + 1), zero)
        return None if bias is None else RelativeBias(F.pad(bias[0, :, :, 0], (low + reach, reach - high)))
    if QUERY not in facts.axes:
        bias = _added(result, like, batch, head, zero, torch.arange(extent.k_len))
        return None if bias is None else DenseBias(bias)
    return None


def _added(result: StandIn, like: Tensor, *places: Tensor) -> Tensor | None:
    """What a function adds to scores of 0 at some batch entries, heads, queries and keys; None if it fails there."""
    sizes = [len(place) for place in places]
    try:
        added = evaluated(result, [like.new_zeros(sizes), *_indices(like, *places)])
    except (RuntimeError, IndexError, TypeError, ValueError):
        return None
    return added if list(added.shape) == sizes else None


def _indices(like: Tensor, *places: Tensor) -> list[Tensor]:
    """Batch entries, heads, queries and keys as tensors that broadcast."""
    return [
        place.to(like.device).view([-1 if axis == position else 1 for axis in range(4)])
        for position, place in enumerate(places)
    ]
