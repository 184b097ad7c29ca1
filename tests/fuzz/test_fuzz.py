"""Random problems across all backends: 100 in ``make test``, 2,000 in ``make test-all``, CLEARHEAD_FUZZ of them in
``make fuzz``."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import clearhead as ch
from tests.fuzz import check as fuzz
from tests.fuzz.problems import Meant, problems

#: Number of random problems, new in each run; None uses the fixed problems of the suite.
_DRAWN = int(os.environ["CLEARHEAD_FUZZ"]) if "CLEARHEAD_FUZZ" in os.environ else None


@pytest.mark.slow
@pytest.mark.parametrize("count", [100, pytest.param(2_000, marks=pytest.mark.slow)] if _DRAWN is None else [_DRAWN])
def test_every_backend_equals_the_formula(count: int) -> None:
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=_DRAWN is None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(meant=problems())
    def every_backend(meant: Meant) -> None:
        assert fuzz.check(meant) > 0

    every_backend()


@pytest.mark.slow
def test_fuzzer_detects_a_wrong_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that is off by one in one place is detected within a few problems."""
    right = ch.Window.allows
    monkeypatch.setattr(
        ch.Window, "allows", lambda self, b, h, i, j: right(self, b, h, i, j) | (j == i - self.before - 1)
    )

    @settings(max_examples=500, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(meant=problems())
    def wrong(meant: Meant) -> None:
        fuzz.check(meant, ("reference",))

    with pytest.raises(fuzz.Wrong, match=r"reference: (output|lse) is"):
        wrong()


def test_all_backends_of_this_machine_are_tested() -> None:
    assert {"reference", "tiled", "sdpa"} <= set(fuzz.HERE)
    assert torch.get_default_dtype() == torch.float32
