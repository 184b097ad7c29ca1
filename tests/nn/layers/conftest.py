"""Every test of a layer in one step has the kernels' products, and nothing is known of calls before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from clearhead.testing import choices
from tests.nn.layers.definition import forget
from tests.steps import steps_taken


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """GEMM and attention are the kernels' on every processor."""
    monkeypatch.setenv("CLEARHEAD_PROJECTION", "native")
    with choices(attention="native"):
        yield


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the steps that calls are."""
    return steps_taken(monkeypatch)
