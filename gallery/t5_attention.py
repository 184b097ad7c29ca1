"""T5's attention: no scale, no biases, and a learned number for each bucket of distances in place of positions.

Half of the buckets are for keys ahead, half for keys behind; half of these are single distances, and the others grow
as logarithms up to ``farthest``, beyond which all distances share the last bucket. So the bias is a ``RelativeBias``
whose table is read from the buckets.

Paper: Raffel et al. 2020, "Exploring the limits of transfer learning", section 2.1; the buckets are those of its code.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import MultiHeadAttention


def buckets(distance: Tensor, num_buckets: int, farthest: int) -> Tensor:
    """The bucket of each ``q_pos - k_pos``."""
    half, size = num_buckets // 2, distance.abs()
    single = half // 2
    far = (size.clamp(min=1) / single).log() / math.log(farthest / single) * (half - single)
    return torch.where(size < single, size, (single + far.long()).clamp(max=half - 1)) + half * (distance < 0)


class T5Attention(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape."""

    def __init__(self, embed_dim: int, num_heads: int, *, num_buckets: int = 32, farthest: int = 128) -> None:
        super().__init__()
        self.heads = MultiHeadAttention(embed_dim, num_heads, bias=False, scale=1.0)
        self.bias = nn.Parameter(0.1 * torch.randn(num_heads, num_buckets))
        self.register_buffer("bucket", buckets(torch.arange(-farthest, farthest + 1), num_buckets, farthest))

    def forward(self, x: Tensor, *, mask: ch.Mask | None = None) -> Tensor:
        rule = ch.RelativeBias(self.bias[:, self.bucket])
        output = ch.attention(*self.heads.project(x), mask=mask, scores=rule, scale=1.0)
        return self.heads.output_projection(output.transpose(-3, -2).flatten(-2))
