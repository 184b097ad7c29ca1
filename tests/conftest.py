"""How the suite runs as a whole."""

from __future__ import annotations

import gc

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that no process waits for it at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """What is here before the first test stays: each full collection of garbage looked at all of torch again, for up to
    a second."""
    gc.collect()
    gc.freeze()
