"""Backward as autograd calls it: any gradient handed in, any of the inputs learning, more than once."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from clearhead.verify.budget import excess, rounding
from clearhead.verify.case import Case, laid_out
from clearhead.verify.law import REFUSALS, Broken, Law, NotApplicable
from clearhead.verify.laws.numbers import require
from clearhead.verify.oracle import attend, slope
from clearhead.verify.process import undisturbed
from clearhead.verify.subject import NAMES, Subject, expected_of

__all__ = ["LAWS"]


def _handed(shape: tuple[int, ...], subject: Subject) -> dict[str, Tensor]:
    """Gradients of an output by how they lie in memory."""
    plain = slope(torch.empty(shape, dtype=subject.dtype, device=subject.device))
    return {
        "it is made": plain,
        "it is made, and is large": 100.0 * plain,
        "heads last": plain.transpose(1, 2).contiguous().transpose(1, 2),
        "part of a larger one": laid_out(plain, "slice"),
        "every other number of a larger one": laid_out(plain, "every other"),
        "one number for all channels": plain[..., :1].expand(shape),
        "one row for all queries": plain[:, :, :1].expand(shape),
        "one number": plain.new_tensor(0.7).expand(shape),
    }


def _check_layouts(subject: Subject, case: Case) -> None:
    tensors, mask = subject.draw(case), subject.spoken(case)
    for layout, grad in _handed((*tensors[0].shape[:3], case.value_dim), subject).items():
        before = grad.clone()
        found = subject.gradients(case, tensors, grad)
        if found is None:
            raise NotApplicable("its output carries no gradient")
        if not torch.equal(grad, before):
            raise Broken("the gradient handed to the output was written to")
        wanted = expected_of(tensors, allowed=None if mask is None else mask.allowed, scale=case.scale, grad=before)
        wrong = subject.off_budget(found, wanted)
        require(None if wrong is None else f"for a gradient of the output that lies in memory as {layout}, {wrong}")


def _check_alone(subject: Subject, case: Case) -> None:
    tensors, wanted = subject.draw(case), subject.expected(case)
    if subject.gradients(case, tensors) is None:
        raise NotApplicable("its output carries no gradient")
    for places in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)):
        leaves = [tensor.detach().requires_grad_(at in places) for at, tensor in enumerate(tensors)]
        words = f"where only {' and '.join(('query', 'key', 'value')[place] for place in places)}"
        words += " wants a gradient" if len(places) == 1 else " want gradients"
        output = subject.call(case, (leaves[0], leaves[1], leaves[2])).output
        if not output.requires_grad:
            raise Broken(f"the output carries no gradient {words}")
        with undisturbed():
            learning = [leaves[place] for place in places]
            found = torch.autograd.grad(output, learning, slope(output), allow_unused=True)
        for place, one in zip(places, found, strict=True):
            if one is None:
                raise Broken(f"{NAMES[place]} is absent {words}")
            wrong = subject.off_gradient(place, one, wanted)
            require(None if wrong is None else f"{words}, {wrong}")


def _check_twice(subject: Subject, case: Case) -> None:
    query, key, value = (tensor.detach().requires_grad_() for tensor in subject.draw(case))
    output = subject.call(case, (query, key, value)).output
    if not output.requires_grad:
        raise NotApplicable("its output carries no gradient")
    for time in ("first", "second"):
        with undisturbed():
            found = torch.autograd.grad(
                output, (query, key, value), slope(output), retain_graph=time == "first", allow_unused=True
            )
        kept = [torch.zeros_like(query) if one is None else one for one in found]
        wrong = subject.off_budget([output.detach(), *kept], subject.expected(case))
        require(None if wrong is None else f"in the {time} backward of one forward, {wrong}")


def _check_later(subject: Subject, case: Case) -> None:
    """Two forwards, then both backwards, the first one's first and, in a second turn, last."""
    cases = (case, replace(case, seed=case.seed + 1))
    for turn in ((0, 1), (1, 0)):
        leaves = [[tensor.detach().requires_grad_() for tensor in subject.draw(own)] for own in cases]
        outputs = [subject.call(own, (q, k, v)).output for own, (q, k, v) in zip(cases, leaves, strict=True)]
        if not all(output.requires_grad for output in outputs):
            raise NotApplicable("its output carries no gradient")
        for place in turn:
            with undisturbed():
                found = torch.autograd.grad(outputs[place], leaves[place], slope(outputs[place]), allow_unused=True)
            kept = [
                torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves[place], found, strict=True)
            ]
            wrong = subject.off_budget([outputs[place].detach(), *kept], subject.expected(cases[place]))
            words = ("first", "second")[place]
            require(None if wrong is None else f"in the backward of the {words} of two forwards, {wrong}")


def _check_again(subject: Subject, case: Case) -> None:
    """Derivatives of ``sum(grad * d output)``: right, or an error that says that there are none."""
    tensors, mask = subject.draw(case), subject.spoken(case)
    found = []
    for own in (torch.float64, subject.dtype, None):
        leaves = [tensor.detach().to(own or subject.dtype).requires_grad_() for tensor in tensors]
        query, key, value = leaves
        if own is None:
            output = subject.call(case, (query, key, value)).output
        else:
            output = attend(query, key, value, allowed=None if mask is None else mask.allowed, scale=case.scale).output
        if not output.requires_grad:
            raise NotApplicable("its output carries no gradient")
        handed = slope(output).requires_grad_()
        try:
            with undisturbed():
                first = torch.autograd.grad(output, leaves, handed, create_graph=True)
                total = sum((one * slope(one)).sum() for one in first)
                found.append(torch.autograd.grad(total, (*leaves, handed), allow_unused=True))  # type: ignore[arg-type]
        except (RuntimeError, *REFUSALS) as error:
            raise NotApplicable(f"it says that its gradients have none: {' '.join(str(error).split())[:120]}") from None
    for name, exact, textbook, one in zip(("query", "key", "value", "the gradient handed in"), *found, strict=True):
        floor = 8.0 * rounding(exact, case.k_len * case.head_dim, 1.0, dtype=subject.dtype)
        wrong = excess(torch.zeros_like(exact) if one is None else one, textbook, exact, floor)
        require(None if wrong is None else f"the gradient of its gradients by {name} is {wrong}")


_SMALL = Case(batch=2, kv_heads=2, q_len=9, k_len=9)
_CASES = (Case(q_len=2, k_len=3), _SMALL, replace(_SMALL, mask="causal"))

LAWS = (
    Law(
        name="gradient layouts",
        says="strides of the gradient handed to the output do not matter, and it is not written to",
        check=_check_layouts,
        search=False,
        cases=_CASES,
    ),
    Law(
        name="gradients alone",
        says="query, key and value receive their gradients where one of them wants one, or two",
        check=_check_alone,
        search=False,
        cases=_CASES,
    ),
    Law(
        name="backward twice",
        says="a second backward of one forward gives the same gradients",
        check=_check_twice,
        search=False,
        cases=_CASES,
    ),
    Law(
        name="backward later",
        says="gradients are those of their own forward, whatever was called in between",
        check=_check_later,
        search=False,
        cases=_CASES,
    ),
    Law(
        name="gradients of gradients",
        says="gradients differentiated once more are right, or an error says that they cannot be",
        check=_check_again,
        search=False,
        cases=_CASES,
    ),
)
"""Laws of backward."""
