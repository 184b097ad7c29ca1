"""T5's attention: no scale, no biases in the projections, and a learned number for each bucket of distances.

``softmax(q k^T + bias_h[bucket(q_pos - k_pos)]) @ v``. In the encoder half of the buckets are for later keys and half
for earlier ones; the decoder is causal and has all buckets for earlier keys. In either direction half of the buckets
are single distances. The others grow as logarithms up to ``farthest``, beyond which all distances share the last
bucket. The bias is a ``RelativeBias`` whose table is looked up by bucket.

Paper: Raffel et al. 2020, "Exploring the limits of transfer learning", section 2.1, arXiv:1910.10683. The buckets are
those of its code.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import MultiHeadAttention


def buckets(distance: Tensor, num_buckets: int, farthest: int, *, causal: bool = False) -> Tensor:
    """The bucket of each ``q_pos - k_pos``."""
    half = num_buckets if causal else num_buckets // 2
    distance, single = distance.clamp(min=0) if causal else distance, half // 2
    if not 0 < single < farthest:
        raise ch.ShapeError(f"farthest must exceed {single} single distances, from 1; got {farthest=} {num_buckets=}")
    size = distance.abs()
    far = (size.clamp(min=1) / single).log() / math.log(farthest / single) * (half - single)
    return torch.where(size < single, size, (single + far.long()).clamp(max=half - 1)) + half * (distance < 0)


class T5Attention(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; ``causal=True`` is the decoder's and needs no mask.

    >>> T5Attention(8, num_heads=2, causal=True)(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, num_buckets: int = 32, farthest: int = 128, causal: bool = False
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads = MultiHeadAttention(embed_dim, num_heads, bias=False, scale=1.0)
        self.bias = nn.Parameter(0.1 * torch.randn(num_heads, num_buckets))
        distance = torch.arange(-farthest, farthest + 1)
        self.register_buffer("bucket", buckets(distance, num_buckets, farthest, causal=causal))
        self.order = ch.Causal() if causal else None

    def forward(self, x: Tensor, *, mask: ch.Mask | None = None) -> Tensor:
        rule = ch.RelativeBias(self.bias[:, self.bucket])
        mask = self.order if mask is None else mask if self.order is None else self.order & mask
        output = ch.attention(*self.heads.project(x), mask=mask, scores=rule, scale=1.0)
        return self.heads.output_projection(output.transpose(-3, -2).flatten(-2))
