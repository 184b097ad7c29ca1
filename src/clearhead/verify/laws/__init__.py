"""The laws, in the order in which they are tried and printed."""

from __future__ import annotations

from clearhead.verify.law import Law
from clearhead.verify.laws import containment, dropout, future, masking, memory, numbers, returned, sameness, sequences

__all__ = ["LAWS"]

LAWS: tuple[Law, ...] = (
    *numbers.LAWS,
    *masking.LAWS,
    *future.LAWS,
    *containment.LAWS,
    *sameness.LAWS,
    *sequences.LAWS,
    *dropout.LAWS,
    *returned.LAWS,
    *memory.LAWS,
)
"""Every law."""
