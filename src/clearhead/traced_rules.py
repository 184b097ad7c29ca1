"""A user's score function that caps the score, adds a bias, or both: the CPU kernels know such rules, not functions.

A bias of the head and the distance is one number for each of the two, whatever the lengths; one of the key alone is a
row. Which of them a function adds, if any, tracing it tells.
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
from clearhead.tracing import BATCH, HEAD, INDICES, MOST_POSITIONS, QUERY, SCORE, StandIn, few, trace, worked_out

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
    """A function as a ``SoftCap``, a bias of the head and the distance or of all but the query, or one after the other.

    Args:
        rule: the function.
        extent: the call's places.
        like: a tensor of the scores' dtype and device.

    Returns:
        Rules that do the same, biases differentiable in what the function closes over; None where the function does
        something else, or that cannot be told.

    Cost: a call of the function on one place and on a few, and its operations on ``heads * (q_len + k_len)`` places
    or on ``batch * heads * k_len``.
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
    """Whether rules give the function's very scores at some places: a constant it made of a stand-in is not seen."""
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
    # Functions may count positions in float32, and subtract them then.
    near = 1e-6 * (extent.query_offset + extent.q_len + extent.k_len) + 1e-5
    return torch.allclose(score, right, rtol=1e-4, atol=near, equal_nan=True)


def _bias(result: StandIn, extent: Extent, like: Tensor) -> ScoreRule | None:
    """What a function adds, in full for all that it depends on; None where that would be every place."""
    zero, facts = torch.zeros(1, dtype=torch.int64), result.facts
    batch, head = (
        torch.arange(size) if axis in facts.axes else zero
        for axis, size in ((BATCH, extent.batch), (HEAD, extent.heads))
    )
    if facts.shift == 0.0 and BATCH not in facts.axes:
        # Distances that do not occur are not asked for: a function may have no number there.
        low, high = extent.query_offset - extent.k_len + 1, extent.query_offset + extent.q_len - 1
        reach = max(-low, high)
        # Queries far from all keys: the table would be of what lies between.
        if reach > 2 * (extent.q_len + extent.k_len):
            return None
        bias = _added(result, like, zero, head, torch.arange(low, high + 1), zero)
        return None if bias is None else RelativeBias(F.pad(bias[0, :, :, 0], (low + reach, reach - high)))
    if QUERY not in facts.axes:
        bias = _added(result, like, batch, head, zero, torch.arange(extent.k_len))
        return None if bias is None else DenseBias(bias)
    return None


def _added(result: StandIn, like: Tensor, *places: Tensor) -> Tensor | None:
    """What a function adds to scores of 0 at some batch entries, heads, queries and keys; None where it fails there."""
    sizes = [len(place) for place in places]
    try:
        added = worked_out(result, [like.new_zeros(sizes), *_indices(like, *places)])
    except (RuntimeError, IndexError, TypeError, ValueError):
        return None
    return added if list(added.shape) == sizes else None


def _indices(like: Tensor, *places: Tensor) -> list[Tensor]:
    """Batch entries, heads, queries and keys as tensors that broadcast."""
    return [
        place.to(like.device).view([-1 if axis == position else 1 for axis in range(4)])
        for position, place in enumerate(places)
    ]
