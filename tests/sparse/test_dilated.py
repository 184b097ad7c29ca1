"""Dilated attention against the same pattern as a mask in float64, and its cost."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.sparse import dilated, dilated_attention, strided


def tensors(length: int, *, kv_heads: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = ((2, 2, length, 8), (2, kv_heads, length, 8), (2, kv_heads, length, 6))
    return [torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes]


def same(ours: Tensor, masked: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(ours, masked, atol=1e-12, rtol=1e-12)
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=ours.dtype)
    for got, wanted in zip(
        torch.autograd.grad((ours * weight).sum(), inputs),
        torch.autograd.grad((masked * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("stride", "keys_before", "keys_after"), list(itertools.product((1, 3, 4), (None, 0, 2), (None, 0, 1))), ids=str
)
@pytest.mark.parametrize("length", [1, 12, 31])
def test_dilated_attention_equals_attention_under_the_mask(
    length: int, stride: int, keys_before: int | None, keys_after: int | None
) -> None:
    inputs = tensors(length)
    ours = dilated_attention(*inputs, stride=stride, before=keys_before, after=keys_after)
    same(ours, ch.attention(*inputs, mask=dilated(stride, keys_before, keys_after)), inputs)


@pytest.mark.parametrize(("stride", "local"), [(4, 3), (4, 1), (3, 7), (5, 5), (1, 2)])
@pytest.mark.parametrize("before", [None, 2])
def test_local_keys_are_added(stride: int, local: int, before: int | None) -> None:
    inputs = tensors(31)
    mask = dilated(stride, before) | (ch.Causal() & ch.Window(local))
    ours = dilated_attention(*inputs, stride=stride, local=local, before=before, scale=0.9)
    same(ours, ch.attention(*inputs, mask=mask, scale=0.9), inputs)


def test_the_strided_pattern() -> None:
    inputs = tensors(30, kv_heads=1)
    same(dilated_attention(*inputs, stride=6, local=5), ch.attention(*inputs, mask=strided(6)), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions(dtype: torch.dtype) -> None:
    inputs = [tensor.detach().to(dtype) for tensor in tensors(64)]
    exact = ch.attention(*(part.double() for part in inputs), mask=strided(8))
    ours = dilated_attention(*inputs, stride=8, local=7)
    assert ours.dtype == dtype
    # Three roundings of outputs of size at most 3: both parts and their mean.
    allowed = 3 * 3.0 * torch.finfo(dtype).eps
    assert float((ours.double() - exact).abs().max()) <= allowed


def test_no_leak_from_the_future() -> None:
    query, key, value = (tensor.detach() for tensor in tensors(31))
    before = dilated_attention(query, key, value, stride=4, local=3)
    for tensor in (query, key, value):
        tensor[:, :, 17:] = torch.randn_like(tensor[:, :, 17:])
    changed = dilated_attention(query, key, value, stride=4, local=3)
    torch.testing.assert_close(before[:, :, :17], changed[:, :, :17], atol=0.0, rtol=0.0)


def test_missing_axes_stay_missing() -> None:
    inputs = [tensor[0, 0] for tensor in tensors(9)]
    assert dilated_attention(*inputs, stride=2).shape == (9, 6)


def test_bad_calls_raise_one_line() -> None:
    query, key, value = tensors(8)
    with pytest.raises(ch.ShapeError, match="dilated_attention: stride must be a whole number of at least 1; got 0"):
        dilated_attention(query, key, value, stride=0)
    with pytest.raises(ch.ShapeError, match="dilated_attention: key must have query's length 5"):
        dilated_attention(query[:, :, :5], key, value, stride=2)
    with pytest.raises(ch.UnsupportedError, match="local must be 0 unless after is 0"):
        dilated_attention(query, key, value, stride=2, after=1, local=1)


def test_large_stride_adds_no_padding() -> None:
    x = torch.randn(1, 1, 6, 4)
    torch.testing.assert_close(ch.sparse.dilated_attention(x, x, x, stride=2**40), x)
    near = ch.sparse.dilated_attention(x, x, x, stride=2**40, local=2)
    torch.testing.assert_close(near, ch.attention(x, x, x, mask=ch.Window(2)))
