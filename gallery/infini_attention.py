"""Infini-attention: softmax attention within a segment, and a state of fixed size for all segments before it.

``sigmoid(g_h) * phi(q) M_(s-1) / (phi(q) z_(s-1)) + (1 - sigmoid(g_h)) * attention within segment s``, where
``M_s = M_(s-1) + sum phi(k)^T v`` and ``z_s = z_(s-1) + sum phi(k)`` over the segment, and ``phi = elu + 1``. The
memory of the first segment is empty and gives 0.

Left out: the paper's other update of the memory, by the delta rule.

Paper: Munkhdalai et al. 2024, "Leave no context behind", section 2.1, arXiv:2404.07143.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import MultiHeadAttention


class InfiniAttention(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; always causal.

    >>> InfiniAttention(8, num_heads=2, segment=2)(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int, *, segment: int = 2048) -> None:
        super().__init__()
        self.heads, self.segment = MultiHeadAttention(embed_dim, num_heads, bias=False), segment
        self.gate = nn.Parameter(torch.zeros(num_heads, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads.project(x)
        state, heads, gate = None, [], self.gate.sigmoid()
        for q, k, v in zip(*(part.split(self.segment, dim=2) for part in (query, key, value)), strict=True):
            read, _ = ch.linear_attention(q, k[:, :, :0], v[:, :, :0], state=state)
            heads.append(gate * read + (1 - gate) * ch.attention(q, k, v, mask=ch.Causal()))
            state = ch.linear_attention(q[:, :, :0], k, v, state=state)[1]
        return self.heads.output_projection(torch.cat(heads, dim=2).transpose(1, 2).flatten(-2))
