"""The lab's HTTP server on a local port."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import uvicorn

from clearhead.errors import DataError
from clearhead.lab.app import application
from clearhead.lab.connection import TimedConnection
from clearhead.lab.desk import Desk
from clearhead.lab.limits import Limits
from clearhead.lab.views import Views
from clearhead.lab.work import Work
from clearhead.lab.works import works_of

__all__ = ["Lab"]

_HOST: Final = "127.0.0.1"
_LAST_PORT: Final = 65535
#: The largest number of connections; further ones get status 503. Half of them may owe a request (``TimedConnection``).
_CONNECTIONS: Final = 256
#: How long jobs may take to notice that the lab stops.
_LAST_SECONDS: Final = 1.0


@dataclass(eq=False)
class Lab:
    """A lab with its port bound, ready to ``run``.

    Attributes:
        folders: model folders that it may read.
        port: the port; 0 for any free port.
        limits: limits of requests.
        more: kinds of jobs besides those of the tabs.
        token: the first part of every path.
        still_working: after ``run``, whether a thread is still in a long computation.

    Raises:
        DataError: the port is in use, or a folder cannot be used.
    """

    folders: Sequence[Path] = ()
    port: int = 0
    limits: Limits = field(default_factory=Limits)
    more: Sequence[Work] = ()
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    still_working: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.desk, self.views = Desk(self.limits), Views(self.limits)
        works = (*works_of(self.folders, self.views, self.limits), *self.more)
        self._socket = _listening(self.port)
        self.port = self._socket.getsockname()[1]
        app = application(works, desk=self.desk, views=self.views, limits=self.limits, token=self.token, port=self.port)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", ws="none", loop="asyncio", http=TimedConnection,
            server_header=False, date_header=False, proxy_headers=False, limit_concurrency=_CONNECTIONS,
            timeout_keep_alive=5, timeout_graceful_shutdown=1,
        )  # fmt: skip
        self.server = _Server(config, self.desk.close)

    @property
    def url(self) -> str:
        """The page's URL, with the token."""
        return f"http://{_HOST}:{self.port}/{self.token}/"

    def run(self) -> None:
        """Serve until ``stop`` or Ctrl-C, which raises KeyboardInterrupt after the cleanup."""
        try:
            self.server.run(sockets=[self._socket])
        finally:
            self._socket.close()
            self.desk.close()
            self.still_working = not self.desk.join(_LAST_SECONDS)

    def stop(self) -> None:
        """Make ``run`` return."""
        self.server.should_exit = True


class _Server(uvicorn.Server):
    """A server that cancels jobs before it waits for open responses."""

    def __init__(self, config: uvicorn.Config, ending: Callable[[], None]) -> None:
        super().__init__(config)
        self._ending = ending

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending()
        await super().shutdown(sockets)


def _listening(port: int) -> socket.socket:
    if not 0 <= port <= _LAST_PORT:
        raise DataError.about(
            "lab", "--port", must=f"be from 0 to {_LAST_PORT}", got=port, then="0 selects any free port."
        )
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((_HOST, port))
        # Clients may connect from here on; they wait until the server runs.
        made.listen(_CONNECTIONS)
    except OSError as failure:
        made.close()
        got = f"{port} ({failure.strerror})"
        raise DataError.about("lab", "--port", must="be free", got=got, then="Name another, or 0 for any.") from failure
    return made
