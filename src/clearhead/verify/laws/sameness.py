"""Laws of invariance: the order of keys, other sequences of the batch, repeated runs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from clearhead.verify.case import Case
from clearhead.verify.law import REFUSALS, Broken, Law
from clearhead.verify.laws.masking import as_square
from clearhead.verify.laws.numbers import require
from clearhead.verify.subject import Subject

__all__ = ["LAWS"]


def _check_alone(subject: Subject, case: Case) -> None:
    """Each sequence of a batch alone."""
    tensors = subject.draw(case)
    wanted = subject.expected(case)
    for row in range(case.batch):
        alone = tuple(tensor[row : row + 1] for tensor in tensors)
        output = subject.call(case, alone).output.clone()  # type: ignore[arg-type]
        whole = subject.call(case, tensors).output
        error = (output.double() - whole[row : row + 1].double()).abs().max().item()
        allowed = wanted.floors[0] + 2.0 * (wanted.textbook[0] - wanted.exact[0]).abs().max().item()
        if not error <= 2.0 * allowed:
            raise Broken(
                f"batch member {row} differs by {error:.2g} between alone and in its batch (budget {allowed:.2g})"
            )


def _check_apart(subject: Subject, case: Case) -> None:
    """Change the last sequence and the last head; the other results must be bitwise identical."""
    query, key, value = subject.draw(case)
    before = subject.call(case, (query, key, value)).output.clone()
    for axis, name in ((0, "batch member"), (1, "key head")):
        if (case.batch, case.kv_heads)[axis] < 2:
            continue
        changed: list[Tensor] = []
        for tensor in (query, key, value):
            copy = tensor.clone()
            members = case.group if axis == 1 and tensor is query else 1
            copy.narrow(axis, copy.shape[axis] - members, members).mul_(-3.0).add_(1.0)
            changed.append(copy)
        perturbed = subject.call(case, (changed[0], changed[1], changed[2])).output
        count = before.shape[axis] - (case.group if axis == 1 else 1)
        if not torch.equal(before.narrow(axis, 0, count), perturbed.narrow(axis, 0, count)):
            raise Broken(f"changing the last {name} changes the others")


def _check_key_order(subject: Subject, case: Case) -> None:
    query, key, value = subject.draw(case)
    order = torch.randperm(case.k_len, generator=torch.Generator().manual_seed(5)).to(subject.device)
    output = subject.call(case, (query, key[:, :, order], value[:, :, order])).output
    wrong = subject.off_budget([output], subject.expected(case))
    require(None if wrong is None else f"after a permutation of keys and values, {wrong}")


def _check_run_to_run(subject: Subject, case: Case) -> None:
    tensors = subject.draw(case)
    first, second = (subject.call(case, tensors).output.clone() for _ in range(2))
    if not torch.equal(first, second):
        raise Broken(f"two runs differ by {(first - second).abs().max().item():.2g}")
    try:
        grads = [[one.clone() for one in subject.gradients(case, tensors) or ()] for _ in range(2)]
    except REFUSALS:
        return
    for name, one, other in zip(("output", "dQ", "dK", "dV"), *grads, strict=False):
        if not torch.equal(one, other):
            raise Broken(f"{name} differs by {(one - other).abs().max().item():.2g} between two runs")


_BATCH = Case(batch=3, kv_heads=2, q_len=9, k_len=9)

LAWS = (
    Law(
        name="batch invariance",
        says="a sequence gives the same alone and in a batch",
        check=_check_alone,
        cases=(_BATCH, replace(_BATCH, q_len=1, k_len=33), replace(_BATCH, q_len=65, k_len=65)),
    ),
    Law(
        name="apart",
        says="results are bitwise independent of other sequences of the batch and of other heads",
        check=_check_apart,
        cases=(replace(_BATCH, batch=2, q_len=3, k_len=3), _BATCH, replace(_BATCH, q_len=65, k_len=65)),
    ),
    Law(
        name="key order",
        says="without a mask, the order of keys and their values does not matter",
        check=_check_key_order,
        cases=(Case(q_len=2, k_len=3), _BATCH, replace(_BATCH, q_len=3, k_len=129)),
    ),
    Law(
        name="determinism",
        says="two runs give the same bits, output and gradients",
        check=_check_run_to_run,
        fit=as_square,
        cases=(_BATCH, replace(_BATCH, q_len=65, k_len=129), replace(_BATCH, q_len=65, k_len=65, mask="causal")),
    ),
)
"""Laws of invariance."""
