"""Attention with learned sinks: each head may put weight on nothing at all.

``weights = exp(score) / (exp(sink_h) + sum exp(score))``: a learned logit in the softmax's sum that has no key and no
value. gpt-oss alternates layers with a sliding window and layers that read the whole past.

Paper: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b model card", section 2 (architecture: banded windows of 128 tokens
alternate with full attention, a learned bias in the denominator of the softmax), arXiv:2508.10925.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import MultiHeadAttention


class LearnedSinks(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; each sees itself and what came before, ``window`` in all.

    >>> LearnedSinks(8, num_heads=2, window=3)(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int, *, num_kv_heads: int | None = None, window: int | None = None):
        super().__init__()
        sink = ch.Sink(nn.Parameter(torch.zeros(num_heads)))
        self.heads = MultiHeadAttention(embed_dim, num_heads, num_kv_heads=num_kv_heads, scores=sink, rotary=True)
        self.reach = ch.Causal() if window is None else ch.Causal() & ch.Window(window - 1)

    def forward(self, x: Tensor, *, mask: ch.Mask | None = None, cache: ch.KVCache | None = None) -> Tensor:
        return self.heads(x, mask=self.reach if mask is None else self.reach & mask, cache=cache)
