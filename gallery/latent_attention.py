"""Multi-head latent attention, absorbed: all heads read one short vector a token, and the cache holds only that.

``latent = x Wd``; head h has keys ``[latent Uk_h, rotated x Wr]`` and values ``latent Uv_h``. All heads share the
rotated part. The module multiplies the query by ``Uk_h`` and the attention's output by ``Uv_h`` instead, so that all
heads attend to the same ``[latent, rotated]``, as to one key head. The cache holds ``latent_dim + rotary_dim`` elements
a token in place of ``2 * num_heads * head_dim``. ``expanded_latent_attention.py`` computes each head's keys and values.

Left out: the query's own compression, which saves memory in training only, and the norm after each compression.

Paper: DeepSeek-AI 2024, "DeepSeek-V2", sections 2.1.2 (compression, the moved products) and 2.1.3 (rotary part),
arXiv:2405.04434.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import clearhead as ch


class LatentAttention(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; give a ``KVCache`` to decode.

    >>> layer, cache = LatentAttention(8, num_heads=2), ch.KVCache()
    >>> layer(torch.zeros(1, 5, 8), mask=ch.Causal(), cache=cache).shape
    torch.Size([1, 5, 8])
    >>> layer(torch.zeros(1, 1, 8), mask=ch.Causal(), cache=cache).shape
    torch.Size([1, 1, 8])
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

    def forward(self, x: Tensor, *, mask: ch.Mask | None = None, cache: ch.KVCache | None = None) -> Tensor:
        first = cache.length if cache is not None else 0
        query, rotated = self.query(x).unflatten(-1, (-1, sum(self.sizes))).transpose(1, 2).split(self.sizes, dim=-1)
        latent, shared = self.compress(x)[:, None].split([self.up.shape[2], self.sizes[1]], dim=-1)
        key = torch.cat([latent, self.rotary.rotate(shared, first)], dim=-1)
        if cache is not None:
            # Values are keys without their rotary part, so the cache needs no values.
            key, _ = cache.append(key, key[..., :0])
        query = torch.cat([query @ self.up[0].mT, self.rotary.rotate(rotated, first)], dim=-1)
        latent, scale = key[..., : self.up.shape[2]], sum(self.sizes) ** -0.5
        heads = ch.attention(query, key, latent, mask=mask, scale=scale, query_offset=first) @ self.up[1]
        return self.output(heads.transpose(1, 2).flatten(-2))
