"""Rotary and sinusoidal positions against their formulas, written out in plain Python."""

from __future__ import annotations

import cmath
import copy
import dataclasses
import math
import weakref

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead import positions
from clearhead.positions import MOST_POSITIONS, Rotary, as_rotary, sinusoidal, table_of
from tests.agreement import needs_native


@pytest.mark.parametrize("base", [10000.0, 100.0])
def test_rotary_equals_complex_multiplication(base: float) -> None:
    x = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rotated = Rotary(base).rotate(x, first=3)
    for batch in range(2):
        for place in range(5):
            for pair in range(3):
                number = complex(x[batch, place, pair], x[batch, place, pair + 3])
                expected = number * cmath.exp(1j * (place + 3) * base ** (-2 * pair / 6))
                got = complex(rotated[batch, place, pair], rotated[batch, place, pair + 3])
                assert abs(got - expected) < 1e-12


def test_scores_depend_on_distance_alone_however_far() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(4, 64), torch.randn(4, 64)
    rotary = Rotary()
    near = rotary.rotate(query) @ rotary.rotate(key).T
    far = rotary.rotate(query, first=10**6) @ rotary.rotate(key, first=10**6).T
    torch.testing.assert_close(far, near, atol=1e-5, rtol=1e-5)


def test_rotary_preserves_position_0_dtype_and_shape() -> None:
    x = torch.randn(2, 1, 8)
    assert torch.equal(Rotary().rotate(x), x)
    half = torch.randn(3, 4, 8, dtype=torch.bfloat16)
    assert Rotary().rotate(half).dtype == torch.bfloat16
    torch.testing.assert_close(Rotary().rotate(half.float()).bfloat16(), Rotary().rotate(half))
    rotated = Rotary().rotate(torch.randn(10, 8, dtype=torch.float64))
    assert rotated.shape == (10, 8)


def formula(x: Tensor, first: int = 0, base: float = 10000.0) -> Tensor:
    """The formula in float64, with pairs as complex numbers."""
    half = x.shape[-1] // 2
    places = torch.arange(first, first + x.shape[-2], dtype=torch.float64)
    angles = torch.outer(places, base ** (-torch.arange(half, dtype=torch.float64) / half))
    wide = x.double()
    rotated = torch.complex(wide[..., :half], wide[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([rotated.real, rotated.imag], -1)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


SHAPES = [(3, 8), (2, 3, 8), (2, 4, 5, 64), (2, 4, 1, 34), (1, 2, 700, 80), (2, 1, 3, 4, 6), (0, 3, 8), (2, 0, 8)]
#: Of numbers of size 1: three roundings of float32, and one to the dtype.
UNITS = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


@pytest.mark.parametrize("first", [0, 7, -3, MOST_POSITIONS - 2, 10**9])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", UNITS, ids=str)
def test_rotary_in_every_dtype_shape_and_place(dtype: torch.dtype, shape: tuple[int, ...], first: int) -> None:
    x = draw(*shape, dtype=dtype).requires_grad_()
    rotated = Rotary().rotate(x, first)
    assert (rotated.shape, rotated.dtype) == (x.shape, dtype)
    unit = 5.0 * UNITS[dtype]
    torch.testing.assert_close(rotated.double(), formula(x, first), rtol=unit, atol=unit)
    # The gradient rotates back, since rotations preserve norms.
    (back,) = torch.autograd.grad(rotated, x, rotated.detach())
    torch.testing.assert_close(back.double(), x.double(), rtol=2 * unit, atol=2 * unit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotary_of_strided_tensors(dtype: torch.dtype) -> None:
    packed = draw(2, 9, 3, 4, 16, dtype=dtype)
    for x in (
        packed[:, :, 1].transpose(1, 2),
        packed[..., 0, :, :].movedim(1, 2),
        packed[:, ::2, 2].transpose(1, 2),
        packed.transpose(-1, -2),
        packed[:, :, 0].expand(2, 9, 4, 16),
        torch.view_as_complex(packed.float().unflatten(-1, (8, 2))).conj().imag.to(dtype),
    ):
        assert torch.equal(Rotary().rotate(x, 5), Rotary().rotate(x.clone(memory_format=torch.contiguous_format), 5))


def test_rotary_does_not_modify_its_input() -> None:
    for x in (draw(3, 8), draw(2, 3, 8), draw(1, 2, 3, 8)):
        before = x.clone()
        leaf = x.requires_grad_()
        rotated = Rotary().rotate(leaf)
        rotated.mul_(2.0)
        (grad,) = torch.autograd.grad(rotated.sum(), leaf)
        assert torch.equal(leaf.detach(), before)
        (right,) = torch.autograd.grad(2.0 * Rotary().rotate(leaf).sum(), leaf)
        torch.testing.assert_close(grad, right)


def test_rotary_has_second_derivatives() -> None:
    x = draw(2, 2, 5, 6).requires_grad_()
    output = Rotary(50.0).rotate(x, 3)
    (grad,) = torch.autograd.grad(output.pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), x)
    wide = x.detach().double().requires_grad_()
    (grad,) = torch.autograd.grad(formula(wide, 3, 50.0).pow(3).sum(), wide, create_graph=True)
    (right,) = torch.autograd.grad(grad.square().sum(), wide)
    torch.testing.assert_close(second.double(), right, rtol=1e-4, atol=1e-4)
    torch.autograd.gradcheck(lambda x: Rotary(50.0).rotate(x, 3), x.detach().double().requires_grad_())


def test_rotary_under_transforms_and_many_gradients_at_once() -> None:
    x = draw(4, 5, 6)
    rotary = Rotary()
    right = torch.stack([rotary.rotate(part, 2) for part in x])
    torch.testing.assert_close(torch.vmap(lambda part: rotary.rotate(part, 2))(x), right)
    _, tangent = torch.func.jvp(lambda part: rotary.rotate(part, 2), (x,), (x,))
    torch.testing.assert_close(tangent, right)
    leaf = x.clone().requires_grad_()
    ups = torch.stack([right, 2.0 * right])
    (many,) = torch.autograd.grad(rotary.rotate(leaf, 2), leaf, ups, is_grads_batched=True)
    torch.testing.assert_close(many, torch.stack([x, 2.0 * x]), rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(rotary.rotate(x, 2), right)


@needs_native
@pytest.mark.usefixtures("_threads_as_before")
def test_rotary_is_bitwise_equal_at_any_thread_count_and_batch() -> None:
    x, rotary = draw(2, 3, 300, 72), Rotary()
    right = rotary.rotate(x)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(rotary.rotate(x), right)
    assert torch.equal(rotary.rotate(x[:1, 1:2, 40:41], 40), right[:1, 1:2, 40:41])


def test_tables_are_cached_and_grow() -> None:
    rotary, other = Rotary(), Rotary(100.0)
    table = table_of(rotary, 8, 3)
    assert table is table_of(rotary, 8, 512)
    assert table is table_of(Rotary(10000), 8, 1)
    assert table is not table_of(other, 8, 3)
    assert table_of(rotary, 6, 3).shape == (512, 6)
    grown = table_of(rotary, 8, 513)
    assert grown.shape == (1024, 8)
    assert torch.equal(grown[:512], table)
    angles = torch.outer(torch.arange(1024.0, dtype=torch.float64), 10000.0 ** (-torch.arange(0, 8, 2).double() / 8))
    assert torch.equal(grown, torch.cat([angles.cos(), angles.sin()], -1).float())
    cached = [weakref.ref(table), weakref.ref(grown)]
    del table, grown
    for base in range(2, 60):
        table_of(Rotary(base), 8, 3)
    assert [each() for each in cached] == [None, None]


def test_a_table_made_in_inference_mode_serves_gradients_later() -> None:
    x, rotary = draw(2, 3, 8), Rotary(123.0)
    with torch.inference_mode():
        right = rotary.rotate(x)
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(rotary.rotate(leaf).square().sum(), leaf, create_graph=True)
    torch.autograd.grad(grad.sum(), leaf)
    assert torch.equal(rotary.rotate(x), right)
    with torch.device("meta"):
        assert torch.equal(Rotary(7.0).rotate(x), Rotary(7.0).rotate(x))


def test_a_rotary_is_a_value() -> None:
    rotary = Rotary(500)
    assert rotary == Rotary(500.0) != Rotary()
    assert len({rotary, Rotary(500.0), copy.deepcopy(rotary)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        rotary.base = 3.0  # type: ignore[misc]


def test_rotary_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(2, 3, 5, 8)
    right = Rotary().rotate(x)
    monkeypatch.setattr(positions, "library", lambda: None)
    torch.testing.assert_close(Rotary().rotate(x), right)


def test_rotary_argument_forms() -> None:
    rotary = Rotary(500.0)
    assert as_rotary("f", rotary) is rotary
    assert as_rotary("f", True).base == 10000.0
    assert as_rotary("f", 500).base == 500.0
    assert as_rotary("f", None) is None
    assert as_rotary("f", False) is None
    assert repr(rotary) == "Rotary(base=500)"


def test_sinusoidal_equals_the_papers_formula() -> None:
    table = sinusoidal(7, 6, dtype=torch.float64)
    for place in range(7):
        for pair in range(3):
            angle = place / 10000 ** (2 * pair / 6)
            assert math.isclose(table[place, 2 * pair], math.sin(angle), abs_tol=1e-12)
            assert math.isclose(table[place, 2 * pair + 1], math.cos(angle), abs_tol=1e-12)
    assert torch.equal(sinusoidal(torch.tensor([[4, 2]]), 6)[0], sinusoidal(5, 6)[[4, 2]])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Rotary(1.0), r"^Rotary: base must be a number above 1; got 1\.0\."),
        (lambda: Rotary("a"), r"^Rotary: base must be a number above 1; got 'a'\."),
        (lambda: as_rotary("f", "a"), r"^f: rotary must be a Rotary, True, a base or None; got 'a'\."),
        (lambda: Rotary().rotate(torch.zeros(2, 3)), r"^Rotary\.rotate: x must have an even number of channels"),
        (lambda: sinusoidal(3, 5), r"^sinusoidal: dim must be a positive even number; got 5\."),
    ],
)
def test_bad_input(call: object, text: str) -> None:
    with pytest.raises(ch.ShapeError, match=text):
        call()  # type: ignore[operator]
