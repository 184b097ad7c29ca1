"""A connection of the lab's server with time limits: no client keeps one for longer than its request takes."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["HEAD_SECONDS", "OWING", "READ_SECONDS", "TimedConnection"]

#: Seconds for the head of a request, and for the rest of a body that its response did not wait for.
HEAD_SECONDS: Final = 10.0
#: Seconds for reading a response, or enough of it that its next part can be written.
READ_SECONDS: Final = 30.0
#: Connections that may owe a request or a reading at once. A further one ends the oldest of them.
OWING: Final = 128

_ANSWERING: Final = (h11.SEND_RESPONSE, h11.SEND_BODY)


class TimedConnection(H11Protocol):
    """uvicorn's HTTP/1.1 connection, which ends if its client owes something for too long.

    A client owes the head of its first request from the start. After a response it owes what is left of the request's
    body, and the head of the next request. It owes the reading of a response that does not fit into the buffers.
    Single bytes extend no time. While a request is answered, the application's own limits hold, and nothing is owed.

    uvicorn ends idle connections too (``timeout_keep_alive``), but a single byte stops its clock.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._since: float | None = None
        self._clock: asyncio.TimerHandle | None = None
        self.paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the time of the first head."""
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        self._owes(HEAD_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Stop the time once a whole head has arrived."""
        super().data_received(data)
        if self._answering() and not self.paused:
            self._owes_nothing()

    def on_response_complete(self) -> None:
        """Start the time of the next head, unless the next request has already arrived."""
        super().on_response_complete()
        if not self._answering():
            self._owes(READ_SECONDS if self.transport.get_write_buffer_size() else HEAD_SECONDS)

    def pause_writing(self) -> None:
        """Start the time of reading; the transport's buffer is full."""
        super().pause_writing()
        self.paused = True
        self._owes(READ_SECONDS)

    def resume_writing(self) -> None:
        """Stop the time of reading; the transport's buffer is nearly empty."""
        super().resume_writing()
        self.paused = False
        if self._answering():
            self._owes_nothing()
        else:
            self._owes(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time."""
        self._owes_nothing()
        super().connection_lost(exc)

    def _answering(self) -> bool:
        return self.conn.our_state in _ANSWERING

    def _owes(self, seconds: float) -> None:
        self._owes_nothing()
        self._since, self._clock = self.loop.time(), self.loop.call_later(seconds, self._end)
        owing = [each for each in self.connections if isinstance(each, TimedConnection) and each._since is not None]
        if len(owing) > OWING:
            min(owing, key=lambda each: each._since or 0.0)._end()

    def _owes_nothing(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._since = self._clock = None

    def _end(self) -> None:
        self._owes_nothing()
        # Unlike close(), it does not wait for a client that does not read.
        self.transport.abort()
