"""The GEMM that ``CLEARHEAD_PROJECTION`` names, for one test."""

from __future__ import annotations

import pytest

from clearhead.projection import named_by_variable


def name_gemm(monkeypatch: pytest.MonkeyPatch, path: str = "") -> None:
    """Set the variable, or unset it. Once a process has read it, clearhead does not look at it again."""
    monkeypatch.setenv("CLEARHEAD_PROJECTION", path)
    named_by_variable.cache_clear()
