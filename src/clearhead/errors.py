"""The errors a user can cause, and the one sentence form that all of them share."""

from __future__ import annotations

from typing import Self

__all__ = ["ClearheadError", "DataError", "MaskError", "ShapeError", "UnsupportedError"]


class ClearheadError(ValueError):
    """Base of every error that clearhead raises on purpose.

    >>> print(ShapeError.about("attention", "key", must="have 4 channels", got="3", then="Project it."))
    attention: key must have 4 channels; got 3. Project it.
    """

    @classmethod
    def about(cls, function: str, argument: str, *, must: str, got: object, then: str) -> Self:
        """Build the error ``<function>: <argument> must <rule>; got <what>. <what to do>`` on one line."""
        text = f"{function}: {argument} must {must}; got {got}. {then}"
        return cls(" ".join(text.split()))


class ShapeError(ClearheadError):
    """A shape, a length, an index or a number out of range."""


class MaskError(ClearheadError):
    """A mask that does not fit the call, or whose positions are ambiguous."""


class UnsupportedError(ClearheadError):
    """A dtype, a device, a backend or a combination that cannot be served; says why."""

    @classmethod
    def from_operator(cls, error: RuntimeError) -> Self:
        """What an operator refused, from the RuntimeError that torch makes of it; any other error is raised again."""
        if " must " not in str(error) or "; got " not in str(error):
            raise error
        return cls(str(error))


class DataError(ClearheadError):
    """A file, a table or a run folder that cannot be used as it is."""
