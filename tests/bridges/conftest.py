"""The kernels, and the steps that calls are, for tests that ask for them."""

from __future__ import annotations

import pytest

from clearhead.nn import step
from tests.steps import steps_taken


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the steps that calls are."""
    return steps_taken(monkeypatch)


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products are the kernels' where larger ones are; and nothing is known of calls before."""
    monkeypatch.setenv("CLEARHEAD_PROJECTION", "native")
    for held in (step._KEPT, step._KNOWN, step._CALLS):
        monkeypatch.setattr(held, "steps", {})
