"""The benchmark's rows of linear attention: checked against float64, then timed together with full attention."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clearhead.benchmark.linear_rows import CROSSING, FULL, LinearRow, linear_rows
from clearhead.benchmark.peers import OURS
from clearhead.benchmark.product import PRODUCT
from clearhead.errors import UnsupportedError


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("verb", ["linear", "retention", "gated", "delta"])
def test_a_row_is_checked_and_timed_against_full_attention(verb: str, training: bool) -> None:
    comparison = LinearRow(verb=verb, shape=(1, 12, 1024, 64), training=training).small().comparison()
    assert set(comparison.timed) == {OURS, FULL, PRODUCT}
    assert set(comparison.check()) == {OURS}
    assert len(comparison.calls[OURS]()) == (2 if training else 1)
    with pytest.raises(UnsupportedError, match="Different work is not timed"):
        replace(comparison, checked={FULL: comparison.calls[FULL]}).check()


def test_operations_are_those_of_the_chunks() -> None:
    row = LinearRow(verb="linear", shape=(2, 3, 256, 32), training=False)
    chunks = 2 * 3 * 256 // 64
    within, with_states = 2 * 64 * 64 * 32, 2 * 64 * 32 * 32
    assert row.operations == chunks * (2 * within + 2 * with_states)
    assert replace(row, training=True).operations == chunks * (7 * within + 6 * with_states)
    assert replace(row, verb="delta").operations is None


def test_rows_cover_256_to_32768_tokens() -> None:
    rows = [row for row in linear_rows() if row.verb == "linear" and row.training]
    assert [rows[0].shape[2], rows[-1].shape[2]] == [256, 32768]
    assert {row.group for row in rows if row.shape[2] >= CROSSING} == {"linear, training, from 1024 tokens"}
    assert [row.memory for row in rows] == [False] * (len(rows) - 1) + [True]
