"""Differential attention: the difference of two softmaxes, which cancels what they have in common.

``norm((softmax(q1 k1^T) - lambda softmax(q2 k2^T)) @ v) * (1 - lambda_init)`` for each head, where
``lambda = exp(a1 . b1) - exp(a2 . b2) + lambda_init`` is learned and values are twice as wide as keys. Both softmaxes
read the same values, so the module computes the difference of two attentions. ``norm`` is an RMS norm of one head.
``lambda_init`` is ``0.8 - 0.6 exp(-0.3 (depth - 1))`` in layer ``depth``, counted from 1.

Paper: Ye et al. 2024, "Differential transformer", section 2.1, arXiv:2410.05258.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import clearhead as ch


class DifferentialAttention(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; ``num_heads`` pairs of softmaxes.

    Give the layer's ``depth``, or ``lambda_init`` itself: 0.8 in every layer is the paper's other choice.

    >>> DifferentialAttention(8, num_heads=2, depth=1)(torch.zeros(1, 5, 8), mask=ch.Causal()).shape
    torch.Size([1, 5, 8])
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, depth: int | None = None, lambda_init: float = 0.8
    ) -> None:  # fmt: skip
        super().__init__()
        if embed_dim % (2 * num_heads):
            raise ch.ShapeError(f"2 * num_heads must divide embed_dim; got {num_heads=} {embed_dim=}")
        lambda_init = lambda_init if depth is None else 0.8 - 0.6 * math.exp(-0.3 * (depth - 1))
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
        # exp(a) - exp(b) loses digits in bfloat16 where both are near 1.
        rate = torch.expm1(a1 @ b1) - torch.expm1(a2 @ b2) + self.lambda_init
        heads = self.norm(first - rate * second) * (1 - self.lambda_init)
        return self.output(heads.transpose(1, 2).flatten(-2))
