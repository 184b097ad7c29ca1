"""The operator ``rotary`` against its formula in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from clearhead.positions import Rotary, table_of
from tests.agreement import needs_native

pytestmark = needs_native

#: Error of elements of magnitude 1: three float32 roundings and one to the dtype.
UNITS = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
DTYPES = pytest.mark.parametrize("dtype", UNITS, ids=str)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "heads side by side": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "column-major": lambda x: x.mT.contiguous().mT,
    "every second token": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "one for all heads": lambda x: x[:, :1].expand_as(x),
    "slices of channels": lambda x: torch.cat([torch.full_like(x, torch.nan), x], -1)[..., x.shape[-1] :],
    "an odd address": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "lazily negated": lambda x: torch._neg_view(-x),
}


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def table(dim: int, positions: int = 512, base: float = 100.0) -> Tensor:
    return table_of(Rotary(base), dim, positions)


def rotate(x: Tensor, first: int = 0, back: bool = False, base: float = 100.0) -> Tensor:
    output: Tensor = torch.ops.clearhead.rotary(x, table(x.shape[-1], base=base), first, back)
    return output


def formula(x: Tensor, first: int, back: bool, base: float = 100.0) -> Tensor:
    """Pairs as complex numbers, times ``exp(i position base^(-2 pair / dim))``."""
    half = x.shape[-1] // 2
    places = torch.arange(first, first + x.shape[-2], dtype=torch.float64)
    angles = torch.outer(places, base ** (-torch.arange(half, dtype=torch.float64) / half)) * (-1 if back else 1)
    wide = x.double()
    rotated = torch.complex(wide[..., :half], wide[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([rotated.real, rotated.imag], -1)


@pytest.mark.parametrize("back", [False, True], ids=["forward", "back"])
@pytest.mark.parametrize("first", [0, 7, 300])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 2), (2, 3, 5, 8), (2, 4, 1, 34), (1, 2, 200, 80), (3, 1, 7, 256), (2, 2, 9, 6)], ids=str
)
@DTYPES
def test_every_dtype_size_and_position_matches_the_formula(
    dtype: torch.dtype, shape: tuple[int, ...], first: int, back: bool
) -> None:
    x, unit = draw(*shape, dtype=dtype), 5.0 * UNITS[dtype]
    output = rotate(x, first, back)
    assert (output.shape, output.dtype) == (x.shape, dtype)
    torch.testing.assert_close(output.double(), formula(x, first, back), rtol=unit, atol=unit)


@DTYPES
def test_rotating_back_restores_the_input(dtype: torch.dtype) -> None:
    x, unit = draw(2, 3, 40, 16, dtype=dtype), 10.0 * UNITS[dtype]
    torch.testing.assert_close(rotate(rotate(x, 3), 3, back=True), x, rtol=unit, atol=unit)


@pytest.mark.parametrize("layout", LAYOUTS)
@DTYPES
def test_strides_do_not_change_bits(dtype: torch.dtype, layout: str) -> None:
    x = LAYOUTS[layout](draw(2, 3, 9, 16, dtype=dtype))
    dense = x.resolve_neg().clone(memory_format=torch.contiguous_format)
    assert torch.equal(rotate(x, 5), rotate(dense, 5))


def test_the_input_stays_unmodified() -> None:
    x = draw(2, 3, 9, 16)
    before = x.clone()
    assert rotate(x, 5).data_ptr() != x.data_ptr()
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8), (2, 2, 3, 0)], ids=str)
def test_no_elements_give_an_empty_output(shape: tuple[int, ...]) -> None:
    assert torch.ops.clearhead.rotary(torch.zeros(shape), torch.zeros(4, shape[-1])).shape == shape


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_nan_stays_in_its_pair(bad: float) -> None:
    x = draw(2, 2, 6, 10)
    x[1, 0, 4, 3] = bad
    output = rotate(x)
    rest = torch.ones_like(x, dtype=torch.bool)
    rest[1, 0, 4, 3] = rest[1, 0, 4, 8] = False
    assert bool(output[rest].isfinite().all())
    assert not bool(output[~rest].isfinite().any())


@pytest.mark.usefixtures("_threads_as_before")
def test_threads_and_batch_do_not_change_bits() -> None:
    x = draw(2, 3, 300, 72)
    right = rotate(x)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(rotate(x), right)
    assert torch.equal(rotate(x[:1, 1:2, 40:41], 40), right[:1, 1:2, 40:41])
