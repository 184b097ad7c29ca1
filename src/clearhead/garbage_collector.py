"""Python's garbage collector around measurements: a pass of some 50 ms would count as the call's own time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_off"]


@contextmanager
def collector_off() -> Iterator[None]:
    """Run a block with the garbage collector off, as ``timeit`` does.

    >>> with collector_off():
    ...     gc.isenabled()
    False
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
