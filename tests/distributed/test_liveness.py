"""Signs of life: a rank that dies or hangs ends the job with one line that names it."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clearhead.distributed.launch import RankError, run_ranks
from clearhead.distributed.liveness import Liveness

PATIENCE = 2.0


def signs_of_life(patience: float = PATIENCE) -> Liveness:
    return Liveness("test", "Start again.", patience=patience)


def hangs() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def dies() -> None:
    # A child keeps this rank's pipe open, whose end would make ``run_ranks`` end the others.
    if os.fork() == 0:
        time.sleep(3.0)
        os._exit(0)
    os._exit(9)


def lost(said: Path, rank: int, how: str, collective: bool) -> None:
    """One rank hangs or dies, while the others are in a collective or wait for something else."""
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    with signs_of_life(PATIENCE if how == "hangs" else 60.0) as liveness:
        dist.barrier()
        if liveness.rank == rank:
            {"hangs": hangs, "dies": dies}[how]()
        if collective:
            dist.all_reduce(torch.zeros(1))
        time.sleep(50.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "rank", "how", "collective"),
    [
        (2, 0, "hangs", True),
        pytest.param(2, 1, "hangs", False, marks=pytest.mark.slow),
        (3, 0, "dies", False),
        (3, 1, "dies", True),
        pytest.param(3, 2, "dies", False, marks=pytest.mark.slow),
    ],
)
def test_lost_rank_is_named_once_and_ends_the_others(
    ranks: int, rank: int, how: str, collective: bool, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    with pytest.raises(RankError, match=r"rank \d died without a result, with exit code 1") as caught:
        run_ranks(lost, ranks, said, rank, how, collective, timeout=40.0)
    assert f"rank {rank} died" not in str(caught.value)
    (line,) = said.read_text().splitlines()
    assert line.startswith(f"test: rank {rank} died (process ")
    assert line.endswith("), so all ranks end. Start again.")


def left() -> list[bool]:
    """Ranks that leave one after another, twice; then one by an error of its own."""
    prints = []
    for _ in range(2):
        with signs_of_life() as liveness:
            time.sleep(0.3 * liveness.rank)
        dist.barrier()
    for text in ("the same", f"of rank {liveness.rank}"):
        with signs_of_life() as liveness:
            prints.append(liveness.prints(text))
        dist.barrier()
    with suppress(ValueError), signs_of_life() as liveness:
        time.sleep((PATIENCE + 1.0) * (liveness.rank != 1))
        raise ValueError
    return prints


@pytest.mark.slow
def test_ranks_that_leave_are_not_dead_and_print_an_error_once() -> None:
    assert run_ranks(left, 3) == [[True, True], [False, True], [False, True]]


class SlowStore:
    """A store that the main thread waits for."""

    def __init__(self, store: dist.TCPStore) -> None:
        self._store = store

    def check(self, keys: list[str]) -> bool:
        if threading.current_thread() is threading.main_thread():
            time.sleep(1.0)
        return self._store.check(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def entered_late() -> bool:
    """Rank 0, which has the store, leaves before the others have seen that all are there."""
    liveness = signs_of_life()
    if liveness.rank > 0:
        liveness.store = SlowStore(liveness.store)
    with liveness:
        return True


@pytest.mark.slow
def test_rank_0_waits_for_ranks_that_still_enter() -> None:
    assert run_ranks(entered_late, 3) == [True] * 3


def handled() -> bool:
    """A handler of the caller's own stays, and torch's default comes back."""
    before = signal.getsignal(signal.SIGTERM)
    with signs_of_life():
        inside = signal.getsignal(signal.SIGTERM)
    unhandled = before == signal.SIG_DFL and inside != before and signal.getsignal(signal.SIGTERM) == before
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with signs_of_life():
        return unhandled and signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_signal_handlers_of_the_caller_stay() -> None:
    assert run_ranks(handled, 2) == [True, True]
