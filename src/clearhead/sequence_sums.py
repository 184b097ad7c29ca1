"""Sums over the sequences of a batch in the order of a binary tree, as gradients of parameters are under
``set_invariant(True)``.

Neighbours are added first, 0 and 1, 2 and 3, then pairs of pairs, and so on. The order depends on the sequences' index
alone, and an aligned power of two of sequences is a node of the tree in every batch. So micro-batches of such sizes,
whose gradients a ``TreeSum`` adds, give the bits of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.shapes import Float, Int

__all__ = ["TreeSum", "embed", "sum_of_sequences"]


class TreeSum:
    """The sum of lists of tensors, one list for each node of equal size, the last of which may be smaller.

    Attributes:
        count: number of lists so far.

    Cost: ``log2(count)`` lists in memory.

    >>> total = TreeSum()
    >>> for number in (1.0, 2.0, 3.0):
    ...     total.add([torch.tensor(number), None])
    >>> total.result()
    [tensor(6.), None]
    """

    def __init__(self) -> None:
        self.count = 0
        self._nodes: list[list[Tensor | None]] = []

    def add(self, tensors: Sequence[Tensor | None]) -> None:
        """Add the next list; None is 0."""
        self._nodes.append(list(tensors))
        node, self.count = self.count, self.count + 1
        while node % 2:
            self._combine_last()
            node //= 2

    def result(self) -> list[Tensor | None]:
        """The sums; an empty list if nothing was added."""
        while len(self._nodes) > 1:
            self._combine_last()
        return self._nodes[0] if self._nodes else []

    def _combine_last(self) -> None:
        last = self._nodes.pop()
        self._nodes[-1] = [
            one if other is None else other if one is None else one + other
            for one, other in zip(self._nodes[-1], last, strict=True)
        ]


def sum_of_sequences(parts: Float[Tensor, "batch ..."]) -> Float[Tensor, "..."]:
    """The sum over the first axis.

    Cost: one pass over ``parts``, and half of it in memory.

    >>> sum_of_sequences(torch.ones(5, 2))
    tensor([5., 5.])
    """
    if not len(parts):
        return parts.sum(0)
    while len(parts) > 1:
        pairs = len(parts) // 2
        parts = torch.cat([parts[0 : 2 * pairs : 2] + parts[1 : 2 * pairs : 2], parts[2 * pairs :]])
    return parts[0]


def embed(ids: Int[Tensor, "batch len"], weight: Float[Tensor, "rows width"]) -> Float[Tensor, "batch len width"]:
    """``weight[ids]``, whose gradient is added token by token in a sequence, and over the sequences in tree order.

    Cost: that of ``torch.nn.functional.embedding``, and in backward ``log2(batch)`` sorts of the ids.

    >>> embed(torch.tensor([[1, 0]]), torch.tensor([[5.0], [7.0]])).tolist()
    [[[7.0], [5.0]]]
    """
    output: Tensor = _Embedding.apply(ids, weight)  # type: ignore[no-untyped-call]
    return output


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = len(weight)
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        return None, _embedding_gradient(grad, ids, ctx.rows)


def _embedding_gradient(grad: Tensor, ids: Tensor, rows: int) -> Tensor:
    """The sum of the rows of ``grad`` for each id; only ids that occur have sums until the end."""
    result = grad.new_zeros(rows, grad.shape[-1])
    if not ids.numel():
        return result
    leaves = 1 << (len(ids) - 1).bit_length()
    # An id in a sequence, then in a pair of sequences, and so on.
    keys = ids.long() * leaves + torch.arange(len(ids), device=ids.device)[:, None]
    keys, sums = _sum_equal(keys.flatten(), grad.flatten(0, 1))
    while leaves > 1:
        leaves //= 2
        keys, sums = _sum_equal(keys // 2, sums)
    return result.index_copy_(0, keys, sums)


def _sum_equal(keys: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The different keys, and for each the sum of its rows in order."""
    keys, place = keys.unique(return_inverse=True)
    sums: Tensor = torch.ops.aten.embedding_dense_backward(rows.contiguous(), place, len(keys), -1, False)
    return keys, sums
