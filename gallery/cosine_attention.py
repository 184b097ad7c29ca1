"""Scaled cosine attention: scores are cosines over a temperature that each head learns, at least 0.01.

``softmax(cos(q, k) / tau_h + bias) @ v``. Any of ``clearhead``'s score rules can be the bias.

Paper: Liu et al. 2022, "Swin transformer V2", section 3.2, arXiv:2111.09883. The temperature is learned as a logarithm,
as in its code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch
from clearhead.nn import MultiHeadAttention


class CosineAttention(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; ``scores`` are added to the cosines over the temperature.

    >>> CosineAttention(8, num_heads=2, scores=[ch.Alibi(2)])(torch.zeros(1, 5, 8), mask=ch.Causal()).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int, *, scores: Sequence[ch.ScoreRule] = ()) -> None:
        super().__init__()
        self.heads = MultiHeadAttention(embed_dim, num_heads, scores=scores)
        self.log_scale = nn.Parameter(torch.full((num_heads, 1, 1), math.log(10.0)))

    def forward(self, x: Tensor, *, mask: ch.Mask | None = None) -> Tensor:
        query, key, value = self.heads.project(x)
        # eps bounds the gradient of a row of zeros; the default eps is 0 in float16.
        query, key = (F.normalize(part, dim=-1, eps=1e-4) for part in (query, key))
        query = query * self.log_scale.clamp(max=math.log(100.0)).exp()
        rules = self.heads.scores.rules()
        # Autocast computes the temperature, and may compute norms, in float32, and values in another dtype.
        query, key = query.type_as(value), key.type_as(value)
        output = ch.attention(query, key, value, mask=mask, scores=rules, scale=1.0)
        return self.heads.output_projection(output.transpose(-3, -2).flatten(-2))
