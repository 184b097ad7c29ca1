"""What one call leaves for the next: results that stay, a process that is as it was; and calls of other kinds."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch

from clearhead.verify.budget import excess
from clearhead.verify.case import Case
from clearhead.verify.law import REFUSALS, Broken, Law, NotApplicable
from clearhead.verify.laws.numbers import check_both, require
from clearhead.verify.oracle import slope
from clearhead.verify.process import undisturbed
from clearhead.verify.subject import NAMES, Subject, expected_of

__all__ = ["LAWS"]


def _check_earlier(subject: Subject, case: Case) -> None:
    first, second = subject.draw(case), subject.draw(replace(case, seed=case.seed + 1))
    earlier = subject.call(case, first).output
    kept = earlier.clone()
    subject.call(case, second)
    if not torch.equal(earlier, kept):
        raise Broken("the output of one call changes with the next call")
    try:
        found = subject.gradients(case, first)
        copies = None if found is None else [one.clone() for one in found]
        subject.gradients(case, second)
    except REFUSALS:
        return
    for name, one, copy in zip(("output", *NAMES), found or (), copies or (), strict=False):
        if not torch.equal(one, copy):
            raise Broken(f"{name} of one call changes with the next call")


def _check_unrecorded(subject: Subject, case: Case) -> None:
    """Leaves that learn, as a model's do, while nothing is recorded."""
    wanted = subject.expected(case)
    for mode, words in ((torch.no_grad, "no_grad"), (torch.inference_mode, "inference_mode")):
        for learning in (False, True):
            query, key, value = (tensor.requires_grad_(learning) for tensor in subject.draw(case))
            with mode():
                output = subject.call(case, (query, key, value)).output.clone()
            wrong = subject.off_budget([output], wanted)
            require(None if wrong is None else f"under torch.{words}(), {wrong}")


def _check_process(subject: Subject, case: Case) -> None:
    changed: list[str] = []
    tensors = subject.draw(case)
    subject.call(case, tensors, changed=changed)
    with suppress(*REFUSALS):
        subject.gradients(case, tensors, changed=changed)
    if changed:
        raise Broken(f"a call changes {', '.join(dict.fromkeys(changed))}")


def _check_threads(subject: Subject, case: Case) -> None:
    if subject.device.type != "cpu":
        raise NotApplicable("threads are the CPU's matter")
    with undisturbed():
        for count in (1, max(2, torch.get_num_threads())):
            torch.set_num_threads(count)
            try:
                check_both(subject, case)
            except Broken as broken:
                raise Broken(f"at {count} thread{'s' * (count > 1)}, {broken}") from None


def _check_shared(subject: Subject, case: Case) -> None:
    """Self-attention on one tensor, and keys that are their own values."""
    query, key, _ = subject.draw(case)
    mask = subject.spoken(case)
    for tensors in ((key, key, key), (query, key, key)):
        wanted = expected_of(tensors, allowed=None if mask is None else mask.allowed, scale=case.scale)
        require(subject.off_budget([subject.call(case, tensors).output], wanted))
        leaf = key.detach().requires_grad_()
        own = tuple(leaf if tensor is key else tensor for tensor in tensors)
        try:
            output = subject.call(case, own).output  # type: ignore[arg-type]
        except REFUSALS:
            return
        if not output.requires_grad:
            return
        with undisturbed():
            (found,) = torch.autograd.grad(output, leaf, slope(output), allow_unused=True)
        shares = [place + 1 for place, tensor in enumerate(tensors) if tensor is key]
        exact, textbook = (
            torch.stack([kind[place] for place in shares]).sum(dim=0) for kind in (wanted.exact, wanted.textbook)
        )
        floor = sum(wanted.floors[place] for place in shares)
        wrong = excess(torch.zeros_like(leaf) if found is None else found, textbook, exact, floor)
        require(None if wrong is None else f"the gradient of a tensor that is {len(shares)} of the inputs is {wrong}")


def _self_attention(case: Case) -> Case:
    return replace(case, q_len=case.k_len, value_dim=case.head_dim)


_SMALL = Case(batch=2, kv_heads=2, q_len=9, k_len=9)
_CASES = (Case(), _SMALL, replace(_SMALL, mask="causal"))

LAWS = (
    Law(
        name="earlier results",
        says="the output and gradients of one call stay as they are after the next",
        check=_check_earlier,
        search=False,
        cases=(*_CASES, replace(_SMALL, q_len=1, k_len=33)),
    ),
    Law(
        name="unrecorded",
        says="the output is right under torch.no_grad() and torch.inference_mode()",
        check=_check_unrecorded,
        every_form=True,
        search=False,
        cases=_CASES,
    ),
    Law(
        name="process state",
        says="a call leaves grad mode, default dtype, determinism, precision and threads of the process as they were, "
        "and its random numbers where nothing is dropped",
        check=_check_process,
        search=False,
        # The probability acts on a module that is training, which none is here.
        cases=(_SMALL, replace(_SMALL, mask="causal"), replace(_SMALL, dropout=0.5)),
    ),
    Law(
        name="threads",
        says="output and gradients hold at one thread and at several",
        check=_check_threads,
        search=False,
        # Work enough to be shared, by heads, by rows, and by keys; much of it divides by no number of threads.
        cases=(
            Case(batch=3, kv_heads=3, q_len=33, k_len=33),
            Case(q_len=257, k_len=257),
            Case(q_len=1, k_len=1500),
            Case(q_len=257, k_len=257, mask="causal"),
            Case(batch=5, kv_heads=2, q_len=65, k_len=65, mask="padding"),
        ),
    ),
    Law(
        name="one tensor",
        says="query, key and value may be one tensor, which receives the gradients of all",
        check=_check_shared,
        fit=_self_attention,
        search=False,
        cases=_CASES,
    ),
)
"""Laws of calls."""
