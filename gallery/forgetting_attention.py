"""Forgetting attention (FoX): each token says how much of the past its head forgets, within the softmax.

``softmax(q_i k_j^T / sqrt(head_dim) + sum_(j < l <= i) log f_l) @ v`` over ``j <= i``, with the gate
``f_l = sigmoid(x_l Wf + b)`` of each head. The sum is a difference ``c_i - c_j`` of cumulative sums. All keys of a row
share ``c_i``, so the softmax cancels it. What remains is the bias ``-c_j``, one number a key.

Paper: Lin et al. 2025, "Forgetting transformer: softmax attention with a forget gate", section 3, arXiv:2503.02130.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch
from clearhead.nn import MultiHeadAttention


class ForgettingAttention(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; always causal.

    >>> ForgettingAttention(8, num_heads=2)(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.heads = MultiHeadAttention(embed_dim, num_heads, bias=False)
        self.forget = nn.Linear(embed_dim, num_heads)

    def forward(self, x: Tensor, *, mask: ch.Mask | None = None) -> Tensor:
        # Sums over the whole past need more digits than 16 bits have.
        exact = torch.promote_types(x.dtype, torch.float32)
        sums = F.logsigmoid(self.forget(x).to(exact)).cumsum(dim=1).mT
        mask = ch.Causal() if mask is None else ch.Causal() & mask
        output = ch.attention(*self.heads.project(x), mask=mask, scores=ch.DenseBias(-sums[:, :, None]))
        return self.heads.output_projection(output.transpose(1, 2).flatten(-2))
