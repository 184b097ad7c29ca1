"""Random problems across all backends: 2,000 in the suite, as many as CLEARHEAD_FUZZ says in ``make fuzz``."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import clearhead as ch
from tests.fuzz import check as fuzz
from tests.fuzz.problems import Meant, problems

_SUITE = 2_000
_WANTED = int(os.environ.get("CLEARHEAD_FUZZ", _SUITE))


@pytest.mark.slow
@settings(
    max_examples=_WANTED, deadline=None, database=None, derandomize=_WANTED == _SUITE,
    suppress_health_check=list(HealthCheck), print_blob=True,
)  # fmt: skip
@given(meant=problems())
def test_every_backend_gives_the_formula(meant: Meant) -> None:
    assert fuzz.check(meant) > 0


def test_the_fuzzer_sees_a_wrong_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that is off by one in one place only is found within a few problems."""
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


def test_all_backends_of_this_machine_take_part() -> None:
    assert {"reference", "tiled", "sdpa"} <= set(fuzz.HERE)
    assert torch.get_default_dtype() == torch.float32
