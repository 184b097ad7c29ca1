"""Sums over the sequences of a batch in the order of a binary tree, as gradients of parameters are under
``set_invariant(True)``.

Neighbours are added first, 0 and 1, 2 and 3, then pairs of pairs, and so on. The order depends on the sequences' index
alone, and an aligned power of two of sequences is a node of the tree in every batch. So parts of a batch that consist
of nodes, whose gradients a ``TreeSum`` adds, give the bits of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.shapes import Float, Int

__all__ = ["TreeSum", "embed", "sum_of_sequences", "tree_nodes"]


class TreeSum:
    """The sum of lists of tensors in tree order, from lists that are each the sum of one node's sequences.

    Attributes:
        nodes: the nodes that are not yet part of a larger one: their sequences and sums, in order.

    Cost: at most ``2 * log2(sequences)`` lists in memory.

    >>> total = TreeSum()
    >>> for number in (1.0, 2.0, 3.0):
    ...     total.add([torch.tensor(number), None])
    >>> total.result()
    [tensor(6.), None]
    """

    def __init__(self) -> None:
        self.nodes: list[tuple[range, list[Tensor | None]]] = []

    def add(self, tensors: Sequence[Tensor | None], sequences: range | None = None) -> None:
        """Add the sum of a node.

        Args:
            tensors: the sums; None is 0.
            sequences: those of the node, one of ``tree_nodes``; by default the next sequence.
        """
        if sequences is None:
            start = self.nodes[-1][0].stop if self.nodes else 0
            sequences = range(start, start + 1)
        self.nodes.append((sequences, list(tensors)))
        while len(self.nodes) > 1 and _are_siblings(self.nodes[-2][0], self.nodes[-1][0]):
            self._combine_last()

    def result(self) -> list[Tensor | None]:
        """The sums; an empty list if nothing was added."""
        while len(self.nodes) > 1:
            self._combine_last()
        return self.nodes[0][1] if self.nodes else []

    def _combine_last(self) -> None:
        after, last = self.nodes.pop()
        before, first = self.nodes.pop()
        sums = [
            one if other is None else other if one is None else one + other
            for one, other in zip(first, last, strict=True)
        ]
        self.nodes.append((range(before.start, after.stop), sums))


def tree_nodes(sequences: range, whole: int) -> list[range]:
    """The largest nodes of the tree over ``whole`` sequences that consist of some consecutive ones, in order.

    Args:
        sequences: some of ``range(whole)``.
        whole: number of sequences of the whole batch.

    Returns:
        Aligned powers of two of sequences, at most ``2 * log2(len(sequences))`` of them; a node at the end of the
        batch may be smaller.

    >>> tree_nodes(range(3, 6), 16)
    [range(3, 4), range(4, 6)]
    >>> tree_nodes(range(0, 12), 12)
    [range(0, 12)]
    """
    nodes, start = [], sequences.start
    while start < sequences.stop:
        size = start & -start or _size(whole)
        while min(start + size, whole) > sequences.stop:
            size //= 2
        nodes.append(range(start, min(start + size, whole)))
        start += size
    return nodes


def _size(count: int) -> int:
    """The power of two of sequences that a node of ``count`` sequences has in a tree with enough of them."""
    return 1 << (count - 1).bit_length()


def _are_siblings(first: range, second: range) -> bool:
    size = len(first)
    return first.stop == second.start and _size(len(second)) == size and first.start % (2 * size) == 0


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
