"""Laws of scores: float masks with finite values, and each score rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from clearhead.masks import Dense
from clearhead.scores import Alibi, RelativeBias, ScoreRule, Sink, SoftCap
from clearhead.verify.case import Case
from clearhead.verify.law import REFUSALS, Broken, Law, NotApplicable
from clearhead.verify.laws.masking import as_square
from clearhead.verify.laws.numbers import require
from clearhead.verify.masks import Spoken
from clearhead.verify.oracle import slope
from clearhead.verify.process import undisturbed
from clearhead.verify.subject import Rule, Subject, expected_of

__all__ = ["LAWS"]

_REACH = 3
_CAP = 1.5


def _numbers(subject: Subject, *shape: int) -> Tensor:
    """Deterministic random values for a bias or a table."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(29), dtype=torch.float64)
    return drawn.to(dtype=subject.dtype, device=subject.device)


# Float masks ------------------------------------------------------------------------------------------------------


def _biases(subject: Subject, case: Case) -> list[Tensor]:
    """A bias for every sequence and head, one shared by all, and one for each head's keys."""
    places = (case.q_len, case.k_len)
    shapes = ((case.batch, case.heads, *places), (1, 1, *places), (1, case.heads, 1, case.k_len))
    return [_numbers(subject, *shape) for shape in shapes]


def _handed_over(subject: Subject, case: Case, bias: Tensor) -> dict[str, Any]:
    if "float" not in subject.signature.forms("dense", subject.signature.carries(subject.fn)):
        raise NotApplicable("it does not support a float mask")
    mask = subject.spoken(case)
    if mask is None:
        everything = torch.ones(1, 1, case.q_len, case.k_len, dtype=torch.bool, device=subject.device)
        mask = Spoken(everything, Dense(everything))
    return {"mask": mask, "form": "float", "bias": bias}


def _bias_rule(bias: Tensor) -> Rule:
    return Rule(bias, lambda learned: {"bias": learned})


def _check_bias(subject: Subject, case: Case) -> None:
    tensors = subject.draw(case)
    for bias in _biases(subject, case):
        said = _handed_over(subject, case, bias)
        wanted = expected_of(tensors, allowed=said["mask"].allowed, rule=_bias_rule(bias))
        require(subject.off_budget([subject.call(case, tensors, **said).output], wanted))
        try:
            results = subject.gradients(case, tensors, **said)
        except REFUSALS:
            continue
        require(None if results is None else subject.off_budget(results, wanted))
    if case.mask == "none":
        _check_lowest(subject, case)


def _check_lowest(subject: Subject, case: Case) -> None:
    """The lowest finite value forbids like -inf; a row of only this value, whose meaning is open, must be finite."""
    tensors, bias = subject.draw(case), _biases(subject, case)[1]
    allowed = torch.ones_like(bias, dtype=torch.bool).tril()
    lowest = bias.masked_fill(~allowed, torch.finfo(subject.dtype).min)
    lowest[:, :, -1] = torch.finfo(subject.dtype).min
    output = subject.call(case, tensors, **_handed_over(subject, case, lowest)).output
    strange = (~torch.isfinite(output)).nonzero()
    if strange.numel():
        place = strange[0].tolist()
        raise Broken(f"output is {output[tuple(place)].item()} at {place} for a float mask of the lowest finite value")
    wanted = expected_of(tensors, allowed=allowed, rule=_bias_rule(bias))
    last = torch.arange(case.q_len, device=subject.device)[:, None] == case.q_len - 1
    wrong = subject.off_budget([torch.where(last, wanted.exact[0].to(output.dtype), output)], wanted)
    require(None if wrong is None else f"if a float mask forbids with the lowest finite value, {wrong}")


def _check_bias_gradient(subject: Subject, case: Case) -> None:
    tensors = subject.draw(case)
    for bias in _biases(subject, case):
        leaf = bias.clone().requires_grad_()
        said = _handed_over(subject, case, leaf)
        results = subject.gradients(case, tensors, learned=leaf, **said)
        if results is None:
            raise NotApplicable("its output carries no gradient")
        wanted = expected_of(tensors, allowed=said["mask"].allowed, rule=_bias_rule(bias))
        require(subject.off_budget(results, wanted))
        output = subject.call(case, tensors, **said).output
        if not output.requires_grad:
            raise Broken("the output carries no gradient if only the float mask requires one")
        with undisturbed():
            (alone,) = torch.autograd.grad(output, leaf, slope(output), allow_unused=True)
        wrong = subject.off_gradient(3, torch.zeros_like(leaf) if alone is None else alone, wanted)
        require(None if wrong is None else f"if only the float mask requires a gradient, {wrong}")


# Score rules ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RuleLaw:
    """A score rule: its learned tensor, its object in clearhead, and its options for the oracle."""

    learned: Callable[[Subject, Case], Tensor | None]
    ours: Callable[[Tensor | None], ScoreRule]
    meaning: Callable[[Case, Tensor], dict[str, Any]]


def _distance(case: Case, device: torch.device) -> Tensor:
    """``q_pos - k_pos``, ``[q_len, k_len]``."""
    q_pos = torch.arange(case.offset, case.offset + case.q_len, device=device)
    return q_pos[:, None] - torch.arange(case.k_len, device=device)


def _alibi(case: Case, slopes: Tensor) -> dict[str, Any]:
    return {"bias": -slopes[:, None, None] * _distance(case, slopes.device).abs()}


def _relative(case: Case, table: Tensor) -> dict[str, Any]:
    return {"bias": table[:, _distance(case, table.device).clamp(-_REACH, _REACH) + _REACH]}


def _of(kind: Callable[[Tensor], ScoreRule], learned: Tensor | None) -> ScoreRule:
    assert learned is not None
    return kind(learned)


def _with_slopes(slopes: Tensor) -> ScoreRule:
    return Alibi(slopes=slopes)


def _check_rule(law: _RuleLaw) -> Callable[[Subject, Case], None]:
    def check(subject: Subject, case: Case) -> None:
        learned = law.learned(subject, case)
        tensors, mask = subject.draw(case), subject.spoken(case)
        wanted = expected_of(
            tensors,
            allowed=None if mask is None else mask.allowed,
            rule=Rule(learned, lambda values: law.meaning(case, values)),
        )
        require(subject.off_budget([subject.call(case, tensors, rules=(law.ours(learned),)).output], wanted))
        leaf = None if learned is None else learned.clone().requires_grad_()
        try:
            results = subject.gradients(case, tensors, learned=leaf, rules=(law.ours(leaf),))
        except REFUSALS:
            return
        require(None if results is None else subject.off_budget(results, wanted))

    return check


def _law(name: str, says: str, rule: _RuleLaw) -> Law:
    return Law(
        name=name, says=says, check=_check_rule(rule), needs=frozenset({"score rules"}), fit=as_square, cases=_CASES
    )


_SMALL = Case(batch=2, kv_heads=2, q_len=9, k_len=9)
_CASES = (
    Case(q_len=2, k_len=3),
    _SMALL,
    replace(_SMALL, mask="causal"),
    replace(_SMALL, group=2, q_len=5, k_len=11, end=True),
    replace(_SMALL, q_len=70, k_len=70, mask="causal"),
)
_BIAS_CASES = (
    Case(q_len=2, k_len=3),
    _SMALL,
    replace(_SMALL, mask="causal"),
    replace(_SMALL, mask="dense", q_len=5, k_len=11),
)

LAWS = (
    *(
        Law(name=name, says=says, check=check, needs=frozenset({"mask"}), search=False, cases=_BIAS_CASES)
        for name, says, check in (
            ("float mask", "finite values of a float mask are added to scaled scores", _check_bias),
            ("float mask in gradients", "a float mask that is learned receives its gradient", _check_bias_gradient),
        )
    ),
    _law(
        "alibi",
        "Alibi subtracts slope[head] * |q_pos - k_pos| from scaled scores",
        _RuleLaw(lambda s, c: _numbers(s, c.heads).abs(), lambda values: _of(_with_slopes, values), _alibi),
    ),
    _law(
        "relative bias",
        "RelativeBias adds table[head, q_pos - k_pos], with distances clipped to the table",
        _RuleLaw(
            lambda s, c: _numbers(s, c.heads, 2 * _REACH + 1), lambda values: _of(RelativeBias, values), _relative
        ),
    ),
    _law(
        "soft cap",
        "SoftCap makes scaled scores cap * tanh(score / cap), before the mask",
        _RuleLaw(lambda s, c: None, lambda values: SoftCap(_CAP), lambda case, values: {"cap": _CAP}),
    ),
    _law(
        "sink",
        "Sink adds a logit per head to the softmax, without a value",
        _RuleLaw(
            lambda s, c: _numbers(s, c.heads), lambda values: _of(Sink, values), lambda case, values: {"sink": values}
        ),
    ),
)
"""Laws of score rules and float masks."""
