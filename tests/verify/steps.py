"""A correct attention made of steps, each of which can be replaced by a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "RIGHT",
    "Broken",
    "Mix",
    "Steps",
    "but",
    "take_causal",
    "take_drop",
    "take_forbid",
    "take_groups",
    "take_mix",
    "take_scores",
    "take_softmax",
]


def take_groups(tensor: Tensor, heads: int) -> Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def take_scores(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    return query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)


def take_causal(q_len: int, k_len: int) -> Tensor:
    return torch.ones(q_len, k_len, dtype=torch.bool).tril()


def take_forbid(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


def take_softmax(scores: Tensor) -> Tensor:
    empty = (scores == -torch.inf).all(dim=-1, keepdim=True)
    return torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)


def take_drop(weights: Tensor, p: float) -> Tensor:
    return weights * (torch.rand_like(weights) >= p) / (1.0 - p) if p else weights


def take_clean(query: Tensor, tensor: Tensor, mask: Tensor | None) -> Tensor:
    """Set tokens to 0 that no query may attend to."""
    if mask is None or mask.dtype != torch.bool:
        return tensor
    shape = (tensor.shape[0], query.shape[1], query.shape[2], tensor.shape[2])
    attended = mask.expand(shape).any(dim=2).unflatten(1, (tensor.shape[1], -1)).any(dim=2)
    return torch.where(attended[..., None], tensor, 0.0)


def take_mix(weights: Tensor, value: Tensor) -> Tensor:
    """``weights @ value`` in which 0 times NaN is 0, in forward and backward."""
    mixed: Tensor = Mix.apply(weights, value)  # type: ignore[no-untyped-call]
    return mixed


class Mix(torch.autograd.Function):
    """``weights @ value``, with containment in forward and backward."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(weights, value)
        return _contained(weights, value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        weights, value = ctx.saved_tensors
        return grads[0] @ value.mT, _contained(weights.mT, grads[0])


def _contained(weights: Tensor, value: Tensor) -> Tensor:
    """NaN and infinity count where the weight is not 0."""
    strange = ~torch.isfinite(value)
    if not bool(strange.any()):
        return weights @ value
    terms = weights[..., None] * value[..., None, :, :]
    counted = (weights != 0.0)[..., None] & strange[..., None, :, :]
    return weights @ value.masked_fill(strange, 0.0) + torch.where(counted, terms, 0.0).sum(dim=-2)


@dataclass(frozen=True)
class Steps:
    """Attention in steps, with the signature of torch's function."""

    groups: Callable[[Tensor, int], Tensor] = take_groups
    scores: Callable[[Tensor, Tensor, Tensor, float | None], Tensor] = take_scores
    causal: Callable[[int, int], Tensor] = take_causal
    forbid: Callable[[Tensor, Tensor], Tensor] = take_forbid
    softmax: Callable[[Tensor], Tensor] = take_softmax
    drop: Callable[[Tensor, float], Tensor] = take_drop
    clean: Callable[[Tensor, Tensor, Tensor | None], Tensor] = take_clean
    mix: Callable[[Tensor, Tensor], Tensor] = take_mix

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        mask = self.causal(query.shape[2], key.shape[2]) if is_causal else attn_mask
        key, value = self.clean(query, key, mask), self.clean(query, value, mask)
        key, value = self.groups(key, query.shape[1]), self.groups(value, query.shape[1])
        scores = self.scores(query, key, value, scale)
        weights = self.softmax(scores if mask is None else self.forbid(scores, mask))
        return self.mix(self.drop(weights, dropout_p), value)


RIGHT = Steps()


def but(**steps: Any) -> Callable[..., Any]:
    return replace(RIGHT, **steps)


@dataclass(frozen=True)
class Broken:
    """A wrong function: the law it breaks, its signature, whether it claims linear memory, and the dtype to test."""

    fn: Callable[..., Any]
    law: str
    signature: str = "sdpa"
    linear_memory: bool = False
    dtype: torch.dtype = torch.float32
