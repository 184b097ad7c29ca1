"""The operator ``cache_append`` writes only the new tokens into a cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from clearhead.int8_rows import quantize
from tests.agreement import needs_native

pytestmark = needs_native

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
CACHES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "heads side by side": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "within a longer one": lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]],
    "within wider heads": lambda x: torch.cat([x, x], 3)[..., x.shape[3] :],
}
NEW: dict[str, Callable[[Tensor], Tensor]] = CACHES | {
    "column-major": lambda x: x.mT.contiguous().mT,
    "one for all heads": lambda x: x[:, :1].expand_as(x),
    "lazily negated": lambda x: torch._neg_view(-x),
}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("new_layout", NEW)
@pytest.mark.parametrize("layout", CACHES)
@DTYPES
def test_strides_do_not_change_bits(dtype: torch.dtype, layout: str, new_layout: str) -> None:
    cache, new = CACHES[layout](draw(2, 3, 17, 9, dtype=dtype)), NEW[new_layout](draw(2, 3, 4, 9, seed=1, dtype=dtype))
    right = cache.clone()
    right[:, :, 5:9] = new
    torch.ops.clearhead.cache_append(cache, new, 5)
    assert torch.equal(cache, right)


@pytest.mark.parametrize(("capacity", "length", "first"), [(1, 1, 0), (8, 8, 0), (8, 1, 7), (300, 200, 99)], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (2, 33), (5, 256), (1, 300)], ids=str)
@DTYPES
def test_any_size_is_within_the_error_budget(
    dtype: torch.dtype, heads: int, dim: int, capacity: int, length: int, first: int
) -> None:
    cache, new = draw(3, heads, capacity, dim, dtype=dtype), draw(3, heads, length, dim, seed=1, dtype=dtype)
    right = cache.clone()
    right[:, :, first : first + length] = new
    torch.ops.clearhead.cache_append(cache, new, first)
    assert torch.equal(cache, right)


@pytest.mark.parametrize("new_layout", NEW)
@pytest.mark.parametrize("layout", CACHES)
@DTYPES
def test_int8_rows_have_the_bits_of_the_formula(dtype: torch.dtype, layout: str, new_layout: str) -> None:
    for dim in (9, 16, 200):
        cache = CACHES[layout](torch.full((2, 3, 17, dim + 4), 77, dtype=torch.int8))
        new, right = NEW[new_layout](draw(2, 3, 4, dim, seed=1, dtype=dtype)), cache.clone()
        right[:, :, 5:9] = quantize(new)
        torch.ops.clearhead.cache_append(cache, new, 5)
        assert torch.equal(cache, right)


def test_a_slice_of_a_cache_leaves_the_rest_unmodified() -> None:
    whole = torch.full((2, 4, 10, 8), torch.nan)
    torch.ops.clearhead.cache_append(whole[:, 1:3, 2:8, :5], torch.ones(2, 2, 3, 5), 1)
    right = torch.full((2, 4, 10, 8), torch.nan)
    right[:, 1:3, 3:6, :5] = 1.0
    torch.testing.assert_close(whole, right, rtol=0.0, atol=0.0, equal_nan=True)


def test_nan_payloads_are_copied_bitwise() -> None:
    """NaN with a payload, infinity, negative zero and subnormals."""
    bits = torch.tensor([0x7F800123, -0x7FFFFF, 0x7F800000, -(2**31), 1], dtype=torch.int32)
    cache = torch.zeros(1, 1, 3, 5)
    torch.ops.clearhead.cache_append(cache, bits.view(torch.float32).view(1, 1, 1, 5), 2)
    assert torch.equal(cache[0, 0, 2].view(torch.int32), bits)


@pytest.mark.parametrize("shape", [(2, 3, 0, 8), (0, 3, 2, 8), (2, 0, 2, 8)], ids=str)
def test_no_tokens_leave_the_cache_unmodified(shape: tuple[int, ...]) -> None:
    cache = torch.zeros(*shape[:2], 4, 8)
    torch.ops.clearhead.cache_append(cache, torch.ones(shape), 1)
    assert bool((cache == 0).all())
