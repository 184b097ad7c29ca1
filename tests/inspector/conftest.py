"""A browser, and pages opened in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clearhead.inspector import Page
from tests.inspector.chromium import Opened, chromium
from tests.inspector.fox import PAGE


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    opened: list[Opened] = []

    def open_it(page: Page | str = PAGE, fragment: str = "", **settings: Any) -> Opened:
        path = tmp_path / "page.html"
        path.write_text(page if isinstance(page, str) else page.html, "utf-8")
        seen = Opened(browser, path, **settings)
        opened.append(seen)
        if fragment:
            seen.page.goto("about:blank")
            seen.page.goto(f"{path.absolute().as_uri()}#{fragment}")
        seen.page.wait_for_selector("#main[data-ready], #alert:not([hidden])", state="attached")
        return seen

    yield open_it
    for page in opened:
        page.context.close()
