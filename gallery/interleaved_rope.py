"""Interleaved RoPE (iRoPE): three layers in four rotate and read chunks; the fourth has no positions and reads all.

A layer with RoPE attends causally within chunks of ``chunk`` tokens. Every ``every``-th layer
has no positions (NoPE) and attends to the whole past. It multiplies its queries by
``1 + strength * log(1 + p // floor)`` with ``p`` the position counted from 1, which keeps the weights sharp over more
keys than training had.

Left out: the norm of queries and keys after RoPE, which some of the Llama 4 models have.

Paper: Meta AI 2025, "The Llama 4 herd", section on pre-training, with the numbers of its released configuration; no
positions: Kazemnejad et al. 2023, "The impact of positional encoding on length generalization in transformers",
arXiv:2305.19466; scaled queries: Nakanishi 2025, "Scalable-softmax is superior for attention", arXiv:2501.19399.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import MultiHeadAttention


class InterleavedRope(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; always causal. ``depth`` counts layers from 1.

    >>> InterleavedRope(8, num_heads=2, depth=4)(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, depth: int = 1, every: int = 4, chunk: int = 8192,
        floor: int = 8192, strength: float = 0.1, num_kv_heads: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.floor, self.strength, rotary = floor, strength, depth % every != 0
        self.chunks = ch.MaskFunction(lambda batch, head, q_pos, k_pos: q_pos // chunk == k_pos // chunk)
        self.heads = MultiHeadAttention(embed_dim, num_heads, num_kv_heads=num_kv_heads, bias=False, rotary=rotary)

    def forward(self, x: Tensor, *, mask: ch.Mask | None = None) -> Tensor:
        mask = ch.Causal() if mask is None else ch.Causal() & mask
        if self.heads.rotary is not None:
            return self.heads(x, mask=mask & self.chunks)
        query, key, value = self.heads.project(x)
        steps = torch.arange(1, x.shape[1] + 1, device=x.device) // self.floor
        query = query * (1 + self.strength * torch.log1p(steps.type_as(query)))[:, None]
        output = ch.attention(query, key, value, mask=mask)
        return self.heads.output_projection(output.transpose(1, 2).flatten(-2))
