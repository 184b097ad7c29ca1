"""Rotary and sinusoidal positions against their formulas, written out in plain Python."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

import clearhead as ch
from clearhead.positions import Rotary, as_rotary, sinusoidal


@pytest.mark.parametrize("base", [10000.0, 100.0])
def test_rotary_turns_pairs_as_complex_numbers(base: float) -> None:
    x = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = Rotary(base).rotate(x, first=3)
    for batch in range(2):
        for place in range(5):
            for pair in range(3):
                number = complex(x[batch, place, pair], x[batch, place, pair + 3])
                expected = number * cmath.exp(1j * (place + 3) * base ** (-2 * pair / 6))
                got = complex(turned[batch, place, pair], turned[batch, place, pair + 3])
                assert abs(got - expected) < 1e-12


def test_scores_depend_on_distance_alone_however_far() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(4, 64), torch.randn(4, 64)
    rotary = Rotary()
    near = rotary.rotate(query) @ rotary.rotate(key).T
    far = rotary.rotate(query, first=10**6) @ rotary.rotate(key, first=10**6).T
    torch.testing.assert_close(far, near, atol=1e-5, rtol=1e-5)


def test_position_0_and_lengths_are_kept_and_dtype_too() -> None:
    x = torch.randn(2, 1, 8)
    assert torch.equal(Rotary().rotate(x), x)
    half = torch.randn(3, 4, 8, dtype=torch.bfloat16)
    assert Rotary().rotate(half).dtype == torch.bfloat16
    torch.testing.assert_close(Rotary().rotate(half.float()).bfloat16(), Rotary().rotate(half))
    turned = Rotary().rotate(torch.randn(10, 8, dtype=torch.float64))
    assert turned.shape == (10, 8)


def test_what_rotary_means_as_an_argument() -> None:
    rotary = Rotary(500.0)
    assert as_rotary("f", rotary) is rotary
    assert as_rotary("f", True).base == 10000.0
    assert as_rotary("f", 500).base == 500.0
    assert as_rotary("f", None) is None
    assert as_rotary("f", False) is None
    assert repr(rotary) == "Rotary(base=500)"


def test_sinusoidal_is_the_papers() -> None:
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
