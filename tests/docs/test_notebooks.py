"""Every code cell of the site runs, without Jupyter: each page's cells in one namespace, in the order of the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"
CELL = re.compile(r"^(`{3,}|:{3,})\{code-cell\}[^\n]*\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)
OPTIONS = re.compile(r"\A(?:---\n.*?^---\n|(?::[^\n]*\n)+)", re.MULTILINE | re.DOTALL)


def cells(page: str) -> list[str]:
    """The code of a page's cells, without their options."""
    return [OPTIONS.sub("", match[2]) for match in CELL.finditer(page)]


PAGES = [path for path in sorted(DOCS.rglob("*.md")) if "_build" not in path.parts and cells(path.read_text("utf-8"))]


def test_cells_are_found_without_their_options() -> None:
    page = "```{code-cell}\n:tags: [hide-input]\n\na = 1\n```\n\ntext\n\n```{code-cell} ipython3\nb = a\n```\n"
    assert [cell.strip() for cell in cells(page)] == ["a = 1", "b = a"]


@pytest.mark.covering(0)
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_page_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": path.stem}
    try:
        for code in cells(path.read_text("utf-8")):
            exec(compile(code, str(path), "exec"), namespace)
    finally:
        # A page may print fewer digits; the doctests do not.
        torch.set_printoptions(profile="default")
