"""Longformer's attention: a sliding window for all tokens, and a few global ones with projections of their own.

A token attends to ``window // 2`` tokens on each side and to the first ``num_global`` ones. A global token attends to
all, by queries, keys and values that only global tokens use.

Paper: Beltagy et al. 2020, "Longformer", section 3.1, arXiv:2004.05150.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import MultiHeadAttention


class LongformerAttention(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; a ``mask`` is read by position, as ``ch.Padding`` is.

    >>> LongformerAttention(8, num_heads=2, window=2)(torch.zeros(1, 5, 8), mask=ch.Padding([4])).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int, *, window: int = 512, num_global: int = 1) -> None:
        super().__init__()
        self.num_global, self.near = num_global, ch.Window(window // 2, window // 2) | ch.Prefix(num_global)
        self.local, self.everywhere = (MultiHeadAttention(embed_dim, num_heads, bias=False) for _ in range(2))

    def forward(self, x: Tensor, *, mask: ch.Mask | None = None) -> Tensor:
        first, rest = x[:, : self.num_global], x[:, self.num_global :]
        near = self.near if mask is None else self.near & mask
        read = self.everywhere(first, x, mask=mask, query_offset=0)
        return torch.cat([read, self.local(rest, x, mask=near, query_offset=first.shape[1])], dim=1)
