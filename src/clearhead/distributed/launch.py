"""Ranks on this machine: processes of one gloo group on the loopback, for tests, laws and measurements."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

__all__ = ["LocalRanks", "RankError", "fork_server", "run_ranks"]

#: Seconds in which the end of a process is seen after other ranks lost their connection to it.
_GRACE: Final = 0.2
#: Modules that the server imports.
_PRELOADED: Final = ["clearhead.distributed", "clearhead.functional.exact", "torch._dynamo"]


@cache
def fork_server() -> ForkServerContext:
    """The server from which each rank is forked; it has imported torch and clearhead and started no thread."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(_PRELOADED)
    return server


class RankError(RuntimeError):
    """A rank raised, died or did not end in time; the text names the ranks.

    Attributes:
        reason: the text in one line, without a traceback.
        raised: whether a rank raised an exception; else it died or did not end in time.
    """

    def __init__(self, text: str, *, reason: str | None = None, raised: bool = False) -> None:
        super().__init__(text)
        self.reason = text if reason is None else reason
        self.raised = raised


@dataclass(frozen=True)
class _Outcome:
    """What a rank sends back: its result, or the traceback of its exception and the reason in one line."""

    result: Any = None
    error: str | None = None
    reason: str = ""


class LocalRanks:
    """Processes that are the ranks of one gloo group and run functions one after another; a context manager.

    Args:
        ranks: number of processes.
        threads: torch's threads in each process; the kernels compute with one, since ranks are forked.
        timeout: seconds that one function may take, and the limit of each collective.
    """

    def __init__(self, ranks: int, *, threads: int = 1, timeout: float = 60.0) -> None:
        self._timeout = timeout
        self._store = TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = fork_server().Pipe()
            options = (rank, ranks, self._store.port, threads, timeout)
            process = fork_server().Process(target=_rank, args=(theirs, options), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function of a module with these arguments on every rank, and return the results by rank.

        Raises:
            RankError: a rank raised, died or took longer than the time limit. All ranks have been ended by then.
        """
        # Plain pickle copies tensors: shared memory would end with the process that made it.
        message = pickle.dumps((function, arguments))
        try:
            for rank, pipe in enumerate(self._pipes):
                try:
                    pipe.send_bytes(message)
                except OSError:
                    raise self._death(rank) from None
            return self._collected()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self._processes, self._pipes = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collected(self) -> list[Any]:
        """The results of all ranks; raises as soon as one of them fails."""
        end = time.monotonic() + self._timeout
        outcomes: dict[int, _Outcome] = {}
        while len(outcomes) < len(self._pipes):
            waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in outcomes}
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                late = ", ".join(str(rank) for rank in waiting.values())
                raise RankError(f"rank {late} did not end within {self._timeout:g} s")
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    outcomes[rank] = pickle.loads(self._pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    raise self._death(rank) from None
                if (error := outcomes[rank].error) is not None:
                    reason = f"rank {rank} raised {outcomes[rank].reason}"
                    raise self._first_death() or RankError(f"rank {rank} raised:\n{error}", reason=reason, raised=True)
        return [outcomes[rank].result for rank in range(len(self._pipes))]

    def _first_death(self) -> RankError | None:
        """The death of a rank, of which the others' errors are the consequence."""
        sentinels: dict[Any, int] = {process.sentinel: rank for rank, process in enumerate(self._processes)}
        ended = wait(list(sentinels), _GRACE)
        return self._death(sentinels[ended[0]]) if ended else None

    def _death(self, rank: int) -> RankError:
        process = self._processes[rank]
        process.join(1.0)
        code = process.exitcode
        return RankError(f"rank {rank} died without a result{'' if code is None else f', with exit code {code}'}")


def run_ranks(
    function: Callable[..., Any], ranks: int, *arguments: Any, threads: int = 1, timeout: float = 60.0
) -> list[Any]:
    """Run a function in several processes that are the ranks of one gloo group, and return what each returned.

    Args:
        function: a function of a module, called with ``arguments``; in it ``torch.distributed`` is initialised.
        ranks: number of processes.
        arguments: sent to every rank by ``pickle``.
        threads: torch's threads in each process; the kernels compute with one, since ranks are forked.
        timeout: seconds until all ranks are ended, and the limit of each collective.

    Returns:
        The results, by rank.

    Raises:
        RankError: a rank raised, died or took longer than ``timeout``. All others have been ended by then.
    """
    with LocalRanks(ranks, threads=threads, timeout=timeout) as local:
        return local.run(function, *arguments)


def _rank(connection: Connection, options: tuple[int, int, int, int, float]) -> None:
    """Join the group, then call the functions that arrive until the connection is closed."""
    rank, ranks, port, threads, timeout = options
    # gloo looks up the host's name otherwise, which need not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(threads)
    limit = timedelta(seconds=timeout)
    joined = False
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            if not joined:
                store = TCPStore("127.0.0.1", port, ranks, is_master=False, timeout=limit)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
                joined = True
            function, arguments = pickle.loads(message)
            outcome = pickle.dumps(_Outcome(function(*arguments)))
        except BaseException as error:  # Any failure of the function is the caller's to see.
            outcome = pickle.dumps(_Outcome(error=traceback.format_exc(), reason=_reason(error)))
        connection.send_bytes(outcome)


def _reason(error: BaseException) -> str:
    """The exception in one line; the place where it was raised if it has no text."""
    text = " ".join(str(error).split())
    if not text:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"at {place.filename}:{place.lineno}"
    return f"{type(error).__name__}: {text}"
