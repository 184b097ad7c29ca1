"""Laws of calls: earlier results and the global state are unmodified, and calls of other kinds do not interfere."""

from __future__ import annotations

from collections.abc import Callable
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
    snapshot = earlier.clone()
    subject.call(case, second)
    if not torch.equal(earlier, snapshot):
        raise Broken("the output of one call changes with the next call")
    try:
        results = subject.gradients(case, first)
        copies = None if results is None else [one.clone() for one in results]
        subject.gradients(case, second)
    except REFUSALS:
        return
    for name, one, copy in zip(("output", *NAMES), results or (), copies or (), strict=False):
        if not torch.equal(one, copy):
            raise Broken(f"{name} of one call changes with the next call")


def _check_unrecorded(subject: Subject, case: Case) -> None:
    """Leaves that require gradients, as a model's do, while autograd does not record."""
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
        raise NotApplicable("the law of threads is for the CPU")
    with undisturbed():
        for count in (1, max(2, torch.get_num_threads())):
            torch.set_num_threads(count)
            try:
                check_both(subject, case)
            except Broken as broken:
                raise Broken(f"at {count} thread{'s' * (count > 1)}, {broken}") from None


def _check_shared(subject: Subject, case: Case) -> None:
    """Self-attention on one tensor, and keys that are also values."""
    query, key, _ = subject.draw(case)
    mask = subject.spoken(case)
    for tensors in ((key, key, key), (query, key, key)):
        wanted = expected_of(tensors, allowed=None if mask is None else mask.allowed, scale=case.scale)
        require(subject.off_budget([subject.call(case, tensors).output], wanted))
        leaf = key.detach().requires_grad_()
        inputs = tuple(leaf if tensor is key else tensor for tensor in tensors)
        try:
            output = subject.call(case, inputs).output  # type: ignore[arg-type]
        except REFUSALS:
            return
        if not output.requires_grad:
            return
        with undisturbed():
            (gradient,) = torch.autograd.grad(output, leaf, slope(output), allow_unused=True)
        shares = [place + 1 for place, tensor in enumerate(tensors) if tensor is key]
        exact, textbook = (
            torch.stack([kind[place] for place in shares]).sum(dim=0) for kind in (wanted.exact, wanted.textbook)
        )
        floor = sum(wanted.floors[place] for place in shares)
        wrong = excess(torch.zeros_like(leaf) if gradient is None else gradient, textbook, exact, floor)
        require(None if wrong is None else f"the gradient of a tensor passed as {len(shares)} of the inputs is {wrong}")


def _check_turns(subject: Subject, case: Case) -> None:
    """Calls of alternating lengths, so that data cached for one length meets another."""
    others: tuple[Case, ...] = (
        case,
        replace(case, k_len=case.k_len - 4),
        replace(case, k_len=case.k_len + 4),
        case,
        replace(case, batch=case.batch + 1),
        replace(case, q_len=case.q_len + 4),
        replace(case, q_len=case.q_len - 4),
        replace(case, q_len=case.k_len, k_len=case.q_len),
        case,
    )
    if case.mask == "none" and "causal flag" in subject.signature.carries(subject.fn):
        # The flag is valid at any lengths, although ``Law.forms`` offers it only for equal ones.
        flagged = tuple(replace(each, mask="causal", form="flag") for each in others)
        unequal = replace(flagged[0], q_len=16, k_len=19)
        alone = subject.off_budget([subject.call(unequal, subject.draw(unequal)).output], subject.expected(unequal))
        others += () if alone else flagged
    for number, each in enumerate(others):
        wrong = subject.off_budget([subject.call(each, subject.draw(each)).output], subject.expected(each))
        if wrong is not None and number == 0:
            raise NotApplicable("the first call is already wrong, which other laws report")
        require(None if wrong is None else f"after calls of other lengths, {wrong}")


def _check_modes(subject: Subject, case: Case) -> None:
    """Calls at lengths that no other law uses, as a function may cache data of inference mode or of another dtype."""
    shorter = replace(case, q_len=case.q_len - 1, k_len=case.k_len - 1)
    reason = "the first call is already wrong, which other laws report"
    try:
        check_both(subject, shorter)
    except Broken:
        raise NotApplicable(reason) from None
    if subject.call(shorter, subject.draw(shorter)).output.dtype != subject.dtype:
        raise NotApplicable(reason)
    with torch.inference_mode():
        subject.call(case, subject.draw(case))
    _check_following("a call under torch.inference_mode()", lambda: check_both(subject, case))
    longer = replace(case, q_len=case.q_len + 1, k_len=case.k_len + 1)
    other = replace(subject, dtype=torch.float32 if subject.dtype == torch.float64 else torch.float64)
    try:
        before = other.call(longer, other.draw(longer)).output
    except Exception as error:
        raise NotApplicable(f"in {other.dtype} it raises {type(error).__name__}") from None
    if before.dtype != other.dtype:
        raise NotApplicable(f"in {other.dtype} its output is {before.dtype}")

    def check() -> None:
        output = subject.call(longer, subject.draw(longer)).output
        if output.dtype != subject.dtype:
            raise Broken(f"the output of a call in {subject.dtype} is {output.dtype}")
        check_both(subject, longer)

    _check_following(f"a call in {other.dtype}", check)


def _check_following(what: str, check: Callable[[], None]) -> None:
    """Run a check; its failures are reported as those after a call of another kind."""
    try:
        check()
    except REFUSALS:
        raise
    except Broken as broken:
        raise Broken(f"after {what}, {broken}") from None
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        raise Broken(f"after {what}, a call in its own dtype raises {type(error).__name__}: {said}") from None


def _check_written(subject: Subject, case: Case) -> None:
    """Write to the output, as layers do that add in place."""
    tensors = subject.draw(case)
    copies = [tensor.clone() for tensor in tensors]
    output = subject.call(case, tensors).output
    copy = output.detach().clone()
    try:
        with torch.no_grad():
            output.mul_(3.0)
    except RuntimeError as error:
        raise Broken(f"its output cannot be written to: {' '.join(str(error).split())[:120]}") from None
    for name, one, other in zip(("query", "key", "value"), tensors, copies, strict=True):
        if not torch.equal(one, other):
            raise Broken(f"writing to the output changes {name}")
    if not torch.equal(output.detach(), 3.0 * copy):
        raise Broken("elements of the output share memory")
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = subject.call(case, (leaves[0], leaves[1], leaves[2])).output
    if not output.requires_grad:
        return
    try:
        with undisturbed():
            # The result is three times the output, so the output's gradient is that of the oracle.
            gradients = torch.autograd.grad(output.mul_(3.0), leaves, slope(output) / 3.0, allow_unused=True)
    except RuntimeError:
        # Autograd detected that a tensor saved for backward was modified.
        return
    for place, one in enumerate(gradients):
        wrong = None if one is None else subject.off_gradient(place, one, subject.expected(case))
        require(None if wrong is None else f"if the output was written to before backward, {wrong}")


def _self_attention(case: Case) -> Case:
    return replace(case, q_len=case.k_len, value_dim=case.head_dim)


_SMALL = Case(batch=2, kv_heads=2, q_len=9, k_len=9)
_CASES = (Case(), _SMALL, replace(_SMALL, mask="causal"))

LAWS = (
    Law(
        name="earlier results",
        says="the output and gradients of one call are unmodified by the next",
        check=_check_earlier,
        search=False,
        cases=(*_CASES, replace(_SMALL, q_len=1, k_len=33)),
    ),
    Law(
        name="calls in turn",
        says="data cached for the lengths of one call does not affect calls of other lengths",
        check=_check_turns,
        search=False,
        every_form=True,
        cases=(Case(batch=2, q_len=14, k_len=22), Case(batch=2, q_len=14, k_len=22, mask="causal")),
    ),
    Law(
        name="kinds in turn",
        says="data cached by a call under torch.inference_mode() or in another dtype does not affect later calls",
        check=_check_modes,
        search=False,
        every_form=True,
        cases=(Case(batch=2, q_len=43, k_len=43), Case(batch=2, q_len=46, k_len=46, mask="causal")),
    ),
    Law(
        name="output written to",
        says="writing to the output changes no input, and gradients remain correct or autograd raises",
        check=_check_written,
        search=False,
        cases=(Case(q_len=1, k_len=1), Case(q_len=3, k_len=1), _SMALL, replace(_SMALL, mask="causal")),
    ),
    Law(
        name="unrecorded",
        says="the output is correct under torch.no_grad() and torch.inference_mode()",
        check=_check_unrecorded,
        every_form=True,
        search=False,
        cases=_CASES,
    ),
    Law(
        name="process state",
        says="a call does not change grad mode, default dtype, determinism, precision or threads, nor the random "
        "state if nothing is dropped",
        check=_check_process,
        search=False,
        # Dropout is inactive here, as no module is in training mode.
        cases=(_SMALL, replace(_SMALL, mask="causal"), replace(_SMALL, dropout=0.5)),
    ),
    Law(
        name="threads",
        says="output and gradients hold at one thread and at several",
        check=_check_threads,
        search=False,
        # Enough work to be split by heads, rows and keys; many sizes are not divisible by the number of threads.
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
