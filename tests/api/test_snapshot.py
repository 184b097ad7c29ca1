"""The public interface equals the stored snapshot."""

from __future__ import annotations

from difflib import unified_diff
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from tests.api.snapshot import lines

STORED = Path(__file__).with_name("snapshot.txt")
ADVICE = "If the change is intended, write an ADR and run: python tests/api/snapshot.py > tests/api/snapshot.txt"


def changes(stored: list[str], current: list[str]) -> str:
    """Lines that are in only one of the snapshots, with "-" for the stored one and "+" for the current one."""
    return "\n".join(line for line in list(unified_diff(stored, current, lineterm="", n=0))[2:] if line[0] in "+-")


def test_public_interface_equals_the_snapshot() -> None:
    difference = changes(STORED.read_text().splitlines(), lines())
    assert not difference, f"the public interface changed:\n{difference}\n{ADVICE}"


def test_changes_name_the_item_that_changed() -> None:
    assert changes(["a(x)", "b(y)", "c"], ["a(x, z)", "b(y)", "c"]) == "-a(x)\n+a(x, z)"
