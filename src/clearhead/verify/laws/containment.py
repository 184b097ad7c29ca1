"""NaN and inf in a key or value that nobody may attend to reach nothing."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from clearhead.verify.case import Case
from clearhead.verify.law import Law, NotApplicable
from clearhead.verify.laws.numbers import require
from clearhead.verify.masks import KINDS
from clearhead.verify.subject import Subject, Tensors, expected_of

__all__ = ["LAWS"]

_POISON = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


def _unseen(subject: Subject, case: Case) -> Tensor:
    """Keys that no query of their batch and key head may attend to, ``[batch, kv_heads, k_len]``."""
    mask = subject.spoken(case)
    assert mask is not None
    seen: Tensor = mask.allowed.expand(case.batch, case.heads, case.q_len, case.k_len).any(dim=2)
    of_key_head: Tensor = seen.unflatten(1, (case.kv_heads, case.group)).any(dim=2)
    return ~of_key_head


def _poisoned(subject: Subject, case: Case) -> tuple[Tensors, Tensors]:
    """The tensors with poison in unseen places, and with 0 there."""
    query, key, value = subject.draw(case)
    unseen = _unseen(subject, case)[..., None]
    if not bool(unseen.any()):
        raise NotApplicable("every key is seen")
    bad = _POISON[case.poison]
    pairs = ((tensor.masked_fill(unseen, fill) for tensor in (key, value)) for fill in (bad, 0.0))
    poisoned, clean = ((query, *pair) for pair in pairs)
    return poisoned, clean  # type: ignore[return-value]


def _check_output(subject: Subject, case: Case) -> None:
    tensors, clean = _poisoned(subject, case)
    mask = subject.spoken(case)
    assert mask is not None
    wanted = expected_of(clean, allowed=mask.allowed)
    require(subject.off_budget([subject.call(case, tensors).output], wanted))


def _check_gradients(subject: Subject, case: Case) -> None:
    tensors, clean = _poisoned(subject, case)
    mask = subject.spoken(case)
    assert mask is not None
    found = subject.gradients(case, tensors)
    if found is None:
        raise NotApplicable("its output carries no gradient")
    require(subject.off_budget(found, expected_of(clean, allowed=mask.allowed)))


def _fit(case: Case) -> Case:
    """The last key is unseen under a causal mask only where there are fewer queries than keys."""
    if KINDS[case.mask].square or case.mask == "dense":
        return replace(case, q_len=case.k_len)
    return replace(case, q_len=min(case.q_len, case.k_len - 1)) if case.mask == "causal" and case.k_len > 1 else case


_CASES = tuple(
    replace(case, poison=poison)
    for case in (
        Case(batch=2, q_len=3, k_len=4, mask="padding"),
        Case(batch=3, kv_heads=2, q_len=9, k_len=9, mask="padding"),
        Case(batch=1, kv_heads=2, q_len=5, k_len=9, mask="causal"),
        Case(batch=2, kv_heads=1, q_len=9, k_len=9, mask="document ids"),
        Case(batch=3, kv_heads=2, q_len=65, k_len=67, mask="padding"),
        Case(batch=2, kv_heads=1, q_len=5, k_len=5, mask="nothing"),
    )
    for poison in ("nan", "inf", "-inf")
)

LAWS = (
    Law(
        name="containment",
        says="NaN and inf in keys and values that nobody may attend to change no output",
        check=_check_output,
        needs=frozenset({"mask"}),
        every_form=True,
        # What is added to NaN is NaN.
        not_as=frozenset({"float"}),
        fit=_fit,
        cases=_CASES,
    ),
    Law(
        name="containment in gradients",
        says="NaN and inf in keys and values that nobody may attend to change no gradient",
        check=_check_gradients,
        needs=frozenset({"mask"}),
        every_form=True,
        # What is added to NaN is NaN.
        not_as=frozenset({"float"}),
        fit=_fit,
        cases=_CASES,
    ),
)
"""Laws of what is not finite."""
