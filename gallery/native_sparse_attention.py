"""Native sparse attention (NSA): each query reads summaries of all blocks, the best few blocks, and a sliding window.

``sum_c gate_c * attention(q, K_c, V_c)`` over three branches ``c``, each with keys and values of its own, one head of
them for all query heads. Compression reads one learned key and value for each complete block. Selection adds up the
compression weights of all query heads and reads the ``keep`` best blocks; the first block, the query's block and the
one before it are always among them. The window reads the last ``window`` tokens. The choice has no gradient.

Compression and selection use the same blocks here, without overlap. The paper lets the two differ.

Paper: Yuan et al. 2025, "Native sparse attention", sections 3.2 (gates) and 3.3 (branches), arXiv:2502.11089.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead as ch


class NativeSparseAttention(nn.Module):
    """Tokens ``[batch, len, embed_dim]`` to the same shape; always causal.

    >>> NativeSparseAttention(8, num_heads=2, size=2)(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, embed_dim: int, num_heads: int, *, size: int = 64, keep: int = 16, window: int = 512) -> None:
        super().__init__()
        self.size, self.keep, self.window, width = size, keep, window, embed_dim // num_heads
        self.project = nn.Linear(embed_dim, (num_heads + 6) * width, bias=False)
        layers = ([nn.Linear(size * width, width), nn.ReLU(), nn.Linear(width, width)] for _ in range(2))
        self.compress = nn.ModuleList(nn.Sequential(*layer) for layer in layers)
        self.gates, self.output = nn.Linear(embed_dim, 3 * num_heads), nn.Linear(embed_dim, embed_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        length, heads, ends = x.shape[1], self.gates.out_features // 3, x.shape[1] // self.size
        query, *shared = self.project(x).unflatten(-1, (heads + 6, -1)).transpose(1, 2).split([heads] + 6 * [1], dim=1)
        cut = (part[:, :, : ends * self.size].unflatten(2, (ends, self.size)).flatten(3) for part in shared[:2])
        short = [layer(part) for layer, part in zip(self.compress, cut, strict=True)]
        row = torch.arange(length, device=x.device)[:, None]
        block = row[:: self.size, 0]
        complete = ch.Dense(block[:ends] + self.size <= row + 1)
        coarse = ch.observe_attention(query, *short, mask=complete, want=ch.Want(rows=range(length)))
        importance = F.pad(coarse.rows.detach().sum(dim=1, keepdim=True), (0, len(block) - ends))
        importance = importance.masked_fill((row - block < 2 * self.size) | (block == 0), torch.inf)
        best = importance.masked_fill(block > row, -torch.inf).topk(min(self.keep, len(block))).indices
        chosen = torch.zeros_like(importance, dtype=torch.bool).scatter(-1, best, True)
        masks = (ch.Dense(chosen.repeat_interleave(self.size, -1)[..., :length]), ch.Window(self.window - 1))
        fine = [ch.attention(query, *shared[2 * c + 2 : 2 * c + 4], mask=ch.Causal() & masks[c]) for c in range(2)]
        gates = self.gates(x).sigmoid().unflatten(-1, (3, heads, 1)).permute(2, 0, 3, 1, 4)
        return self.output((gates * torch.stack([coarse.output, *fine])).sum(dim=0).transpose(1, 2).flatten(-2))
