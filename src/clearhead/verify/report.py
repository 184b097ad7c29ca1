"""What verify found: one finding a law, as a table in plain text and as JSON."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass, replace
from typing import Any, Literal

from clearhead.verify.case import Case

__all__ = ["Finding", "Report", "Status"]

Status = Literal["holds", "fails", "does not apply"]

#: How a detail begins where a function did not come to an end.
_ERRORS = ("raises ", "ends the process")

_MARKS = {"holds": "ok", "fails": "FAILS", "does not apply": "-"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What became of one law.

    Attributes:
        law: its name.
        says: what holds where it holds.
        status: "holds", "fails" or "does not apply".
        detail: how it fails, why it does not apply, or what the function refused on the way.
        example: the smallest failing case found.
        cases: how many cases it was tried on.
    """

    law: str
    says: str
    status: Status
    detail: str = ""
    example: Case | None = None
    cases: int = 0

    @property
    def raised(self) -> bool:
        """Whether the law fails because the function did not come to an end."""
        return self.status == "fails" and self.detail.startswith(_ERRORS)

    def to_dict(self) -> dict[str, Any]:
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
    """All findings about one function; ``str`` is a table.

    Attributes:
        name: of the function.
        signature: the convention it was called by.
        dtype: the numbers it was tried on.
        device: where they lay.
        findings: one a law.
        versions: of Python, torch and clearhead.
        searched: whether Hypothesis looked for further and smaller examples.
        unheard: parameters of the function that sound like what was tried, and were never given.
        known: names of arguments that the convention gives.
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
        return next(finding for finding in self.findings if finding.law == law)

    @property
    def always_raises(self) -> Finding | None:
        """Of a function that raised under every law that could be tried, the finding with the smallest call; else
        None."""
        tried = [finding for finding in self.findings if finding.status != "does not apply"]
        smallest = min(tried, key=lambda one: one.example.places if one.example else 0, default=None)
        return smallest if len(tried) > 1 and all(finding.raised for finding in tried) else None

    @property
    def verdict(self) -> str:
        """One sentence."""
        counts = {status: sum(finding.status == status for finding in self.findings) for status in _MARKS}
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
        where = f"signature {self.signature}, {self.dtype} on {self.device}"
        return f"{self.name}: {where}; {', '.join(f'{name} {version}' for name, version in self.versions.items())}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know about how the report was made."""
        without = (
            "Only the fixed cases were tried, and failing examples are not made smaller (examples is 0, or Hypothesis "
            "is not installed: install clearhead[verify])."
        )
        never = (
            f"Never given, and so not tried: {', '.join(self.unheard)}. The convention {self.signature} gives "
            f"{', '.join(self.known)}; wrap the function to have these names where it means the same."
        )
        return (*(() if self.searched else (without,)), *((never,) if self.unheard else ()))

    def lines(self, width: int = 118) -> list[str]:
        """The table, a finding a line and what went wrong below it."""
        name = max((len(finding.law) for finding in self.findings), default=0)
        notes = (line for note in self.notes for line in textwrap.wrap(note, max(30, width)))
        found = [*textwrap.wrap(self.heading, max(30, width)), *notes, ""]
        for finding in self._shown():
            lead = f"  {_MARKS[finding.status]:<5} {finding.law:<{name}}  "
            text = finding.says if finding.status == "holds" else finding.detail
            wrapped = textwrap.wrap(text, max(30, width - len(lead))) or [""]
            found += [lead + wrapped[0], *(" " * len(lead) + line for line in wrapped[1:])]
            if finding.example is not None:
                example = textwrap.wrap(f"with {finding.example}", max(30, width - len(lead)), break_on_hyphens=False)
                found += [" " * len(lead) + line for line in example]
        return [*(line.rstrip() for line in found), "", self.verdict]

    def _shown(self) -> list[Finding]:
        """The findings as the table has them: an error is told once, under the first law that meets it."""
        always = self.always_raises
        if always is not None:
            # What does not apply because of an error would only repeat it.
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
        """Everything, as JSON."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)
