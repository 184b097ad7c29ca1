"""The public interface is the one that the snapshot lists."""

from __future__ import annotations

from difflib import unified_diff
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from tests.api.snapshot import lines

STORED = Path(__file__).with_name("snapshot.txt")
ADVICE = "If the change is intended, write an ADR and run: python tests/api/snapshot.py > tests/api/snapshot.txt"


def changes(before: list[str], after: list[str]) -> str:
    """The lines that are in one snapshot only, "-" for those of the first."""
    return "\n".join(line for line in list(unified_diff(before, after, lineterm="", n=0))[2:] if line[0] in "+-")


def test_public_interface_is_that_of_the_snapshot() -> None:
    difference = changes(STORED.read_text().splitlines(), lines())
    assert not difference, f"the public interface changed:\n{difference}\n{ADVICE}"


def test_changes_name_the_item_that_changed() -> None:
    assert changes(["a(x)", "b(y)", "c"], ["a(x, z)", "b(y)", "c"]) == "-a(x)\n+a(x, z)"
