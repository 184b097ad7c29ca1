"""Laws of causality: a query depends on no key that it may not attend to, in output or gradients."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from clearhead.verify.case import Case
from clearhead.verify.law import Broken, Law, NotApplicable
from clearhead.verify.subject import Subject

__all__ = ["LAWS"]


def _cuts(length: int) -> list[int]:
    """Positions at which to cut: the first, the middle, both sides of tile borders, the last but one."""
    cuts = {0, length // 2, length - 2, *(place for place in (31, 62, 63, 64, 126, 127, 128) if place < length - 1)}
    return sorted(place for place in cuts if 0 <= place < length - 1)


def _check_perturbed(subject: Subject, case: Case) -> None:
    query, key, value = subject.draw(case)
    before = subject.call(case, (query, key, value)).output.clone()
    for cut in _cuts(case.k_len):
        changed = (_changed(key, cut + 1), _changed(value, cut + 1))
        perturbed = subject.call(case, (query, *changed)).output
        differs = (before[:, :, : cut + 1] != perturbed[:, :, : cut + 1]).nonzero()
        if differs.numel():
            row = int(differs[:, 2].max())
            raise Broken(f"the query at {row} changes with the key or value at {cut + 1} or later")


def _changed(tensor: Tensor, first: int) -> Tensor:
    """Different and larger values from a position on."""
    other = tensor.clone()
    other[:, :, first:] = -7.0 * other[:, :, first:].flip(-1) + 3.0
    return other


def _check_gradient(subject: Subject, case: Case) -> None:
    tensors = subject.draw(case)
    shape = (*tensors[0].shape[:3], tensors[2].shape[3])
    for cut in _cuts(case.k_len):
        grad = torch.zeros(shape, dtype=subject.dtype, device=subject.device)
        grad[:, :, : cut + 1] = 1.0 + torch.arange(shape[3], dtype=subject.dtype, device=subject.device)
        results = subject.gradients(case, tensors, grad)
        if results is None:
            raise NotApplicable("its output carries no gradient")
        for name, one in (("dK", results[2]), ("dV", results[3])):
            late = (one[:, :, cut + 1 :] != 0.0).nonzero()
            if late.numel():
                raise Broken(f"{name} at {cut + 1 + int(late[0, 2])} has a share of the queries up to {cut}")
        if bool((results[1][:, :, cut + 1 :] != 0.0).any()):
            raise Broken(f"dQ after {cut} has a share of the gradient of queries up to {cut}")


def _square(case: Case) -> Case:
    return replace(case, k_len=case.q_len)


_CASES = tuple(
    Case(batch=batch, kv_heads=2, q_len=length, k_len=length, mask="causal")
    for batch, length in ((1, 2), (2, 5), (1, 33), (1, 65), (1, 129))
)

LAWS = (
    Law(
        name="no leak from the future",
        says="under a causal mask, changing later keys and values leaves earlier outputs bitwise identical",
        check=_check_perturbed,
        every_form=True,
        fit=_square,
        cases=_CASES,
    ),
    Law(
        name="no leak in gradients",
        says="under a causal mask, the gradient of a query reaches later keys and values as exactly 0",
        check=_check_gradient,
        every_form=True,
        fit=_square,
        cases=_CASES,
    ),
)
"""Laws of causality."""
