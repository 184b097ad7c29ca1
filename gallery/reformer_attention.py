"""Reformer's attention: queries are keys, and a token attends to those that a random hash puts into its bucket.

``k = q / |q|``, ``bucket = argmax([q R, -q R])`` with a random ``R`` for each head, and
``softmax(q k^T - 10^5 [q_pos = k_pos]) @ v`` over the keys of the bucket, so that a token attends to itself only where
it has no other key. Tokens are sorted by bucket: each bucket is an interval of keys, and attention skips all others.

There is one round of hashing. The paper joins several, and cuts buckets into chunks of equal length, which drops some
pairs. The sizes of buckets are data, so ``torch.compile(fullgraph=True)`` refuses this module.

Paper: Kitaev et al. 2020, "Reformer", section 2, arXiv:2001.04451.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch


class ReformerAttention(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; ``buckets`` is even.

    >>> ReformerAttention(8, num_heads=2)(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int, *, buckets: int = 4, causal: bool = True) -> None:
        super().__init__()
        self.causal, self.num_heads = causal, num_heads
        self.project = nn.Linear(embed_dim, 2 * embed_dim, bias=False)
        self.output = nn.Linear(embed_dim, embed_dim, bias=False)
        self.register_buffer("rotations", torch.randn(num_heads, embed_dim // num_heads, buckets // 2))

    def forward(self, x: Tensor) -> Tensor:
        query, value = self.project(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        sides = query.detach() @ self.rotations
        # A stable sort keeps the order of tokens within a bucket, so Causal means there what it means outside.
        bucket, order = torch.cat([sides, -sides], dim=-1).argmax(dim=-1).sort(dim=-1, stable=True)
        # Each head has buckets of its own, as sequences of a batch have documents of their own.
        query, value = (part.take_along_dim(order[..., None], dim=2).flatten(0, 1)[:, None] for part in (query, value))
        same = ch.Documents(ids=bucket.flatten(0, 1))
        itself = ch.RelativeBias(torch.tensor([[0.0, -1e5, 0.0]], device=x.device))
        key = F.normalize(query, dim=-1, eps=1e-4).type_as(value)
        mask = ch.Causal() & same if self.causal else same
        heads = ch.attention(query, key, value, mask=mask, scores=itself, scale=1.0)
        heads = heads[:, 0].unflatten(0, order.shape[:2]).take_along_dim(order.argsort(dim=-1)[..., None], dim=2)
        return self.output(heads.transpose(1, 2).flatten(-2))
