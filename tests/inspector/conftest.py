"""Pages opened in a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clearhead.inspector import Page
from tests.inspector.chromium import Opened
from tests.inspector.fox import PAGE


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    opened: list[Opened] = []

    def open_it(page: Page | str = PAGE, fragment: str = "", **settings: Any) -> Opened:
        path = tmp_path / "page.html"
        path.write_text(page if isinstance(page, str) else page.html, "utf-8")
        opened_page = Opened(browser, path, **settings)
        opened.append(opened_page)
        if fragment:
            opened_page.page.goto("about:blank")
            opened_page.page.goto(f"{path.absolute().as_uri()}#{fragment}")
        opened_page.page.wait_for_selector("#main[data-ready], #alert:not([hidden])", state="attached")
        return opened_page

    yield open_it
    for page in opened:
        page.context.close()
