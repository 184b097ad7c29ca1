"""The kernels, and the steps that calls are, for tests that ask for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from clearhead.nn import step
from clearhead.testing import choices
from tests.steps import steps_taken


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the steps that calls are."""
    return steps_taken(monkeypatch)


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """GEMM and attention are the kernels' on every processor; and nothing is known of calls before."""
    monkeypatch.setenv("CLEARHEAD_PROJECTION", "native")
    for held in (step._KEPT, step._KNOWN, step._CALLS):
        monkeypatch.setattr(held, "steps", {})
    with choices(attention="native"):
        yield
