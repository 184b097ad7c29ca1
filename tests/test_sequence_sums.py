"""Sums over sequences: their order is that of a tree over the sequences' index, whatever the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clearhead.sequence_sums import TreeSum, embed, sum_of_sequences, tree_nodes


def _tree(parts: list[Tensor]) -> Tensor:
    """The definition: neighbours, then pairs of pairs."""
    while len(parts) > 1:
        pairs = [parts[place] + parts[place + 1] for place in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 16])
def test_sum_has_the_order_of_the_tree(count: int) -> None:
    parts = torch.randn(count, 50, generator=torch.Generator().manual_seed(count))
    assert torch.equal(sum_of_sequences(parts), _tree(list(parts)))
    for size in (1, 2, 4):
        total = TreeSum()
        for some in parts.split(size):
            total.add([sum_of_sequences(some)])
        (result,) = total.result()
        assert result is not None
        assert torch.equal(result, _tree(list(parts)))


@pytest.mark.parametrize("count", [1, 5, 12, 16, 29])
def test_parts_of_any_size_are_nodes_of_the_tree(count: int) -> None:
    parts = torch.randn(count, 20, generator=torch.Generator().manual_seed(count))
    for size in range(1, count + 1):
        total, sequences = TreeSum(), []
        for start in range(0, count, size):
            for node in tree_nodes(range(start, min(start + size, count)), count):
                total.add([sum_of_sequences(parts[node.start : node.stop])], node)
                sequences += node
        assert sequences == list(range(count))
        (result,) = total.result()
        assert result is not None
        assert torch.equal(result, _tree(list(parts)))
    assert tree_nodes(range(0), count) == []
    assert len(tree_nodes(range(count), count)) == 1


def test_an_absent_tensor_counts_as_zero() -> None:
    total = TreeSum()
    for tensors in ([None, torch.ones(1)], [torch.ones(1), None], [None, None]):
        total.add(tensors)
    assert total.result() == [torch.ones(1), torch.ones(1)]
    assert TreeSum().result() == []


@pytest.mark.parametrize("batch", [1, 2, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_of_an_embedding_has_the_order_of_the_tree(batch: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(0, 4, (batch, 30), generator=generator)
    grad = torch.randn(batch, 30, 3, generator=generator).to(dtype)
    weight = torch.randn(6, 3, generator=generator).to(dtype).requires_grad_()
    output = embed(ids, weight)
    assert torch.equal(output, torch.nn.functional.embedding(ids, weight))
    (computed,) = torch.autograd.grad(output, weight, grad)
    each = [torch.ops.aten.embedding_dense_backward(grad[row], ids[row], 6, -1, False) for row in range(batch)]
    assert torch.equal(computed, _tree(each))
