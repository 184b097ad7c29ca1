"""What one call leaves for the next: results that stay, a process that is as it was; and calls of other kinds."""

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


def _check_turns(subject: Subject, case: Case) -> None:
    """Lengths that come and go, so that what is kept for some of them meets others."""
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
        # The flag may be handed over at any lengths, which a law's forms leave to the law of the flag.
        flagged = tuple(replace(own, mask="causal", form="flag") for own in others)
        apart = replace(flagged[0], q_len=16, k_len=19)
        alone = subject.off_budget([subject.call(apart, subject.draw(apart)).output], subject.expected(apart))
        others += () if alone else flagged
    for number, own in enumerate(others):
        wrong = subject.off_budget([subject.call(own, subject.draw(own)).output], subject.expected(own))
        if wrong is not None and number == 0:
            raise NotApplicable("it is wrong before anything is kept, which is another law's matter")
        require(None if wrong is None else f"after calls of other lengths, {wrong}")


def _check_modes(subject: Subject, case: Case) -> None:
    """At lengths that no other law has: what is made without gradients, or in another dtype, may be kept."""
    shorter = replace(case, q_len=case.q_len - 1, k_len=case.k_len - 1)
    reason = "it is wrong before anything is kept, which is another law's matter"
    try:
        check_both(subject, shorter)
    except Broken:
        raise NotApplicable(reason) from None
    if subject.call(shorter, subject.draw(shorter)).output.dtype != subject.dtype:
        raise NotApplicable(reason)
    with torch.inference_mode():
        subject.call(case, subject.draw(case))
    _after("a call under torch.inference_mode()", lambda: check_both(subject, case))
    longer = replace(case, q_len=case.q_len + 1, k_len=case.k_len + 1)
    other = replace(subject, dtype=torch.float32 if subject.dtype == torch.float64 else torch.float64)
    try:
        before = other.call(longer, other.draw(longer)).output
    except Exception as error:
        raise NotApplicable(f"in {other.dtype} it raises {type(error).__name__}") from None
    if before.dtype != other.dtype:
        raise NotApplicable(f"in {other.dtype} its output is {before.dtype}")

    def check() -> None:
        found = subject.call(longer, subject.draw(longer)).output
        if found.dtype != subject.dtype:
            raise Broken(f"the output of one in {subject.dtype} is {found.dtype}")
        check_both(subject, longer)

    _after(f"a call in {other.dtype}", check)


def _after(what: str, check: Callable[[], None]) -> None:
    """A check whose findings, and errors, are told as those after a call of another kind."""
    try:
        check()
    except REFUSALS:
        raise
    except Broken as broken:
        raise Broken(f"after {what}, {broken}") from None
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        raise Broken(f"after {what}, one in its own raises {type(error).__name__}: {said}") from None


def _check_written(subject: Subject, case: Case) -> None:
    """As layers do that add to their input in place."""
    tensors = subject.draw(case)
    kept = [tensor.clone() for tensor in tensors]
    output = subject.call(case, tensors).output
    copy = output.detach().clone()
    try:
        with torch.no_grad():
            output.mul_(3.0)
    except RuntimeError as error:
        raise Broken(f"its output cannot be written to: {' '.join(str(error).split())[:120]}") from None
    for name, one, other in zip(("query", "key", "value"), tensors, kept, strict=True):
        if not torch.equal(one, other):
            raise Broken(f"what is written to the output is written to {name}")
    if not torch.equal(output.detach(), 3.0 * copy):
        raise Broken("places of the output share memory")
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = subject.call(case, (leaves[0], leaves[1], leaves[2])).output
    if not output.requires_grad:
        return
    try:
        with undisturbed():
            # The result is three times the output, whose gradient is then what the oracle is handed.
            found = torch.autograd.grad(output.mul_(3.0), leaves, slope(output) / 3.0, allow_unused=True)
    except RuntimeError:
        # Autograd says that what backward needs was written to.
        return
    for place, one in enumerate(found):
        wrong = None if one is None else subject.off_gradient(place, one, subject.expected(case))
        require(None if wrong is None else f"where the output was written to before backward, {wrong}")


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
        name="calls in turn",
        says="what is kept for the lengths of one call does no harm to calls of others",
        check=_check_turns,
        search=False,
        every_form=True,
        cases=(Case(batch=2, q_len=14, k_len=22), Case(batch=2, q_len=14, k_len=22, mask="causal")),
    ),
    Law(
        name="kinds in turn",
        says="what is kept by a call under torch.inference_mode() or in another dtype does no harm to later ones",
        check=_check_modes,
        search=False,
        every_form=True,
        cases=(Case(batch=2, q_len=43, k_len=43), Case(batch=2, q_len=46, k_len=46, mask="causal")),
    ),
    Law(
        name="output written to",
        says="writing to the output changes no input, and gradients stay right, or autograd says that they cannot",
        check=_check_written,
        search=False,
        cases=(Case(q_len=1, k_len=1), Case(q_len=3, k_len=1), _SMALL, replace(_SMALL, mask="causal")),
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
