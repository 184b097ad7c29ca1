"""Axial attention: each pixel attends to its column, then to its row, and so reaches the whole image.

``rows(columns(x))``: two attentions, one over each axis. One axis is the sequence, and the other one joins the batch.
There are ``height * width * (height + width)`` scores in place of ``(height * width) ** 2``. The module adds no
positions: add an embedding of each axis to its input.

Papers: Ho et al. 2019, "Axial attention in multidimensional transformers", section 3, arXiv:1912.12180; one axis
directly after the other: Wang et al. 2020, "Axial-DeepLab", section 3, arXiv:2003.07853.
"""

from __future__ import annotations

from torch import Tensor, nn

from clearhead.nn import MultiHeadAttention


class AxialAttention(nn.Module):
    """An image ``[batch, height, width, embed_dim]`` of any size to the same shape.

    >>> import torch
    >>> AxialAttention(8, num_heads=2)(torch.zeros(1, 6, 9, 8)).shape
    torch.Size([1, 6, 9, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.columns, self.rows = (MultiHeadAttention(embed_dim, num_heads) for _ in range(2))

    def forward(self, image: Tensor) -> Tensor:
        batch, height, width, _ = image.shape
        columns = self.columns(image.transpose(1, 2).flatten(0, 1)).unflatten(0, (batch, width))
        return self.rows(columns.transpose(1, 2).flatten(0, 1)).unflatten(0, (batch, height))
