"""How the suite runs as a whole."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from clearhead.backends import native_library


@pytest.fixture(autouse=True)
def _best_instruction_set() -> Iterator[None]:
    """A test that runs operators on another instruction set does so alone."""
    yield
    if (library := native_library.library()) is not None:
        library.ch_use_isa(native_library.isa_index())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that no process waits for it at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """What is here before the first test stays: each full collection of garbage looked at all of torch again, for up to
    a second."""
    gc.collect()
    gc.freeze()
