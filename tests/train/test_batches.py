"""Batches: every example once, within both limits, the same for the same seed and epoch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.errors import DataError, ShapeError
from clearhead.train.batches import Sequences, bucketed, padded, split


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=200),
    batch_size=st.integers(1, 9),
    batch_tokens=st.integers(1, 200),
    epoch=st.integers(0, 3),
)
def test_epoch_has_every_example_once_within_the_limits(
    lengths: list[int], batch_size: int, batch_tokens: int, epoch: int
) -> None:
    sizes = np.array(lengths)
    limits = {"batch_size": batch_size, "batch_tokens": batch_tokens}
    batches = bucketed(sizes, **limits, seed=3, epoch=epoch)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    for batch in batches:
        assert 1 <= len(batch) <= batch_size
        assert len(batch) == 1 or len(batch) * sizes[batch].max() <= batch_tokens
    repeated = bucketed(sizes, **limits, seed=3, epoch=epoch)
    assert [batch.tolist() for batch in repeated] == [batch.tolist() for batch in batches]


def test_epochs_and_seeds_differ() -> None:
    sizes = np.arange(1, 101)
    plans = {
        str([batch.tolist() for batch in bucketed(sizes, batch_size=10, batch_tokens=10**6, seed=seed, epoch=epoch)])
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(plans) == 4


def test_rows_of_similar_length_are_batched_together() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, size=2000)
    batches = bucketed(lengths, batch_size=50, batch_tokens=10**6, seed=0, epoch=0)
    waste = sum(len(batch) * lengths[batch].max() for batch in batches) / lengths.sum()
    assert waste < 1.1  # unsorted batches would waste about twice


def test_padded_is_zero_after_each_row() -> None:
    ids, lengths = padded([[5, 6, 7], [8]])
    assert torch.equal(ids, torch.tensor([[5, 6, 7], [8, 0, 0]]))
    assert lengths.tolist() == [3, 1]


def test_split_is_stratified_reproducible_and_complete() -> None:
    targets = [0] * 90 + [1] * 10 + [2]
    training, held_out = split(targets, 0.1, seed=0)
    assert sorted(training + held_out) == list(range(101))
    assert [sum(targets[place] == target for place in held_out) for target in (0, 1, 2)] == [9, 1, 0]
    assert split(targets, 0.1, seed=0) == (training, held_out)
    assert split(targets, 0.1, seed=1) != (training, held_out)


def test_split_raises_if_nothing_can_be_held_out() -> None:
    with pytest.raises(DataError, match=r"must have two examples of some class"):
        split([0, 1, 2], 0.5, seed=0)


def test_sequences_raise_for_inconsistent_data() -> None:
    with pytest.raises(ShapeError, match=r"must match the 2 rows of ids; got 1 targets"):
        Sequences([[1], [2]], [0])
    with pytest.raises(DataError, match=r"must have no empty row; got row 1"):
        Sequences([[1], []], [0, 1])
