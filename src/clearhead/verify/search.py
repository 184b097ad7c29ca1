"""The search with Hypothesis for failing examples beyond the fixed cases, and for smaller ones.

Hypothesis is optional; without it only the fixed cases are tried.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from clearhead.verify.case import Case
from clearhead.verify.law import Law
from clearhead.verify.signatures import CallingConvention

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["can_search", "search"]

_SIZES = ("batch", "kv_heads", "q_len", "k_len", "head_dim", "value_dim")


def can_search() -> bool:
    """Whether Hypothesis is installed."""
    return find_spec("hypothesis") is not None


def search(
    law: Law, signature: CallingConvention, carried: frozenset[str], fails: Callable[[Case], bool], tries: int
) -> None:
    """Call ``fails`` on ``tries`` drawn cases; if it returns True, also on ever smaller ones.

    Sizes and their product are at most those of the law's cases; other parameters are drawn from the values in them.
    """
    from hypothesis import HealthCheck, Phase, find, settings
    from hypothesis.errors import Flaky, NoSuchExample

    chosen = settings(
        max_examples=tries,
        deadline=None,
        database=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    with suppress(NoSuchExample, Flaky):
        find(_cases(law, signature, carried), fails, settings=chosen, random=random.Random(0))


def _cases(law: Law, signature: CallingConvention, carried: frozenset[str]) -> SearchStrategy[Case]:
    from hypothesis import strategies as st

    def values(name: str) -> list[Any]:
        listed = [getattr(case, name) for case in law.cases]
        return list(dict.fromkeys(listed))

    drawn: dict[str, SearchStrategy[Any]] = {name: st.integers(1, max(values(name))) for name in _SIZES}
    drawn["group"] = st.integers(min(values("group")), max(values("group")))
    drawn["seed"] = st.integers(0, 3)
    for field in fields(Case):
        if field.name not in drawn and field.name != "form":
            drawn[field.name] = st.sampled_from(values(field.name))
    drawn["form"] = st.integers(0, 3)
    same_dim = "value width" not in carried or all(case.value_dim == case.head_dim for case in law.cases)
    most = max(case.places for case in law.cases)
    same_len = all(case.q_len == case.k_len for case in law.cases)

    def built(numbers: dict[str, Any]) -> Case:
        form = numbers.pop("form")
        case = _within(Case(**numbers), most)
        if same_dim:
            case = replace(case, value_dim=case.head_dim)
        if same_len:
            case = replace(case, q_len=case.k_len)
        case = law.fit(case)
        forms = law.forms(signature, carried, case)
        return replace(case, form=forms[form % len(forms)]) if forms else replace(case, mask="none", form="none")

    return st.fixed_dictionaries(drawn).map(built)


def _within(case: Case, most: int) -> Case:
    """The case, shrunk to at most this size, as independently drawn sizes can have a larger product."""
    while case.places > most:
        longest = max(("batch", "kv_heads", "q_len", "k_len"), key=lambda name: int(getattr(case, name)))
        if getattr(case, longest) == 1:
            return case
        case = replace(case, **{longest: getattr(case, longest) // 2})
    return case
