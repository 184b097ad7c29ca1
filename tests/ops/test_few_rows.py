"""A few rows by weights that are read once, in several streams of memory: their numbers, and bits on any threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clearhead.ops.packed_weight import PackedWeight
from clearhead.ops.quantized_weight import QuantizedWeight
from clearhead.projection.stored import StoredWeight, multiply_stored
from tests.agreement import needs_native
from tests.budget import within_budget

pytestmark = needs_native

ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 17, 24)
#: Outputs and inputs: streams of all lengths, the last rows of a weight, more than a unit of work, and a weight that is
#: taken for one in memory.
SIZES = ((1, 256), (5, 512), (67, 264), (259, 1032), (600, 640), (1101, 256), (1101, 1568))
#: Inputs that are no whole vectors.
ODD_SIZES = ((200, 17), (300, 1025))
DTYPES = (torch.float32, torch.bfloat16)


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _among_nan(x: Tensor) -> Tensor:
    """The same rows with NaN before and behind each."""
    rows, size = x.shape
    return torch.full((rows, size + 32), torch.nan, dtype=x.dtype).narrow(1, 16, size).copy_(x)


def _on_threads(counts: tuple[int, ...], x: Tensor, weight: Tensor | StoredWeight) -> Tensor:
    """The product, of the same bits for all counts of threads."""
    before, results = torch.get_num_threads(), list[Tensor]()
    try:
        for count in counts:
            torch.set_num_threads(count)
            if isinstance(weight, Tensor):
                results.append(torch.ops.clearhead.linear.default(x, weight))
            else:
                results.append(multiply_stored(x, weight, None))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])
    return results[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rows_of_a_weight_in_place(size: tuple[int, int], dtype: torch.dtype) -> None:
    weight = _draw(*size, seed=1).to(dtype)
    # The same weight with rows that do not follow each other in memory.
    strided = torch.cat((weight, weight), dim=1)[:, : size[1]]
    for rows in ROWS:
        x = _among_nan(_draw(rows, size[1]).to(dtype))
        output, exact = _on_threads((1, 2, 3), x, weight), x.double() @ weight.double().t()
        within_budget(f"{rows} rows", output, x @ weight.t(), exact, terms=size[1], dtype=dtype)
        assert torch.equal(output, _on_threads((1, 2), x, strided))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES + ODD_SIZES, ids=str)
def test_packed_rows_have_the_bits_that_they_have_among_many(size: tuple[int, int], dtype: torch.dtype) -> None:
    dense, x = _draw(*size, seed=1).to(dtype), _among_nan(_draw(40, size[1]).to(dtype))
    weight = PackedWeight.of(dense)
    many = _on_threads((1, 2, 3), x, weight)
    within_budget("40 rows", many, x @ dense.t(), x.double() @ dense.double().t(), terms=size[1], dtype=dtype)
    for rows in ROWS:
        assert torch.equal(_on_threads((1, 2, 3), x[:rows], weight), many[:rows]), rows


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [(1, 256), (6, 512), (259, 1024), (1101, 256)], ids=str)
def test_rows_of_integers(size: tuple[int, int], bits: int) -> None:
    generator = torch.Generator().manual_seed(1)
    out, steps = size
    if bits == 8:
        codes = torch.randint(-128, 128, size, dtype=torch.int8, generator=generator)
        weight = QuantizedWeight(codes, torch.rand(out, 1, generator=generator) / 128)
    else:
        codes = torch.randint(0, 256, (out, steps // 2), dtype=torch.uint8, generator=generator)
        scale, offset = torch.rand(2, out, steps // 32, generator=generator) / 8
        weight = QuantizedWeight(codes, scale, offset)
    dense = weight.dequantized()
    for rows in (1, 2, 3, 5, 8):
        x = _among_nan(_draw(rows, steps))
        exact = x.double() @ weight.dequantized(torch.float64).t()
        within_budget(f"{rows} rows", _on_threads((1, 2, 3), x, weight), x @ dense.t(), exact, terms=steps)
