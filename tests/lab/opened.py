"""A tab of a running lab in a real Chromium, with its requests and console messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from clearhead.lab.server import Lab

__all__ = ["Tab", "opened"]


class Tab:
    """The page, opened at one tab."""

    def __init__(self, browser: Any, lab: Lab, name: str, **settings: Any) -> None:
        self.name = name
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings})
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page = self.context.new_page()
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        self.page.goto(f"{lab.url}#{name}")
        self.page.wait_for_selector(f"#panel-{name}[data-ready]")

    @property
    def root(self) -> Any:
        return self.page.locator(f"#panel-{self.name}")

    def until_shown(self, act: Any) -> None:
        """Run an action and wait until the tab shows its result."""
        before = self.root.get_attribute("data-shown")
        act()
        self.page.wait_for_function(
            "([name, before]) => document.getElementById(`panel-${name}`).dataset.shown !== before",
            arg=[self.name, before],
        )

    def text(self, selector: str) -> str:
        """The text of an element of the tab."""
        return str(self.root.locator(selector).first.inner_text())

    def focused(self) -> str | None:
        """The place of the focused cell."""
        return self.page.evaluate("document.activeElement.dataset.cell ?? null")  # type: ignore[no-any-return]


@contextmanager
def opened(browser: Any, lab: Lab, name: str, **settings: Any) -> Iterator[Tab]:
    """A tab, whose page must not send requests to other machines or log messages."""
    tab = Tab(browser, lab, name, **settings)
    try:
        yield tab
        # Chromium warns about reading pixels back, which only tests do.
        complaints = [each for each in tab.complaints if "willReadFrequently" not in each]
        assert not complaints, complaints
        assert all(url.startswith((lab.url, "data:", "blob:")) for url in tab.requests), tab.requests
    finally:
        tab.context.close()
