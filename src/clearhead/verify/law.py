"""What a law is: a name, a sentence, what it needs, the cases it is tried on, and a check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from clearhead.errors import UnsupportedError
from clearhead.verify.case import Case
from clearhead.verify.signatures import Signature
from clearhead.verify.subject import Subject

__all__ = ["REFUSALS", "Broken", "Law", "NotApplicable"]

#: A function that raises one of these says that it does not do this; anything else it raises is a failure.
REFUSALS = (NotImplementedError, UnsupportedError)


class Broken(Exception):
    """A law does not hold; the text says how."""


class NotApplicable(Exception):
    """A law says nothing about this function; the text says why."""


def _as_it_is(case: Case) -> Case:
    return case


@dataclass(frozen=True, kw_only=True)
class Law:
    """One property of attention.

    Attributes:
        name: a few words.
        says: what holds where the law holds.
        check: raises ``Broken``, or ``NotApplicable``, or returns.
        cases: what is always tried, simplest first; the search for smaller examples stays within their sizes.
        needs: what a signature must carry, see ``signatures.CARRIED``.
        every_form: tries each form in which the signature can hand a mask over; else the first only.
        not_as: forms in which the law says nothing.
        search: whether other cases are tried too; not where each is slow, or where chance has a say.
        fit: makes a case of free numbers one that the check understands.
    """

    name: str
    says: str
    check: Callable[[Subject, Case], None]
    cases: tuple[Case, ...]
    needs: frozenset[str] = frozenset()
    every_form: bool = False
    not_as: frozenset[str] = frozenset()
    search: bool = True
    fit: Callable[[Case], Case] = field(default=_as_it_is)

    def forms(self, signature: Signature, carried: frozenset[str], case: Case) -> tuple[str, ...]:
        """The forms in which the law hands over a case's mask; none where the function can take it in none."""
        if case.mask == "none":
            return ("none",)
        # A flag alone says causal from the upper left corner and nothing else.
        flag = case.q_len == case.k_len
        known = [
            form for form in signature.forms(case.mask, carried) if form not in self.not_as and (form != "flag" or flag)
        ]
        return tuple(known if self.every_form else known[:1])
