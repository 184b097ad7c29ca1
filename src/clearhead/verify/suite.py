"""``verify``: one attention function checked against every law."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from clearhead.errors import UnsupportedError
from clearhead.invariance import invariant
from clearhead.problem import DTYPES
from clearhead.verify.case import Case
from clearhead.verify.distributed import Distributed
from clearhead.verify.law import REFUSALS, Broken, Law, NotApplicable
from clearhead.verify.laws import LAWS
from clearhead.verify.laws.invariance import INVARIANCE_LAWS
from clearhead.verify.laws.ranks import RANK_LAWS
from clearhead.verify.process import undisturbed, undrawn
from clearhead.verify.report import Finding, Report, Status, error_detail, versions
from clearhead.verify.search import can_search, search
from clearhead.verify.signatures import CARRIED, signature_of
from clearhead.verify.subject import Subject

__all__ = ["law_names", "verify"]

_SHRINK = 100


def verify(
    fn: Callable[..., Any],
    *,
    signature: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    laws: Iterable[str] | None = None,
    examples: int = 20,
    linear_memory: bool = False,
    invariance: bool = False,
    name: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Check any attention function against the laws that attention obeys.

    Results are compared with the formula in float64; the error budget is twice the error of the textbook formula in the
    same precision, plus rounding. A law does not apply if the function has no argument for it. A refusal with
    ``NotImplementedError`` or ``ch.UnsupportedError`` is not a failure; any other exception is.

    A test in another project::

        import clearhead, mine

        def test_my_attention():
            report = clearhead.verify(mine.attention, signature="sdpa")
            assert report.ok, report

    Args:
        fn: the function; for ``"mha"`` a class or factory of modules.
        signature: the calling convention. ``"sdpa"``: that of ``torch.nn.functional.scaled_dot_product_attention``,
            with ``attn_mask`` (bool, True may attend; or float, added), ``is_causal``, ``scale``, ``enable_gqa`` and
            ``dropout_p`` if ``fn`` has them; ``fn`` may return ``(output, lse)`` or ``(output, weights)``.
            ``"clearhead"``: that of ``clearhead.attention`` or ``observe_attention``. ``"mha"``: that of
            ``torch.nn.MultiheadAttention``, in whose masks True forbids.
        dtype: dtype of query, key and value, float32 by default.
        device: device of query, key and value, the CPU by default.
        laws: names of the laws to try, by default all; ``law_names()`` lists them, and ``law_names(invariance=True)``
            those of ``invariance``.
        examples: how many further cases Hypothesis draws for each law that holds on its fixed cases; with 0, failing
            examples are not shrunk either. Needs the extra ``verify``.
        linear_memory: whether the function must use memory linear in the length, in backward too. By default the
            memory of forward is measured only.
        invariance: whether to try the laws of bits in place of the others, under ``ch.invariant()``: a sequence has
            the same bits alone, in any batch, padded, packed, in chunks, decoded token by token and on any number of
            threads. Results are compared bit by bit, without an error budget.
        name: name of the function in the report.
        progress: called with the name of each law before it is tried.

    Returns:
        A ``Report``: ``str()`` gives a table, ``.ok`` says whether no law fails, ``.broken`` names the laws that fail,
        and ``.to_json()`` gives everything, with the smallest failing example for each law.

    Raises:
        UnsupportedError: an unknown signature, law or dtype, or a function that cannot be called by the convention.

    Cost: a few hundred small calls, each with a float64 oracle; about 20 s for most functions.

    >>> import torch, clearhead as ch
    >>> def average(query, key, value):
    ...     return value.mean(dim=2, keepdim=True).expand_as(query)
    >>> report = ch.verify(average, laws=["output", "key order"], examples=0)
    >>> report.ok, report.broken
    (False, ('output', 'key order'))
    """
    convention = signature_of(signature)
    if not callable(fn):
        raise UnsupportedError.about(
            "verify", "fn", must="be callable", got=type(fn).__name__, then="Pass an attention function."
        )
    ranks = isinstance(fn, Distributed)
    if ranks:
        _check_distributed(signature, torch.device(device))
    how = convention.refused(fn)
    if how is not None:
        raise UnsupportedError.about(
            "verify",
            "fn",
            must=f"be callable as {how}",
            got=_shown(fn),
            then="Wrap it; further arguments need defaults or the convention's names.",
        )
    if dtype not in DTYPES:
        raise UnsupportedError.about(
            "verify", "dtype", must="be floating point", got=dtype, then="16, 32 and 64 bit floats are supported."
        )
    subject = Subject(
        fn=fn, signature=convention, dtype=dtype, device=torch.device(device), linear_memory=linear_memory
    )
    if ranks and invariance:
        raise UnsupportedError.about(
            "verify",
            "invariance",
            must="be False for a function on several ranks",
            got="True",
            then="Verify the function of one rank.",
        )
    searched = examples > 0 and can_search() and not ranks
    chosen = _chosen(laws, _laws(distributed=ranks, invariance=invariance))
    findings: list[Finding] = []
    processes = fn if isinstance(fn, Distributed) else nullcontext()
    setting = invariant() if invariance else nullcontext()
    with processes, setting, undisturbed(), undrawn(subject.device), torch.enable_grad():
        for law in chosen:
            if progress is not None:
                progress(law.name)
            findings.append(_try(law, subject, examples if searched else 0, shrinks=not _only_raises(findings)))
    return Report(
        name=name or str(getattr(fn, "__qualname__", type(fn).__name__)),
        signature=signature,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        findings=tuple(findings),
        versions=versions(),
        searched=searched,
        unheard=convention.unheard(fn),
        known=convention.options,
    )


def law_names(*, distributed: bool = False, invariance: bool = False) -> tuple[str, ...]:
    """The names of all laws, in the order in which they are tried.

    Args:
        distributed: whether to name the laws of a ``Distributed`` function, by default those of any other.
        invariance: whether to name the laws of bits, which ``verify(..., invariance=True)`` tries.

    >>> law_names()[:3]
    ('output', 'gradients', 'shape and dtype')
    """
    return tuple(law.name for law in _laws(distributed=distributed, invariance=invariance))


def _laws(*, distributed: bool, invariance: bool) -> tuple[Law, ...]:
    return INVARIANCE_LAWS if invariance else RANK_LAWS if distributed else LAWS


def _chosen(names: Iterable[str] | None, laws: tuple[Law, ...]) -> list[Law]:
    wanted = [law.name for law in laws] if names is None else [names] if isinstance(names, str) else list(names)
    there_are = [law.name for law in laws]
    for name in wanted:
        if name not in there_are:
            raise UnsupportedError.about(
                "verify", "laws", must="be names of laws", got=repr(name), then=f"There are: {', '.join(there_are)}."
            )
    return [law for law in laws if law.name in wanted]


def _check_distributed(signature: str, device: torch.device) -> None:
    """Ranks are processes of gloo on the CPU, and are given functions of tensors."""
    if signature == "mha":
        raise UnsupportedError.about(
            "verify",
            "signature",
            must="be 'sdpa' or 'clearhead' for a function on several ranks",
            got=repr(signature),
            then="Wrap the module's heads in a function.",
        )
    if device.type != "cpu":
        raise UnsupportedError.about(
            "verify",
            "device",
            must="be the CPU for a function on several ranks",
            got=repr(str(device)),
            then="The laws run the same code with gloo.",
        )


def _shown(fn: Callable[..., Any]) -> str:
    """A function's name and parameters."""
    name = getattr(fn, "__qualname__", type(fn).__name__)
    try:
        return f"{name}{inspect.signature(fn)}"[:160]
    except (TypeError, ValueError):
        return str(name)


def _only_raises(findings: list[Finding]) -> bool:
    """Whether every law so far raised an error, so that one smallest example of the error suffices."""
    tried = [finding for finding in findings if finding.status != "does not apply"]
    return bool(tried) and all(finding.raised for finding in tried)


def _try(law: Law, subject: Subject, examples: int, *, shrinks: bool = True) -> Finding:
    """Try one law on its fixed cases, then on cases from Hypothesis; errors are shrunk only if ``shrinks``."""
    carried = subject.signature.carries(subject.fn)
    missing = [CARRIED[word] for word in sorted(law.needs - carried)]
    if missing:
        return Finding(
            law=law.name, says=law.says, status="does not apply", detail=f"it does not support {' or '.join(missing)}"
        )
    tried, reasons = 0, dict[str, None]()
    for case in _expanded(law, subject, carried):
        outcome = _outcome(law, subject, case)
        if outcome.startswith(_FAILS):
            if shrinks or not outcome.startswith(f"{_FAILS}raises"):
                case, outcome = _smaller(law, subject, carried, examples, (case, outcome))
            return _failed(law, case, outcome, tried + 1)
        if outcome:
            reasons[outcome] = None
        else:
            tried += 1
    if tried and examples and law.search:
        failure = _search(law, subject, carried, examples)
        if failure is not None:
            return _failed(law, *failure, tried + 1)
        tried += examples
    status: Status = "holds" if tried else "does not apply"
    detail = "; ".join(reasons) if tried or reasons else "it does not support this mask"
    return Finding(law=law.name, says=law.says, status=status, detail=detail, cases=tried)


_FAILS = "fails: "


def _outcome(law: Law, subject: Subject, case: Case) -> str:
    """Empty if the law holds; else a description, which starts with ``_FAILS`` if the law is broken."""
    try:
        law.check(subject, case)
    except Broken as broken:
        return f"{_FAILS}{broken}"
    except NotApplicable as reason:
        return str(reason)
    except REFUSALS as refusal:
        return f"refused: {' '.join(str(refusal).split())}"
    except SystemExit as leaving:
        return f"{_FAILS}ends the process: sys.exit({leaving.code!r})"
    except Exception as error:
        return f"{_FAILS}{error_detail(error)}"
    return ""


def _expanded(law: Law, subject: Subject, carried: frozenset[str]) -> Iterator[Case]:
    """The law's cases, in each form of the mask argument."""
    for case in law.cases:
        if "value width" not in carried and case.value_dim != case.head_dim:
            case = replace(case, value_dim=case.head_dim)
        fitted = law.fit(case)
        for form in law.forms(subject.signature, carried, fitted):
            yield replace(fitted, form=form)


def _failed(law: Law, case: Case, outcome: str, cases: int) -> Finding:
    detail = outcome.removeprefix(_FAILS)
    return Finding(law=law.name, says=law.says, status="fails", detail=detail, example=case, cases=cases)


def _smaller(
    law: Law, subject: Subject, carried: frozenset[str], examples: int, fixed: tuple[Case, str]
) -> tuple[Case, str]:
    """The smaller of a failing fixed case and the one that Hypothesis finds, with its outcome."""
    smallest = _search(law, subject, carried, max(examples, _SHRINK)) if examples and law.search else None
    return fixed if smallest is None or smallest[0].places > fixed[0].places else smallest


def _search(law: Law, subject: Subject, carried: frozenset[str], tries: int) -> tuple[Case, str] | None:
    """The smallest failing case that Hypothesis finds, with its outcome; None if there is none."""
    failures: list[tuple[Case, str]] = []

    def fails(case: Case) -> bool:
        outcome = _outcome(law, subject, case)
        if not outcome.startswith(_FAILS):
            return False
        failures.append((case, outcome))
        return True

    search(law, subject.signature, carried, fails, tries)
    # The last case that Hypothesis tried need not be the smallest, and a function that fails randomly has none.
    return min(failures, key=lambda one: (one[0].places, len(str(one[0])))) if failures else None
