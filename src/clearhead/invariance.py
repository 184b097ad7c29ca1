"""The same bits for a sequence however it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from clearhead.arguments import repr_of
from clearhead.choices import is_invariant, overrides, set_overrides
from clearhead.errors import UnsupportedError
from clearhead.ops.library import library

__all__ = ["invariant", "is_invariant", "set_invariant"]


def set_invariant(invariant: bool) -> None:
    """Set whether a sequence's bits must not depend on how it is computed, in the whole process.

    Args:
        invariant: True for one order of every sum, a function of positions alone.

    Raises:
        UnsupportedError: it is not a boolean.

    >>> import clearhead as ch
    >>> ch.set_invariant(False)
    """
    if not isinstance(invariant, bool):
        then = "True computes the same bits in any batch, in chunks and token by token."
        raise UnsupportedError.about(
            "set_invariant", "invariant", must="be True or False", got=repr_of(invariant), then=then
        )
    _set(invariant)


@contextmanager
def invariant(invariant: bool = True) -> Iterator[None]:
    """Inside the context, like ``set_invariant(invariant)``; the previous setting returns at the end.

    >>> import clearhead as ch
    >>> with ch.invariant():
    ...     pass
    """
    before = overrides().invariant
    set_invariant(invariant)
    try:
        yield
    finally:
        _set(before)


def _set(invariant: bool | None) -> None:
    set_overrides(replace(overrides(), invariant=invariant))
    if (loaded := library()) is not None:
        loaded.ch_set_invariant(is_invariant())
