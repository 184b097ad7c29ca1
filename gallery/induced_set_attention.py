"""Induced set attention (Set Transformer): a set is read by a few learned points, and reads them in turn.

``out = block(x, block(points, x))`` with ``block(a, b) = norm(h + feedforward(h))``, ``h = norm(a + attention(a, b))``.
Two attentions of ``len * num_points`` scores replace one of ``len ** 2``. A permutation of the tokens permutes the
outputs in the same way.

Paper: Lee et al. 2019, "Set transformer", section 3.1, arXiv:1810.00825.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import FeedForward, MultiHeadAttention


class InducedSetAttention(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; mask padding with ``ch.Padding``.

    >>> InducedSetAttention(8, num_heads=2, num_points=3)(torch.zeros(2, 5, 8), mask=ch.Padding([5, 4])).shape
    torch.Size([2, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int, *, num_points: int = 8) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(num_points, embed_dim))
        self.heads = nn.ModuleList(MultiHeadAttention(embed_dim, num_heads) for _ in range(2))
        self.feedforwards = nn.ModuleList(FeedForward(embed_dim, embed_dim, activation="relu") for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(embed_dim) for _ in range(4))

    def block(self, place: int, query: Tensor, key: Tensor, mask: ch.Mask | None) -> Tensor:
        read = self.norms[2 * place](query + self.heads[place](query, key, mask=mask))
        return self.norms[2 * place + 1](read + self.feedforwards[place](read))

    def forward(self, x: Tensor, *, mask: ch.Mask | None = None) -> Tensor:
        points = self.block(0, self.points.expand(x.shape[0], -1, -1), x, mask)
        return self.block(1, x, points, None)
