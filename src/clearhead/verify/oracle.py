"""The formula of attention, written independently of every backend.

In float64 it is the exact result; in the dtype of a call it is the textbook whose error defines the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["OracleResult", "attend", "slope"]


@dataclass(frozen=True, eq=False)
class OracleResult:
    """Output ``[batch, heads, q_len, value_dim]``, weights, log-sum-exp, and the largest absolute score."""

    output: Tensor
    weights: Tensor
    lse: Tensor
    largest_score: float


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, allowed: Tensor | None = None, scale: float | None = None,
    bias: Tensor | None = None, keep: Tensor | None = None, cap: float | None = None, sink: Tensor | None = None,
) -> OracleResult:  # fmt: skip
    """``softmax(scale * query @ key^T + bias, where allowed) * keep @ value``, every step in the tensors' dtype.

    Args:
        query: ``[batch, heads, q_len, head_dim]``.
        key: ``[batch, kv_heads, k_len, head_dim]``; query head ``h`` reads key head ``h // (heads // kv_heads)``.
        value: ``[batch, kv_heads, k_len, value_dim]``.
        allowed: bool that broadcasts to the scores; True may attend. A row without a True gives 0.
        scale: by default ``1 / sqrt(head_dim)``.
        bias: added to scaled scores.
        keep: factor of each weight: 0 if it is dropped, else ``1 / (1 - p)``.
        cap: scaled scores become ``cap * tanh(score / cap)``, before the bias.
        sink: float ``[heads]``, the logit of a sink: an additional score of each row without a value.
    """
    of_head = torch.arange(query.shape[1], device=query.device) // (query.shape[1] // key.shape[1])
    key, value = key[:, of_head], value[:, of_head]
    scores = query @ key.mT * (query.shape[3] ** -0.5 if scale is None else scale)
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias
    largest = scores.detach().abs().max().item() if scores.numel() else 0.0
    if allowed is not None:
        scores = torch.where(allowed, scores, -torch.inf)
    top = scores.detach().amax(dim=-1, keepdim=True)
    if sink is not None:
        sink = sink[:, None, None]
        top = torch.maximum(top, sink.detach())
    top = torch.where(top == -torch.inf, 0.0, top)
    terms = torch.exp(scores - top)
    total = terms.sum(dim=-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    weights = terms / torch.where(total == 0.0, 1.0, total)
    lse = (top + torch.log(total))[..., 0]
    output = (weights if keep is None else weights * keep) @ value
    return OracleResult(output, weights, lse, largest)


def slope(output: Tensor) -> Tensor:
    """A gradient for ``output`` with different values at neighbouring elements."""
    # A copy, as backward of the function under test may write to it.
    return _slope(output.numel()).to(dtype=output.dtype, device=output.device, copy=True).view(output.shape)


@lru_cache(maxsize=64)
def _slope(count: int) -> Tensor:
    return torch.cos(0.7 * torch.arange(count, dtype=torch.float64) + 0.3)
