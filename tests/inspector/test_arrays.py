"""Arrays of a page: unpacking restores what was packed."""

from __future__ import annotations

import numpy as np
import pytest

from clearhead.inspector.arrays import TYPES, Rows, pack, pack_part, unpack


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (3, 5)])
def test_unpack_restores_what_pack_was_given(kind: str, shape: tuple[int, ...]) -> None:
    numbers = np.arange(np.prod(shape)).reshape(shape)
    assert np.array_equal(unpack(pack(numbers, kind)), numbers)


def test_nan_and_infinity_are_restored() -> None:
    numbers = np.array([-np.inf, np.nan, 2.0])
    assert np.array_equal(unpack(pack(numbers, "f32")), numbers, equal_nan=True)
    assert np.array_equal(unpack(pack_part(np.abs(numbers))), np.abs(numbers), equal_nan=True)


def test_text_needs_no_escape_within_a_page() -> None:
    text = pack(np.random.default_rng(0).random(5000), "f32")["data"]
    assert not set(text) & set('<>&"\\')
    assert text.isascii()


def test_pack_part_rounds_to_steps_of_1_in_65535() -> None:
    numbers = np.random.default_rng(0).random(1000) * 40
    assert np.abs(unpack(pack_part(numbers)) - numbers).max() <= numbers.max() / 65535


@pytest.mark.parametrize("step", [1e-9, 1e-3, 10.0])
def test_rows_are_rounded_to_their_steps(step: float) -> None:
    rows = np.random.default_rng(0).normal(size=(50, 16)) * np.logspace(-6, 6, 50)[:, None]
    rows[3] = 0.0
    packed = Rows.of(rows, np.full(50, step))
    assert np.array_equal(unpack(packed.packed()), packed.values)
    # The requested step, but never coarser than 1/511 of the largest value nor finer than 16 bits allow.
    largest = np.abs(rows).max(axis=1, keepdims=True)
    allowed = np.clip(step, largest / 32767 * 2**0.25, largest / 511)
    assert (np.abs(packed.values - rows) <= allowed / 2 * (1 + 1e-6)).all()


def test_damaged_array_raises() -> None:
    packed = pack(np.arange(40), "i32")
    for wrong in ({"shape": [41]}, {"type": "u8"}, {"data": packed["data"][:-9]}, {"data": "&&&&&"}, {"data": ""}):
        with pytest.raises(ValueError, match=r"."):
            unpack(packed | wrong)
