"""A lab on its own port in a thread, and HTTP requests to it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra 'lab'")
pytest.importorskip("uvicorn", reason="needs the extra 'lab'")

from clearhead.lab.limits import Limits
from clearhead.lab.server import Lab
from clearhead.lab.work import Ticket, Work

__all__ = ["WAITING", "Answer", "Ticketless", "asked", "running", "sent", "until", "work_request"]


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.body.splitlines()]

    @property
    def last(self) -> dict[str, Any]:
        return self.lines[-1]


class Ticketless:
    """A ticket of a job that is never cancelled."""

    def step(self, done: float, text: str = "") -> None:
        """Do nothing."""


@contextmanager
def running(folders: Sequence[Path] = (), limits: Limits | None = None, works: Sequence[Work] = ()) -> Iterator[Lab]:
    """A lab that serves until the block ends, with ``works`` besides its own."""
    lab = Lab(folders, limits=limits or Limits(), more=tuple(works))
    thread = threading.Thread(target=lab.run)
    thread.start()
    try:
        until(lambda: _answers(lab.port))
        yield lab
    finally:
        lab.stop()
        thread.join(10)
        assert not thread.is_alive()


def _answers(port: int) -> bool:
    with socket.socket() as made:
        return made.connect_ex(("127.0.0.1", port)) == 0


def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until a condition holds; fails after ``seconds``."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "the condition did not hold in time"
        time.sleep(0.01)


def sent(
    lab: Lab,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> Answer:
    """Send one request; ``path`` is sent unmodified, and a ``Host`` in ``headers`` replaces the correct one."""
    connection = http.client.HTTPConnection("127.0.0.1", lab.port, timeout=timeout)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        given = {"Host": f"127.0.0.1:{lab.port}", **(headers or {})}
        if body is not None:
            given.setdefault("Content-Length", str(len(body)))
        for name, value in given.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def asked(
    lab: Lab, name: str, params: object = None, headers: Mapping[str, str] | None = None, timeout: float = 60.0
) -> Answer:
    """Request a job as the page does."""
    body = json.dumps({} if params is None else params).encode()
    given = {"Content-Type": "application/json", **(headers or {})}
    return sent(lab, "POST", f"/{lab.token}/works/{name}", body, given, timeout)


@contextmanager
def work_request(lab: Lab, name: str) -> Iterator[socket.socket]:
    """Request a job by a client that may disconnect: its socket."""
    with socket.create_connection(("127.0.0.1", lab.port), timeout=10) as made:
        head = f"POST /{lab.token}/works/{name} HTTP/1.1\r\nHost: 127.0.0.1:{lab.port}\r\n"
        made.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        yield made


def _wait(params: Mapping[str, Any], ticket: Ticket) -> Any:
    """Runs until it is cancelled."""
    count = 0
    while True:
        count += 1
        ticket.step(min(1.0, count / 1000), f"at {count}")
        time.sleep(0.01)


#: A job that only its ticket ends.
WAITING = Work("wait", _wait)
