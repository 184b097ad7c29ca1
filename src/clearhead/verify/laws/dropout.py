"""Laws of dropout: the rate, independence, no dropout if it is off, and the same weights in backward.

With the identity as values the output equals the weights, so dropped weights can be counted.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from clearhead.verify.budget import excess
from clearhead.verify.case import Case
from clearhead.verify.law import REFUSALS, Broken, Law, NotApplicable
from clearhead.verify.laws.numbers import check_both, check_output, require
from clearhead.verify.oracle import attend
from clearhead.verify.signatures import CARRIED
from clearhead.verify.subject import Subject, Tensors, expected_of

__all__ = ["LAWS", "factors", "probe", "wide"]

#: Tolerance in standard deviations; a correct function exceeds it once in two million times.
_SIGMAS = 5.0


def probe(subject: Subject, case: Case, allowed: Tensor | None = None) -> tuple[Tensors, Tensor]:
    """Tensors whose values are the identity and random channels, and the weights before dropout."""
    query, key, value = subject.draw(case)
    value = value.clone()
    value[..., : case.k_len] = torch.eye(case.k_len, dtype=value.dtype, device=value.device)
    exact = attend(query.double(), key.double(), value.double(), allowed=allowed)
    return (query, key, value), exact.weights


def factors(subject: Subject, case: Case, output: Tensor, weights: Tensor, allowed: Tensor | None = None) -> Tensor:
    """The factor of each weight, 0 or ``1 / (1 - p)``; other factors raise, and masked weights have 0."""
    factor = output[..., : case.k_len].detach().double() / weights
    if allowed is not None:
        factor = torch.where(allowed, factor, 0.0)
    factor_kept = 1.0 / (1.0 - case.dropout)
    unit = 64.0 * torch.finfo(subject.dtype).eps
    strange = (factor.abs() > unit) & ((factor - factor_kept).abs() > unit * factor_kept)
    if bool(strange.any()):
        place = strange.nonzero()[0].tolist()
        raise Broken(
            f"the weight at {place} is multiplied by {factor[tuple(place)].item():.4g}, not by 0 or {factor_kept:.4g}"
        )
    return (factor > 0.5 * factor_kept).double() * factor_kept


def _check_statistics(subject: Subject, case: Case) -> None:
    try:
        check_output(subject, replace(case, dropout=0.0))
    except Broken:
        raise NotApplicable("it is wrong without dropout, which other laws report") from None
    tensors, weights = probe(subject, case)
    output = subject.call(case, tensors, training=True).output
    survives = (factors(subject, case, output, weights) > 0.0).double()
    p = case.dropout
    _near("the share of weights kept", survives.mean().item(), 1.0 - p, (p * (1.0 - p) / survives.numel()) ** 0.5)
    both = (1.0 - p) ** 2 + p**2
    for axis, name in ((0, "batch members"), (1, "heads"), (2, "queries"), (3, "keys")):
        # Repeated random numbers usually repeat at the distance of a tile.
        for lag in (2**power for power in range(7) if 2**power < survives.shape[axis]):
            one, other = (survives.narrow(axis, start, survives.shape[axis] - lag) for start in (0, lag))
            same = (one == other).double()
            # Pairs share members, which increases the standard deviation by a factor of at most two.
            spread = 2.0 * (both * (1.0 - both) / same.numel()) ** 0.5
            _near(f"the share of equal dropout decisions in {name} {lag} apart", same.mean().item(), both, spread)
    _check_values(subject, case, tensors, output)


def _check_values(subject: Subject, case: Case, tensors: Tensors, output: Tensor) -> None:
    """Every channel of a value has the same weight: dropout acts on weights, not outputs."""
    expected = output[..., : case.k_len].double() @ tensors[2][..., case.k_len :].double()
    actual = output[..., case.k_len :]
    budget = 16.0 * torch.finfo(subject.dtype).eps * case.k_len**0.5 * 4.0
    wrong = excess(actual, expected, expected, budget)
    require(None if wrong is None else f"channels of a value are dropped independently: {wrong}")


def _check_draws(subject: Subject, case: Case) -> None:
    """Two calls in a row, and one from another seed."""
    tensors, weights = probe(subject, case)
    with torch.random.fork_rng(devices=[subject.device] if subject.device.type == "cuda" else []):
        torch.manual_seed(case.seed)
        outputs = [subject.call(case, tensors, training=True, seed=None).output.clone() for _ in range(2)]
    outputs.append(subject.call(case, tensors, training=True, seed=case.seed + 1).output)
    survive = [factors(subject, case, output, weights) > 0.0 for output in outputs]
    same = (1.0 - case.dropout) ** 2 + case.dropout**2
    for other, what in ((survive[1], "in two calls"), (survive[2], "under two random seeds")):
        share = (survive[0] == other).double().mean().item()
        _near(f"the share of equal dropout decisions {what}", share, same, (same * (1.0 - same) / other.numel()) ** 0.5)


def _check_masked(subject: Subject, case: Case) -> None:
    if case.group > 1 and "grouped heads" not in subject.signature.carries(subject.fn):
        raise NotApplicable(f"it does not support {CARRIED['grouped heads']}")
    try:
        check_both(subject, replace(case, dropout=0.0))
    except Broken:
        raise NotApplicable("it is wrong without dropout, which other laws report") from None
    mask = subject.spoken(case)
    assert mask is not None
    allowed, p = mask.allowed.expand(case.batch, case.heads, case.q_len, case.k_len), case.dropout
    tensors, weights = probe(subject, case, allowed)
    output = subject.call(case, tensors, training=True).output
    survives = (factors(subject, case, output, weights, allowed) > 0.0)[allowed].double()
    _near(
        "the share of weights kept under a mask",
        survives.mean().item(),
        1.0 - p,
        (p * (1.0 - p) / survives.numel()) ** 0.5,
    )
    try:
        results = subject.gradients(case, tensors, training=True)
    except REFUSALS:
        return
    if results is not None:
        keep = factors(subject, case, results[0], weights, allowed)
        wrong = subject.off_budget(results, expected_of(tensors, allowed=allowed, keep=keep))
        require(None if wrong is None else f"for the weights that forward dropped, {wrong}")


def _near(what: str, actual: float, expected: float, spread: float) -> None:
    if abs(actual - expected) > _SIGMAS * spread:
        raise Broken(f"{what} is {actual:.4f}, not {expected:.4f} (within {_SIGMAS * spread:.2g})")


def _check_off(subject: Subject, case: Case) -> None:
    tensors = subject.draw(case)
    first, second = (subject.call(case, tensors, training=False, seed=seed).output.clone() for seed in (1, 2))
    if not torch.equal(first, second):
        raise Broken("the output depends on the random seed while dropout is off")
    require(subject.off_budget([first], subject.expected(case)))


def _check_backward(subject: Subject, case: Case) -> None:
    tensors, weights = probe(subject, case)
    results = subject.gradients(case, tensors, training=True)
    if results is None:
        raise NotApplicable("its output carries no gradient")
    keep = factors(subject, case, results[0], weights)
    wrong = subject.off_budget(results, expected_of(tensors, keep=keep))
    require(None if wrong is None else f"for the weights that forward dropped, {wrong}")


def wide(case: Case) -> Case:
    """A case whose values are wide enough for the identity and as many random channels."""
    return replace(case, q_len=case.k_len, head_dim=2 * case.k_len, value_dim=2 * case.k_len, size=0.3)


_PROBE = wide(Case(batch=2, kv_heads=4, q_len=32, k_len=32, dropout=0.25))
#: Two tiles of keys, and of queries.
_TILES = wide(Case(kv_heads=2, q_len=128, k_len=128, dropout=0.25))

LAWS = (
    Law(
        name="dropout",
        says="weights are dropped independently with probability p, and the others divided by 1 - p",
        check=_check_statistics,
        search=False,
        needs=frozenset({"dropout"}),
        cases=(_PROBE, replace(_PROBE, dropout=0.5), replace(_PROBE, q_len=20), _TILES),
    ),
    Law(
        name="dropout draws",
        says="different calls and different random seeds drop different weights",
        check=_check_draws,
        search=False,
        needs=frozenset({"dropout"}),
        cases=(_PROBE,),
    ),
    Law(
        name="dropout under a mask",
        says="weights are dropped under a mask and in grouped heads too, and gradients are those of the weights kept",
        check=_check_masked,
        search=False,
        every_form=True,
        needs=frozenset({"dropout"}),
        cases=(replace(_PROBE, mask="causal"), replace(_PROBE, kv_heads=2, group=2, mask="causal")),
    ),
    Law(
        name="dropout off",
        says="nothing is dropped with probability 0, or by a module that is not training",
        check=_check_off,
        needs=frozenset({"dropout"}),
        cases=tuple(Case(batch=2, kv_heads=2, q_len=9, k_len=9, dropout=p) for p in (0.0, 0.5)),
    ),
    Law(
        name="dropout in backward",
        says="gradients are those of the weights that forward kept",
        check=_check_backward,
        needs=frozenset({"dropout"}),
        fit=wide,
        cases=(_PROBE, replace(_PROBE, dropout=0.5)),
    ),
)
"""Laws of dropout."""
