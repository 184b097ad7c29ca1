"""Rows of keys and values in int8, as an int8 KV cache holds them: the integers of a row, then its float32 scale.

``x[c] = integers[c] * scale`` with ``scale = max |x| / 127``, for each batch entry, head and token.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from clearhead.shapes import Float, Int

__all__ = ["SCALE_BYTES", "channels_of", "dequantize", "is_quantized", "quantize", "row_length"]

#: Bytes of the scale behind the integers of a row.
SCALE_BYTES: Final = 4
#: A row whose values are all smaller is a row of zeros: its scale could be subnormal (``CH_LEAST_QUANTIZED``).
_LEAST: Final = 2.0**-119
_MOST: Final = 127


def is_quantized(rows: Tensor) -> bool:
    """Whether a tensor has int8 rows."""
    return rows.dtype is torch.int8


def row_length(channels: int, dtype: torch.dtype | None) -> int:
    """Elements that a row of so many channels has in a cache of this dtype."""
    return channels + SCALE_BYTES if dtype is torch.int8 else channels


def channels_of(rows: Tensor) -> int:
    """Channels of a row of keys or values, quantized or not."""
    return rows.shape[-1] - SCALE_BYTES if is_quantized(rows) else rows.shape[-1]


def quantize(x: Float[Tensor, "*batch channels"]) -> Int[Tensor, "*batch bytes"]:
    """Rows in int8, each followed by its scale; what the operator ``cache_append`` writes, bit for bit.

    Values are rounded to the nearest integer, halves to the even one. A row of zeros, or of values below 2**-119, has
    the scale 0. A row with NaN or infinity has zeros and the scale NaN.
    """
    x = x.to(torch.float32)
    most = x.abs().amax(dim=-1, keepdim=True)
    scale = most / _MOST
    scale = scale.masked_fill(most < _LEAST, 0.0).masked_fill(~torch.isfinite(most), torch.nan)
    integers = torch.nan_to_num(torch.round(x / scale), nan=0.0, posinf=0.0, neginf=0.0).to(torch.int8)
    return torch.cat([integers, scale.contiguous().view(torch.int8)], dim=-1)


def dequantize(rows: Int[Tensor, "*batch bytes"]) -> Float[Tensor, "*batch channels"]:
    """The float32 values of int8 rows: those that attention to the rows is defined by."""
    integers, scale = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:]
    # A copy, as a float32 view must start at a multiple of its size.
    return integers.to(torch.float32) * scale.clone(memory_format=torch.contiguous_format).view(torch.float32)
