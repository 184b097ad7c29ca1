"""The rows of a user's own function: everyone computes the same, and memory is part of the answer."""

from __future__ import annotations

import pytest

from clearhead.benchmark import SUITES
from clearhead.benchmark.function_rows import ALIBI, CAUSAL, LEARNED, MADE, FunctionRow
from clearhead.benchmark.lines import measure_row
from clearhead.benchmark.peers import OURS
from clearhead.ops.library import library


@pytest.mark.parametrize("kind", [ALIBI, LEARNED, CAUSAL])
def test_all_contenders_do_the_same_work(kind: str) -> None:
    comparison = FunctionRow(kind=kind, shape=(2, 3, 70, 8)).comparison()
    errors = comparison.check()
    assert errors.keys() == comparison.calls.keys()
    assert max(errors.values()) < 1e-5
    if library() is not None:
        assert comparison.backend() == "native"


@pytest.mark.slow
def test_dense_bias_counts_in_peak_memory() -> None:
    line = measure_row(FunctionRow(kind=ALIBI, shape=(1, 8, 1024, 16)), repeats=3, seconds=None)
    assert line.memory[MADE] > 4 * 8 * 1024**2 > 2 * line.memory[OURS]


def test_every_row_has_a_small_form() -> None:
    for row in SUITES["function"].rows():
        assert row.small().comparison().check()
