"""Swin's attention: an image in square windows, and in every second layer the windows shifted by half of their side.

Windows are sequences of a batch. A shift rolls the image, which puts tokens from opposite edges into one window: they
are documents of it that do not see each other. The bias is a learned number for each of the ``(2 side - 1)^2``
differences of places within a window.

Paper: Liu et al. 2021, "Swin transformer", section 3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import MultiHeadAttention


class SwinWindows(nn.Module):
    """An image ``[batch, height, width, embed_dim]`` to the same shape; ``side`` divides height and width."""

    def __init__(self, embed_dim: int, num_heads: int, *, side: int = 4, shifted: bool = False) -> None:
        super().__init__()
        self.heads = MultiHeadAttention(embed_dim, num_heads)
        self.side, self.shift = side, side // 2 if shifted else 0
        self.bias = nn.Parameter(0.02 * torch.randn(num_heads, 2 * side - 1, 2 * side - 1))
        place = torch.cartesian_prod(torch.arange(side), torch.arange(side))
        self.register_buffer("apart", place[:, None] - place + side - 1)

    def windows(self, image: Tensor) -> Tensor:
        cut = image.unflatten(2, (-1, self.side)).unflatten(1, (-1, self.side)).transpose(2, 3)
        return cut.flatten(3, 4).flatten(0, 2)

    def forward(self, image: Tensor) -> Tensor:
        batch, height, width, _ = image.shape
        regions = [(torch.arange(n) >= n - self.shift).long() for n in (height, width)]
        ids = (2 * regions[0][:, None] + regions[1]).expand(batch, -1, -1)[..., None]
        tokens = self.windows(image.roll((-self.shift, -self.shift), (1, 2)))
        bias = ch.DenseBias(self.bias[:, self.apart[..., 0], self.apart[..., 1]])
        mask = ch.Documents(ids=self.windows(ids)[..., 0]) if self.shift else None
        output = ch.attention(*self.heads.project(tokens), mask=mask, scores=bias).transpose(1, 2).flatten(-2)
        cut = self.heads.output_projection(output).unflatten(1, (self.side, self.side))
        cut = cut.unflatten(0, (batch, height // self.side, -1)).transpose(2, 3)
        return cut.flatten(3, 4).flatten(1, 2).roll((self.shift, self.shift), (1, 2))
