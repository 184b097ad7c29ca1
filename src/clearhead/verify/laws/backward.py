"""Laws of backward: gradients in any layout, any subset of inputs that require them, repeated and delayed backward."""

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
    """Gradients of an output by a description of their memory layout."""
    plain = slope(torch.empty(shape, dtype=subject.dtype, device=subject.device))
    return {
        "contiguous": plain,
        "contiguous with large values": 100.0 * plain,
        "heads last": plain.transpose(1, 2).contiguous().transpose(1, 2),
        "a slice of a larger tensor": laid_out(plain, "slice"),
        "every other element of a larger tensor": laid_out(plain, "every other"),
        "one value expanded over channels": plain[..., :1].expand(shape),
        "one row expanded over queries": plain[:, :, :1].expand(shape),
        "one value expanded": plain.new_tensor(0.7).expand(shape),
    }


def _check_layouts(subject: Subject, case: Case) -> None:
    tensors, mask = subject.draw(case), subject.spoken(case)
    for layout, grad in _handed((*tensors[0].shape[:3], case.value_dim), subject).items():
        before = grad.clone()
        results = subject.gradients(case, tensors, grad)
        if results is None:
            raise NotApplicable("its output carries no gradient")
        if not torch.equal(grad, before):
            raise Broken("the gradient of the output was written to")
        wanted = expected_of(tensors, allowed=None if mask is None else mask.allowed, scale=case.scale, grad=before)
        wrong = subject.off_budget(results, wanted)
        require(None if wrong is None else f"for a gradient of the output with the layout {layout!r}, {wrong}")


def _check_alone(subject: Subject, case: Case) -> None:
    tensors, wanted = subject.draw(case), subject.expected(case)
    if subject.gradients(case, tensors) is None:
        raise NotApplicable("its output carries no gradient")
    for places in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)):
        leaves = [tensor.detach().requires_grad_(at in places) for at, tensor in enumerate(tensors)]
        words = f"if only {' and '.join(('query', 'key', 'value')[place] for place in places)}"
        words += " requires a gradient" if len(places) == 1 else " require gradients"
        output = subject.call(case, (leaves[0], leaves[1], leaves[2])).output
        if not output.requires_grad:
            raise Broken(f"the output carries no gradient {words}")
        with undisturbed():
            learning = [leaves[place] for place in places]
            gradients = torch.autograd.grad(output, learning, slope(output), allow_unused=True)
        for place, one in zip(places, gradients, strict=True):
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
            gradients = torch.autograd.grad(
                output, (query, key, value), slope(output), retain_graph=time == "first", allow_unused=True
            )
        results = [torch.zeros_like(query) if one is None else one for one in gradients]
        wrong = subject.off_budget([output.detach(), *results], subject.expected(case))
        require(None if wrong is None else f"in the {time} backward of one forward, {wrong}")


def _check_later(subject: Subject, case: Case) -> None:
    """Two forwards, then both backwards, in both orders."""
    cases = (case, replace(case, seed=case.seed + 1))
    for turn in ((0, 1), (1, 0)):
        leaves = [[tensor.detach().requires_grad_() for tensor in subject.draw(each)] for each in cases]
        outputs = [subject.call(each, (q, k, v)).output for each, (q, k, v) in zip(cases, leaves, strict=True)]
        if not all(output.requires_grad for output in outputs):
            raise NotApplicable("its output carries no gradient")
        for place in turn:
            with undisturbed():
                gradients = torch.autograd.grad(outputs[place], leaves[place], slope(outputs[place]), allow_unused=True)
            results = [
                torch.zeros_like(leaf) if one is None else one
                for leaf, one in zip(leaves[place], gradients, strict=True)
            ]
            wrong = subject.off_budget([outputs[place].detach(), *results], subject.expected(cases[place]))
            words = ("first", "second")[place]
            require(None if wrong is None else f"in the backward of the {words} of two forwards, {wrong}")


def _check_second_derivatives(subject: Subject, case: Case) -> None:
    """Second derivatives: correct, or refused with an error."""
    tensors, mask = subject.draw(case), subject.spoken(case)
    derivatives = []
    for dtype in (torch.float64, subject.dtype, None):
        leaves = [tensor.detach().to(dtype or subject.dtype).requires_grad_() for tensor in tensors]
        query, key, value = leaves
        if dtype is None:
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
                derivatives.append(torch.autograd.grad(total, (*leaves, handed), allow_unused=True))  # type: ignore[arg-type]
        except (RuntimeError, *REFUSALS) as error:
            raise NotApplicable(f"second derivatives are refused: {' '.join(str(error).split())[:120]}") from None
    for name, exact, textbook, one in zip(
        ("query", "key", "value", "the output's gradient"), *derivatives, strict=True
    ):
        floor = 8.0 * rounding(exact, case.k_len * case.head_dim, 1.0, dtype=subject.dtype)
        wrong = excess(torch.zeros_like(exact) if one is None else one, textbook, exact, floor)
        require(None if wrong is None else f"the second derivative by {name} is {wrong}")


_SMALL = Case(batch=2, kv_heads=2, q_len=9, k_len=9)
_CASES = (Case(q_len=2, k_len=3), _SMALL, replace(_SMALL, mask="causal"))

LAWS = (
    Law(
        name="gradient layouts",
        says="strides of the output's gradient do not matter, and it is not written to",
        check=_check_layouts,
        search=False,
        cases=_CASES,
    ),
    Law(
        name="gradients alone",
        says="query, key and value receive their gradients if one or two of them require gradients",
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
        says="gradients belong to their own forward, also with other calls between forward and backward",
        check=_check_later,
        search=False,
        cases=_CASES,
    ),
    Law(
        name="gradients of gradients",
        says="second derivatives are correct, or are refused with an error",
        check=_check_second_derivatives,
        search=False,
        cases=_CASES,
    ),
)
"""Laws of backward."""
