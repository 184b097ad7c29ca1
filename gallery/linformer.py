"""Linformer: keys and values are mixed along the sequence into a few, so that the cost is linear in the length.

``softmax(q (E k)^T / sqrt(head_dim)) @ (F v)`` with learned ``E`` and ``F`` of ``[num_keys, len]``, shared by the
heads. Each key mixes the whole sequence, so there is no causal form.

Paper: Wang et al. 2020, "Linformer", section 4, arXiv:2006.04768.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import MultiHeadAttention


class Linformer(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; ``len`` is at most ``max_len``.

    >>> Linformer(8, num_heads=2)(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int, *, max_len: int = 512, num_keys: int = 128) -> None:
        super().__init__()
        self.heads = MultiHeadAttention(embed_dim, num_heads)
        self.mix = nn.Parameter(torch.randn(2, num_keys, max_len) / num_keys**0.5)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads.project(x)
        key, value = (mix[:, : x.shape[1]] @ part for mix, part in zip(self.mix, (key, value), strict=True))
        return self.heads.output_projection(ch.attention(query, key, value).transpose(1, 2).flatten(-2))
