"""Fixtures and hooks of the whole test suite."""

from __future__ import annotations

import gc
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from clearhead.ops import library as native_library
from clearhead.projection import named_by_variable
from tests import processes  # noqa: F401 - its server of processes is to be that of run_ranks
from tests.covering import covering
from tests.inspector.chromium import chromium

LEFT_OUT = "left out: the time is up"
# A busy machine is no failure.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")
if not torch.cuda.is_available():
    # torch's own function also formats its caller's stack for three kinds of accelerator, which takes 1.4 ms.
    torch.manual_seed = torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def _own_kernels() -> Iterator[None]:
    """A test that runs operators on another instruction set, or names a GEMM, does so alone."""
    yield
    named_by_variable.cache_clear()
    if (library := native_library.library()) is not None:
        library.ch_use_isa(native_library.isa_index())


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def _threads_as_before() -> Iterator[None]:
    """A test may set the number of torch's threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--until", type=float, metavar="TIME", help="skip tests that have not started at this Unix time")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow the combinations beyond a covering array, and the browser tests of a file beyond the first; let slow
    tests start first."""
    functions: dict[str, list[pytest.Function]] = defaultdict(list)
    opened: set[Path] = set()
    for item in items:
        if item.get_closest_marker("slow") is None and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            functions[item.nodeid.partition("[")[0]].append(item)
        if item.get_closest_marker("browser") is not None:
            if item.path in opened:
                item.add_marker("slow")
            opened.add(item.path)
    for combinations in functions.values():
        rows = list(map(_options, combinations))
        marker = combinations[0].get_closest_marker("covering")
        # Every pair of two options is the full product.
        strength = 2 if len(rows[0]) > 2 else 1
        covered = set(covering(rows, *(marker.args if marker is not None else (strength,))))
        for index, item in enumerate(combinations):
            if index not in covered:
                item.add_marker("slow")
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def _options(item: pytest.Function) -> list[Hashable]:
    """What each ``parametrize`` of a test and each of its fixtures' parameters chose; the names of one list are one."""
    chosen = {
        name: repr(value) if isinstance(value, (str, int, float, tuple)) else id(value)
        for name, value in item.callspec.params.items()
    }
    together = [mark.args[0] for mark in item.iter_markers("parametrize")]
    listed = [[part.strip() for part in names.split(",")] if isinstance(names, str) else names for names in together]
    columns: list[Hashable] = [tuple(chosen.pop(name, None) for name in names) for names in listed]
    return columns + list(chosen.values())


def pytest_collection_finish() -> None:
    """What is here before the first test stays: each full collection of garbage looked at all of torch again, for up to
    a second. Modules that tests import later stay too, so full collections are rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(2000, 20, 50)


def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("--until")
    if until is not None and time.time() > until:
        pytest.skip(LEFT_OUT)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    files = Counter(report.nodeid.partition("::")[0] for report in skipped if LEFT_OUT in str(report.longrepr))
    if files:
        terminalreporter.section(f"{files.total()} tests left out, as the time was up")
    for file, count in sorted(files.items()):
        terminalreporter.line(f"{count:5} of {file}")
