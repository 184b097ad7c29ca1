"""Laws of output and gradients: sizes, scale, heads, magnitudes, layouts."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clearhead.masks import Dense
from clearhead.verify.case import LAYOUTS, Case
from clearhead.verify.law import REFUSALS, Broken, Law, NotApplicable
from clearhead.verify.masks import Spoken
from clearhead.verify.signatures import CARRIED, AttentionCall, read
from clearhead.verify.subject import Subject, Tensors

__all__ = ["LAWS", "check_both", "check_gradients", "check_output", "require"]

LENGTHS = (1, 2, 3, 7, 13, 31, 63, 64, 65, 127, 128, 129, 257)
_CROSSED = ((1, 257), (257, 1), (64, 65), (65, 64), (31, 129), (2, 1))


def require(wrong: str | None) -> None:
    """Raise ``Broken`` with ``wrong`` unless it is None."""
    if wrong is not None:
        raise Broken(wrong)


def check_output(subject: Subject, case: Case) -> None:
    """Check the output, without gradients."""
    output = subject.call(case, subject.draw(case)).output
    require(subject.off_budget([output], subject.expected(case)))


def _check_named(subject: Subject, case: Case) -> None:
    """Check the output; if it is wrong, whether it would be right for ``[batch, len, heads, head_dim]``."""
    query, key, value = subject.draw(case)
    wrong = subject.off_budget([subject.call(case, (query, key, value)).output], subject.expected(case))
    if wrong is None:
        return
    transposed = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    with suppress(Exception):
        other = subject.signature.made(subject.fn, AttentionCall(query=query, key=key, value=value))(*transposed)
        output = read(
            other, AttentionCall(query=transposed[0], key=transposed[1], value=transposed[2])
        ).output.transpose(1, 2)
        if subject.off_budget([output], subject.expected(case)) is None:
            wrong = "it expects [batch, len, heads, head_dim]; here tensors are [batch, heads, len, head_dim]"
    raise Broken(wrong)


def check_gradients(subject: Subject, case: Case) -> None:
    """Check the output and its gradients."""
    results = subject.gradients(case, subject.draw(case))
    if results is None:
        raise NotApplicable("its output carries no gradient")
    require(subject.off_budget(results, subject.expected(case)))


def check_both(subject: Subject, case: Case) -> None:
    """Check the output without gradients, then with them, as many functions have separate code paths."""
    check_output(subject, case)
    _check_gradients_if_any(subject, case)


def _check_form(subject: Subject, case: Case) -> None:
    query, key, value = subject.draw(case)
    shape = (*query.shape[:3], value.shape[3])
    for learning in (False, True):
        try:
            output = subject.call(case, _leaves((query, key, value), learning)).output
        except REFUSALS:
            if learning:
                return
            raise
        where = " while gradients are recorded" if learning else ""
        if tuple(output.shape) != shape:
            raise Broken(f"output has shape {tuple(output.shape)}, not {shape}{where}")
        if output.dtype != query.dtype or output.device != query.device:
            raise Broken(f"output is {output.dtype} on {output.device}, not {query.dtype} on {query.device}{where}")


def _leaves(tensors: Tensors, learning: bool) -> Tensors:
    """The tensors, all with or all without ``requires_grad``."""
    query, key, value = (tensor.detach().requires_grad_(learning) for tensor in tensors)
    return query, key, value


def _check_inputs_unchanged(subject: Subject, case: Case) -> None:
    drawn, mask = subject.draw(case), subject.spoken(case)
    given: dict[str, Any] = {"mask": mask}
    handed = None if mask is None else mask.allowed
    if mask is not None and case.form == "float":
        # An all-True mask passes the float mask unmodified, so that a write to it is detected.
        handed = torch.zeros_like(mask.allowed, dtype=subject.dtype).masked_fill(~mask.allowed, -torch.inf)
        everything = torch.ones_like(mask.allowed)
        given = {"mask": Spoken(everything, Dense(everything)), "bias": handed}
    copy = None if handed is None else handed.clone()
    for learning in (False, True):
        tensors = _leaves(drawn, learning)
        before = [tensor.detach().clone() for tensor in tensors]
        try:
            subject.call(case, tensors, **given)
        except REFUSALS:
            if learning:
                return
            raise
        _require_equal(tensors, before, " while gradients are recorded" * learning)
        for name, one in zip(("query", "key", "value"), tensors, strict=True):
            if one.requires_grad != learning or one.grad is not None:
                raise Broken(f"{name} was changed: its requires_grad or its grad")
        if handed is not None and copy is not None and not torch.equal(handed, copy):
            raise Broken("the mask was written to")
    before = [tensor.clone() for tensor in drawn]
    with suppress(*REFUSALS):
        subject.gradients(case, drawn, **given)
    _require_equal(drawn, before, " by backward")
    if handed is not None and copy is not None and not torch.equal(handed, copy):
        raise Broken("the mask was written to by backward")


def _require_equal(tensors: Tensors, before: list[Tensor], words: str) -> None:
    for name, one, other in zip(("query", "key", "value"), tensors, before, strict=True):
        if not torch.equal(one.detach(), other):
            raise Broken(f"{name} was written to{words}")


def _check_scale(subject: Subject, case: Case) -> None:
    if case.group > 1:
        if "grouped heads" not in subject.signature.carries(subject.fn):
            raise NotApplicable(f"it does not support {CARRIED['grouped heads']}")
        try:
            check_both(subject, replace(case, scale=None))
        except Broken:
            raise NotApplicable("grouped heads are wrong at any scale, which another law reports") from None
    check_both(subject, case)


def _check_heads(subject: Subject, case: Case) -> None:
    output = subject.call(case, subject.draw(case)).output
    wrong = subject.off_budget([output], subject.expected(case))
    if wrong is None:
        _check_gradients_if_any(subject, case)
        return
    if case.group > 1 and case.kv_heads > 1:
        query, key, value = subject.draw(case)
        # The result if query head h read key head h % kv_heads.
        order = torch.arange(case.heads).view(case.kv_heads, case.group).mT.flatten()
        other = subject.call(case, (query[:, order], key, value)).output[:, order.argsort()]
        if subject.off_budget([other], subject.expected(case)) is None:
            raise Broken(f"query head h reads key head h % {case.kv_heads}, not h // {case.group}: {wrong}")
    raise Broken(wrong)


def _check_huge(subject: Subject, case: Case) -> None:
    """If scores overflow 16 bits before scaling, in the textbook too, finite results suffice."""
    if bool(torch.isfinite(subject.expected(case).textbook[0]).all()):
        check_both(subject, case)
        return
    output = subject.call(case, subject.draw(case)).output
    strange = (~torch.isfinite(output)).nonzero()
    if strange.numel():
        place = strange[0].tolist()
        raise Broken(f"output is {output[tuple(place)].item():.4g} at {place}, although scaled scores are in range")


def _check_gradients_if_any(subject: Subject, case: Case) -> None:
    try:
        check_gradients(subject, case)
    except (NotApplicable, *REFUSALS):
        return


_SMALL = Case(batch=2, kv_heads=2, q_len=7, k_len=7)
#: One of the three tensors has another layout than the others.
_MIXED = (
    *(f"{name}: {layout}" for name in ("query", "key", "value") for layout in LAYOUTS[1:4]),
    "key: one head",
    "value: one head",
)

#: Batch and heads beyond the sizes of tables that a kernel may have.
_MANY = ((1, 33), (17, 2))

LAWS = (
    Law(
        name="output",
        says="the output is softmax(scale * query @ key^T) @ value, on the error budget",
        check=_check_named,
        cases=(Case(), _SMALL, replace(_SMALL, q_len=3, k_len=11), replace(_SMALL, head_dim=16, value_dim=16)),
    ),
    Law(
        name="gradients",
        says="dQ, dK and dV are those of the formula, on the error budget",
        check=check_gradients,
        cases=(Case(), _SMALL, replace(_SMALL, q_len=3, k_len=11), replace(_SMALL, q_len=40, k_len=33)),
    ),
    Law(
        name="shape and dtype",
        says="the output is [batch, heads, q_len, value_dim] in query's dtype, also under a mask and with gradients",
        check=_check_form,
        cases=(Case(q_len=1, k_len=1), replace(_SMALL, q_len=3, k_len=11), replace(_SMALL, mask="dense")),
        every_form=True,
    ),
    Law(
        name="inputs unchanged",
        says="query, key, value and the mask are not written to, by forward or backward",
        check=_check_inputs_unchanged,
        cases=(_SMALL, replace(_SMALL, mask="causal"), replace(_SMALL, mask="dense")),
        every_form=True,
    ),
    Law(
        name="lengths",
        says="output and gradients are correct at length 1, at primes, near tile borders, and for q_len != k_len",
        check=check_both,
        cases=tuple(
            Case(kv_heads=2, q_len=q_len, k_len=k_len)
            for q_len, k_len in (*((length, length) for length in LENGTHS), *_CROSSED)
        ),
    ),
    Law(
        name="long and wide",
        says="output and gradients are correct with over a thousand keys or queries, and with heads wider than 64",
        check=check_both,
        # Each case is slow.
        search=False,
        cases=(
            Case(q_len=3, k_len=1500), Case(q_len=1500, k_len=3), Case(kv_heads=2, head_dim=128, value_dim=128),
            Case(q_len=3, k_len=7, head_dim=256, value_dim=256),
        ),
    ),
    Law(
        name="widths",
        says="output and gradients are correct at width 1, at odd widths, and at widths far from a power of 2",
        check=check_both,
        search=False,
        cases=tuple(
            Case(kv_heads=2, q_len=5, k_len=7, head_dim=width, value_dim=width)
            for width in (1, 3, 5, 7, 12, 20, 33, 40, 72, 80, 96, 160, 192)
        ),
    ),
    Law(
        name="many heads and sequences",
        says="output and gradients are correct with over 32 heads and 65535 sequences, also under a mask and in decode",
        check=check_both,
        # Each case is slow.
        search=False,
        cases=(
            *(
                replace(_SMALL, batch=batch, kv_heads=kv_heads)
                for batch, kv_heads in ((1, 9), (1, 17), (1, 33), (5, 2), (9, 2), (17, 2), (5, 9))
            ),
            # A CUDA grid has at most 65535 blocks along all axes but one.
            Case(batch=65537, q_len=1, k_len=2, head_dim=2, value_dim=2),
            *(replace(_SMALL, batch=batch, kv_heads=kv_heads, q_len=1) for batch, kv_heads in _MANY),
            *(
                replace(_SMALL, batch=batch, kv_heads=kv_heads, mask=name)
                for name in ("causal", "padding", "dense") for batch, kv_heads in _MANY
            ),
        ),
    ),
    Law(
        name="value width",
        says="values may be wider or narrower than keys",
        check=check_both,
        needs=frozenset({"value width"}),
        every_form=True,
        cases=(
            replace(_SMALL, value_dim=3), replace(_SMALL, head_dim=4, value_dim=12),
            *(
                replace(_SMALL, head_dim=head_dim, value_dim=value_dim, mask=name)
                for name in ("causal", "dense") for head_dim, value_dim in ((8, 3), (4, 12))
            ),
        ),
    ),
    Law(
        name="scale",
        says="scores are multiplied by scale, by default 1 / sqrt(head_dim), head_dim the width of query",
        check=_check_scale,
        needs=frozenset({"scale"}),
        cases=(
            replace(_SMALL, scale=1.0), replace(_SMALL, scale=0.05), replace(_SMALL, scale=-0.5),
            replace(_SMALL, head_dim=16, value_dim=4), replace(_SMALL, head_dim=3, value_dim=3),
            replace(_SMALL, q_len=1, k_len=9, scale=0.7), replace(_SMALL, group=2, scale=0.7),
            replace(_SMALL, scale=0.0),
        ),
    ),
    Law(
        name="default scale",
        says="scores are multiplied by 1 / sqrt(head_dim)",
        check=check_output,
        cases=(replace(_SMALL, head_dim=2, value_dim=2), replace(_SMALL, head_dim=32, value_dim=32)),
    ),
    Law(
        name="grouped heads",
        says="query head h reads key head h // (heads // kv_heads), forward and backward",
        check=_check_heads,
        needs=frozenset({"grouped heads"}),
        every_form=True,
        cases=(
            Case(kv_heads=2, group=2), Case(kv_heads=1, group=4), Case(batch=2, kv_heads=3, group=2, q_len=9, k_len=17),
            Case(kv_heads=2, group=4, q_len=1, k_len=33), Case(batch=3, kv_heads=2, group=2, q_len=1, k_len=9),
            *(
                Case(batch=2, kv_heads=2, group=2, q_len=q_len, k_len=9, mask=name)
                for q_len, name in ((9, "causal"), (9, "dense"), (1, "dense"))
            ),
            Case(batch=3, kv_heads=2, group=2, q_len=1, k_len=9, mask="padding"),
            Case(kv_heads=33, group=2), Case(batch=5, kv_heads=9, group=4, q_len=1, k_len=9),
            Case(batch=2, kv_heads=17, group=2, mask="dense"),
            # More rows in a group than a tile has; and enough keys to be split among workers for one query.
            Case(kv_heads=2, group=2, q_len=65, k_len=65), Case(kv_heads=2, group=2, q_len=1, k_len=257),
            *(Case(batch=2, kv_heads=2, group=2, layout=layout) for layout in ("heads last", "slice")),
        ),
    ),
    Law(
        name="huge scores",
        says="scores in the thousands give finite results, on the error budget",
        check=_check_huge,
        cases=(
            replace(_SMALL, size=20.0), replace(_SMALL, size=60.0), replace(_SMALL, q_len=65, k_len=65, size=60.0),
            replace(_SMALL, head_dim=64, value_dim=64, size=60.0),
        ),
    ),
    Law(
        name="layouts",
        says="strides and offsets of the inputs do not matter",
        check=check_both,
        cases=tuple(replace(_SMALL, layout=layout, q_len=9, k_len=9) for layout in (*LAYOUTS[1:], *_MIXED)),
    ),
)  # fmt: skip
"""Laws of output and gradients."""
