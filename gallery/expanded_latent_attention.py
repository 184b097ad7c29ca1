"""Multi-head latent attention, expanded: each head's keys and values are computed from the latent vector.

``latent = x Wd``; head h has keys ``[latent Uk_h, rotated x Wr]`` and values ``latent Uv_h``. This is the paper's
formula as it stands. ``latent_attention.py`` is its absorbed form, which multiplies the query by ``Uk_h`` and the
attention's output by ``Uv_h``. Both have the same parameters and give the same outputs. The expanded form multiplies
rows of ``head_dim + rotary_dim`` channels, fewer than the absorbed form's ``latent_dim + rotary_dim`` in models of the
paper's size, and suits training and prefill. The absorbed form reads one row a token for all heads and suits decoding.

Paper: DeepSeek-AI 2024, "DeepSeek-V2", sections 2.1.2 and 2.1.3, equations 9 to 19, arXiv:2405.04434.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import clearhead as ch


class ExpandedLatentAttention(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; its ``state_dict`` fits ``LatentAttention``.

    >>> ExpandedLatentAttention(8, num_heads=2)(torch.zeros(1, 5, 8), mask=ch.Causal()).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int, *, latent_dim: int = 16, rotary_dim: int = 8) -> None:
        super().__init__()
        if embed_dim % num_heads or rotary_dim % 2:
            raise ch.ShapeError(f"num_heads must divide {embed_dim=} and 2 {rotary_dim=}; got {num_heads=}")
        self.sizes = [embed_dim // num_heads, rotary_dim]
        self.query = nn.Linear(embed_dim, num_heads * sum(self.sizes), bias=False)
        self.compress = nn.Linear(embed_dim, latent_dim + rotary_dim, bias=False)
        self.up = nn.Parameter(torch.randn(2, num_heads, latent_dim, self.sizes[0]) / latent_dim**0.5)
        self.output = nn.Linear(embed_dim, embed_dim, bias=False)
        self.rotary = ch.positions.Rotary()

    def forward(self, x: Tensor, *, mask: ch.Mask | None = None) -> Tensor:
        query, rotated = self.query(x).unflatten(-1, (-1, sum(self.sizes))).transpose(1, 2).split(self.sizes, dim=-1)
        latent, shared = self.compress(x)[:, None].split([self.up.shape[2], self.sizes[1]], dim=-1)
        key, value = latent @ self.up[0], latent @ self.up[1]
        query = torch.cat([query, self.rotary.rotate(rotated)], dim=-1)
        key = torch.cat([key, self.rotary.rotate(shared).expand(-1, key.shape[1], -1, -1)], dim=-1)
        return self.output(ch.attention(query, key, value, mask=mask).transpose(1, 2).flatten(-2))
