"""The rows of flex_attention: each kind computes the formula, and torch's compiled function the same."""

from __future__ import annotations

import pytest

from clearhead.benchmark import SUITES
from clearhead.benchmark.flex_rows import COMPILED, PLAIN_CAUSAL
from clearhead.benchmark.peers import OURS
from clearhead.ops.library import library

ROWS = SUITES["flex"].rows()


@pytest.mark.parametrize("row", [row for row in ROWS if row.group == "training"], ids=lambda row: row.title)
def test_training_computes_the_formula(row) -> None:  # type: ignore[no-untyped-def]
    comparison = row.small().comparison()
    assert {*comparison.calls} == {OURS, PLAIN_CAUSAL}
    assert comparison.check()[OURS] < 1e-5
    if library() is not None:
        assert comparison.backend() == "native"


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row.group == "forward"], ids=lambda row: row.title)
def test_forward_computes_what_torch_compiles(row) -> None:  # type: ignore[no-untyped-def]
    errors = row.small().comparison().check()
    assert {*errors} == {OURS, COMPILED}
    assert max(errors.values()) < 1e-5
