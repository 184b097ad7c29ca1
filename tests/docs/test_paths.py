"""Every file that a page names is there: pages name files in code spans, and code moves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "native", "docs", "gallery", "examples", "tools", "benchmarks")
NAMED = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*\.(?:py|h|cpp|md|toml|js|svg))`")
#: Files that a page tells the reader to write.
TO_WRITE = {
    "docs/adr/NNNN-title.md",
    "native/src/scaling.h",
    "src/clearhead/backends/eager.py",
    "src/clearhead/inspector/viewer/histogram.js",
    "tests/ops/test_scale_heads.py",
}
PAGES = [path for path in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))] if "_build" not in path.parts]


def missing(page: str) -> list[str]:
    """The files that a page names and that do not exist."""
    return [name for name in NAMED.findall(page) if name not in TO_WRITE and not (ROOT / name).exists()]


def test_missing_file_is_noticed() -> None:
    assert missing("`src/clearhead/masks/base.py` and `src/clearhead/masks/gone.py`") == ["src/clearhead/masks/gone.py"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_exist(path: Path) -> None:
    # A record of a decision names files as they were.
    if path.parent.name != "adr" and path.name != "CHANGELOG.md":
        assert missing(path.read_text("utf-8")) == []
