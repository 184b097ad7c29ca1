"""Signs of life of the ranks of a process group: a rank that dies or hangs ends the job with one line that names it.

Without them the other ranks would wait in a collective until its time limit, and none would say for which rank.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, Final, NoReturn, Self

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore, rendezvous  # type: ignore[attr-defined]

from clearhead.errors import ClearheadError

__all__ = ["Liveness", "launched"]

#: Seconds between two signs of life.
_EVERY: Final = 0.25
#: Seconds until all ranks are connected: torch's store looks up the name of each, which takes 5 s without an answer.
_CONNECTING: Final = 300.0
#: Seconds in which ranks answer each other when the job ends.
_GRACE: Final = 5.0
_DIED: Final = 1
_WRONG_USE: Final = 2
_TERMINATED: Final = 128 + signal.SIGTERM


@dataclass(frozen=True)
class _Process:
    """The process of a rank, and the port of the store if it has it."""

    pid: int
    host: str
    namespace: str
    port: int | None

    @classmethod
    def this(cls, port: int | None) -> Self:
        namespace = ""
        with suppress(OSError):
            namespace = os.readlink("/proc/self/ns/pid")
        return cls(os.getpid(), socket.gethostname(), namespace, port)

    def has_ended(self, seen_from: _Process) -> bool:
        """Whether it has ended, even as a zombie; False as well where that cannot be seen."""
        if (self.host, self.namespace) != (seen_from.host, seen_from.namespace):
            return False
        try:
            os.kill(self.pid, 0)
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as file:
                return file.read().rpartition(")")[2].split()[0] == "Z"
        except ProcessLookupError:
            return True
        except OSError:
            return False


class Liveness:
    """Signs of life of all ranks of the default process group; a context manager that all ranks enter together.

    Rank ``r`` watches rank ``r + 1``. It sees at once that a process of its own machine has ended, and after
    ``patience`` seconds that any other process is dead or hangs. It then prints a line, and all ranks exit with status
    1, also if their main threads wait in a collective.

    Args:
        function: name of the caller in that line.
        then: what the user can do, the end of that line.
        patience: seconds without a sign of life until a rank counts as dead.

    Attributes:
        rank: this rank.
        size: number of ranks.
        store: keys and values of all ranks, for the caller too. It is in the process of rank 0.
    """

    def __init__(self, function: str, then: str, *, patience: float = 30.0) -> None:
        self._function, self._then, self._patience = function, then, patience
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._watched = (self.rank + 1) % self.size
        self.store, self._processes = self._connected()
        self._beats, self._last, self._changed, self._limit = 0, b"", time.monotonic(), _CONNECTING
        self._entered, self._ended = threading.Event(), threading.Event()
        self._noticed, self._signalled = threading.Event(), threading.Event()
        self._asking = ThreadPoolExecutor(1)
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)

    def _connected(self) -> tuple[TCPStore, list[_Process]]:
        """The store, and the processes of all ranks."""
        limit, server = timedelta(seconds=_CONNECTING), None
        if self.rank == 0:
            server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, _Process.this(None if server is None else server.port))
        if server is None:
            address = "127.0.0.1" if len({each.host for each in every}) == 1 else every[0].host
            server = TCPStore(os.environ.get("MASTER_ADDR", address), every[0].port, is_master=False, timeout=limit)
        return server, every

    def __enter__(self) -> Self:
        # torchrun sends SIGTERM as soon as a rank has died: the line that names the rank comes first.
        in_main = threading.current_thread() is threading.main_thread()
        self._handles = in_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if self._handles:
            signal.signal(signal.SIGTERM, self._terminated)
        self._thread.start()
        while not self.store.check([f"beat/{rank}" for rank in range(self.size)]):
            time.sleep(_EVERY / 10)
        self._changed, self._limit = time.monotonic(), self._patience
        self._entered.set()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None and issubclass(kind, RuntimeError):
            # A collective, perhaps, whose other side has died; the thread then ends this process.
            self._noticed.set()
            self._thread.join(2 * _GRACE)
        self._ended.set()
        self._thread.join()
        self._asking.shutdown()
        self._part()
        if self._handles:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def prints(self, text: str) -> bool:
        """Whether this rank is to print an error: rank 0 is, and others whose error is not that of rank 0."""
        first = self.rank == 0
        with suppress(RuntimeError):
            self.store.set(f"error/{self.rank}", text)
            raising = range(self.size if first else 1)
            self.store.wait([f"error/{rank}" for rank in raising], timedelta(seconds=_GRACE))
            return first or self.store.get("error/0").decode() != text
        return True

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        self._signalled.set()
        self._noticed.set()

    def _run(self) -> None:
        noticed: float | None = None
        while True:
            try:
                if self._store_answers() or self._ended.wait(_EVERY if noticed is None else _EVERY / 5):
                    return
            except (RuntimeError, TimeoutError):
                # Rank 0 has died, and the store with it.
                if self._watched == 0:
                    self._print_death()
                os._exit(_DIED)
            if self._noticed.is_set():
                noticed = time.monotonic() if noticed is None else noticed
                if time.monotonic() - noticed > _GRACE:
                    if self._signalled.is_set():
                        self._exit(_TERMINATED)
                    # A collective failed for another reason, which the main thread raises.
                    return

    def _store_answers(self) -> bool:
        """``_look`` in a thread of its own: a store in a process that hangs neither answers nor raises."""
        asked, start = self._asking.submit(self._look), time.monotonic()
        while not asked.done() and time.monotonic() - start < self._limit and not self._has_ended(0):
            wait([asked], _EVERY)
        return asked.result(_EVERY)

    def _look(self) -> bool:
        """Give a sign of life, and end this process if a rank is dead; whether rank 0 ends the store.

        ``add`` of the store would be shorter, but keeps the interpreter's lock while it waits.
        """
        self._beats += 1
        self.store.set(f"beat/{self.rank}", str(self._beats))
        if self.store.check(["dead"]):
            self._exit(_DIED)
        if self.store.check([beat := f"beat/{self._watched}"]) and (last := self.store.get(beat)) != self._last:
            self._last, self._changed = last, time.monotonic()
        gone = time.monotonic() - self._changed > self._limit or self._has_ended(self._watched)
        # It may have left in the meantime.
        if gone and not self.store.check([f"left/{self._watched}"]):
            self._print_death()
            self.store.set("dead", str(self._watched))
            self._exit(_DIED)
        # A rank that enters still reads the store, for which rank 0 waits.
        ends = self.rank != 0 and self._entered.is_set() and self.store.check(["left/0"])
        if ends:
            self._part()
        return ends

    def _has_ended(self, rank: int) -> bool:
        return self._processes[rank].has_ended(self._processes[self.rank])

    def _print_death(self) -> None:
        process = self._processes[self._watched]
        who = f"rank {self._watched} died (process {process.pid} on {process.host})"
        line = f"{self._function}: {who}, so all ranks end. {self._then}\n"
        os.write(2, line.encode())

    def _part(self) -> None:
        """Say that this rank needs the store no more; rank 0, which has the store, waits for the others."""
        with suppress(RuntimeError):
            self.store.set(f"left/{self.rank}", "")
            if self.rank == 0:
                dead = int(self.store.get("dead")) if self.store.check(["dead"]) else 0
                others = [f"left/{rank}" for rank in range(self.size) if rank not in (0, dead)]
                self.store.wait(others, timedelta(seconds=_GRACE))

    def _exit(self, status: int) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._part()
        os._exit(status)


@contextmanager
def launched(
    function: str, then: str, *, backend: str = "gloo", timeout: timedelta | None = None
) -> Iterator[Liveness]:
    """The process group of the processes that torchrun started, with their signs of life, for a ``with`` block.

    A ``ClearheadError`` that all ranks raise is raised by rank 0 alone; the others exit with status 2.

    Args:
        function: name of the caller in the line that names a dead rank.
        then: what the user can do, the end of that line.
        backend: of the group.
        timeout: of its collectives; by default torch's.
    """
    # gloo looks up the host's name otherwise, which need not resolve.
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store, rank, size = next(iter(rendezvous("env://")))
    # torchrun starts the processes again with the same store, where keys of the last start are left.
    store = PrefixStore(f"clearhead/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    prints = True
    try:
        with Liveness(function, then) as liveness:
            try:
                yield liveness
                dist.barrier()
            except ClearheadError as error:
                prints = liveness.prints(str(error))
                raise
    except ClearheadError:
        if prints:
            raise
        # torchrun ends all processes once one has ended: rank 0 is to print first.
        time.sleep(1.0)
        raise SystemExit(_WRONG_USE) from None
    finally:
        dist.destroy_process_group()
