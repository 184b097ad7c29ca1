"""Dropout of activations by the operator ``clearhead::dropout_add``."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.backends.dropout import LEVELS
from clearhead.ops.library import library
from clearhead.shapes import Float

__all__ = ["LEVELS", "dropped", "takes"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def takes(x: Tensor) -> bool:
    """Whether ``dropped`` takes such a tensor."""
    return x.dtype in _DTYPES and x.is_cpu and library() is not None


def dropped(
    x: Float[Tensor, "*batch width"],
    levels: int,
    seed: int,
    added: Float[Tensor, "*batch width"] | None = None,
    first_row: int = 0,
) -> Float[Tensor, "*batch width"]:
    """``x`` with some of its elements 0 and the others divided by the share that is kept, plus ``added``.

    An element is kept where its 16 bits are at least ``levels``: those that ``backends.dropout.bits`` has for its
    column in the row ``(row, 0, 2**32 - 1)``. Rows are counted over all leading axes, from ``first_row``.

    Args:
        x: ``[*batch, width]``, float32, bfloat16, float16 or float64.
        levels: how many of ``LEVELS`` elements are dropped on average, below ``LEVELS``.
        seed: below ``2**64``.
        added: of the same shape and dtype.
        first_row: the first row's index in the whole that ``x`` is a part of.

    Cost: one pass over memory; the same bits whatever the number of threads is.

    >>> dropped(torch.ones(1, 4), 0, 0, torch.ones(1, 4))
    tensor([[2., 2., 2., 2.]])
    """
    signed = seed - 2**64 if seed >= 2**63 else seed
    if x.dim() == 0:
        row = None if added is None else added.reshape(1)
        return dropped(x.reshape(1), levels, seed, row, first_row).squeeze(0)
    if x.dtype is torch.float64:
        # The operator has no float64. It says which elements are kept.
        mask = dropped(torch.ones_like(x, dtype=torch.float32), levels, seed, None, first_row).bool()
        exact = torch.where(mask, x.detach() * (LEVELS / (LEVELS - levels)), 0.0)
        return exact if added is None else exact + added.detach()
    output: Tensor = torch.ops.clearhead.dropout_add.default(x.detach(), added, levels, signed, first_row)
    return output
