"""Pages of attention that the lab has made, the newest few, each under a name that nobody guesses."""

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
    """The pages kept; the one that was not looked at for the longest goes first."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pages: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return sum(map(len, self._pages.values()))

    def add(self, page: Page) -> str:
        """Keep a page; its name.

        Raises:
            UnsupportedError: it is larger than all of them may be.
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
        """A page by name, if it is kept."""
        with self._lock:
            if name in self._pages:
                self._pages.move_to_end(name)
            return self._pages.get(name)


def policy_of(html: bytes) -> str:
    """A page's own policy, and the sandbox that keeps its script away from the lab's."""
    found = _OWN_POLICY.search(html[:4096].decode("utf-8", "replace"))
    assert found is not None
    return f"sandbox allow-scripts allow-downloads; frame-ancestors 'self'; {found[1]}"
