"""The yardstick: how fast this machine multiplies matrices when nothing else is asked of it."""

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


def _product_call(dtype: torch.dtype) -> Callable[[], Tensor]:
    """The product in ``dtype`` by oneDNN.

    In float32 torch's own ``@`` goes to MKL, which on some processors runs at half the rate; oneDNN is asked for by
    name where this torch has it. In 16 bits ``@`` goes to oneDNN.
    """
    one = torch.randn(_SIZE, _SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
    if dtype != torch.float32:
        return lambda: one @ one
    try:
        linear = torch.ops.mkldnn._linear_pointwise
        linear(one[:8], one, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return lambda: one @ one
    return lambda: linear(one, one, None, "none", [], "")


def yardsticks(dtype: torch.dtype) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """The product by its name; or why it is left out: where oneDNN has none in 16 bits torch's takes a minute."""
    absent = None if dtype is torch.float32 else ONEDNN.absent(dtype)
    return ({PRODUCT: _product_call(dtype)}, {}) if absent is None else ({}, {PRODUCT: absent})
