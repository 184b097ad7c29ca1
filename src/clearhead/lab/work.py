"""Kinds of jobs that the lab's page can request: a name, a function from JSON to JSON, and a time limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Cancelled", "Ticket", "Work"]


class Cancelled(Exception):
    """The job was cancelled or exceeded its time limit; raised by ``Ticket.step`` within the job."""


class Ticket(Protocol):
    """Reports progress from a running job, and cancels it."""

    def step(self, done: float, text: str = "") -> None:
        """Report that the share ``done`` of the job (0 to 1) is complete; ``text`` describes the next part.

        Raises:
            Cancelled: the job was cancelled; the exception must propagate.
        """


@dataclass(frozen=True)
class Work:
    """One kind of job that the page can request.

    Attributes:
        name: its name in the request ``POST works/<name>``.
        run: a function from the request's JSON object and a ticket to a JSON value. The page shows the text of a
            ``ClearheadError``.
        seconds: the time limit in seconds.
    """

    name: str
    run: Callable[[Mapping[str, Any], Ticket], Any]
    seconds: float = 60.0
