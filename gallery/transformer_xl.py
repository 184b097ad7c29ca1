"""Transformer-XL's attention: scores that depend on distance through content, and a memory of earlier segments.

``score_ij = ((q_i + u) k_j + (q_i + v) W_h R(i - j)) / sqrt(head_dim)`` with learned ``u`` and ``v`` for each head.
``R(d) = [cos(d w), -sin(d w)]`` are the paper's sinusoids up to order and sign, which ``W_h`` absorbs. RoPE makes the
second term a dot product: that of ``(q_i + v) W_h`` rotated by ``i`` with ``[1, 0]`` rotated by ``j``. So the whole is
one exact attention on rows of ``head_dim + embed_dim`` channels, without a matrix of distances.

Paper: Dai et al. 2019, "Transformer-XL", sections 3.2 (memory) and 3.3 (distances), arXiv:1901.02860.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import MultiHeadAttention


class TransformerXl(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; ``memory``: the tokens before them, without gradient.

    >>> TransformerXl(8, num_heads=2)(torch.zeros(1, 5, 8), mask=ch.Causal(), memory=torch.zeros(1, 3, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.heads, self.rotary = MultiHeadAttention(embed_dim, num_heads, bias=False), ch.positions.Rotary()
        self.waves = nn.Parameter(torch.randn(num_heads, self.heads.head_dim, embed_dim) / embed_dim**0.5)
        self.biases = nn.Parameter(torch.zeros(2, num_heads, 1, self.heads.head_dim))

    def forward(self, x: Tensor, *, mask: ch.Mask | None = None, memory: Tensor | None = None) -> Tensor:
        tokens = x if memory is None else torch.cat([memory.detach(), x], dim=1)
        first, half = tokens.shape[1] - x.shape[1], x.shape[2] // 2
        query, key, value = self.heads.project(x, tokens)
        start = torch.cat([key.new_ones(tokens.shape[1], half), key.new_zeros(tokens.shape[1], half)], dim=-1)
        waves = self.rotary.rotate(start).expand(*key.shape[:2], -1, -1)
        by_distance = self.rotary.rotate((query + self.biases[1]) @ self.waves, first).type_as(key)
        query = torch.cat([(query + self.biases[0]).type_as(key), by_distance], dim=-1)
        key, scale = torch.cat([key, waves], dim=-1), self.heads.head_dim**-0.5
        output = ch.attention(query, key, value, mask=mask, scale=scale, query_offset=first)
        return self.heads.output_projection(output.transpose(1, 2).flatten(-2))
