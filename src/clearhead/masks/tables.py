"""Masks given as a table: of blocks, or of single places."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from clearhead.arguments import repr_of, tensor_of, whole
from clearhead.errors import MaskError
from clearhead.masks.base import Carrying
from clearhead.shapes import Bool

__all__ = ["Blocks", "Dense"]


class Blocks(Carrying):
    """A mask of square blocks, given by a table: ``table[q_pos // size, k_pos // size]``.

    Args:
        table: bool ``[q_blocks, k_blocks]``, ``[heads, q_blocks, k_blocks]`` or ``[batch, heads, q_blocks, k_blocks]``;
            ``True`` means may attend.
        size: positions per block, 1 or more.

    Raises:
        MaskError: ``table`` is not bool with 2 to 4 axes.
        ShapeError: ``size`` is not a whole number of at least 1.

    >>> Blocks(torch.tensor([[True, False], [True, True]]), size=2).dense(4, 4).int().tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    """

    fields: ClassVar[tuple[str, ...]] = ("table", "size")
    position_dependent = True

    def __init__(self, table: Bool[Tensor, "*leading q_blocks k_blocks"], size: int) -> None:
        self.table = _four_axes("Blocks", "table", table)
        self.size = whole("Blocks", "size", size, low=1)

    def carries(self) -> tuple[int, int]:
        return self.table.shape[0], self.table.shape[1]

    def own_size(self) -> tuple[int, int]:
        return self.table.shape[2] * self.size, self.table.shape[3] * self.size

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return _look_up(self.table, batch, head, q_pos // self.size, k_pos // self.size)

    def check(self, function: str, batch: int, heads: int, q_pos: range, k_len: int) -> None:
        super().check(function, batch, heads, q_pos, k_len)
        q_reach, k_reach = self.table.shape[2] * self.size, self.table.shape[3] * self.size
        if (len(q_pos) and (q_pos.start < 0 or q_pos.stop > q_reach)) or k_len > k_reach:
            raise MaskError.about(
                function,
                "mask",
                must=f"cover queries {q_pos.start} to {q_pos.stop - 1} and {k_len} keys",
                got=f"a table that covers {q_reach} and {k_reach}",
                then="Add blocks or make them larger.",
            )


class Dense(Carrying):
    """A mask given as a boolean tensor: one row per query of the call, one column per key.

    Args:
        allowed: bool ``[q_len, k_len]``, ``[heads, q_len, k_len]`` or ``[batch, heads, q_len, k_len]``;
            any axis may be 1. ``True`` means may attend; in torch's ``nn.MultiheadAttention`` it means the opposite.

    Raises:
        MaskError: ``allowed`` is not bool with 2 to 4 axes; during the call, its shape does not fit.

    >>> Dense(torch.tensor([[True, False], [True, True]])).dense(2, 2).int().tolist()
    [[1, 0], [1, 1]]
    """

    fields = ("allowed", "first")

    def __init__(self, allowed: Bool[Tensor, "*leading q_len k_len"]) -> None:
        self.allowed = _four_axes("Dense", "allowed", allowed)
        #: Position of the query that the first row is for.
        self.first = 0

    def carries(self) -> tuple[int, int]:
        return self.allowed.shape[0], self.allowed.shape[1]

    def own_size(self) -> tuple[int, int]:
        return self.allowed.shape[2], self.allowed.shape[3]

    def placed(self, query_offset: int) -> Dense:
        if query_offset == self.first:
            return self
        copy = self.mapped(lambda tensor: tensor)
        copy.first = query_offset
        return copy

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return _look_up(self.allowed, batch, head, q_pos - self.first, k_pos)

    def check(self, function: str, batch: int, heads: int, q_pos: range, k_len: int) -> None:
        super().check(function, batch, heads, q_pos, k_len)
        rows, columns = self.allowed.shape[2:]
        if rows not in (1, len(q_pos)) or columns not in (1, k_len):
            raise MaskError.about(
                function,
                "mask",
                must=f"have shape [..., {len(q_pos)}, {k_len}]",
                got=tuple(self.allowed.shape),
                then="A dense mask has one row per query of the call and one column per key.",
            )


def _four_axes(function: str, argument: str, value: Tensor) -> Tensor:
    tensor = tensor_of(value)
    if tensor is None or tensor.dtype != torch.bool or not 2 <= tensor.ndim <= 4:
        raise MaskError.about(
            function,
            argument,
            must="be bool with 2 to 4 axes",
            got=repr_of(value if tensor is None else tensor),
            then="True means may attend; add a float bias with ch.DenseBias.",
        )
    return tensor.reshape((1,) * (4 - tensor.ndim) + tensor.shape)


def _look_up(table: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """``table[batch, head, row, column]``; an axis of size 1 broadcasts."""
    index = [at if size > 1 else at * 0 for at, size in zip((batch, head, row, column), table.shape, strict=True)]
    return table[index[0], index[1], index[2], index[3]]
