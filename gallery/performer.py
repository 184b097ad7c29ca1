"""Performer (FAVOR+): random features stand in for the softmax, at a cost linear in the length.

``output_i = phi(q_i) sum_j phi(k_j)^T v_j / (phi(q_i) sum_j phi(k_j))`` with ``phi(x) = exp(W y - |y|^2 / 2)``,
``y = x / head_dim^(1/4)``. Rows of ``W`` are random normal vectors, orthogonal in blocks of ``head_dim``, so that
``phi(q) . phi(k)`` estimates ``exp(q . k / sqrt(head_dim))`` without bias. All features are positive.

Left out: drawing new features during training.

Paper: Choromanski et al. 2021, "Rethinking attention with Performers", sections 2.3 and 2.4, arXiv:2009.14794.
"""

from __future__ import annotations

from torch import Tensor, nn

import clearhead as ch
from clearhead.linear import PositiveRandomFeatures
from clearhead.nn import LinearAttention


class Performer(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape, under no mask, ``Causal``, ``Padding`` or their ``&``.

    >>> import torch
    >>> Performer(8, num_heads=2)(torch.zeros(1, 5, 8), mask=ch.Causal()).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int, *, num_features: int | None = None, seed: int = 0) -> None:
        super().__init__()
        features = PositiveRandomFeatures.draw(embed_dim // num_heads, num_features, seed=seed)
        self.heads = LinearAttention(embed_dim, num_heads, feature_map=features)

    def forward(self, x: Tensor, *, mask: ch.Mask | None = None) -> Tensor:
        return self.heads(x, mask=mask)
