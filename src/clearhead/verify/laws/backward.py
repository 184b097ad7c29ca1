"""Backward as autograd calls it: any gradient handed in, any of the inputs learning, more than once."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from clearhead.verify.case import Case
from clearhead.verify.law import Broken, Law, NotApplicable
from clearhead.verify.laws.numbers import require
from clearhead.verify.oracle import slope
from clearhead.verify.process import undisturbed
from clearhead.verify.subject import NAMES, Subject, expected_of

__all__ = ["LAWS"]


def _handed(shape: tuple[int, ...], subject: Subject) -> dict[str, Tensor]:
    """Gradients of an output by how they lie in memory."""
    plain = slope(torch.empty(shape, dtype=subject.dtype, device=subject.device))
    return {
        "as it is": plain,
        "heads last": plain.transpose(1, 2).contiguous().transpose(1, 2),
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
    for place, name in enumerate(("query", "key", "value")):
        query, key, value = (tensor.detach().requires_grad_(at == place) for at, tensor in enumerate(tensors))
        output = subject.call(case, (query, key, value)).output
        if not output.requires_grad:
            raise Broken(f"the output carries no gradient where only {name} wants one")
        with undisturbed():
            (found,) = torch.autograd.grad(output, (query, key, value)[place], slope(output), allow_unused=True)
        if found is None:
            raise Broken(f"{NAMES[place]} is absent where only {name} wants a gradient")
        wrong = subject.off_gradient(place, found, wanted)
        require(None if wrong is None else f"where only {name} wants a gradient, {wrong}")


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
        says="query, key and value each receive their gradient where no other wants one",
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
)
"""Laws of backward."""
