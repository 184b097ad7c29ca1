"""Neighborhood attention (NAT): each pixel attends to the ``side * side`` pixels nearest to it.

``softmax(q k^T / sqrt(head_dim) + bias_h[row_q - row_k, column_q - column_k]) @ v`` over a square around the pixel. At
the border of the image the square is shifted inwards, so that every pixel has as many keys. The bias is learned.

Paper: Hassani et al. 2023, "Neighborhood attention transformer", section 3.1, arXiv:2204.07143.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import MultiHeadAttention


class NeighborhoodAttention(nn.Module):
    """An image ``[batch, height, width, embed_dim]`` to the same shape; ``side`` is odd.

    >>> NeighborhoodAttention(8, num_heads=2, side=3)(torch.zeros(1, 6, 9, 8)).shape
    torch.Size([1, 6, 9, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int, *, side: int = 3) -> None:
        super().__init__()
        self.heads, self.side = MultiHeadAttention(embed_dim, num_heads), side
        self.bias = nn.Parameter(0.02 * torch.randn(num_heads, 2 * side - 1, 2 * side - 1))

    def forward(self, image: Tensor) -> Tensor:
        height, width = image.shape[1:3]
        place = torch.arange(height * width, device=image.device)
        near, offsets = torch.ones(1, 1, dtype=torch.bool, device=image.device), []
        for axis, size in ((place // width, height), (place % width, width)):
            first = (axis - self.side // 2).clamp(0, max(size - self.side, 0))[:, None]
            near = near & (axis >= first) & (axis < first + self.side)
            offsets.append((axis[:, None] - axis).clamp(1 - self.side, self.side - 1) + self.side - 1)
        bias = ch.DenseBias(self.bias[:, offsets[0], offsets[1]])
        parts = self.heads.project(image.flatten(1, 2))
        output = ch.attention(*parts, mask=ch.Dense(near), scores=bias).transpose(1, 2).flatten(-2)
        return self.heads.output_projection(output).unflatten(1, (height, width))
