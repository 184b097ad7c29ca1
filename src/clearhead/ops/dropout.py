"""Dropout of activations by the operator ``clearhead::dropout_add``."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.backends.dropout import LEVELS, bits
from clearhead.ops.library import library
from clearhead.shapes import Float, Int

__all__ = ["LEVELS", "dropped", "dropped_at", "takes"]

#: Columns of a group of bits; the third word of a row of activations; elements whose bits are drawn at a time.
_COLUMNS, _ROW_WORD, _BLOCK = 64, 2**32 - 1, 2**20
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def takes(x: Tensor) -> bool:
    """Whether ``dropped`` takes such a tensor."""
    return x.dtype in _DTYPES and x.is_cpu and library() is not None


def dropped(
    x: Float[Tensor, "*batch width"],
    levels: int,
    seed: int,
    added: Float[Tensor, "*batch width"] | None = None,
    rows: Int[Tensor, " rows"] | int = 0,
) -> Float[Tensor, "*batch width"]:
    """``x`` with some of its elements 0 and the others divided by the share that is kept, plus ``added``.

    An element is kept where its 16 bits are at least ``levels``: those that ``backends.dropout.bits`` has for its
    column in the row ``(number % 2**32, number >> 32, 2**32 - 1)``. Rows are counted over all leading axes.

    Args:
        x: ``[*batch, width]``, float32, bfloat16, float16 or float64.
        levels: how many of ``LEVELS`` elements are dropped on average, below ``LEVELS``.
        seed: below ``2**64``.
        added: of the same shape and dtype.
        rows: the rows' numbers, int64, or the first one's, from which the others are counted: the index in the whole
            that ``x`` is a part of.

    Cost: one pass over memory; the same bits whatever the number of threads is.

    >>> dropped(torch.ones(1, 4), 0, 0, torch.ones(1, 4))
    tensor([[2., 2., 2., 2.]])
    """
    signed = seed - 2**64 if seed >= 2**63 else seed
    if x.dim() == 0:
        row = None if added is None else added.reshape(1)
        return dropped(x.reshape(1), levels, seed, row, rows).squeeze(0)
    if x.dtype is torch.float64:
        # The operator has no float64. It says which elements are kept.
        mask = dropped(torch.ones_like(x, dtype=torch.float32), levels, seed, None, rows).bool()
        exact = torch.where(mask, x.detach() * (LEVELS / (LEVELS - levels)), 0.0)
        return exact if added is None else exact + added.detach()
    place = (rows, None) if isinstance(rows, int) else (0, rows)
    output: Tensor = torch.ops.clearhead.dropout_add.default(x.detach(), added, levels, signed, *place)
    return output


def dropped_at(
    x: Float[Tensor, "*batch width"],
    levels: int,
    seed: int,
    rows: Int[Tensor, " rows"] | int,
    first_column: int,
    added: Float[Tensor, "*batch width"] | None = None,
) -> Float[Tensor, "*batch width"]:
    """``dropped`` for a part of a larger tensor, which drops the same elements as ``dropped`` of the whole.

    Args:
        x: the part.
        levels: how many of ``LEVELS`` elements are dropped on average, below ``LEVELS``.
        seed: below ``2**64``.
        rows: the rows' numbers in the whole, int64, or the first one's, from which the others are counted.
        first_column: the whole's column that is the first of ``x``.
        added: of the same shape and dtype.

    Cost: that of ``dropped`` if all columns are there from the first one; else about 90 passes over an eighth of the
    elements in int64.

    >>> whole = torch.ones(4, 96)
    >>> part = dropped_at(whole[2:, 48:], 30000, 7, torch.tensor([2, 3]), 48)
    >>> torch.equal(part, dropped(whole, 30000, 7)[2:, 48:])
    True
    """
    if first_column == 0:
        return dropped(x, levels, seed, added, rows)
    if isinstance(rows, int):
        rows = torch.arange(rows, rows + x.shape[:-1].numel(), device=x.device)
    width, start = x.shape[-1], first_column // _COLUMNS
    groups = torch.arange(start, (first_column + width - 1) // _COLUMNS + 1, device=rows.device)
    flat, columns = x.detach().reshape(-1, width), slice(first_column - start * _COLUMNS, None)
    factor, output = LEVELS / (LEVELS - levels), torch.empty_like(flat)
    # In blocks, since the bits take several times the memory of the elements.
    for block in torch.arange(len(flat), device=rows.device).split(max(1, _BLOCK // max(1, width))):
        row = rows[block, None], rows[block, None] >> 32, torch.full_like(rows[:1], _ROW_WORD)
        keep = bits(seed, groups, row)[:, columns][:, :width] >= levels
        work = flat[block].to(torch.promote_types(x.dtype, torch.float32))
        output[block] = torch.where(keep, work * factor, 0.0).to(x.dtype)
    dropped_part = output.view(x.shape)
    return dropped_part if added is None else dropped_part + added.detach()
