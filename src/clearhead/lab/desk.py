"""Where works are done: a few threads, a short queue before them, and tickets by which a work is told to end."""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Final

from clearhead.errors import ClearheadError
from clearhead.lab.limits import Limits
from clearhead.lab.work import Cancelled, Work

__all__ = ["Busy", "Desk", "Job"]

#: Progress is told at most this often.
_EVERY: Final = 0.05
#: How much of where it failed is printed.
_FRAMES: Final = 20
#: What is handed on of a failure's text.
_LONGEST: Final = 500


class Busy(Exception):
    """All works are taken, and all places to wait."""


@dataclass(eq=False)
class Job:
    """One work that was asked for; it is also the ticket that the work holds.

    Attributes:
        work: what to do.
        params: with what.
        tell: given each line of the answer, JSON without its end, in the thread that works.
        seconds: how long it may run.
    """

    work: Work
    params: Mapping[str, Any]
    tell: Callable[[dict[str, Any]], None]
    seconds: float
    started: float | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _told: float = 0.0

    def cancel(self) -> None:
        """Nobody waits for it any longer: its next step ends it."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """Whether it was told to end."""
        return self._cancelled.is_set()

    @property
    def overdue(self) -> bool:
        """Whether its time is over."""
        return self.started is not None and time.monotonic() - self.started > self.seconds

    def step(self, done: float, text: str = "") -> None:
        """As ``Ticket.step``."""
        if self.cancelled or self.overdue:
            raise Cancelled
        now = time.monotonic()
        if now - self._told >= _EVERY:
            self._told = now
            self.tell({"progress": round(min(max(float(done), 0.0), 1.0), 4), "text": text})

    def too_long(self) -> dict[str, Any]:
        """The line for a work whose time is over."""
        return {"error": f"{self.work.name}: must end within {self.seconds:g} seconds; it did not. Ask for less."}

    def given_up(self) -> dict[str, Any]:
        """The line for a work that was told to end."""
        return {"error": f"{self.work.name}: was cancelled."}

    def run(self) -> None:
        """Do it, and tell its end; what goes wrong is told, never raised."""
        self.started = time.monotonic()
        if self.cancelled:
            return
        try:
            line = {"result": self.work.run(self.params, self)}
            # What is no JSON is found here, where it can still be told.
            json.dumps(line, allow_nan=False)
        except Cancelled:
            line = self.too_long() if self.overdue else self.given_up()
        except ClearheadError as failure:
            line = {"error": " ".join(str(failure).split())[:_LONGEST]}
        except MemoryError:
            line = {"error": f"{self.work.name}: there is not enough memory. Ask for less."}
        except Exception as failure:
            traceback.print_exc(limit=-_FRAMES, file=sys.stderr)
            line = {
                "error": f"{self.work.name}: failed inside the lab ({type(failure).__name__}). "
                "The terminal that it runs in says where."
            }
        self.tell(line)


class Desk:
    """Does works, ``limits.works`` at once; as many threads are made, when they are first needed."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._jobs: set[Job] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False

    @property
    def taken(self) -> int:
        """How many works run or wait."""
        with self._lock:
            return len(self._jobs)

    def take(self, work: Work, params: Mapping[str, Any], tell: Callable[[dict[str, Any]], None]) -> Job:
        """Put a work in the queue.

        Raises:
            Busy: the queue is full, or the desk closed.
        """
        job = Job(work, params, tell, min(work.seconds, self._limits.seconds))
        with self._lock:
            if self._closed or len(self._jobs) >= self._limits.works + self._limits.waiting:
                raise Busy
            self._jobs.add(job)
            if len(self._threads) < min(self._limits.works, len(self._jobs)):
                name = f"clearhead lab {len(self._threads)}"
                # Daemons: a work that does not come to its next step keeps no process alive.
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._queue.put(job)
        return job

    def drop(self, job: Job) -> None:
        """Nobody waits for it any longer: it ends at its next step, or leaves the queue if it has not begun."""
        job.cancel()
        if job.started is None:
            with self._lock:
                self._jobs.discard(job)

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job.run()
            finally:
                with self._lock:
                    self._jobs.discard(job)
                job.ended.set()
                # A waiting thread holds nothing of what it has done.
                del job

    def close(self) -> None:
        """End every work at its next step and every thread after it; no further work is taken."""
        with self._lock:
            self._closed = True
            jobs, threads = list(self._jobs), len(self._threads)
        for job in jobs:
            job.cancel()
        for _ in range(threads):
            self._queue.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the threads to end; whether they did."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
