"""How the suite runs as a whole."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that no process waits for it at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
