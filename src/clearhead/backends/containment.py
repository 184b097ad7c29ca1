"""Keeping NaN and inf where they belong: a token that nobody may attend to touches nobody.

Zero weight times NaN is NaN, so a product with masked tokens in it spreads them. Tokens that are not
finite are therefore zeroed before the products, and put back as NaN where the mask lets them through:
a row that attends to such a key is NaN, a row that attends to such a value is NaN in that channel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clearhead.shapes import Bool, Float

__all__ = ["all_finite", "clean_rows"]


def all_finite(*tensors: Tensor) -> bool:
    """Whether every entry is finite, in one pass and without a copy.

    A sum that overflows on finite entries gives a harmless false alarm.
    """
    return all(math.isfinite(float(tensor.detach().sum(dtype=_sum_dtype(tensor)))) for tensor in tensors)


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def clean_rows(
    tensor: Float[Tensor, "batch heads len dim"],
) -> tuple[Float[Tensor, "batch heads len dim"], Bool[Tensor, "batch heads len"]]:
    """The tensor with tokens that are not finite set to 0, and which tokens those were."""
    bad = ~torch.isfinite(tensor).all(dim=-1)
    return tensor.masked_fill(bad[..., None], 0.0), bad
