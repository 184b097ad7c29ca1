"""Functions on local ranks: one after another, and what is said of a rank that fails."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from clearhead.distributed.launch import LocalRanks, RankError, run_ranks


def summed(tensor: Tensor) -> tuple[int, Tensor]:
    total = tensor * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return os.getpid(), total


def dies(code: int) -> None:
    if dist.get_rank() == 1:
        os._exit(code)
    dist.barrier()


def raises_without_text() -> None:
    assert dist.get_rank() != 0


def sleeps() -> None:
    time.sleep(60.0 * dist.get_rank())


def test_ranks_run_several_functions_in_the_same_processes() -> None:
    with LocalRanks(2) as local:
        results = [local.run(summed, torch.full((3,), value)) for value in (1.0, torch.nan)]
    assert [one[0] for one in results[0]] == [one[0] for one in results[1]]
    assert len({one[0] for one in results[0]}) == 2
    assert torch.equal(results[0][1][1], torch.full((3,), 3.0))
    assert results[1][0][1].isnan().all()


def test_dead_rank_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankError, match="rank 1 died without a result, with exit code 7") as caught:
        run_ranks(dies, 2, 7)
    assert not caught.value.raised


def test_reason_of_an_exception_without_text_is_its_place() -> None:
    with pytest.raises(RankError, match="Traceback") as caught:
        run_ranks(raises_without_text, 1)
    assert caught.value.raised
    assert caught.value.reason.startswith("rank 0 raised AssertionError: at ")
    assert "test_launch.py:" in caught.value.reason


@pytest.mark.slow
def test_late_rank_is_ended_in_time() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 did not end within 2 s"):
        run_ranks(sleeps, 2, timeout=2.0)
    assert time.monotonic() - start < 20.0
