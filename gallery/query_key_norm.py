"""Query-key norm: scores are cosines times one learned number, so no score can grow without bound.

``softmax(gain * (q / |q|) @ (k / |k|)^T) @ v``, with ``gain`` starting at ``log2(longest^2 - longest)``.

Paper: Henry et al. 2020, "Query-key normalization for transformers", the section that defines QKNorm,
arXiv:2010.04245.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch
from clearhead.nn import MultiHeadAttention


class QueryKeyNorm(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; ``longest``, from 2: 97.5 % of the data are no longer.

    >>> QueryKeyNorm(8, num_heads=2, longest=50)(torch.zeros(1, 5, 8), mask=ch.Causal()).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int, *, longest: int = 128) -> None:
        super().__init__()
        self.heads = MultiHeadAttention(embed_dim, num_heads)
        self.gain = nn.Parameter(torch.tensor(math.log2(longest**2 - longest)))

    def forward(self, x: Tensor, *, mask: ch.Mask | None = None) -> Tensor:
        query, key, value = self.heads.project(x)
        # eps bounds the gradient of a row of zeros; the default eps is 0 in float16.
        query, key = self.gain * F.normalize(query, dim=-1, eps=1e-4), F.normalize(key, dim=-1, eps=1e-4)
        # Autocast may compute norms in float32, and values in another dtype.
        output = ch.attention(query.type_as(value), key.type_as(value), value, mask=mask, scale=1.0)
        return self.heads.output_projection(output.transpose(-3, -2).flatten(-2))
