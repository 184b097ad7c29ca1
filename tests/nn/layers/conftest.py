"""Every test of a layer in one step has the kernels' products, and nothing is known of calls before."""

from __future__ import annotations

import pytest

from tests.nn.layers.definition import forget
from tests.steps import steps_taken


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products are the kernels' where larger ones are."""
    monkeypatch.setenv("CLEARHEAD_PROJECTION", "native")


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the steps that calls are."""
    return steps_taken(monkeypatch)
