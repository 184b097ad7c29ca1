"""Gated attention: a gate on each channel of the heads' output, computed from the token itself.

``(attention(q, k, v) * sigmoid(x Wg)) Wo``: the gate on the output of the heads, which the paper found best. A token
that needs nothing closes its gate and need not put its weight on some key.

Paper: Qiu et al. 2025, "Gated attention for large language models", section 2.2, arXiv:2505.06708.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import MultiHeadAttention


class GatedAttention(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape.

    >>> GatedAttention(8, num_heads=2)(torch.zeros(1, 5, 8), mask=ch.Causal()).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.heads = MultiHeadAttention(embed_dim, num_heads, bias=False)
        self.gate = nn.Linear(embed_dim, embed_dim, bias=False)

    def forward(self, x: Tensor, *, mask: ch.Mask | None = None) -> Tensor:
        output = ch.attention(*self.heads.project(x), mask=mask).transpose(-3, -2).flatten(-2)
        return self.heads.output_projection(output * torch.sigmoid(self.gate(x)))
