"""Laws of containment of NaN and infinity.

Masked ones reach nothing. A NaN that is attended to reaches exactly the rows that attend to it, and likewise a NaN in
a gradient. An infinity that is attended to counts by IEEE arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from clearhead.verify.case import Case
from clearhead.verify.law import Broken, Law, NotApplicable
from clearhead.verify.laws.numbers import require
from clearhead.verify.masks import KINDS
from clearhead.verify.oracle import attend, slope
from clearhead.verify.subject import Subject, Tensors

__all__ = ["LAWS"]

_POISON = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


def _unseen(subject: Subject, case: Case) -> Tensor:
    """Keys that no query of their batch and key head may attend to, ``[batch, kv_heads, k_len]``."""
    mask = subject.spoken(case)
    assert mask is not None
    attended: Tensor = mask.allowed.expand(case.batch, case.heads, case.q_len, case.k_len).any(dim=2)
    of_key_head: Tensor = attended.unflatten(1, (case.kv_heads, case.group)).any(dim=2)
    return ~of_key_head


def _poisoned(subject: Subject, case: Case) -> Tensors:
    """The tensors with NaN or infinity in the tokens that no query may attend to."""
    query, key, value = subject.draw(case)
    unseen = _unseen(subject, case)[..., None]
    if not bool(unseen.any()):
        raise NotApplicable("every key may be attended to")
    bad = _POISON[case.poison]
    return query, key.masked_fill(unseen, bad), value.masked_fill(unseen, bad)


def _check_output(subject: Subject, case: Case) -> None:
    require(subject.off_budget([subject.call(case, _poisoned(subject, case)).output], subject.expected(case)))


def _check_gradients(subject: Subject, case: Case) -> None:
    results = subject.gradients(case, _poisoned(subject, case))
    if results is None:
        raise NotApplicable("its output carries no gradient")
    require(subject.off_budget(results, subject.expected(case)))


def _nan_tokens(subject: Subject, case: Case) -> Iterator[tuple[str, Tensors, Tensor, Tensor]]:
    """One token of the first sequence is NaN, in query, key and value in turn.

    Yields the tensor's name, the tensors, which rows ``[batch, 1, q_len, 1]`` may depend on the token, and the mask
    ``[1, 1, q_len, k_len]`` of the first sequence.
    """
    mask = subject.spoken(case)
    place = min(case.q_len, case.k_len) // 2
    everywhere = torch.ones(1, 1, case.q_len, case.k_len, dtype=torch.bool, device=subject.device)
    allowed = everywhere if mask is None else mask.allowed[:1, :1].expand_as(everywhere)
    for number, name in enumerate(("query", "key", "value")):
        tensors = [tensor.clone() for tensor in subject.draw(case)]
        tensors[number][0, :, place] = torch.nan
        reached = torch.zeros(case.batch, 1, case.q_len, 1, dtype=torch.bool, device=subject.device)
        if name == "query":
            reached[0, 0, place] = True
        else:
            reached[0, 0, :, 0] = allowed[0, 0, :, place]
        yield name, (tensors[0], tensors[1], tensors[2]), reached, allowed


def _with_nan(subject: Subject, case: Case) -> Iterator[tuple[str, Tensor, Tensor]]:
    """For each tensor with a NaN token: its name, the output, and the rows that may depend on the token."""
    for name, tensors, reached, _ in _nan_tokens(subject, case):
        yield name, subject.call(case, tensors).output, reached


def _check_shown(subject: Subject, case: Case) -> None:
    for name, output, reached in _with_nan(subject, case):
        hidden = (~output.isnan() & reached).nonzero()
        if hidden.numel():
            raise Broken(f"a NaN in {name} is hidden: the output at {hidden[0].tolist()} is a number")


def _check_not_spread(subject: Subject, case: Case) -> None:
    wanted = subject.expected(case)
    for name, output, reached in _with_nan(subject, case):
        spread = (output.isnan() & ~reached).nonzero()
        if spread.numel():
            raise Broken(f"a NaN in {name} of one sequence reaches the output at {spread[0].tolist()}")
        clean = torch.where(reached, wanted.exact[0].to(output.dtype), output)
        wrong = subject.off_budget([clean], wanted)
        require(None if wrong is None else f"beside a NaN in {name}, {wrong}")


def _check_shown_in_gradients(subject: Subject, case: Case) -> None:
    """Rows that are NaN have NaN gradients, for their queries and for the keys and values that they attend to."""
    for name, tensors, reached, allowed in _nan_tokens(subject, case):
        results = subject.gradients(case, tensors)
        if results is None:
            raise NotApplicable("its output carries no gradient")
        keys = torch.zeros(case.batch, 1, case.k_len, 1, dtype=torch.bool, device=subject.device)
        keys[0, 0, :, 0] = (reached[0, 0] & allowed[0, 0]).any(dim=0)
        expected = [("dQ", reached), ("dK", keys)] if name == "value" else [("dQ", reached), ("dK", keys), ("dV", keys)]
        for (gradient, places), result in zip(expected, results[1:], strict=False):
            hidden = (torch.isfinite(result) & places).nonzero()
            if hidden.numel():
                raise Broken(f"a NaN in {name} is hidden: {gradient} at {hidden[0].tolist()} is a number")


def _check_infinity(subject: Subject, case: Case) -> None:
    """One element of a key or a value of the first sequence is infinite, with either sign."""
    if subject.signature.name == "mha":
        raise NotApplicable("linear layers make NaN of an infinite element")
    wanted, place = subject.expected(case), case.k_len // 2
    for number, name in ((1, "key"), (2, "value")):
        for infinity in (torch.inf, -torch.inf):
            tensors = [tensor.clone() for tensor in subject.draw(case)]
            tensors[number][0, :, place, 0] = infinity
            output = subject.call(case, (tensors[0], tensors[1], tensors[2])).output
            doubles = [tensor.double() for tensor in tensors]
            exact = attend(doubles[0], doubles[1], doubles[2], scale=case.scale).output
            wrong = (~torch.isclose(output.double(), exact, rtol=torch.inf, equal_nan=True)).nonzero()
            if wrong.numel():
                at = tuple(wrong[0].tolist())
                raise Broken(
                    f"beside {infinity} in {name}, {output[at].item():.4g} at {[*at]}, not {exact[at].item():.4g}"
                )
            # The budget of the clean call, which has the same sizes.
            moved = wanted.exact[0] + (output.double() - exact).masked_fill(~torch.isfinite(exact), 0.0)
            off = subject.off_budget([moved], wanted)
            require(None if off is None else f"beside {infinity} in {name}, {off}")


def _check_arrivals(subject: Subject, case: Case) -> None:
    """The gradient of one row of the first sequence is NaN."""
    mask, wanted = subject.spoken(case), subject.expected(case)
    place = min(case.q_len, case.k_len) // 2
    grad = slope(wanted.exact[0]).to(subject.dtype)
    grad[0, :, place] = torch.nan
    results = subject.gradients(case, subject.draw(case), grad)
    if results is None:
        raise NotApplicable("its output carries no gradient")
    rows, keys = (
        torch.zeros(case.batch, 1, length, 1, dtype=torch.bool, device=subject.device)
        for length in (case.q_len, case.k_len)
    )
    rows[0, 0, place] = True
    keys[0, 0, :, 0] = True if mask is None else mask.allowed[0, 0, place]
    for number, (name, reached) in enumerate((("dQ", rows), ("dK", keys), ("dV", keys)), start=1):
        spread = (results[number].isnan() & ~reached).nonzero()
        if spread.numel():
            raise Broken(f"a NaN that arrives at query {place} of one sequence reaches {name} at {spread[0].tolist()}")
        # Gradients that it may not reach must equal those of the clean call.
        clean = torch.where(reached, wanted.exact[number].to(subject.dtype), results[number])
        wrong = subject.off_gradient(number - 1, clean, wanted)
        require(None if wrong is None else f"beside a NaN that arrives at query {place}, {wrong}")


def _fit(case: Case) -> Case:
    """Under a causal mask, no query attends to the last key only if there are fewer queries than keys."""
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

_SMALL = Case(batch=2, kv_heads=2, q_len=9, k_len=9)
_NEIGHBOURS = (_SMALL, replace(_SMALL, mask="causal"), replace(_SMALL, q_len=65, k_len=65, mask="causal"))

LAWS = (
    Law(
        name="NaN is shown",
        says="a NaN in a query, key or value makes the rows that attend to it NaN",
        check=_check_shown,
        search=False,
        # Three keys are fewer than the lanes of any vector unit.
        cases=(
            Case(q_len=9, k_len=9),
            _SMALL,
            replace(_SMALL, q_len=3, k_len=70),
            replace(_SMALL, mask="causal"),
            replace(_SMALL, q_len=3, k_len=3),
        ),
    ),
    Law(
        name="NaN is shown in gradients",
        says="rows that a NaN in a query, key or value reaches have NaN gradients",
        check=_check_shown_in_gradients,
        search=False,
        cases=(_SMALL, replace(_SMALL, q_len=3, k_len=70), replace(_SMALL, mask="causal"), Case(q_len=3, k_len=3)),
    ),
    Law(
        name="infinity",
        says="an infinite value makes its channel infinite, a score of inf its row NaN, one of -inf has weight 0",
        check=_check_infinity,
        search=False,
        cases=(Case(q_len=3, k_len=3), _SMALL, replace(_SMALL, q_len=3, k_len=70), replace(_SMALL, q_len=70)),
    ),
    Law(
        name="NaN is not spread",
        says="a NaN reaches no row that may not attend to it, and no other sequence of the batch",
        check=_check_not_spread,
        every_form=True,
        # A float mask is added, and NaN plus -inf is NaN.
        not_as=frozenset({"float"}),
        search=False,
        cases=_NEIGHBOURS,
    ),
    Law(
        name="NaN is not spread in gradients",
        says="a NaN in a row's gradient reaches that row's query, and the keys and values that it may attend to",
        check=_check_arrivals,
        every_form=True,
        # With an added -inf, the score is part of its row's gradient.
        not_as=frozenset({"float"}),
        search=False,
        cases=_NEIGHBOURS,
    ),
    Law(
        name="containment",
        says="NaN and inf in keys and values that no query attends to change no output",
        check=_check_output,
        needs=frozenset({"mask"}),
        every_form=True,
        # A float mask is added, and NaN plus -inf is NaN.
        not_as=frozenset({"float"}),
        fit=_fit,
        cases=_CASES,
    ),
    Law(
        name="containment in gradients",
        says="NaN and inf in keys and values that no query attends to change no gradient",
        check=_check_gradients,
        needs=frozenset({"mask"}),
        every_form=True,
        # A float mask is added, and NaN plus -inf is NaN.
        not_as=frozenset({"float"}),
        fit=_fit,
        cases=_CASES,
    ),
)
"""Laws of NaN and infinity."""
