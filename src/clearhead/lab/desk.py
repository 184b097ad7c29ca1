"""Runs jobs in a few threads with a bounded queue; each job can be cancelled."""

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

#: The least time in seconds between two progress lines.
_EVERY: Final = 0.05
#: The number of printed traceback frames of a failed job.
_FRAMES: Final = 20
#: The largest length of an error text that is sent.
_LONGEST: Final = 500


class Busy(Exception):
    """All threads are busy and the queue is full."""


@dataclass(eq=False)
class Job:
    """One requested job; it is also the ``Ticket`` that its function receives.

    Attributes:
        work: the kind of job.
        params: the parameters of the request.
        tell: called with each line of the answer, a JSON object, in the job's thread.
        seconds: the time limit in seconds.
    """

    work: Work
    params: Mapping[str, Any]
    tell: Callable[[dict[str, Any]], None]
    seconds: float
    started: float | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _last_progress: float = 0.0

    def cancel(self) -> None:
        """Cancel the job, which ends at its next step."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """Whether the job was cancelled."""
        return self._cancelled.is_set()

    @property
    def overdue(self) -> bool:
        """Whether the job has exceeded its time limit."""
        return self.started is not None and time.monotonic() - self.started > self.seconds

    def step(self, done: float, text: str = "") -> None:
        """Report progress; raises ``Cancelled`` if the job was cancelled or is overdue."""
        if self.cancelled or self.overdue:
            raise Cancelled
        now = time.monotonic()
        if now - self._last_progress >= _EVERY:
            self._last_progress = now
            self.tell({"progress": round(min(max(float(done), 0.0), 1.0), 4), "text": text})

    def too_long(self) -> dict[str, Any]:
        """The line for a job that exceeded its time limit."""
        return {"error": f"{self.work.name}: exceeded its limit of {self.seconds:g} seconds. Request less."}

    def given_up(self) -> dict[str, Any]:
        """The line for a cancelled job."""
        return {"error": f"{self.work.name}: was cancelled."}

    def run(self) -> None:
        """Run the job and send its last line; errors are sent, never raised."""
        self.started = time.monotonic()
        if self.cancelled:
            return
        try:
            line = {"result": self.work.run(self.params, self)}
            # A result that is not JSON raises here, where the error can still be sent.
            json.dumps(line, allow_nan=False)
        except Cancelled:
            line = self.too_long() if self.overdue else self.given_up()
        except ClearheadError as failure:
            line = {"error": " ".join(str(failure).split())[:_LONGEST]}
        except MemoryError:
            line = {"error": f"{self.work.name}: there is not enough memory. Request less."}
        except Exception as failure:
            traceback.print_exc(limit=-_FRAMES, file=sys.stderr)
            line = {
                "error": f"{self.work.name}: failed inside the lab ({type(failure).__name__}). "
                "The lab's terminal shows the traceback."
            }
        self.tell(line)


class Desk:
    """Runs up to ``limits.works`` jobs at once, in threads that start when they are first needed."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._jobs: set[Job] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False

    @property
    def num_jobs(self) -> int:
        """The number of running and waiting jobs."""
        with self._lock:
            return len(self._jobs)

    def take(self, work: Work, params: Mapping[str, Any], tell: Callable[[dict[str, Any]], None]) -> Job:
        """Put a job in the queue.

        Raises:
            Busy: the queue is full, or the desk is closed.
        """
        job = Job(work, params, tell, min(work.seconds, self._limits.seconds))
        with self._lock:
            if self._closed or len(self._jobs) >= self._limits.works + self._limits.waiting:
                raise Busy
            self._jobs.add(job)
            if len(self._threads) < min(self._limits.works, len(self._jobs)):
                name = f"clearhead lab {len(self._threads)}"
                # Daemon threads, so that a job that does not reach its next step does not keep the process alive.
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._queue.put(job)
        return job

    def drop(self, job: Job) -> None:
        """Cancel a job: it ends at its next step, or leaves the queue if it has not started."""
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
                # A waiting thread must not keep its last job alive.
                del job

    def close(self) -> None:
        """Cancel all jobs and end all threads; no further job is accepted."""
        with self._lock:
            self._closed = True
            jobs, threads = list(self._jobs), len(self._threads)
        for job in jobs:
            job.cancel()
        for _ in range(threads):
            self._queue.put(None)

    def join(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the threads to end; returns whether they did."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
