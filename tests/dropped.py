"""Which activations dropout keeps, from the definition in ``native_dropout.dropped``, in torch's operators."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.backends.dropout import philox

__all__ = ["kept"]


def kept(rows: int, width: int, levels: int, seed: int) -> Tensor:
    """bool ``[rows, width]``."""
    columns = torch.arange(width)
    counter = (columns // 128 * 16 + columns % 16).expand(rows, width)
    row, last = torch.arange(rows)[:, None].expand(rows, width), torch.full((rows, width), 2**32 - 1)
    words = torch.stack(philox((counter, row, torch.zeros_like(row), last), seed), -1)
    half = (columns % 128 // 16).expand(rows, width)
    drawn = words.gather(-1, half[..., None] // 2)[..., 0] >> (16 * (half % 2)) & 0xFFFF
    return drawn >= levels
