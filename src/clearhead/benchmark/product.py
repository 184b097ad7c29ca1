"""The yardstick: this machine's rate of a plain matrix product."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from clearhead.projection.paths import ONEDNN

__all__ = ["OPERATIONS", "PRODUCT", "yardsticks"]

PRODUCT = "oneDNN product"
"""Name of the yardstick among the contenders: two square matrices of 2048 rows."""

_SIZE = 2048
OPERATIONS = 2.0 * _SIZE**3


def yardsticks(dtype: torch.dtype) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """The product in ``dtype`` by oneDNN, or the reason why it is left out.

    In float32 torch's ``@`` uses MKL, which on some processors runs at half the rate; this calls oneDNN directly where
    this torch has it. In 16 bits ``@`` uses oneDNN; without it the product takes a minute and is left out.
    """
    one = torch.randn(_SIZE, _SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
    absent = ONEDNN.absent(dtype)
    if dtype is torch.float32:
        return {PRODUCT: (lambda: one @ one) if absent else (lambda: ONEDNN.forward(one, one, None))}, {}
    return ({}, {PRODUCT: absent}) if absent else ({PRODUCT: lambda: one @ one}, {})
