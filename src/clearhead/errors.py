"""The errors that clearhead raises, and the form of their texts."""

from __future__ import annotations

from typing import Self

__all__ = ["CacheFullError", "ClearheadError", "DataError", "MaskError", "ShapeError", "UnsupportedError"]


class ClearheadError(ValueError):
    """Base class of the errors that clearhead raises for wrong arguments, data and combinations.

    >>> print(ShapeError.about("attention", "key", must="have 4 channels", got="3", then="Project it."))
    attention: key must have 4 channels; got 3. Project it.
    """

    @classmethod
    def about(cls, function: str, argument: str, *, must: str, got: object, then: str) -> Self:
        """Make an error with the text ``<function>: <argument> must <must>; got <got>. <then>`` on one line.

        Args:
            function: the public name that was called.
            argument: the name of the wrong argument.
            must: the rule that it breaks.
            got: the value, or what describes it.
            then: what the caller can do.

        Returns:
            The error, to be raised.
        """
        text = f"{function}: {argument} must {must}; got {got}. {then}"
        return cls(" ".join(text.split()))


class ShapeError(ClearheadError):
    """Raised when a shape, a length, an index or a number does not fit or is out of range."""


class MaskError(ClearheadError):
    """Raised when a mask does not fit the call, or needs a ``query_offset`` that was not given."""


class UnsupportedError(ClearheadError):
    """Raised when a dtype, a device, a backend or a combination of arguments is not supported; the text says why."""

    @classmethod
    def from_operator(cls, error: RuntimeError) -> Self:
        """The error that an operator raised, from torch's RuntimeError; any other RuntimeError is raised again."""
        if " must " not in str(error) or "; got " not in str(error):
            raise error
        return cls(str(error))


class CacheFullError(ClearheadError):
    """Raised when a ``PagedKVCache`` has too few free blocks; the cache is as it was before the call."""


class DataError(ClearheadError):
    """Raised when a file, a table of data or a run folder is missing, malformed or inconsistent."""
