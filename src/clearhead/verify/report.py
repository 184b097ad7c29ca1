"""The report of ``verify``: one finding for each law, as a plain text table and as JSON."""

from __future__ import annotations

import json
import platform
import textwrap
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Literal

import torch

from clearhead.verify.case import Case

__all__ = ["Finding", "Report", "Status", "error_detail", "versions"]

Status = Literal["holds", "fails", "does not apply"]

#: Prefixes of the detail if a function did not return.
_ERRORS = ("raises ", "ends the process")

_LABELS = {"holds": "ok", "fails": "FAILS", "does not apply": "-"}


def versions() -> dict[str, str]:
    """Versions of clearhead, torch and Python."""
    try:
        version = metadata.version("clearhead")
    except metadata.PackageNotFoundError:
        version = "not installed as a package"
    return {"clearhead": version, "torch": torch.__version__, "python": platform.python_version()}


def error_detail(error: Exception) -> str:
    """The detail of a law under which what is verified raised."""
    return f"raises {type(error).__name__}: {' '.join(str(error).split())[:300]}"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one law.

    Attributes:
        law: name of the law.
        says: the law as a sentence.
        status: ``"holds"``, ``"fails"`` or ``"does not apply"``.
        detail: how the law fails, why it does not apply, or what the function refused.
        example: the smallest failing case, or None.
        cases: number of cases that were tried.
    """

    law: str
    says: str
    status: Status
    detail: str = ""
    example: Case | None = None
    cases: int = 0

    @property
    def raised(self) -> bool:
        """Whether the law fails because the function raised or ended the process."""
        return self.status == "fails" and self.detail.startswith(_ERRORS)

    def to_dict(self) -> dict[str, Any]:
        """The finding as plain values for JSON."""
        example = None if self.example is None else self.example.to_dict()
        return {
            "law": self.law,
            "says": self.says,
            "status": self.status,
            "detail": self.detail,
            "example": example,
            "cases": self.cases,
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """The findings about one function; ``str()`` gives a table.

    Attributes:
        name: name of the function.
        signature: name of the calling convention.
        dtype: dtype of the tensors.
        device: device of the tensors.
        findings: one finding for each law.
        versions: versions of Python, torch and clearhead.
        searched: whether Hypothesis searched for further and smaller examples.
        unheard: parameters of the function that look like arguments of the convention but were never passed.
        known: names of the arguments that the convention passes.
    """

    name: str
    signature: str
    dtype: str
    device: str
    findings: tuple[Finding, ...]
    versions: dict[str, str]
    searched: bool
    unheard: tuple[str, ...] = ()
    known: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no law fails and at least one holds."""
        return not self.broken and any(finding.status == "holds" for finding in self.findings)

    @property
    def broken(self) -> tuple[str, ...]:
        """Names of the laws that fail."""
        return tuple(finding.law for finding in self.findings if finding.status == "fails")

    def __getitem__(self, law: str) -> Finding:
        """The finding of a law by name."""
        return next(finding for finding in self.findings if finding.law == law)

    @property
    def always_raises(self) -> Finding | None:
        """The finding with the smallest call if the function raised under every law that applies; else None."""
        tried = [finding for finding in self.findings if finding.status != "does not apply"]
        smallest = min(tried, key=lambda one: one.example.places if one.example else 0, default=None)
        return smallest if len(tried) > 1 and all(finding.raised for finding in tried) else None

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        counts = {status: sum(finding.status == status for finding in self.findings) for status in _LABELS}
        if self.always_raises is not None:
            return f"it raises under all {counts['fails']} laws that apply."
        if self.broken:
            tried = counts["fails"] + counts["holds"]
            return f"{counts['fails']} of {tried} laws that apply fail: {', '.join(self.broken)}."
        if not self.ok:
            return "no law could be tried."
        return f"all {counts['holds']} laws that apply hold."

    @property
    def heading(self) -> str:
        """One line with the function's name, signature, dtype, device and the versions."""
        where = f"signature {self.signature}, {self.dtype} on {self.device}"
        return f"{self.name}: {where}; {', '.join(f'{name} {version}' for name, version in self.versions.items())}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Limitations of the report: laws without a search for examples, and parameters that were never passed."""
        without = (
            "Only the fixed cases were tried, and failing examples were not shrunk (examples is 0, the function runs "
            "on several ranks, or Hypothesis is not installed: install clearhead[verify])."
        )
        never = (
            f"Never passed, so not tested: {', '.join(self.unheard)}. The convention {self.signature} passes "
            f"{', '.join(self.known)}; wrap the function to use these names."
        )
        return (*(() if self.searched else (without,)), *((never,) if self.unheard else ()))

    def lines(self, width: int = 118) -> list[str]:
        """The table: one line for each finding, with details and the failing example below it.

        Args:
            width: the number of columns at which texts wrap.
        """
        name = max((len(finding.law) for finding in self.findings), default=0)
        notes = (line for note in self.notes for line in textwrap.wrap(note, max(30, width)))
        lines = [*textwrap.wrap(self.heading, max(30, width)), *notes, ""]
        for finding in self._shown():
            lead = f"  {_LABELS[finding.status]:<5} {finding.law:<{name}}  "
            text = finding.says if finding.status == "holds" else finding.detail
            wrapped = textwrap.wrap(text, max(30, width - len(lead))) or [""]
            lines += [lead + wrapped[0], *(" " * len(lead) + line for line in wrapped[1:])]
            if finding.example is not None:
                example = textwrap.wrap(f"with {finding.example}", max(30, width - len(lead)), break_on_hyphens=False)
                lines += [" " * len(lead) + line for line in example]
        return [*(line.rstrip() for line in lines), "", self.verdict]

    def _shown(self) -> list[Finding]:
        """The findings of the table: an error is shown once, under the first law that meets it."""
        always = self.always_raises
        if always is not None:
            # Laws that do not apply because of the same error are left out.
            others = (finding for finding in self.findings if not finding.raised and "raises " not in finding.detail)
            return [replace(always, law="every law"), *others]
        first: dict[str, str] = {}
        shown = []
        for finding in self.findings:
            law = first.setdefault(finding.detail, finding.law) if finding.raised else finding.law
            same = law != finding.law
            shown.append(replace(finding, detail=f"the same error as under {law}") if same else finding)
        return shown

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values for JSON."""
        return {
            "name": self.name,
            "signature": self.signature,
            "dtype": self.dtype,
            "device": self.device,
            "versions": self.versions,
            "searched": self.searched,
            "notes": list(self.notes),
            "ok": self.ok,
            "verdict": self.verdict,
            "findings": [finding.to_dict() for finding in self.findings],
        }

    def to_json(self) -> str:
        """The report as a JSON text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)
