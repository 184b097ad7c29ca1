"""The activations that dropout does not drop, by the definition of ``clearhead.ops.dropout.dropped``, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.backends.dropout import bits

__all__ = ["keep_mask"]


def keep_mask(rows: int, width: int, levels: int, seed: int) -> Tensor:
    """bool ``[rows, width]``."""
    group = torch.arange((width + 63) // 64)
    row = torch.arange(rows)[:, None]
    drawn = bits(seed, group, (row, torch.zeros_like(row), torch.full_like(row, 2**32 - 1)))
    return drawn[:, :width] >= levels
