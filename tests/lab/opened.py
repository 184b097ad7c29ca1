"""A room of a running lab in a real Chromium, with everything that it asked for or complained about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from clearhead.lab.server import Lab

__all__ = ["Room", "opened"]


class Room:
    """The page, opened at one room."""

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
        self.page.wait_for_selector(f"#room-{name}[data-ready]")

    @property
    def root(self) -> Any:
        return self.page.locator(f"#room-{self.name}")

    def after(self, act: Any) -> None:
        """Do something and wait until the room shows what came of it."""
        before = self.root.get_attribute("data-shown")
        act()
        self.page.wait_for_function(
            "([name, before]) => document.getElementById(`room-${name}`).dataset.shown !== before",
            arg=[self.name, before],
        )

    def text(self, selector: str) -> str:
        """What stands in an element of the room."""
        return str(self.root.locator(selector).first.inner_text())

    def focused(self) -> str | None:
        """The place of the cell that has the focus."""
        return self.page.evaluate("document.activeElement.dataset.cell ?? null")  # type: ignore[no-any-return]


@contextmanager
def opened(browser: Any, lab: Lab, name: str, **settings: Any) -> Iterator[Room]:
    """A room, whose page must have asked nothing of other machines and complained about nothing."""
    room = Room(browser, lab, name, **settings)
    try:
        yield room
        # Reading pixels back, as only tests do, makes Chromium recommend another way to do it.
        complaints = [each for each in room.complaints if "willReadFrequently" not in each]
        assert not complaints, complaints
        assert all(url.startswith((lab.url, "data:", "blob:")) for url in room.requests), room.requests
    finally:
        room.context.close()
