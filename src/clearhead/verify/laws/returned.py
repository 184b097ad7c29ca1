"""Laws of returned statistics: log-sum-exp, weights, their entropy, and the attention that each key receives."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from clearhead.verify.budget import excess
from clearhead.verify.case import Case
from clearhead.verify.law import Broken, Law, NotApplicable
from clearhead.verify.laws.masking import as_square
from clearhead.verify.laws.numbers import require
from clearhead.verify.signatures import Answer
from clearhead.verify.subject import Subject

__all__ = ["LAWS"]


def _answer(subject: Subject, case: Case) -> Answer:
    return subject.call(case, subject.draw(case), returned=True)


def _unit(subject: Subject) -> float:
    return float(torch.finfo(subject.dtype).eps)


def _check_lse(subject: Subject, case: Case) -> None:
    lse = _answer(subject, case).lse
    if lse is None:
        raise NotApplicable("it returns no log-sum-exp")
    exact = subject.expected(case).lse
    # Scores of the case's magnitude, summed over head_dim and then over keys.
    reach = 1.0 + exact[torch.isfinite(exact)].abs().max().item() if bool(torch.isfinite(exact).any()) else 1.0
    floor = 32.0 * _unit(subject) * reach * case.head_dim**0.5
    wrong = excess(lse, exact, exact, floor)
    if wrong is None:
        return
    same = lse.shape == exact.shape
    for other, words in (
        (exact / math.log(2.0), "is in base 2"),
        (exact + math.log(2.0), "is larger by ln 2"),
        (exact - math.log(2.0), "is smaller by ln 2"),
    ):
        if same and excess(lse, other, other, 2.0 * floor) is None:
            raise Broken(f"the log-sum-exp {words}")
    raise Broken(f"the log-sum-exp is {wrong}")


def _check_weights(subject: Subject, case: Case) -> None:
    weights = _answer(subject, case).weights
    if weights is None:
        raise NotApplicable("it returns no weights")
    exact = subject.expected(case).weights
    if weights.shape != exact.shape:
        raise Broken(f"the weights have shape {tuple(weights.shape)}, not {tuple(exact.shape)}")
    returned = weights.detach().double()
    if bool((returned < 0.0).any()):
        raise Broken(f"a weight is {returned.min().item():.3g}")
    floor = 32.0 * _unit(subject) * case.head_dim**0.5
    sums, wanted = returned.sum(dim=-1), exact.sum(dim=-1)
    require(_said("the sum of a row of weights", excess(sums, wanted, wanted, floor)))
    entropy = torch.special.entr(returned).sum(dim=-1)
    if bool((entropy > math.log(max(1, case.k_len)) + floor * case.k_len).any()):
        raise Broken(f"the entropy of a row is {entropy.max().item():.4g}, above ln {case.k_len}")
    require(_said("the weight", excess(returned, exact, exact, floor)))


def _said(what: str, wrong: str | None) -> str | None:
    return None if wrong is None else f"{what} is {wrong}"


def _check_entropy(subject: Subject, case: Case) -> None:
    entropy = _answer(subject, case).entropy
    if entropy is None:
        raise NotApplicable("it returns no entropy")
    exact = torch.special.entr(subject.expected(case).weights).sum(dim=-1)
    require(_said("the entropy", excess(entropy, exact, exact, _loose(subject, case))))


def _check_received(subject: Subject, case: Case) -> None:
    received = _answer(subject, case).received
    if received is None:
        raise NotApplicable("it returns no sums over queries")
    exact: Tensor = subject.expected(case).weights.sum(dim=-2)
    require(_said("what a key receives", excess(received, exact, exact, _loose(subject, case) * case.q_len**0.5)))


def _loose(subject: Subject, case: Case) -> float:
    return 32.0 * _unit(subject) * math.sqrt(case.head_dim) * math.log(2.0 + case.k_len)


_SMALL = Case(batch=2, kv_heads=2, q_len=9, k_len=9)
_CASES = (
    Case(q_len=1, k_len=2),
    _SMALL,
    replace(_SMALL, q_len=3, k_len=70),
    replace(_SMALL, mask="causal"),
    replace(_SMALL, mask="empty rows"),
)

LAWS = (
    Law(
        name="log-sum-exp",
        says="the log-sum-exp is of scaled scores, in natural logarithms, -inf where nothing may be attended to",
        check=_check_lse,
        fit=as_square,
        cases=_CASES,
    ),
    Law(
        name="weights",
        says="returned weights are not negative, sum to 1 (to 0 in an empty row), and have at most ln k_len nats",
        check=_check_weights,
        fit=as_square,
        cases=_CASES,
    ),
    Law(
        name="entropy",
        says="returned entropies are those of the weights, in nats",
        check=_check_entropy,
        fit=as_square,
        cases=_CASES,
    ),
    Law(
        name="received",
        says="returned sums over queries are the column sums of the weights",
        check=_check_received,
        fit=as_square,
        cases=_CASES,
    ),
)
"""Laws of returned statistics."""
