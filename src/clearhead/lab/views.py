"""A store of the most recent attention pages, under random names."""

from __future__ import annotations

import re
import secrets
import threading
from collections import OrderedDict
from typing import Final

from clearhead.errors import UnsupportedError
from clearhead.inspector import Page
from clearhead.lab.limits import Limits

__all__ = ["Views"]

_OWN_POLICY: Final = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">')


class Views:
    """The stored pages; the least recently used one is dropped first."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pages: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def size(self) -> int:
        """The total number of bytes."""
        return sum(map(len, self._pages.values()))

    def add(self, page: Page) -> str:
        """Store a page and return its name.

        Raises:
            UnsupportedError: the page is larger than the limit of all pages.
        """
        html = page.html.encode()
        if len(html) > self._limits.view_bytes:
            raise UnsupportedError.about(
                "look",
                "page",
                must=f"have at most {self._limits.view_bytes / 1e6:.0f} MB",
                got=f"{len(html) / 1e6:.0f}",
                then="Show fewer layers, or a shorter text.",
            )
        name = secrets.token_urlsafe(16)
        with self._lock:
            self._pages[name] = html
            while len(self._pages) > self._limits.views or self.size > self._limits.view_bytes:
                self._pages.popitem(last=False)
        return name

    def get(self, name: str) -> bytes | None:
        """A page by name, or None if it is not stored."""
        with self._lock:
            if name in self._pages:
                self._pages.move_to_end(name)
            return self._pages.get(name)


def policy_of(html: bytes) -> str:
    """A page's content security policy, with a sandbox that isolates its script from the lab."""
    match = _OWN_POLICY.search(html[:4096].decode("utf-8", "replace"))
    assert match is not None
    return f"sandbox allow-scripts allow-downloads; frame-ancestors 'self'; {match[1]}"
