"""Dropout of packed tokens by sequence and position, as it is under ``set_invariant(True)``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from clearhead.batch_part import packed_rows
from clearhead.masks import Mask
from clearhead.masks.numbers import packed_numbers

__all__ = ["by_sequence"]


def by_sequence(mask: Mask | None) -> AbstractContextManager[None]:
    """A ``with`` block in which dropout of tokens that ``mask`` packs draws as in a padded batch."""
    numbers = packed_numbers(mask)
    return nullcontext() if numbers is None else packed_rows(numbers)
