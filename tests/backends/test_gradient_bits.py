"""Bits of gradients of attention: those of a head and a sequence are the same with others beside them, or without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.ops.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels are not installed")

MASKS = {
    "full": None,
    "causal": ch.Causal(),
    "window": ch.Causal() & ch.Window(100),
    "far window": ch.Window(600),
    "prefix": ch.Causal() | ch.Prefix(300),
}


def _inputs(batch: int, heads: int, kv_heads: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(heads, 24), (kv_heads, 24), (kv_heads, 16), (heads, 16)]
    return [torch.randn(batch, count, length, width, generator=generator).to(dtype) for count, width in shapes]


def _gradients(inputs: list[Tensor], **options: Any) -> list[Tensor]:
    *leaves, grad = (tensor.detach().clone() for tensor in inputs)
    output = ch.attention(*(leaf.requires_grad_() for leaf in leaves), **options)
    return list(torch.autograd.grad(output, leaves, grad))


@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("length", [700, 2_100, pytest.param(5_000, marks=pytest.mark.slow)])
def test_heads_batch_and_threads_change_no_bit(length: int, kv_heads: int, dtype: torch.dtype) -> None:
    inputs = _inputs(2, 4, kv_heads, length, dtype)
    for name, mask in MASKS.items():
        torch.set_num_threads(1)
        right = _gradients(inputs, mask=mask)
        torch.set_num_threads(3)
        assert all(map(torch.equal, right, _gradients(inputs, mask=mask))), name
        group = 4 // kv_heads
        one = [tensor[:1, : group if place in (0, 3) else 1] for place, tensor in enumerate(inputs)]
        for whole, alone in zip(right, _gradients(one, mask=mask), strict=True):
            assert torch.equal(whole[:1, : alone.shape[1]], alone), name


def _padded(tensor: Tensor, length: int, first: int) -> Tensor:
    result = torch.zeros(*tensor.shape[:2], length, tensor.shape[3], dtype=tensor.dtype)
    result[:, :, first : first + tensor.shape[2]] = tensor
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 5, 100, 257, 600])
def test_padding_and_packing_change_no_bit(length: int, dtype: torch.dtype) -> None:
    inputs = _inputs(1, 2, 2, length, dtype)
    with ch.invariant():
        alone = _gradients(inputs, mask=ch.Causal())
        for total, first in ((length + 7, 0), (900, 0), (length + 130, 130), (length + 3, 3)):
            beside = _inputs(1, 2, 2, total, dtype)
            ids = torch.full((2, total), -1)
            ids[0, first : first + length] = 0
            ids[1, : total // 2], ids[1, total // 2 :] = 0, 1
            both = [
                torch.cat([_padded(tensor, total, first), other]) for tensor, other in zip(inputs, beside, strict=True)
            ]
            for one, many in zip(alone, _gradients(both, mask=ch.Documents(ids=ids) & ch.Causal()), strict=True):
                assert torch.equal(one, many[:1, :, first : first + length]), (total, first)


@pytest.mark.parametrize("length", [30, 600])
def test_gradient_of_a_table_adds_the_batch_in_a_tree(length: int) -> None:
    inputs = _inputs(6, 2, 2, length, torch.float32)
    table = torch.randn(2, 9, requires_grad=True)
    grad = inputs.pop()

    def gradient(part: slice) -> Tensor:
        output = ch.attention(*(tensor[part] for tensor in inputs), scores=[ch.RelativeBias(table)])
        return torch.autograd.grad(output, table, grad[part])[0]

    each = [gradient(slice(row, row + 1)) for row in range(6)]
    assert torch.equal(gradient(slice(6)), ((each[0] + each[1]) + (each[2] + each[3])) + (each[4] + each[5]))
