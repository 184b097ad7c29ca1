"""Perceiver's cross-attention: a few learned vectors read an input of any length.

``latents + attention(norm(latents), norm(x))``, then a feedforward. The output has ``num_latents`` tokens for an input
of any length, at a cost of ``num_latents * len`` scores. The attention knows the order of tokens only from the tokens
themselves. Latents read the input only, as in Perceiver; Flamingo's also read each other in the same attention.

Papers: Jaegle et al. 2021, "Perceiver", section 3.1, arXiv:2103.03206; as a resampler before a language model:
Alayrac et al. 2022, "Flamingo", section 2.1, arXiv:2204.14198.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import FeedForward, MultiHeadAttention


class PerceiverResampler(nn.Module):
    """Tokens ``[batch, len, input_dim]`` to ``[batch, num_latents, embed_dim]``; mask padding with ``ch.Padding``.

    >>> layer = PerceiverResampler(8, num_heads=2, num_latents=3, input_dim=6)
    >>> layer(torch.zeros(2, 5, 6), mask=ch.Padding([5, 4])).shape
    torch.Size([2, 3, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int, *, num_latents: int = 8, input_dim: int | None = None) -> None:
        super().__init__()
        input_dim = input_dim or embed_dim
        self.latents = nn.Parameter(torch.randn(num_latents, embed_dim))
        self.heads = MultiHeadAttention(embed_dim, num_heads, key_dim=input_dim, value_dim=input_dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for dim in (embed_dim, input_dim, embed_dim))
        self.feedforward = FeedForward(embed_dim, 4 * embed_dim)

    def forward(self, x: Tensor, *, mask: ch.Mask | None = None) -> Tensor:
        latents = self.latents.expand(x.shape[0], -1, -1)
        read = latents + self.heads(self.norms[0](latents), self.norms[1](x), mask=mask)
        return read + self.feedforward(self.norms[2](read))
