"""Whether the processes of a training live: each shows it to the next one, which ends the job if it stops.

Without this, the processes that remain would wait in a collective until its time-out, and none would say for whom.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from types import FrameType
from typing import Final, NoReturn

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

__all__ = ["Liveness", "torchrun_store"]

#: Seconds between two signs of life, and after how many without one a process counts as dead.
_EVERY: Final = 0.25
_PATIENCE: Final = 30.0
#: Seconds in which a death is found that another process has noticed by a broken connection or torchrun's SIGTERM.
_NOTICED: Final = 5.0
_DIED: Final = 1
_TERMINATED: Final = 128 + signal.SIGTERM


def torchrun_store(name: str) -> PrefixStore:
    """A client of the store that torchrun serves, for the keys of this start of the processes.

    torchrun starts the processes again with the same store, where keys of the last start are left.
    """
    server = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(minutes=5))
    return PrefixStore(f"clearhead/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}", server)


class Liveness:
    """Signs of life of the processes that torchrun started, in a thread of each.

    Rank ``r`` watches rank ``r + 1``. It sees at once that a process of its own machine has ended, and after half a
    minute that one of another machine, or one that hangs, gives no sign.

    Args:
        function: name of the caller in the line that names a dead rank.
    """

    def __init__(self, function: str) -> None:
        self._function = function
        self._rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._store = torchrun_store("liveness")
        self._host = socket.gethostname()
        self._store.set(f"who/{self._rank}", f"{os.getpid()} {self._host}")
        self._watched = (self._rank + 1) % self._size
        pid, self._watched_host = self._store.get(f"who/{self._watched}").decode().split(" ", 1)
        self._watched_pid = int(pid)
        self._ended, self._noticed, self._signalled = threading.Event(), threading.Event(), threading.Event()
        self._before = signal.signal(signal.SIGTERM, self._terminated)
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Say that this process ends as it should, or with an error that it prints."""
        self._store.set(f"left/{self._rank}", "1")
        self._ended.set()
        self._thread.join()
        signal.signal(signal.SIGTERM, self._before)

    def wait_for_reason(self) -> None:
        """Wait for the line that names a dead rank, after a collective failed; returns if none is dead."""
        self._noticed.set()
        self._thread.join(2 * _NOTICED)

    def say_once(self, text: str) -> bool:
        """Whether this process is to print an error: the first one, and others with an error of their own."""
        self._store.set(f"error/{self._rank}", text)
        if self._rank == 0:
            return True
        end = time.monotonic() + _NOTICED
        while time.monotonic() < end:
            if self._store.check(["error/0"]):
                if self._store.get("error/0").decode() != text:
                    return True
                # torchrun ends all processes once one has ended; the first one is to have printed by then.
                time.sleep(1.0)
                return False
            time.sleep(_EVERY / 4)
        return True

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        self._signalled.set()
        self._noticed.set()

    def _run(self) -> None:
        beats, last, changed = 0, b"", time.monotonic()
        noticed: float | None = None
        while not self._ended.wait(_EVERY / 5 if noticed is not None else _EVERY):
            beats += 1
            try:
                self._store.set(f"beat/{self._rank}", str(beats))
                if self._store.check(["dead"]):
                    self._leave(_DIED)
                if self._is_gone(time.monotonic() - changed):
                    self._report()
                if self._store.check([f"beat/{self._watched}"]):
                    beat = self._store.get(f"beat/{self._watched}")
                    changed = changed if beat == last else time.monotonic()
                    last = beat
            except RuntimeError:
                # The store is gone, so torchrun is, or the first process, which may have had it.
                self._leave(_DIED)
            if self._noticed.is_set():
                noticed = time.monotonic() if noticed is None else noticed
                if time.monotonic() - noticed > _NOTICED:
                    if self._signalled.is_set():
                        self._leave(_TERMINATED)
                    # A collective failed for another reason, which the main thread raises.
                    return

    def _is_gone(self, silent: float) -> bool:
        if self._store.check([f"left/{self._watched}"]):
            return False
        if self._watched_host == self._host and _has_ended(self._watched_pid):
            # It may have said so in the meantime.
            return not self._store.check([f"left/{self._watched}"])
        return silent > _PATIENCE

    def _report(self) -> NoReturn:
        process = f"process {self._watched_pid} on {self._watched_host}"
        line = (
            f"{self._function}: rank {self._watched} died ({process}), so all ranks end. "
            "Add --resume to go on from the last checkpoint."
        )
        os.write(2, f"{line}\n".encode())
        self._store.set("dead", str(self._watched))
        self._leave(_DIED)

    def _leave(self, status: int) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _has_ended(pid: int) -> bool:
    """Whether a process of this machine has ended, even as a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False
