"""Connections that never end: a client that drips a head, a body or nothing, reads nothing, or closes one half."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from statistics import median
from typing import Any

import pytest

from clearhead.lab import connection
from clearhead.lab.limits import Limits
from clearhead.lab.server import Lab
from clearhead.lab.work import Work
from tests.lab.running import asked, running, sent, until

ECHO = Work("echo", lambda params, ticket: dict(params))
#: An answer that no buffer of a socket holds.
LARGE = Work("large", lambda params, ticket: {"text": "x" * 30_000_000})
#: Longer than the limits below.
PATIENCE = 8.0


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.6)
    monkeypatch.setattr(connection, "READ_SECONDS", 0.9)
    with running(limits=Limits(), works=[ECHO, LARGE]) as started:
        yield started


def _opened(lab: Lab) -> socket.socket:
    return socket.create_connection(("127.0.0.1", lab.port), timeout=10)


def _head(lab: Lab, path: str, *lines: str) -> bytes:
    return "\r\n".join([f"GET /{lab.token}/{path} HTTP/1.1", f"Host: 127.0.0.1:{lab.port}", *lines, "", ""]).encode()


def _large(lab: Lab) -> bytes:
    head = f"POST /{lab.token}/works/large HTTP/1.1\r\nHost: 127.0.0.1:{lab.port}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{{}}".encode()


def _ends(made: socket.socket, drip: bytes = b"") -> float:
    """The seconds until the server ends a connection whose client sends a byte now and then, and reads nothing."""
    start = time.monotonic()
    while time.monotonic() - start < PATIENCE:
        try:
            if drip:
                made.send(drip)
            made.getpeername()
            if not drip and made.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
                return time.monotonic() - start
        except BlockingIOError:
            pass
        except OSError:
            return time.monotonic() - start
        time.sleep(0.05)
    return float("inf")


#: What a client sends first, and again and again.
OWED: dict[str, tuple[Callable[[Lab], bytes], bytes]] = {
    "nothing": (lambda lab: b"", b""),
    "a head, byte by byte": (lambda lab: b"GET /", b"x"),
    "headers without end": (lambda lab: _head(lab, "")[:-2], b"X-More: x\r\n"),
    "a second head, byte by byte": (lambda lab: _head(lab, "none"), b"G"),
    "the body of a request that was answered": (lambda lab: _head(lab, "none", "Content-Length: 100000"), b"x"),
    "chunks of a request that was answered": (
        lambda lab: _head(lab, "none", "Transfer-Encoding: chunked"),
        b"1\r\nx\r\n",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("owed", OWED)
def test_connection_ends_that_owes_a_request(lab: Lab, owed: str) -> None:
    first, drip = OWED[owed]
    with _opened(lab) as made:
        made.sendall(first(lab))
        assert 0.3 < _ends(made, drip) < PATIENCE
    assert sent(lab, "GET", f"/{lab.token}/").status == 200


@pytest.mark.slow
@pytest.mark.parametrize("request_of", [_large, lambda lab: _large(lab) * 2], ids=["one", "pipelined"])
def test_connection_ends_whose_response_is_not_read(lab: Lab, request_of: Callable[[Lab], bytes]) -> None:
    with socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.connect(("127.0.0.1", lab.port))
        made.sendall(request_of(lab))
        until(lambda: any(each.paused for each in _connections(lab)))
        until(lambda: not _connections(lab))
    until(lambda: lab.desk.num_jobs == 0)


def _connections(lab: Lab) -> list[Any]:
    return list(lab.server.server_state.connections)


@pytest.mark.slow
def test_response_that_is_read_steadily_arrives_whole(lab: Lab) -> None:
    with _opened(lab) as made:
        made.sendall(_large(lab).replace(b"Content-Type", b"Connection: close\r\nContent-Type"))
        size = 0
        while part := made.recv(2**20):
            size += len(part)
    assert size > 30_000_000


@pytest.mark.parametrize("first", [b"", b"GET / HT"], ids=["before", "within"])
def test_half_closed_connection_ends_at_once(lab: Lab, first: bytes) -> None:
    with _opened(lab) as made:
        made.sendall(first)
        made.shutdown(socket.SHUT_WR)
        assert made.recv(1) == b""
    until(lambda: not _connections(lab))


@pytest.mark.slow
def test_long_job_is_not_ended(lab: Lab) -> None:
    def slow(params: object, ticket: Any) -> str:
        for step in range(20):
            ticket.step(step / 20, "")
            time.sleep(0.1)
        return "done"

    with running(limits=Limits(), works=[Work("slow", slow)]) as other:
        assert asked(other, "slow").last == {"result": "done"}


def test_connections_that_drip_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far below the time limit: the oldest connections that owe a request end where more come."""
    monkeypatch.setattr(connection, "OWING", 8)
    with running(limits=Limits(), works=[ECHO]) as lab, ExitStack() as stack:
        dripping = [stack.enter_context(_opened(lab)) for _ in range(40)]
        for made in dripping:
            made.sendall(b"GET / HTTP/1.1\r\nX")
        assert asked(lab, "echo", {"a": 1}).last == {"result": {"a": 1}}
        until(lambda: len(_connections(lab)) <= 9)


@pytest.mark.slow
def test_four_hundred_connections_that_drip_delay_nobody() -> None:
    """All 400 drip, and connect again where they are ended; a page and a job are served meanwhile."""
    stop, times = threading.Event(), list[float]()
    with running(limits=Limits(), works=[ECHO]) as lab:

        def drip(count: int) -> None:
            dripping: list[socket.socket] = []
            while not stop.wait(0.25):
                while len(dripping) < count:
                    dripping.append(_opened(lab))
                    dripping[-1].sendall(b"GET / HTTP/1.1\r\n")
                for made in list(dripping):
                    try:
                        made.sendall(b"X: y\r\n")
                    except OSError:
                        made.close()
                        dripping.remove(made)
            for made in dripping:
                made.close()

        clients = [threading.Thread(target=drip, args=(100,)) for _ in range(4)]
        for client in clients:
            client.start()
        try:
            time.sleep(2.0)
            for _ in range(100):
                start = time.monotonic()
                assert sent(lab, "GET", f"/{lab.token}/lab.js").status == 200
                assert asked(lab, "echo", {"a": 1}).last == {"result": {"a": 1}}
                times.append(time.monotonic() - start)
        finally:
            stop.set()
            for client in clients:
                client.join()
        print(f"median {median(times) * 1000:.1f} ms, slowest {max(times) * 1000:.1f} ms for a page and a job")
        assert median(times) < 1.0
