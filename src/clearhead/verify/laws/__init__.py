"""The laws, in the order in which they are tried and printed."""

from __future__ import annotations

from clearhead.verify.law import Law
from clearhead.verify.laws import (
    backward,
    calls,
    containment,
    dropout,
    empty,
    future,
    masking,
    memory,
    numbers,
    returned,
    rules,
    sameness,
    sequences,
)

__all__ = ["LAWS"]

LAWS: tuple[Law, ...] = (
    *numbers.LAWS,
    *backward.LAWS,
    *masking.LAWS,
    *rules.LAWS,
    *future.LAWS,
    *empty.LAWS,
    *containment.LAWS,
    *sameness.LAWS,
    *calls.LAWS,
    *sequences.LAWS,
    *dropout.LAWS,
    *returned.LAWS,
    *memory.LAWS,
)
"""All laws."""
