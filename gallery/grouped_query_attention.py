"""Grouped-query attention (GQA): query heads share fewer key and value heads, and the cache shrinks with them.

Query head h reads key head ``h // (num_heads // num_kv_heads)``; one key head for all is multi-query attention.
``from_multi_head`` converts a trained module: a group's key and value projections become their mean.

Papers: Ainslie et al. 2023, "GQA", sections 2.1 (conversion) and 2.2 (groups), arXiv:2305.13245; one head for all:
Shazeer 2019, "Fast transformer decoding", section 3, arXiv:1911.02150.
"""

from __future__ import annotations

from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import MultiHeadAttention


class GroupedQueryAttention(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; give a ``KVCache`` to decode.

    >>> import torch
    >>> layer = GroupedQueryAttention.from_multi_head(MultiHeadAttention(8, num_heads=4), num_kv_heads=2)
    >>> layer(torch.zeros(1, 5, 8), mask=ch.Causal()).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int, *, num_kv_heads: int = 1) -> None:
        super().__init__()
        self.heads = MultiHeadAttention(embed_dim, num_heads, num_kv_heads=num_kv_heads)

    @classmethod
    def from_multi_head(cls, heads: MultiHeadAttention, num_kv_heads: int) -> GroupedQueryAttention:
        """A module with the weights of ``heads``, which has biases, as many key as query heads, and no more options."""
        new, weights = cls(heads.embed_dim, heads.num_heads, num_kv_heads=num_kv_heads), heads.state_dict()
        for name in [name for name in weights if name.startswith(("key", "value"))]:
            weights[name] = weights[name].unflatten(0, (num_kv_heads, -1, heads.head_dim)).mean(dim=1).flatten(0, 1)
        new.heads.load_state_dict(weights)
        return new

    def forward(self, x: Tensor, *, mask: ch.Mask | None = None, cache: ch.KVCache | None = None) -> Tensor:
        return self.heads(x, mask=mask, cache=cache)
