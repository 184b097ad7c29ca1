"""How many threads torch uses for a part of the demo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["threads"]


@contextmanager
def threads(count: int) -> Iterator[int]:
    """Torch on ``count`` threads inside; gives the number that it had before, and has again afterwards.

    >>> with threads(1):
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield before
    finally:
        torch.set_num_threads(before)
