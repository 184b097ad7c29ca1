"""Big Bird's attention: each block of tokens reads its neighbours, the first blocks, and a few random ones.

``softmax(q k^T / sqrt(head_dim)) @ v`` under a table of blocks. A block reads a window of ``window`` blocks, the first
``num_global`` blocks, and ``num_random`` random ones, which each head draws once. The first ``num_global`` blocks read
all.

Paper: Zaheer et al. 2020, "Big Bird", section 2 and appendix D, arXiv:2007.14062; the defaults are its base model's.
"""

from __future__ import annotations

from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import MultiHeadAttention


class BigBirdAttention(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; ``len`` is at most ``max_len``.

    >>> import torch
    >>> BigBirdAttention(8, num_heads=2, max_len=16, size=2)(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, max_len: int = 4096, size: int = 64, window: int = 3,
        num_global: int = 2, num_random: int = 3,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.size = MultiHeadAttention(embed_dim, num_heads), size
        options = {"window": window, "num_global": num_global, "num_random": num_random, "num_heads": num_heads}
        self.register_buffer("table", ch.sparse.big_bird(max_len, size=size, **options).table)

    def forward(self, x: Tensor, *, mask: ch.Mask | None = None) -> Tensor:
        blocks = ch.Blocks(self.table, self.size)
        return self.heads(x, mask=blocks if mask is None else blocks & mask)
