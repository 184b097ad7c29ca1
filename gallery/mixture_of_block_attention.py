"""Mixture of block attention (MoBA): each query routes itself to the few blocks of keys that fit it best.

The affinity of a query and a block is ``q . mean_j k_j`` over the block's keys. A query attends to the ``keep`` blocks
with the largest affinity among those that are complete before its own; its own block counts as one of
them and is read causally. The choice has no gradient: keys learn through the scores of the blocks that were chosen.

``ch.sparse.routed`` makes one choice for each block of queries instead, and attention under it skips what was not
chosen. Here each token chooses, as in the paper, and the mask is a table of ``len * len`` booleans a head.

Paper: Lu et al. 2025, "MoBA: mixture of block attention for long-context LLMs", section 2.2, arXiv:2502.13189.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch
from clearhead.nn import MultiHeadAttention


class MixtureOfBlockAttention(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; always causal.

    >>> MixtureOfBlockAttention(8, num_heads=2, size=2, keep=2)(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int, *, size: int = 512, keep: int = 3) -> None:
        super().__init__()
        self.heads, self.size, self.keep = MultiHeadAttention(embed_dim, num_heads, bias=False), size, keep

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads.project(x)
        length = x.shape[1]
        # Only the last block may be incomplete, and no query chooses it by its mean: it is never a past block.
        blocks = F.pad(key.detach(), (0, 0, 0, -length % self.size)).unflatten(2, (-1, self.size)).mean(dim=3)
        row = torch.arange(length, device=x.device)[:, None]
        block = row[:: self.size, 0]
        affinity = (query.detach() @ blocks.mT).masked_fill(row - block < self.size, torch.inf)
        best = affinity.masked_fill(block > row, -torch.inf).topk(min(self.keep, blocks.shape[2])).indices
        chosen = torch.zeros_like(affinity, dtype=torch.bool).scatter(-1, best, True)
        mask = ch.Causal() & ch.Dense(chosen.repeat_interleave(self.size, dim=-1)[..., :length])
        return self.heads.output_projection(ch.attention(query, key, value, mask=mask).transpose(1, 2).flatten(-2))
