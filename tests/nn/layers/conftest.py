"""Every test of a layer uses the kernels' GEMM and attention on every processor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from clearhead.testing import choices, fused_calls
from tests.gemms import name_gemm


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    name_gemm(monkeypatch, "native")
    with choices(attention="native"):
        yield


@pytest.fixture
def kinds() -> Iterator[list[str]]:
    """The kinds of the block operators that run."""
    with fused_calls() as kinds_run:
        yield kinds_run
