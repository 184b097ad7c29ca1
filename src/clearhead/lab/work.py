"""What the lab's page can ask for, as data: a name, a function from JSON to JSON, and how long it may take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Cancelled", "Ticket", "Work"]


class Cancelled(Exception):
    """The work is no longer wanted, or its time is over; raised by ``Ticket.step`` inside the work."""


class Ticket(Protocol):
    """What running work holds: a way to say how far it is, and to be told that nobody waits any longer."""

    def step(self, done: float, text: str = "") -> None:
        """Say that ``done`` of the work (0 to 1) is behind, ``text`` being what comes next.

        Raises:
            Cancelled: nobody waits for the result any longer. Let it pass.
        """


@dataclass(frozen=True)
class Work:
    """One question of the page.

    Attributes:
        name: what the page asks for, ``POST works/<name>``.
        run: from the page's JSON object and a ticket to a JSON value. A ``ClearheadError`` becomes the message that
            the page shows.
        seconds: the longest it may take.
    """

    name: str
    run: Callable[[Mapping[str, Any], Ticket], Any]
    seconds: float = 60.0
