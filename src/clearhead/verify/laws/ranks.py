"""Laws of attention over a sequence that is sharded over ranks.

Most are laws of any attention on cases that the boundaries of ranks cut, as a ``Distributed`` function is called on
whole tensors. Sequences are as long in queries as in keys, since each rank has both of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from clearhead.distributed.layout import positions_of
from clearhead.masks import Dense
from clearhead.verify.case import Case
from clearhead.verify.distributed import Distributed
from clearhead.verify.law import Broken, Law, NotApplicable
from clearhead.verify.laws import backward, containment, dropout, numbers, returned, rules
from clearhead.verify.laws.masking import as_square
from clearhead.verify.laws.numbers import check_both, require
from clearhead.verify.masks import Spoken
from clearhead.verify.subject import Subject, expected_of

__all__ = ["RANK_LAWS"]

#: Seconds by which a rank begins late; its messages then arrive after those of all others.
_LATE = 0.02


def _distributed(subject: Subject) -> Distributed:
    assert isinstance(subject.fn, Distributed)
    return subject.fn


def _parts(subject: Subject, case: Case) -> Iterator[tuple[int, Tensor]]:
    """Each rank and a bool ``[k_len]`` that is True at its tokens; ranks without tokens are left out."""
    ranks = _distributed(subject)
    for rank in range(ranks.ranks):
        part = torch.zeros(case.k_len, dtype=torch.bool)
        part[positions_of(case.k_len, ranks.ranks, rank, ranks.layout)] = True
        if bool(part.any()):
            yield rank, part


def _check_empty_part(subject: Subject, case: Case) -> None:
    """No query of one rank may attend to anything."""
    tensors = subject.draw(case)
    for rank, part in _parts(subject, case):
        allowed = (~part)[None, None, :, None].expand(1, 1, case.q_len, case.k_len)
        mask, wanted = Spoken(allowed, Dense(allowed)), expected_of(tensors, allowed=allowed)
        results = subject.gradients(case, tensors, mask=mask)
        if results is None:
            results = [subject.call(case, tensors, mask=mask).output]
        wrong = subject.off_budget(results, wanted)
        require(None if wrong is None else f"if all rows of rank {rank} are empty, {wrong}")


def _check_unattended_part(subject: Subject, case: Case) -> None:
    """No query may attend to a key of one rank, whose keys and values are NaN."""
    query, key, value = subject.draw(case)
    for rank, part in _parts(subject, case):
        if bool(part.all()):
            raise NotApplicable("one rank has all tokens")
        allowed = (~part)[None, None, None].expand(1, 1, case.q_len, case.k_len)
        mask, wanted = Spoken(allowed, Dense(allowed)), expected_of((query, key, value), allowed=allowed)
        poisoned = (query, *(tensor.masked_fill(part[:, None], torch.nan) for tensor in (key, value)))
        results = subject.gradients(case, (poisoned[0], poisoned[1], poisoned[2]), mask=mask)
        if results is None:
            raise NotApplicable("its output carries no gradient")
        wrong = subject.off_budget(results, wanted)
        require(None if wrong is None else f"if keys and values of rank {rank} are NaN and masked, {wrong}")


def _check_late_ranks(subject: Subject, case: Case) -> None:
    """The same bits whichever rank is last."""
    tensors = subject.draw(case)
    ranks, runs = _distributed(subject), []
    for rank in range(ranks.ranks):
        with ranks.late(rank, _LATE):
            results = subject.gradients(case, tensors)
            runs.append([subject.call(case, tensors).output] if results is None else results)
    for rank, results in enumerate(runs):
        for name, one, other in zip(("output", "dQ", "dK", "dV"), runs[0], results, strict=False):
            if not torch.equal(one, other):
                error = (one - other).abs().max().item()
                raise Broken(f"{name} differs by {error:.2g} between runs in which rank 0 and rank {rank} are late")


def _check_dropped(subject: Subject, case: Case) -> None:
    """The weights that one rank drops for a random seed are those that several ranks drop."""
    mask = subject.spoken(case)
    allowed = None if mask is None else mask.allowed.expand(case.batch, case.heads, case.q_len, case.k_len)
    tensors, weights = dropout.probe(subject, case, allowed)
    with _distributed(subject).on(1) as alone:
        output = replace(subject, fn=alone).call(case, tensors, training=True).output
    keep = dropout.factors(subject, case, output, weights, allowed)
    results = subject.gradients(case, tensors, training=True)
    if results is None:
        results = [subject.call(case, tensors, training=True).output]
    wrong = subject.off_budget(results, expected_of(tensors, allowed=allowed, keep=keep))
    require(None if wrong is None else f"for the weights that one rank drops, {wrong}")


def _lengths(case: Case, *lengths: int) -> tuple[Case, ...]:
    return tuple(replace(case, q_len=length, k_len=length) for length in lengths)


def _masked(names: tuple[str, ...], *lengths: int) -> tuple[Case, ...]:
    return tuple(one for name in names for one in _lengths(replace(_SMALL, mask=name), *lengths))


def _from(laws: tuple[Law, ...], cases: dict[str, tuple[Case, ...]]) -> tuple[Law, ...]:
    """Laws of any attention by name, on other cases."""
    named = {law.name: law for law in laws}
    return tuple(replace(named[name], cases=of_ranks, search=False) for name, of_ranks in cases.items())


#: For 2 and 4 ranks, lengths divide by 2 * ranks except in laws of unequal parts, and there are as many key heads as
#: ranks, which exchanges of heads need.
_SMALL = Case(batch=2, kv_heads=4, q_len=8, k_len=8)
_GROUPED = replace(_SMALL, group=2)
_FEW_KEY_HEADS = tuple(replace(_SMALL, kv_heads=kv_heads, group=3) for kv_heads in (2, 1))
_MASK = frozenset({"mask"})
#: Longer than a tile of 64 on each of two ranks.
_LONG = 160
_BIASED = (_SMALL, *_lengths(replace(_SMALL, mask="causal"), 8, 16))
_SCORED = (*_BIASED, replace(_SMALL, group=2))
_PROBE = dropout.wide(Case(batch=2, kv_heads=4, q_len=32, k_len=32, dropout=0.25))
_TOKENS = (*_lengths(_SMALL, 8, 16), *_masked(("causal", "documents"), 8, 40))
_NAN = tuple(
    replace(case, poison=poison)
    for case in (*_masked(("padding", "document ids"), 8, 16), *_masked(("nothing",), 8))
    for poison in ("nan", "inf")
)

RANK_LAWS: tuple[Law, ...] = (
    Law(
        name="output and gradients",
        says="output and gradients are the formula's over all ranks' tokens",
        check=check_both,
        search=False,
        cases=_lengths(_SMALL, 8, 16, _LONG),
    ),
    *_from(numbers.LAWS, {"shape and dtype": (_SMALL,), "scale": tuple(replace(_SMALL, scale=s) for s in (0.5, 0.0))}),
    Law(
        name="causal",
        says="a causal mask is that of positions in the whole sequence",
        check=check_both,
        every_form=True,
        search=False,
        cases=_lengths(replace(_SMALL, mask="causal"), 8, 16, _LONG),
    ),
    Law(
        name="windows",
        says="windows reach over the boundaries of ranks",
        check=check_both,
        needs=_MASK,
        every_form=True,
        search=False,
        cases=_masked(("window", "causal window"), 8, 16, _LONG),
    ),
    Law(
        name="documents across ranks",
        says="documents that begin on one rank and end on another are attended to whole, and no others",
        check=check_both,
        needs=_MASK,
        every_form=True,
        search=False,
        # Boundaries of 2 and of 4 ranks lie within documents.
        cases=_masked(("documents", "interleaved documents", "document ids"), 8, 40),
    ),
    Law(
        name="masks",
        says="every other kind of mask gives the formula's output and gradients",
        check=check_both,
        needs=_MASK,
        every_form=True,
        search=False,
        cases=_masked(("prefix", "padding", "global", "strided", "blocks", "dense", "function", "not window"), 16),
    ),
    Law(
        name="unequal parts",
        says="lengths that do not divide by the ranks change nothing, with masks and without",
        check=check_both,
        search=False,
        cases=_masked(("none", "causal", "window", "documents", "padding", "empty rows"), 5, 7, 9, 67),
    ),
    Law(
        name="ranks without tokens",
        says="fewer tokens than ranks change nothing",
        check=check_both,
        search=False,
        cases=_masked(("none", "causal"), 1, 2, 3),
    ),
    *(
        replace(law, name=f"{law.name} over unequal parts", cases=_masked(("none", "causal"), 7, 15), search=False)
        for law in rules.LAWS if law.name in ("relative bias", "sink")
    ),
    Law(
        name="grouped heads",
        says="query heads h * group to (h + 1) * group - 1 attend to key head h of every rank",
        check=check_both,
        needs=frozenset({"grouped heads"}),
        search=False,
        cases=(_GROUPED, *_lengths(replace(_GROUPED, mask="causal"), 8, 16), *_FEW_KEY_HEADS),
    ),
    Law(
        name="huge scores",
        says="scores in the thousands on one rank give finite results after merging",
        check=check_both,
        search=False,
        cases=tuple(
            replace(case, size=size) for case in _lengths(_SMALL, 8, 64) for size in (20.0, 100.0)
        ),
    ),
    Law(
        name="empty rows",
        says="queries that may attend to nothing give 0, and gradients are finite",
        check=check_both,
        needs=_MASK,
        every_form=True,
        fit=as_square,
        search=False,
        cases=_masked(("padding to nothing", "empty rows", "nothing"), 8, 16),
    ),
    Law(
        name="empty rows on one rank",
        says="a rank whose queries may attend to nothing gives 0, and the others their results",
        check=_check_empty_part,
        needs=_MASK,
        search=False,
        cases=_lengths(replace(_SMALL, mask="dense"), 8, 16),
    ),
    *_from(rules.LAWS, {
        "float mask": _BIASED, "float mask in gradients": _BIASED, "alibi": _SCORED, "relative bias": _SCORED,
        "soft cap": _SCORED, "sink": _SCORED,
    }),
    *_from(backward.LAWS, {
        "gradients alone": (_SMALL, replace(_SMALL, mask="causal")), "backward twice": (_SMALL,),
        "backward later": (_SMALL,),
    }),
    *_from(containment.LAWS, {
        "NaN is shown": _TOKENS, "NaN is not spread": _TOKENS, "NaN is not spread in gradients": _TOKENS,
        "containment": _NAN, "containment in gradients": _NAN,
    }),
    Law(
        name="NaN on one rank",
        says="NaN in keys and values of a rank that no query attends to change no output and no gradient",
        check=_check_unattended_part,
        needs=_MASK,
        not_as=frozenset({"float"}),
        search=False,
        cases=_lengths(replace(_SMALL, mask="dense"), 8, 16),
    ),
    Law(
        name="determinism",
        says="runs give the same bits, output and gradients, whichever rank is late",
        check=_check_late_ranks,
        search=False,
        cases=(*_lengths(_SMALL, 16, 64), replace(_SMALL, q_len=64, k_len=64, mask="causal")),
    ),
    *_from(dropout.LAWS, {
        "dropout": (_PROBE, replace(_PROBE, dropout=0.5)), "dropout draws": (_PROBE,),
        "dropout under a mask": (replace(_PROBE, mask="causal"),), "dropout in backward": (_PROBE,),
    }),
    Law(
        name="dropout of one rank",
        says="the weights dropped for a random seed do not depend on the number of ranks",
        check=_check_dropped,
        needs=frozenset({"dropout"}),
        search=False,
        cases=(_PROBE, replace(_PROBE, mask="causal")),
    ),
    *_from(returned.LAWS, {"log-sum-exp": (_SMALL, *_masked(("causal", "padding to nothing"), 8, 16))}),
)  # fmt: skip
"""Laws of a ``Distributed`` function."""
