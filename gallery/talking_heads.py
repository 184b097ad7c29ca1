"""Talking-heads attention: heads mix their scores before the softmax, and their weights after it.

``scores'_h = sum_g L[g, h] q_g k_g^T`` is one product of rows as wide as all heads together: queries ``L[g, h] q_g``
side by side, keys ``k_g`` side by side. ``output_h = sum_g W[g, h] weights_g v_h`` needs each head's weights on the
values of all heads, which lie side by side too. So the module is one exact attention of ``num_heads`` query heads on
one wide key head, and holds no matrix of weights.

Cost: its two products are ``num_heads`` times those of attention without mixing; memory stays linear in the length.

Paper: Shazeer et al. 2020, "Talking-heads attention", section 4, arXiv:2003.02436.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import MultiHeadAttention


class TalkingHeads(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape.

    >>> TalkingHeads(8, num_heads=2)(torch.zeros(1, 5, 8), mask=ch.Causal()).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.heads = MultiHeadAttention(embed_dim, num_heads)
        self.mix_scores = nn.Parameter(torch.eye(num_heads) + 0.1 * torch.randn(num_heads, num_heads))
        self.mix_weights = nn.Parameter(torch.eye(num_heads) + 0.1 * torch.randn(num_heads, num_heads))

    def forward(self, x: Tensor, *, mask: ch.Mask | None = None) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in self.heads.project(x))
        # Autocast does not see this einsum as a matrix product and leaves it in float32.
        wide = torch.einsum("btgd,gh->bhtgd", query, self.mix_scores).flatten(-2).type_as(key)
        key, all_values = key.flatten(-2)[:, None], value.flatten(-2)[:, None]
        attended = ch.attention(wide, key, all_values, mask=mask, scale=self.heads.head_dim**-0.5)
        output = torch.einsum("bgthd,gh->bthd", attended.unflatten(-1, value.shape[2:]), self.mix_weights)
        return self.heads.output_projection(output.flatten(-2))
