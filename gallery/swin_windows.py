"""Swin's attention: an image in square windows, which every second layer shifts by half of their side.

``softmax(q k^T / sqrt(head_dim) + bias_h[row_q - row_k, column_q - column_k]) @ v`` within a window, where the bias is
a learned number for each of the ``(2 side - 1)^2`` differences of places.

Windows are sequences of a batch. A shift rolls the image, which puts tokens from opposite sides of it into one window;
a mask keeps them apart. An image whose size ``side`` does not divide is padded at the bottom and the right, and no
token reads the padding (in the paper's code tokens read it, as zeros). An axis of the image that fits into one window
is not shifted, as in the paper's code.

Paper: Liu et al. 2021, "Swin transformer", section 3.2, arXiv:2103.14030.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch
from clearhead.nn import MultiHeadAttention


class SwinWindows(nn.Module):
    """An image ``[batch, height, width, embed_dim]`` of any size to the same shape, in windows of ``side * side``.

    >>> SwinWindows(8, num_heads=2, side=4, shifted=True)(torch.zeros(1, 6, 9, 8)).shape
    torch.Size([1, 6, 9, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int, *, side: int = 4, shifted: bool = False) -> None:
        super().__init__()
        self.heads = MultiHeadAttention(embed_dim, num_heads)
        self.side, self.shift = side, side // 2 if shifted else 0
        self.bias = nn.Parameter(0.02 * torch.randn(num_heads, 2 * side - 1, 2 * side - 1))
        place = torch.cartesian_prod(torch.arange(side), torch.arange(side))
        self.register_buffer("apart", place[:, None] - place + side - 1)

    def windows(self, image: Tensor, down: int, right: int) -> Tensor:
        cut = image.roll((-down, -right), (1, 2)).unflatten(2, (-1, self.side)).unflatten(1, (-1, self.side))
        return cut.transpose(2, 3).flatten(3, 4).flatten(0, 2)

    def forward(self, image: Tensor) -> Tensor:
        batch, height, width, _ = image.shape
        down, right = (self.shift if size > self.side else 0 for size in (height, width))
        image = F.pad(image, (0, 0, 0, -width % self.side, 0, -height % self.side))
        rows, columns = torch.meshgrid([torch.arange(n, device=image.device) for n in image.shape[1:3]], indexing="ij")
        # Which tokens a roll brings from the opposite side, by row and by column, and which are padding.
        ids = (2 * (rows < down) + (columns < right)).masked_fill((rows >= height) | (columns >= width), 4)
        ids = self.windows(ids.expand(batch, -1, -1)[..., None], down, right)
        mask = ch.Dense((ids == ids.mT)[:, None]) if down or right or image.shape[1:3] != (height, width) else None
        bias = ch.DenseBias(self.bias[:, self.apart[..., 0], self.apart[..., 1]])
        output = ch.attention(*self.heads.project(self.windows(image, down, right)), mask=mask, scores=bias)
        cut = self.heads.output_projection(output.transpose(1, 2).flatten(-2)).unflatten(1, (self.side, self.side))
        cut = cut.unflatten(0, (batch, image.shape[1] // self.side, image.shape[2] // self.side)).transpose(2, 3)
        return cut.flatten(3, 4).flatten(1, 2).roll((down, right), (1, 2))[:, :height, :width]
