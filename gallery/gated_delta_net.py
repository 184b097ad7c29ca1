"""Gated DeltaNet: a state of fixed size that a gate lets decay and the delta rule corrects towards each new value.

``S_i = a_i S_(i-1) + b_i k_i^T (v_i - k_i a_i S_(i-1))``, ``output_i = q_i S_i / sqrt(head_dim)`` with unit keys and
queries, ``a_i = exp(-exp(A) softplus(x_i Wa + c))`` and ``b_i = sigmoid(x_i Wb)`` for each head. Queries, keys and
values pass a causal convolution over four tokens and SiLU; the output passes an RMS norm and a gate.

Paper: Yang et al. 2024, "Gated delta networks: improving Mamba2 with delta rule", section 3, arXiv:2412.06464.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.linear import delta_attention


class GatedDeltaNet(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; always causal.

    >>> GatedDeltaNet(8, num_heads=2)(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.sizes = [3 * embed_dim, embed_dim, num_heads, num_heads]
        self.project = nn.Linear(embed_dim, sum(self.sizes), bias=False)
        self.convolve = nn.Conv1d(3 * embed_dim, 3 * embed_dim, 4, groups=3 * embed_dim, bias=False)
        self.fade = nn.Parameter(torch.stack([torch.linspace(1, 16, num_heads).log(), torch.full((num_heads,), -4.0)]))
        self.norm = nn.RMSNorm(embed_dim // num_heads, eps=1e-5)
        self.output = nn.Linear(embed_dim, embed_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed, gate, fade, rate = self.project(x).split(self.sizes, dim=-1)
        mixed = F.silu(self.convolve(F.pad(mixed.mT, (3, 1)))[..., : x.shape[1]].mT)
        query, key, value = mixed.unflatten(-1, (3, self.sizes[2], -1)).permute(2, 0, 3, 1, 4)
        log_gate = -self.fade[0].exp() * F.softplus(fade + self.fade[1])
        heads, _ = delta_attention(query, key, value, rate=rate.sigmoid().mT, log_gate=log_gate.mT[..., None])
        heads = self.norm(heads.transpose(1, 2)).flatten(-2)
        return self.output(heads * F.silu(gate))
