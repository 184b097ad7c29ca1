"""Multi-scale retention (RetNet): linear attention whose state decays at a fixed rate in each head.

``S_i = decay_h S_(i-1) + k_i^T v_i``, ``output_i = q_i S_i / sqrt(head_dim)`` with rotated queries and keys and
``decay_h = 1 - 2^(-5 - h)``; then a norm of each head and a gate ``silu(x Wg)``.

Paper: Sun et al. 2023, "Retentive network", sections 2.1 and 2.2, arXiv:2307.08621.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.linear import retention
from clearhead.nn import MultiHeadAttention


class MultiScaleRetention(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; always causal.

    >>> import torch
    >>> MultiScaleRetention(8, num_heads=2)(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.heads = MultiHeadAttention(embed_dim, num_heads, bias=False, rotary=True)
        self.gate = nn.Linear(embed_dim, embed_dim, bias=False)
        self.norm = nn.LayerNorm(self.heads.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        heads, _ = retention(*self.heads.project(x))
        output = self.norm(heads.transpose(1, 2)).flatten(-2)
        return self.heads.output_projection(output * F.silu(self.gate(x)))
