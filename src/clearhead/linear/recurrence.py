"""One recurrence for the whole family, as data: what its members put into it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from clearhead.linear.feature_maps import FEATURE_MAPS, FeatureMap
from clearhead.linear.state import LinearState
from clearhead.shapes import Float
from clearhead.torch_private import differentiates_forward, transforms

__all__ = ["Recurrence", "bounded", "least", "quotient", "transformed", "weightless"]

#: Logarithms whose exponentials are 0, by dtype, with room for what a running sum rounds.
_NOTHING_LEFT: Final = {torch.float32: -128.0, torch.float64: -1024.0}


@dataclass(frozen=True, kw_only=True, eq=False)
class Recurrence:
    """A call of a member in float32 or float64. Absent keys have no features, no value, and do not decay.

    Attributes:
        query: ``[batch, heads, q_len, head_dim]``.
        key: ``[batch, kv_heads, len, head_dim]``; head ``h`` of queries reads the state of ``h // group``.
        value: ``[batch, kv_heads, len, value_dim]``.
        feature_map: still to be applied to queries and keys.
        scale: factor on queries' features, still to be applied.
        log_decay: logarithm of what the state is multiplied by before a token is added, at most 0:
            ``[batch, kv_heads, len, 1]`` for a head's whole state, or ``[.., features]`` for each of its rows; None: 1.
        rate: the delta rule's step, ``[batch, kv_heads, len, 1]``; None where there is no such rule.
        normalized: whether outputs are divided by ``phi(q) z``.
        given: the dtype of the caller's tensors, which products may be taken in where sums are not.
        faint: whether ``log_decay``, one for all channels, is the logarithm of decays so small that its gradient is
            as small and divided by them: it may then be no difference of sums that are large.
    """

    query: Float[Tensor, "batch heads q_len head_dim"]
    key: Float[Tensor, "batch kv_heads len head_dim"]
    value: Float[Tensor, "batch kv_heads len value_dim"]
    feature_map: FeatureMap
    scale: float = 1.0
    log_decay: Tensor | None = None
    rate: Tensor | None = None
    normalized: bool = False
    given: torch.dtype = torch.float32
    faint: bool = False

    @property
    def group(self) -> int:
        """Heads of queries that share a head of keys."""
        heads, kv_heads = self.query.shape[1], self.key.shape[1]
        return heads // kv_heads if kv_heads else 1

    def ungrouped(self) -> Recurrence:
        """The same call with a head of keys for each head of queries."""

        def repeated(part: Tensor) -> Tensor:
            return part.repeat_interleave(self.group, dim=1)

        return replace(
            self,
            key=repeated(self.key),
            value=repeated(self.value),
            log_decay=None if self.log_decay is None else repeated(self.log_decay),
            rate=None if self.rate is None else repeated(self.rate),
        )

    def featured(self) -> Recurrence:
        """The same call with its features taken."""
        if self.feature_map is FEATURE_MAPS["identity"] and self.scale == 1.0:
            return self
        query = self.feature_map.query(self.query)
        return replace(
            self,
            query=query if self.scale == 1.0 else query * self.scale,
            key=self.feature_map.key(self.key),
            feature_map=FEATURE_MAPS["identity"],
            scale=1.0,
        )

    def without(self, absent: Tensor) -> Recurrence:
        """The same call where keys at ``absent``, ``[batch, 1, len, 1]``, were not: nothing reads what they hold."""
        fill = self.feature_map.absent
        clean = replace(
            self,
            key=self.key.masked_fill(absent, 0.0 if fill is None else fill),
            value=self.value.masked_fill(absent, 0.0),
            log_decay=None if self.log_decay is None else self.log_decay.masked_fill(absent, 0.0),
            rate=None if self.rate is None else self.rate.masked_fill(absent, 0.0),
        )
        if fill is not None:
            return clean
        featured = clean.featured()
        return replace(featured, key=featured.key.masked_fill(absent, 0.0))

    def start(self, state: LinearState | None, features: int) -> LinearState:
        """The state to begin with: the one given, or nothing seen."""
        if state is not None:
            return state
        leading = self.key.shape[:2]
        return LinearState(
            matrix=self.key.new_zeros((*leading, features, self.value.shape[-1])),
            normalizer=self.key.new_zeros((*leading, features)) if self.normalized else None,
        )


def transformed() -> bool:
    """Whether a transform of ``torch.func`` or forward-mode differentiation is active; kernels have no rule for it."""
    return transforms() or differentiates_forward()


def bounded(log_decay: Tensor) -> Tensor:
    """Log decays to be summed up: what leaves nothing of a state leaves nothing, and no sum of it is infinite.

    The bound is as near 0 as it can be, for what a sum of logarithms rounds is lost from those behind a strong one. Its
    gradient of 0 below the bound is that of an exponential that is 0.
    """
    return log_decay.clamp_min(least(log_decay.dtype))


def least(dtype: torch.dtype) -> float:
    """The least logarithm that is summed up."""
    return _NOTHING_LEFT[dtype]


def weightless(denominator: Tensor) -> Tensor:
    """Where a row has no weight to give: sums so small that their reciprocal is not finite count as 0."""
    return denominator.abs() < torch.finfo(denominator.dtype).tiny


def quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator / denominator[..., None]``; 0 for a row without weight."""
    below = denominator[..., None]
    empty = weightless(below)
    return torch.where(empty, 0.0, numerator / torch.where(empty, 1.0, below))
