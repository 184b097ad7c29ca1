"""Mamba-2: a state space model whose state is that of gated linear attention (state space duality).

``S_i = exp(A_h dt_i) S_(i-1) + dt_i b_i^T x_i``, ``y_i = c_i S_i + D_h x_i``. This is linear attention with queries
``c``, keys ``b``, values ``dt x`` and one gate a head and token. All heads share ``b`` and ``c``. ``x``, ``b`` and
``c`` pass a causal convolution over four tokens and SiLU; the output passes a gate and an RMS norm.

Paper: Dao and Gu 2024, "Transformers are SSMs", sections 5 (duality) and 7 (architecture), arXiv:2405.21060.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.linear import gated_linear_attention


class Mamba2(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; always causal. ``num_heads`` divides ``2 * embed_dim``.

    >>> Mamba2(8, num_heads=2)(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int, *, state_dim: int = 16) -> None:
        super().__init__()
        inner = 2 * embed_dim
        self.sizes, wide = [inner, inner + 2 * state_dim, num_heads], inner + 2 * state_dim
        self.project = nn.Linear(embed_dim, sum(self.sizes), bias=False)
        self.convolve = nn.Conv1d(wide, wide, 4, groups=wide)
        rates = torch.linspace(1, 16, num_heads).log(), torch.full((num_heads,), -4.0), torch.ones(num_heads)
        self.log_rate, self.step, self.skip = (nn.Parameter(rate) for rate in rates)
        self.norm, self.output = nn.RMSNorm(inner, eps=1e-5), nn.Linear(inner, embed_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        (inner, _, heads), wide = self.sizes, self.sizes[1] - self.sizes[0]
        gate, mixed, step = self.project(x).split(self.sizes, dim=-1)
        mixed = F.silu(self.convolve(F.pad(mixed.mT, (3, 1)))[..., : x.shape[1]].mT)
        value, key, query = mixed[:, None].split([inner, wide // 2, wide // 2], dim=-1)
        value, step = value[:, 0].unflatten(-1, (heads, -1)), F.softplus(step + self.step)
        key, query = (part.expand(-1, heads, -1, -1) for part in (key, query))
        log_gate = (-self.log_rate.exp() * step).mT[..., None]
        written = (value * step[..., None]).transpose(1, 2).type_as(key)
        state, _ = gated_linear_attention(query, key, written, log_gate=log_gate, scale=1.0)
        output = (state.transpose(1, 2) + self.skip[:, None] * value).flatten(-2)
        return self.output(self.norm(output * F.silu(gate)))
