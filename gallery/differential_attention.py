"""Differential attention: what two softmaxes have in common is noise, and is taken off.

``norm((softmax(q1 k1^T) - lambda softmax(q2 k2^T)) @ v) * (1 - lambda_init)`` for each head, where
``lambda = exp(a1 . b1) - exp(a2 . b2) + lambda_init`` is learned and values are twice as wide as keys. As both
softmaxes read the same values, it is the difference of two attentions.

Paper: Ye et al. 2024, "Differential transformer", section 2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import clearhead as ch


class DifferentialAttention(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; ``num_heads`` pairs of softmaxes."""

    def __init__(self, embed_dim: int, num_heads: int, *, lambda_init: float = 0.8) -> None:
        super().__init__()
        self.num_heads, self.lambda_init = num_heads, lambda_init
        self.project = nn.Linear(embed_dim, 3 * embed_dim, bias=False)
        self.output = nn.Linear(embed_dim, embed_dim, bias=False)
        self.norm = nn.RMSNorm(embed_dim // num_heads, eps=1e-5)
        self.rates = nn.Parameter(0.1 * torch.randn(4, embed_dim // num_heads // 2))

    def forward(self, x: Tensor, *, mask: ch.Mask | None = None) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        pairs = zip(query.chunk(2, dim=-1), key.chunk(2, dim=-1), strict=True)
        first, second = (ch.attention(q, k, value, mask=mask) for q, k in pairs)
        a1, b1, a2, b2 = self.rates
        rate = torch.exp(a1 @ b1) - torch.exp(a2 @ b2) + self.lambda_init
        heads = self.norm(first - rate * second) * (1 - self.lambda_init)
        return self.output(heads.transpose(1, 2).flatten(-2))
