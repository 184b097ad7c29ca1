"""The digits: their split, and the changes that training makes to them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sklearn", reason="scikit-learn is not installed (clearhead[demo] brings it)")

from clearhead.demo.digits import CLASSES, INTENSITIES, TOKENS, jittered, load, shifted


def test_a_fifth_of_every_class_is_held_out() -> None:
    train, held_out = load()
    assert len(train) + len(held_out) == 1797
    assert sorted([*train.numbers.tolist(), *held_out.numbers.tolist()]) == list(range(1797))
    for label in range(CLASSES):
        here, there = (int((part.labels == label).sum()) for part in (train, held_out))
        assert abs(there - 0.2 * (here + there)) <= 0.5
    assert train.ids.shape == (len(train), TOKENS)
    assert (int(train.ids.min()), int(train.ids.max())) == (0, INTENSITIES - 1)


def test_split_is_fixed() -> None:
    torch.manual_seed(5)
    held_out = load()[1]
    assert len(held_out) == 359
    assert torch.equal(held_out.numbers, load()[1].numbers)
    # Accuracies can be compared only while these are the digits that are held out.
    assert held_out.numbers[:5].tolist() == [4, 13, 20, 28, 30]
    assert int(held_out.numbers.sum()) == 303549


def test_shift_moves_by_at_most_one_pixel_without_wrapping() -> None:
    ids = torch.zeros(200, TOKENS, dtype=torch.int64)
    ids[:, 8 * 3 + 4] = 9
    moved = shifted(ids, 1.0).view(-1, 8, 8)
    places = {(int(row), int(column)) for _, row, column in moved.nonzero()}
    assert places == {(row, column) for row in (2, 3, 4) for column in (3, 4, 5)}
    corner = torch.zeros(200, TOKENS, dtype=torch.int64)
    corner[:, 0] = 9
    places = {(int(row), int(column)) for _, row, column in shifted(corner, 1.0).view(-1, 8, 8).nonzero()}
    assert places == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert torch.equal(shifted(ids, 0.0), ids)


def test_jitter_keeps_empty_pixels_and_stays_in_range() -> None:
    ids = torch.randint(0, INTENSITIES, (50, TOKENS))
    changed = jittered(ids, 1.0, 2)
    assert torch.equal(changed == 0, (ids == 0) | (changed == 0))
    assert bool((changed[ids == 0] == 0).all())
    assert int((changed - ids).abs().max()) == 2
    assert 0 <= int(changed.min()) <= int(changed.max()) <= INTENSITIES - 1
    assert torch.equal(jittered(ids, 0.0, 2), ids)
