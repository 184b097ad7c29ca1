"""The tests that only ``make test-slow`` runs, and the end of a run whose time is up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import reported

ROOT = Path(__file__).resolve().parent.parent
SUITE = """
import pytest

@pytest.mark.parametrize("c", "xyz")
@pytest.mark.parametrize("b", "xyz")
@pytest.mark.parametrize("a", "xyz")
def test_pairs(a, b, c):
    pass

@pytest.mark.parametrize("b", "xyz")
@pytest.mark.parametrize("a", "xyz")
def test_each(a, b):
    pass

@pytest.mark.covering(2)
@pytest.mark.parametrize("b", "xyz")
@pytest.mark.parametrize("a", "xyz")
def test_all(a, b):
    pass

@pytest.mark.covering(0)
@pytest.mark.parametrize("a", [pytest.param("x", marks=pytest.mark.slow), "y", "z"])
def test_one(a):
    pass

@pytest.mark.parametrize(("a", "b", "c"), [(1, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 1, 2)])
def test_table(a, b, c):
    pass

@pytest.mark.parametrize("a", range(2))
@pytest.mark.browser
def test_page(a):
    pass

@pytest.mark.slow
def test_long():
    pass
"""

PYTEST = """
import os, sys, pytest
os.chdir(sys.argv[1])
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "test_suite.py"
    path.write_text(SUITE, encoding="utf-8")
    return path


def run(suite: Path, *arguments: str) -> str:
    settings = ("-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(suite.parent))
    done = reported(PYTEST, [str(ROOT), *settings, "-p", "no:cacheprovider", "-q", *arguments, str(suite)])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_covering_arrays_one_page_and_what_is_not_slow_run(suite: Path) -> None:
    collected = run(suite, "--collect-only", "-m", "not slow")
    counts = {
        name: collected.count(f"::test_{name}") for name in ("pairs", "each", "all", "one", "table", "page", "long")
    }
    assert 9 <= counts.pop("pairs") <= 12
    assert counts == {"each": 3, "all": 9, "one": 1, "table": 5, "page": 1, "long": 0}
    assert "test_one[y]" in collected


@pytest.mark.slow
def test_run_without_time_skips_every_test_and_says_so(suite: Path) -> None:
    said = run(suite, "--until", "0")
    assert "56 tests left out, as the time was up" in said
    assert "   56 of test_suite.py" in said
    assert "56 skipped" in said
