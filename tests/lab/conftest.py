"""The small example is trained once for all tests of the lab."""

from __future__ import annotations

from functools import cache

import pytest

pytest.importorskip("starlette", reason="needs the extra 'lab'")

from clearhead.lab import example
from clearhead.readers import Reader
from tests.lab.running import Ticketless

_made = example.made


@cache
def trained_example() -> Reader:
    return _made(Ticketless())


@pytest.fixture
def ready_example(monkeypatch: pytest.MonkeyPatch) -> Reader:
    """The example, already trained."""
    reader = trained_example()
    monkeypatch.setattr(example, "made", lambda ticket: reader)
    return reader
