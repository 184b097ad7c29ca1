"""Attention with linear biases (ALiBi): each head lowers a score in proportion to the distance; no other positions.

``softmax(q k^T / sqrt(head_dim) - slope_h |q_pos - k_pos|) @ v`` with the fixed slopes ``2^(-8 h / num_heads)`` for
``h`` from 1. A model trained on short texts can read longer ones.

Paper: Press et al. 2022, "Train short, test long", section 3, arXiv:2108.12409.
"""

from __future__ import annotations

from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import MultiHeadAttention


class AlibiAttention(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; give a ``KVCache`` to decode.

    >>> import torch
    >>> AlibiAttention(8, num_heads=2)(torch.zeros(1, 5, 8), mask=ch.Causal()).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.heads = MultiHeadAttention(embed_dim, num_heads, scores=ch.Alibi(num_heads))

    def forward(self, x: Tensor, *, mask: ch.Mask | None = None, cache: ch.KVCache | None = None) -> Tensor:
        return self.heads(x, mask=mask, cache=cache)
