"""verify(): one attention function through every law."""

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib import metadata
from typing import Any

import torch

from clearhead.errors import UnsupportedError
from clearhead.problem import DTYPES
from clearhead.verify.case import Case
from clearhead.verify.law import REFUSALS, Broken, Law, NotApplicable
from clearhead.verify.laws import LAWS
from clearhead.verify.process import undisturbed, undrawn
from clearhead.verify.report import Finding, Report, Status
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
    name: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Run an attention function, ours or a stranger's, through the laws that attention obeys.

    Numbers are held against the formula in float64, on a budget of twice the error that the textbook makes in the
    same precision, plus rounding. What a function cannot be told does not apply to it; what it refuses with
    ``NotImplementedError`` or ``ch.UnsupportedError`` does not count against it; anything else that it raises does.

    In another project's tests, three lines:

        import clearhead, mine
        def test_my_attention():
            report = clearhead.verify(mine.attention, signature="sdpa"); assert report.ok, report

    Args:
        fn: the function; for ``"mha"`` a class or factory of modules.
        signature: how it is called. ``"sdpa"``: as ``torch.nn.functional.scaled_dot_product_attention``, with
            ``attn_mask`` (bool, True may attend; or float, added), ``is_causal``, ``scale``, ``enable_gqa`` and
            ``dropout_p`` as far as ``fn`` has them; may return ``(output, lse)`` or ``(output, weights)``.
            ``"clearhead"``: as ``clearhead.attention`` or ``observe_attention``. ``"mha"``: as
            ``torch.nn.MultiheadAttention``, in whose masks True forbids.
        dtype: of query, key and value.
        device: where they lie.
        laws: names of the laws to try, by default all; ``law_names()`` lists them.
        examples: how many further cases Hypothesis draws for each law that its fixed cases found to hold; 0 for none,
            and then failing examples are not made smaller either. Needs the extra ``verify``.
        linear_memory: hold the function to memory that grows with the length, backward's too; by default that of
            forward is measured, and no law.
        name: what the report calls the function.
        progress: is called with the name of each law before it is tried.

    Returns:
        A ``Report``: ``str()`` of it is a table, ``.ok`` the verdict, ``.broken`` names the laws that fail, and
        ``.to_json()`` holds all of it with the smallest failing example found for each.

    Raises:
        UnsupportedError: an unknown signature, law or dtype; or a function that Python sees cannot be called so.

    Cost: some hundreds of small calls, each with a float64 oracle beside it; some twenty seconds for most functions.

    >>> import torch, clearhead as ch
    >>> def average(query, key, value):
    ...     return value.mean(dim=2, keepdim=True).expand_as(query)
    >>> report = ch.verify(average, laws=["output", "key order"], examples=0)
    >>> report.ok, report.broken
    (False, ('output', 'key order'))
    """
    known = signature_of(signature)
    if not callable(fn):
        raise UnsupportedError.about(
            "verify", "fn", must="be callable", got=type(fn).__name__, then="Pass an attention function."
        )
    how = known.refused(fn)
    if how is not None:
        raise UnsupportedError.about(
            "verify",
            "fn",
            must=f"be callable as {how}",
            got=_shown(fn),
            then="Wrap it in a function that is; arguments behind these need defaults, or the convention's names.",
        )
    if dtype not in DTYPES:
        raise UnsupportedError.about(
            "verify", "dtype", must="be floating point", got=dtype, then="16, 32 and 64 bit floats are served."
        )
    subject = Subject(fn=fn, signature=known, dtype=dtype, device=torch.device(device), linear_memory=linear_memory)
    searched = examples > 0 and can_search()
    chosen = _chosen(laws)
    findings: list[Finding] = []
    with undisturbed(), undrawn(subject.device), torch.enable_grad():
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
        versions=_versions(),
        searched=searched,
        unheard=known.unheard(fn),
        known=known.options,
    )


def law_names() -> tuple[str, ...]:
    """Names of all laws, in the order in which they are tried.

    >>> law_names()[:3]
    ('output', 'gradients', 'shape and dtype')
    """
    return tuple(law.name for law in LAWS)


def _chosen(names: Iterable[str] | None) -> list[Law]:
    if names is None:
        return list(LAWS)
    wanted = [names] if isinstance(names, str) else list(names)
    for name in wanted:
        if name not in law_names():
            raise UnsupportedError.about(
                "verify", "laws", must="be names of laws", got=repr(name), then=f"Known are: {', '.join(law_names())}."
            )
    return [law for law in LAWS if law.name in wanted]


def _shown(fn: Callable[..., Any]) -> str:
    """A function with its parameters."""
    name = getattr(fn, "__qualname__", type(fn).__name__)
    try:
        return f"{name}{inspect.signature(fn)}"[:160]
    except (TypeError, ValueError):
        return str(name)


def _versions() -> dict[str, str]:
    try:
        own = metadata.version("clearhead")
    except metadata.PackageNotFoundError:
        own = "not installed as a package"
    return {"clearhead": own, "torch": torch.__version__, "python": platform.python_version()}


def _only_raises(findings: list[Finding]) -> bool:
    """Whether nothing has come of the laws so far but errors, of which one smallest call is enough."""
    tried = [finding for finding in findings if finding.status != "does not apply"]
    return bool(tried) and all(finding.raised for finding in tried)


def _try(law: Law, subject: Subject, examples: int, *, shrinks: bool = True) -> Finding:
    """One law: its fixed cases, then what Hypothesis draws; an error is made small only where it ``shrinks``."""
    carried = subject.signature.carries(subject.fn)
    missing = [CARRIED[word] for word in sorted(law.needs - carried)]
    if missing:
        return Finding(
            law=law.name, says=law.says, status="does not apply", detail=f"it cannot be told {' or '.join(missing)}"
        )
    tried, told = 0, dict[str, None]()
    for case in _expanded(law, subject, carried):
        outcome = _outcome(law, subject, case)
        if outcome.startswith(_FAILS):
            if shrinks or not outcome.startswith(f"{_FAILS}raises"):
                case, outcome = _smaller(law, subject, carried, examples, (case, outcome))
            return _failed(law, case, outcome, tried + 1)
        if outcome:
            told[outcome] = None
        else:
            tried += 1
    if tried and examples and law.search:
        found = _search(law, subject, carried, examples)
        if found is not None:
            return _failed(law, *found, tried + 1)
        tried += examples
    status: Status = "holds" if tried else "does not apply"
    detail = "; ".join(told) if tried or told else "it cannot be told this mask"
    return Finding(law=law.name, says=law.says, status=status, detail=detail, cases=tried)


_FAILS = "fails: "


def _outcome(law: Law, subject: Subject, case: Case) -> str:
    """Empty where the law holds; else what it says, beginning with ``_FAILS`` where it is broken."""
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
        return f"{_FAILS}raises {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def _expanded(law: Law, subject: Subject, carried: frozenset[str]) -> Iterator[Case]:
    """The law's cases in the forms of the signature."""
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
    """The smaller of a fixed case that fails and what Hypothesis finds, with what each says."""
    found = _search(law, subject, carried, max(examples, _SHRINK)) if examples and law.search else None
    return fixed if found is None or found[0].places > fixed[0].places else found


def _search(law: Law, subject: Subject, carried: frozenset[str], tries: int) -> tuple[Case, str] | None:
    """A failing case as small as Hypothesis can make it, with what the law says of it."""
    seen: list[tuple[Case, str]] = []

    def fails(case: Case) -> bool:
        outcome = _outcome(law, subject, case)
        if not outcome.startswith(_FAILS):
            return False
        seen.append((case, outcome))
        return True

    search(law, subject.signature, carried, fails, tries)
    # The last that Hypothesis tried need not be its smallest; and a function that fails now and then has none.
    return min(seen, key=lambda one: (one[0].places, len(str(one[0])))) if seen else None
