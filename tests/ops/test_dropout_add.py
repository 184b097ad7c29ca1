"""The operator ``dropout_add`` against its definition: surviving elements and the sum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from clearhead.ops.dropout import LEVELS
from tests.agreement import needs_native
from tests.dropped import keep_mask

pytestmark = needs_native

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "sliced": lambda x: torch.cat([torch.full_like(x, torch.nan), x], -1).chunk(2, -1)[1],
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
    "an odd address": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "lazily negated": lambda x: torch._neg_view(-x),
}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dropout_add(x: Tensor, residual: Tensor | None, levels: int, seed: int) -> Tensor:
    output: Tensor = torch.ops.clearhead.dropout_add.default(x, residual, levels, seed)
    return output


@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("levels", [0, 1, LEVELS // 4, LEVELS - 1])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (7, 64), (2, 3, 129), (1, 1025), (300, 24)], ids=str)
@DTYPES
def test_output_matches_its_definition(dtype: torch.dtype, shape: tuple[int, ...], levels: int, added: bool) -> None:
    x, residual, seed = draw(*shape, dtype=dtype), draw(*shape, seed=1, dtype=dtype), 2**40 + 7
    rows = x.numel() // shape[-1]
    keeps = keep_mask(rows, shape[-1], levels, seed).view(shape)
    exact = torch.where(keeps, x.double() * (LEVELS / (LEVELS - levels)), 0.0)
    exact = exact + residual.double() if added else exact
    output = dropout_add(x, residual if added else None, levels, seed)
    assert output.dtype is dtype
    # Three roundings: of the scaled element and of the sum in float32, and to the dtype.
    unit = torch.finfo(dtype).eps + 2 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(output.double(), exact, rtol=unit, atol=unit)
    if not added:
        assert torch.equal(output == 0, ~keeps | (x == 0))


@pytest.mark.parametrize("which", ["x", "residual", "both"])
@pytest.mark.parametrize("layout", LAYOUTS)
@DTYPES
def test_strides_do_not_change_bits(dtype: torch.dtype, layout: str, which: str) -> None:
    x, residual = draw(9, 33, dtype=dtype), draw(9, 33, seed=1, dtype=dtype)
    right = dropout_add(x, residual, LEVELS // 3, 5)
    lay = LAYOUTS[layout]
    given = (lay(x) if which != "residual" else x, lay(residual) if which != "x" else residual)
    assert torch.equal(dropout_add(*given, LEVELS // 3, 5), right)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1, -(2**63), -1])
def test_every_seed_gives_its_own_mask(seed: int) -> None:
    x = torch.ones(4, 256)
    output = dropout_add(x, None, LEVELS // 2, seed)
    assert torch.equal(output != 0, keep_mask(4, 256, LEVELS // 2, seed % 2**64))
    assert not torch.equal(output, dropout_add(x, None, LEVELS // 2, seed ^ 1))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_dropped_nan_and_infinity_become_0(bad: float) -> None:
    output = dropout_add(torch.full((8, 128), bad), torch.ones(8, 128), LEVELS // 2, 3)
    keeps = keep_mask(8, 128, LEVELS // 2, 3)
    assert bool((output[~keeps] == 1.0).all())
    assert not bool(output[keeps].isfinite().any())


@pytest.mark.usefixtures("_threads_as_before")
def test_any_number_of_threads_gives_the_same_bits() -> None:
    x, outputs = draw(700, 300), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        outputs.append(dropout_add(x, x, LEVELS // 4, 11))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (2, 0, 3)], ids=str)
def test_no_elements_give_an_empty_output(shape: tuple[int, ...]) -> None:
    assert dropout_add(torch.zeros(shape), torch.zeros(shape), 9, 1).shape == shape
