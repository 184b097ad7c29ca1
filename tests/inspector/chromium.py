"""A real Chromium without a network, for the tests that open a page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def _executable() -> str | None:
    named = os.environ.get("CLEARHEAD_CHROMIUM")
    return named or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser, or a skip that says what is missing."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (clearhead[dev] brings it)")
    executable = _executable()
    if executable is None:
        pytest.skip("there is no chromium on the path (Debian: apt install chromium; or set CLEARHEAD_CHROMIUM)")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=executable, args=list(_ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


class Opened:
    """A page that was opened without a network, with its requests, console messages and errors."""

    def __init__(self, browser: Any, path: Path, **settings: Any) -> None:
        self.context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900}, **settings)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page = self.context.new_page()
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        self.page.goto(path.absolute().as_uri())

    def text(self, selector: str) -> str:
        """The text of an element."""
        return str(self.page.locator(selector).inner_text())

    def read(self, expression: str, argument: Any = None) -> Any:
        """The value of a JavaScript expression in the page."""
        return self.page.evaluate(expression, argument)
