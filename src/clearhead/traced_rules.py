"""Converts a user's score function to rules of the CPU kernels, by tracing: a cap of the score, a bias, and a mask.

A bias of the head and the distance is a table ``[heads, distances]``, a bias of the key alone is a row, and any other
one is written out if it is small. A score that is -infinity under a condition is masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.errors import ClearheadError
from clearhead.masks import Mask, MaskFunction
from clearhead.scores import DenseBias, RelativeBias, ScoreFunction, ScoreRule, SoftCap
from clearhead.tracing import BATCH, HEAD, INDICES, MOST_POSITIONS, QUERY, SCORE, StandIn, evaluated, few, trace

__all__ = ["MOST_ENTRIES", "Extent", "TracedRules", "traced_rules"]

#: The largest bias that is written out for a function: 64 MiB in float32.
MOST_ENTRIES: Final = 2**24
#: Places at which such a bias is evaluated at once: positions take 8 bytes each.
_STRIP: Final = 2**20


@dataclass(frozen=True, kw_only=True)
class Extent:
    """The places of a call: sizes, and the absolute position of its first query."""

    batch: int
    heads: int
    q_len: int
    k_len: int
    query_offset: int


@dataclass(frozen=True, kw_only=True)
class TracedRules:
    """A score function as rules, then a mask; None for everything."""

    rules: tuple[ScoreRule, ...]
    mask: Mask | None


def traced_rules(rule: ScoreFunction, extent: Extent, like: Tensor) -> TracedRules | None:
    """A score function as equal rules: a ``SoftCap``, a bias (``RelativeBias`` or ``DenseBias``), or both, and a mask.

    Args:
        rule: the function.
        extent: the call's places.
        like: a tensor of the scores' dtype and device.

    Returns:
        The rules, with biases that are differentiable in the tensors that the function closes over, and the mask; None
        if the function does something else, or tracing cannot show what it does.

    Cost: one call of the function on one place and one on a few, and its operations on ``heads * (q_len + k_len)``
    places, on ``batch * heads * k_len``, or on up to ``2**24`` places of a bias that is written out.
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
    mask = _mask(result.facts.conditions)
    return TracedRules(rules=tuple(rules), mask=mask) if _holds(rule, rules, mask, extent, like) else None


def _mask(conditions: Sequence[tuple[StandIn, bool]]) -> Mask | None:
    """The places at which all conditions have the values that they must have."""

    def mask_of(condition: StandIn, holds: bool) -> Mask:
        mask = MaskFunction(lambda *indices: evaluated(condition, (None, *indices)))
        return mask if holds else ~mask

    masks = [mask_of(*one) for one in conditions]
    return reduce(and_, masks) if masks else None


def _holds(rule: ScoreFunction, rules: Sequence[ScoreRule], mask: Mask | None, extent: Extent, like: Tensor) -> bool:
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
        score = score if mask is None else score.masked_fill(~mask.allows(*places), -torch.inf)
    # Functions may convert positions to float32 before they subtract them.
    near = 1e-6 * (abs(extent.query_offset) + extent.q_len + extent.k_len) + 1e-5
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
    return _written_bias(result, extent, like, batch, head)


def _written_bias(result: StandIn, extent: Extent, like: Tensor, batch: Tensor, head: Tensor) -> DenseBias | None:
    """A bias of all indices, one row per query; None if it is large."""
    places = len(batch) * len(head) * extent.q_len * extent.k_len
    if places > MOST_ENTRIES:
        return None
    first = extent.query_offset
    rows = torch.arange(first, first + extent.q_len).split(max(1, _STRIP * extent.q_len // places))
    strips = [_added(result, like, batch, head, positions, torch.arange(extent.k_len)) for positions in rows]
    written = [strip for strip in strips if strip is not None]
    return DenseBias(torch.cat(written, dim=2)).placed(first) if len(written) == len(strips) else None


def _added(result: StandIn, like: Tensor, *places: Tensor) -> Tensor | None:
    """What a function adds to scores of 0 at some batch entries, heads, queries and keys; None if it fails there."""
    sizes = [len(place) for place in places]
    try:
        added = evaluated(result, [like.new_zeros(sizes), *_indices(like, *places)], unmasked=True)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return None
    return added if list(added.shape) == sizes else None


def _indices(like: Tensor, *places: Tensor) -> list[Tensor]:
    """Batch entries, heads, queries and keys as tensors that broadcast."""
    return [
        place.to(like.device).view([-1 if axis == position else 1 for axis in range(4)])
        for position, place in enumerate(places)
    ]
