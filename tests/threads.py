"""Calls on several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["on_threads"]


def on_threads(count: int, work: Callable[[int], object]) -> None:
    """Call ``work`` with each of the numbers below ``count``, each on a thread of its own."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
