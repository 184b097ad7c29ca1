"""Cross-covariance attention (XCiT): channels attend to channels, at a cost linear in the number of tokens.

``V softmax(K^T Q / tau_h)`` where each column of ``Q`` and ``K``, one channel over all tokens, is a unit vector. The
temperature is learned for each head. On transposed heads, with channels as the sequence, it is plain attention.

Paper: El-Nouby et al. 2021, "XCiT: cross-covariance image transformers", section 3.2, arXiv:2106.09681.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch
from clearhead.nn import MultiHeadAttention


class CrossCovarianceAttention(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; every output reads every token.

    >>> CrossCovarianceAttention(8, num_heads=2)(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.heads = MultiHeadAttention(embed_dim, num_heads)
        self.gain = nn.Parameter(torch.ones(num_heads, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.mT for part in self.heads.project(x))
        query, key = self.gain * F.normalize(query, dim=-1, eps=1e-4), F.normalize(key, dim=-1, eps=1e-4)
        output = ch.attention(query.type_as(value), key.type_as(value), value, scale=1.0).mT
        return self.heads.output_projection(output.transpose(1, 2).flatten(-2))
