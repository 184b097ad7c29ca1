"""The hosted CI names releases and make targets that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")


def test_releases_are_the_oldest_and_the_newest_of_the_matrix() -> None:
    text = (ROOT / "tools" / "matrix.py").read_text(encoding="utf-8")
    for package in ("torch", "transformers"):
        (listed,) = re.findall(rf"^{package.upper()} = \((.*)\)$", text, re.MULTILINE)
        (tested,) = re.findall(rf"^        {package}: \[(.*)\]$", WORKFLOW, re.MULTILINE)
        releases = re.findall(r'"([^"]+)"', listed)
        assert re.findall(r'"([^"]+)"', tested) == [releases[0], releases[-1]]


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    called = set(re.findall(r"run: make ([a-z-]+)", WORKFLOW))
    assert called
    assert called <= targets
