"""Query-key norm: scores are cosines, times one learned number, so no weight can run away.

``softmax(gain * (q / |q|) @ (k / |k|)^T) @ v``, with ``gain`` starting at ``log2(longest^2 - longest)``.

Paper: Henry et al. 2020, "Query-key normalization for transformers", the section that defines QKNorm.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch
from clearhead.nn import MultiHeadAttention


class QueryKeyNorm(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; ``longest`` is a usual length of the data."""

    def __init__(self, embed_dim: int, num_heads: int, *, longest: int = 128) -> None:
        super().__init__()
        self.heads = MultiHeadAttention(embed_dim, num_heads)
        self.gain = nn.Parameter(torch.tensor(math.log2(longest**2 - longest)))

    def forward(self, x: Tensor, *, mask: ch.Mask | None = None) -> Tensor:
        query, key, value = self.heads.project(x)
        query, key = self.gain * F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        output = ch.attention(query, key, value, mask=mask, scale=1.0)
        return self.heads.output_projection(output.transpose(-3, -2).flatten(-2))
