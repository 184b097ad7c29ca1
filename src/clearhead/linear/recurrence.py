"""``Recurrence``: a call of linear attention as data, for all forms."""

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

#: Logarithms whose exponentials are 0, by dtype, with a margin for the rounding of running sums.
_NOTHING_LEFT: Final = {torch.float32: -128.0, torch.float64: -1024.0}


@dataclass(frozen=True, kw_only=True, eq=False)
class Recurrence:
    """A call of linear attention in float32 or float64. Absent keys have features and values of 0, and a decay of 1.

    Attributes:
        query: ``[batch, heads, q_len, head_dim]``.
        key: ``[batch, kv_heads, len, head_dim]``; query head ``h`` reads the state of ``h // group``.
        value: ``[batch, kv_heads, len, value_dim]``.
        feature_map: the map that is still to be applied to queries and keys.
        scale: factor on queries' features that is still to be applied.
        log_decay: logarithm of the state's decay before a token is added, at most 0: ``[batch, kv_heads, len, 1]`` for
            a head's state, or ``[batch, kv_heads, len, features]`` for each of its rows; None for no decay.
        rate: the delta rule's step, ``[batch, kv_heads, len, 1]``; None without the delta rule.
        normalized: whether outputs are divided by ``phi(q) z``.
        given: the dtype of the caller's tensors, in which GEMMs may be computed.
        faint: whether ``log_decay``, one for all channels, is the logarithm of small decays that require a gradient,
            which must then not be a difference of large sums.
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
        """The number of query heads that share a key head."""
        heads, kv_heads = self.query.shape[1], self.key.shape[1]
        return heads // kv_heads if kv_heads else 1

    def ungrouped(self) -> Recurrence:
        """The same call with one key head for each query head."""

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
        """The same call with features in place of queries and keys, and the identity as feature map."""
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
        """The same call without the keys at ``absent``, ``[batch, 1, len, 1]``, whose elements are not read."""
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
        """The initial state: ``state``, or zeros."""
        if state is not None:
            return state
        leading = self.key.shape[:2]
        return LinearState(
            matrix=self.key.new_zeros((*leading, features, self.value.shape[-1])),
            normalizer=self.key.new_zeros((*leading, features)) if self.normalized else None,
        )


def transformed() -> bool:
    """Whether a transform of ``torch.func`` or forward-mode differentiation is active, which kernels do not support."""
    return transforms() or differentiates_forward()


def bounded(log_decay: Tensor) -> Tensor:
    """Log decays clamped from below, so that sums are finite; an exponential of the bound is 0 too.

    The bound is as close to 0 as possible, since a sum that includes a large logarithm rounds the later ones. Below the
    bound the gradient is 0, as is that of the exponential.
    """
    return log_decay.clamp_min(least(log_decay.dtype))


def least(dtype: torch.dtype) -> float:
    """The lower bound of log decays."""
    return _NOTHING_LEFT[dtype]


def weightless(denominator: Tensor) -> Tensor:
    """Where the sum of a row's weights counts as 0: its reciprocal would be infinite."""
    return denominator.abs() < torch.finfo(denominator.dtype).tiny


def quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator / denominator[..., None]``; 0 where the denominator counts as 0."""
    below = denominator[..., None]
    empty = weightless(below)
    return torch.where(empty, 0.0, numerator / torch.where(empty, 1.0, below))
