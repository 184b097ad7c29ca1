"""Ranks on this machine: processes of one gloo group on the loopback, for tests, laws and measurements."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

__all__ = ["RankError", "run_ranks"]

#: Each rank is forked from a server that has imported torch and clearhead and started no thread.
_SERVER: Final = multiprocessing.get_context("forkserver")
#: Modules that the server imports.
_PRELOADED: Final = ["clearhead.distributed", "clearhead.functional.exact", "torch._dynamo"]


class RankError(RuntimeError):
    """A rank of ``run_ranks`` raised, died or did not end in time; the text names the ranks."""


@dataclass(frozen=True)
class _Outcome:
    """What a rank sends back: its result, or the text of its exception."""

    result: Any = None
    error: str | None = None


def run_ranks(
    function: Callable[..., Any], ranks: int, *arguments: Any, threads: int = 1, timeout: float = 60.0
) -> list[Any]:
    """Run a function in several processes that are the ranks of one gloo group, and return what each returned.

    Args:
        function: a function of a module, called with ``arguments``; in it ``torch.distributed`` is initialised.
        ranks: number of processes.
        arguments: sent to every rank by ``multiprocessing``.
        threads: torch's threads in each process.
        timeout: seconds until all ranks are ended, and the limit of each collective.

    Returns:
        The results, by rank.

    Raises:
        RankError: a rank raised, died or took longer than ``timeout``. All others have been ended by then.
    """
    _SERVER.set_forkserver_preload(_PRELOADED)
    store = TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
    pipes: list[Connection] = []
    processes = []
    for rank in range(ranks):
        receiver, sender = _SERVER.Pipe(duplex=False)
        options = (rank, ranks, store.port, threads, timeout)
        process = _SERVER.Process(target=_rank, args=(sender, options, function, arguments), daemon=True)
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        return _collected(pipes, timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collected(pipes: list[Connection], timeout: float) -> list[Any]:
    """The results of all ranks; raises as soon as one of them fails."""
    end = time.monotonic() + timeout
    outcomes: dict[int, _Outcome] = {}
    while len(outcomes) < len(pipes):
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in outcomes}
        ready = wait(list(waiting), max(0.0, end - time.monotonic()))
        if not ready:
            late = ", ".join(str(rank) for rank in waiting.values())
            raise RankError(f"rank {late} did not end within {timeout:g} s")
        for pipe in ready:
            rank = waiting[pipe]
            try:
                outcomes[rank] = pipes[rank].recv()
            except EOFError:
                raise RankError(f"rank {rank} died without a result") from None
            if (error := outcomes[rank].error) is not None:
                raise RankError(f"rank {rank} raised:\n{error}")
    return [outcomes[rank].result for rank in range(len(pipes))]


def _rank(
    sender: Connection,
    options: tuple[int, int, int, int, float],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    rank, ranks, port, threads, timeout = options
    # gloo looks up the host's name otherwise, which need not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(threads)
    limit = timedelta(seconds=timeout)
    try:
        store = TCPStore("127.0.0.1", port, ranks, is_master=False, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
        outcome = _Outcome(function(*arguments))
        # A rank that leaves early closes connections that others still read.
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # Any failure of the function is the caller's to see.
        outcome = _Outcome(error=traceback.format_exc())
    sender.send(outcome)
    sender.close()
