"""Laws of masks: polarity, causal alignment, every kind of mask, and empty rows."""

from __future__ import annotations

from dataclasses import replace

import torch

from clearhead.masks import Dense
from clearhead.verify.budget import excess
from clearhead.verify.case import Case
from clearhead.verify.law import REFUSALS, Broken, Law, NotApplicable
from clearhead.verify.laws.numbers import check_both, require
from clearhead.verify.masks import KINDS, Spoken
from clearhead.verify.subject import Subject, expected_of

__all__ = ["LAWS", "as_square"]


def as_square(case: Case) -> Case:
    """The case with as many keys as queries if its mask needs that, and without negative positions."""
    if case.mask != "none" and KINDS[case.mask].square:
        return replace(case, q_len=case.k_len, end=False)
    return replace(case, end=case.end and case.q_len <= case.k_len)


def _needs_full_rows(subject: Subject, case: Case) -> None:
    """Raise ``NotApplicable`` for empty rows, which have their own law."""
    mask = subject.spoken(case)
    if mask is not None and not bool(mask.allowed.any(dim=-1).all()):
        raise NotApplicable("a query may attend to nothing, which another law covers")


def _check_masked(subject: Subject, case: Case) -> None:
    _needs_full_rows(subject, case)
    check_both(subject, case)


def _check_polarity(subject: Subject, case: Case) -> None:
    _needs_full_rows(subject, case)
    tensors = subject.draw(case)
    output = subject.call(case, tensors).output
    wrong = subject.off_budget([output], subject.expected(case))
    if wrong is None:
        return
    mask = subject.spoken(case)
    assert mask is not None
    inverse = expected_of(tensors, allowed=~mask.allowed)
    if excess(output, inverse.textbook[0], inverse.exact[0], inverse.floors[0]) is None:
        raise Broken("True in its mask forbids, where it should mean that a query may attend")
    unmasked = expected_of(tensors)
    if excess(output, unmasked.textbook[0], unmasked.exact[0], unmasked.floors[0]) is None:
        raise Broken("the mask is ignored")
    raise Broken(wrong)


def _check_flag(subject: Subject, case: Case) -> None:
    """The flag alone; if the function has the other alignment, the failure names it."""
    tensors = subject.draw(case)
    output = subject.call(case, tensors, form="flag").output
    wrong = subject.off_budget([output], subject.expected(case))
    if wrong is None:
        check_both(subject, replace(case, form="flag"))
        return
    q_pos = torch.arange(case.q_len, device=subject.device)[:, None] + case.k_len - case.q_len
    other = expected_of(tensors, allowed=torch.arange(case.k_len, device=subject.device)[None] <= q_pos)
    if case.q_len != case.k_len and excess(output, other.textbook[0], other.exact[0], other.floors[0]) is None:
        raise Broken("its causal flag aligns the last query with the last key, not the first query with the first key")
    raise Broken(wrong)


def _check_end(subject: Subject, case: Case) -> None:
    """A causal mask passed as a mask, in either alignment."""
    output = subject.call(case, subject.draw(case)).output
    wrong = subject.off_budget([output], subject.expected(case))
    if wrong is not None:
        other = subject.expected(replace(case, end=not case.end))
        if excess(output, other.textbook[0], other.exact[0], other.floors[0]) is None:
            places = ("first", "last") if case.end else ("last", "first")
            raise Broken(
                f"the {places[0]} query is aligned with the {places[0]} key, not the {places[1]} with the {places[1]}"
            )
        raise Broken(wrong)
    check_both(subject, case)


def _check_shapes(subject: Subject, case: Case) -> None:
    """The same mask with fewer axes, with other strides, and with a copy for every head."""
    _needs_full_rows(subject, case)
    tensors, mask, wanted = subject.draw(case), subject.spoken(case), subject.expected(case)
    assert mask is not None
    whole = mask.allowed.expand(case.batch, case.heads, case.q_len, case.k_len)
    shapes = {
        "of all four axes": whole.contiguous(),
        "that is expanded": whole,
        "that is transposed in memory": whole.mT.contiguous().mT,
    }
    larger = torch.ones(*whole.shape[:2], case.q_len + 3, case.k_len + 5, dtype=torch.bool, device=whole.device)
    larger[:, :, 2:-1, 1:-4] = whole
    shapes["that is a slice of a larger one"] = larger[:, :, 2:-1, 1:-4]
    if bool((whole == whole[:1, :1]).all()):
        shapes["of [q_len, k_len]"] = whole[0, 0]
    if bool((whole == whole[:, :1, :1]).all()):
        shapes["of [batch, 1, 1, k_len]"] = whole[:, :1, :1].contiguous()
    for words, allowed in shapes.items():
        reshaped = Spoken(allowed, Dense(allowed))
        wrong = subject.off_budget([subject.call(case, tensors, mask=reshaped).output], wanted)
        require(None if wrong is None else f"for a mask {words}, {wrong}")


def _check_three_axes(subject: Subject, case: Case) -> None:
    """With as many sequences as heads, so that a function that reads the first axis as sequences does not raise."""
    tensors, mask = subject.draw(case), subject.spoken(case)
    assert mask is not None
    whole = mask.allowed.expand(case.batch, case.heads, case.q_len, case.k_len)
    for words, three in (("[heads, q_len, k_len]", whole[0].contiguous()), ("[1, q_len, k_len]", whole[0, :1])):
        mask_3d, wanted = Spoken(three, Dense(three)), expected_of(tensors, allowed=three)
        for learning in (False, True):
            try:
                one = subject.call(case, tensors, mask=mask_3d).output
                results = subject.gradients(case, tensors, mask=mask_3d) if learning else [one]
            except Exception as error:
                if learning and isinstance(error, REFUSALS):
                    continue
                said = " ".join(str(error).split())[:120]
                raise NotApplicable(f"for a mask {words} it raises {type(error).__name__}: {said}") from None
            wrong = subject.off_budget(results or [], wanted)
            if wrong is not None and subject.off_budget([one], expected_of(tensors, allowed=three[:, None])) is None:
                raise Broken("the first of a mask's three axes is read as sequences, not as heads")
            require(None if wrong is None else f"for a mask {words}, {wrong}")


_SMALL = Case(batch=2, kv_heads=2, q_len=9, k_len=9)
_EMPTY = ("padding to nothing", "document ids", "empty rows", "nothing")
_MASK = frozenset({"mask"})

LAWS = (
    Law(
        name="mask polarity",
        says="a mask changes what is attended to, and True in it means what the convention says",
        check=_check_polarity,
        needs=_MASK,
        every_form=True,
        cases=(
            Case(mask="one key", q_len=3, k_len=3), Case(batch=2, kv_heads=2, q_len=7, k_len=7, mask="one key"),
            replace(_SMALL, mask="not window"),
        ),
    ),
    Law(
        name="masks",
        says="every kind of mask, in every form, gives the formula's output and gradients",
        check=_check_masked,
        needs=_MASK,
        every_form=True,
        fit=as_square,
        cases=tuple(
            replace(_SMALL, batch=3, mask=name, q_len=length, k_len=length)
            for name in KINDS if name not in _EMPTY
            for length in (9, 21, *((64, 65, 129) if name in ("causal", "window", "padding", "documents") else ()))
        ) + tuple(
            # Mask rows that are multiples of a vector or tile may take another code path.
            replace(_SMALL, mask="dense", q_len=length, k_len=length) for length in (16, 32)
        ) + tuple(
            # Exchanged axes of different lengths raise; they are detected only at equal lengths.
            replace(_SMALL, batch=size, kv_heads=size, mask=name) for name in ("padding", "dense") for size in (2, 3)
        ),
    ),
    Law(
        name="mask layouts",
        says="axes that a mask is repeated along, and its strides, do not matter",
        check=_check_shapes,
        needs=_MASK,
        every_form=True,
        not_as=frozenset({"flag", "object", "padding"}),
        search=False,
        cases=tuple(replace(_SMALL, batch=3, mask=name) for name in ("causal", "padding", "dense")),
    ),
    Law(
        name="masks of three axes",
        says="a mask [heads, q_len, k_len] is broadcast as torch does, each head's for all sequences, or is refused",
        check=_check_three_axes,
        needs=_MASK,
        every_form=True,
        not_as=frozenset({"flag", "object", "padding"}),
        search=False,
        cases=(replace(_SMALL, mask="dense"),),
    ),
    Law(
        name="masks and lengths",
        says="masks hold where q_len differs from k_len, for queries at the front and at the end",
        check=_check_masked,
        needs=_MASK,
        fit=as_square,
        cases=tuple(
            replace(_SMALL, batch=3, mask=name, q_len=q_len, k_len=k_len, end=end)
            for name in ("window", "causal window", "prefix", "padding", "global", "strided", "blocks", "dense")
            for q_len, k_len, end in ((5, 11, True), (11, 5, False), (1, 65, True))
        ) + tuple(
            # This many keys may be split among workers even for one query.
            replace(_SMALL, batch=3, mask=name, q_len=1, k_len=257, end=True) for name in ("padding", "dense")
        ),
    ),
    Law(
        name="causal flag",
        says="the causal flag is the causal mask, with the first query aligned with the first key",
        check=_check_flag,
        needs=frozenset({"causal flag"}),
        cases=tuple(
            replace(_SMALL, mask="causal", form="flag", q_len=q_len, k_len=k_len)
            for q_len, k_len in ((9, 9), (2, 3), (1, 3), (3, 11), (11, 3), (64, 64), (65, 65), (64, 128), (129, 129),
                                 (70, 130))
        ),
    ),
    Law(
        name="causal alignment",
        says="a causal mask has the given alignment: first query with first key, or last query with last key",
        check=_check_end,
        needs=_MASK,
        fit=as_square,
        cases=tuple(
            replace(_SMALL, mask="causal", q_len=q_len, k_len=k_len, end=end)
            for q_len, k_len in ((2, 3), (3, 11), (64, 129)) for end in (True, False)
        ),
    ),
    Law(
        name="scale under a mask",
        says="any scale, including negative ones and 0, leaves forbidden keys forbidden",
        check=_check_masked,
        needs=frozenset({"scale"}),
        every_form=True,
        cases=tuple(
            replace(_SMALL, mask="causal", q_len=length, k_len=length, scale=scale)
            for length in (3, 9, 65) for scale in (0.5, 0.0, -0.5)
        ),
    ),
    Law(
        name="huge scores under a mask",
        says="scores in the thousands give finite results, and forbidden keys remain forbidden",
        check=_check_masked,
        needs=_MASK,
        cases=tuple(
            replace(_SMALL, mask=name, q_len=length, k_len=length, size=size)
            for name in ("causal", "dense") for length, size in ((9, 20.0), (9, 100.0), (65, 60.0))
        ),
    ),
    Law(
        name="empty rows",
        says="a query that may attend to nothing gives 0, and gradients are finite",
        check=check_both,
        needs=_MASK,
        every_form=True,
        fit=as_square,
        cases=tuple(replace(_SMALL, mask=name, q_len=length, k_len=length) for name in _EMPTY for length in (4, 9, 67)),
    ),
)  # fmt: skip
"""Laws of masks."""
