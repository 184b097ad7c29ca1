"""A law: a name, a sentence, the arguments it needs, its cases and a check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from clearhead.errors import UnsupportedError
from clearhead.verify.case import Case
from clearhead.verify.signatures import CallingConvention
from clearhead.verify.subject import Subject

__all__ = ["REFUSALS", "Broken", "Law", "NotApplicable"]

#: A function raises one of these for what it does not support; any other exception is a failure.
REFUSALS = (NotImplementedError, UnsupportedError)


class Broken(Exception):
    """A law does not hold; the text describes the failure."""


class NotApplicable(Exception):
    """A law does not apply to this function; the text gives the reason."""


def _unmodified(case: Case) -> Case:
    return case


@dataclass(frozen=True, kw_only=True)
class Law:
    """One property of attention.

    Attributes:
        name: a short name.
        says: the law as a sentence.
        check: raises ``Broken`` or ``NotApplicable``, or returns.
        cases: cases that are always tried, simplest first; the search for smaller examples stays within their sizes.
        needs: arguments that the function must support, keys of ``signatures.CARRIED``.
        every_form: whether to try each form of the mask argument, or only the first.
        not_as: forms of the mask argument to which the law does not apply.
        search: whether Hypothesis tries other cases too; False if each is slow or the check is statistical.
        fit: adjusts a drawn case to one that the check accepts.
    """

    name: str
    says: str
    check: Callable[[Subject, Case], None]
    cases: tuple[Case, ...]
    needs: frozenset[str] = frozenset()
    every_form: bool = False
    not_as: frozenset[str] = frozenset()
    search: bool = True
    fit: Callable[[Case], Case] = field(default=_unmodified)

    def forms(self, signature: CallingConvention, carried: frozenset[str], case: Case) -> tuple[str, ...]:
        """The forms in which the law passes a case's mask; empty if the function accepts it in no form."""
        if case.mask == "none":
            return ("none",)
        # The flag means causal from the upper left corner, so it needs equal lengths.
        flag = case.q_len == case.k_len
        forms = [
            form for form in signature.forms(case.mask, carried) if form not in self.not_as and (form != "flag" or flag)
        ]
        return tuple(forms if self.every_form else forms[:1])
