"""The kernels' instruction sets by name."""

from __future__ import annotations

from clearhead.ops.library import library

__all__ = ["place_of", "use_set"]


def place_of(name: str) -> int:
    """A set's index, as the library counts."""
    loaded = library()
    assert loaded is not None
    return next(place for place in range(99) if loaded.ch_isa_name(place) == name.encode())


def use_set(name: str) -> None:
    """Let every operator run on one set, until the fixture of all tests puts the best one back."""
    loaded = library()
    assert loaded is not None
    loaded.ch_use_isa(place_of(name))
