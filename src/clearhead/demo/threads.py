"""The number of torch's threads for a part of the demo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["threads"]


@contextmanager
def threads(count: int) -> Iterator[int]:
    """Use ``count`` torch threads within the context; yields the previous number and restores it.

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
