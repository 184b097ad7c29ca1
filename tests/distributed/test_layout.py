"""Sequences cut over ranks and joined."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from clearhead import ShapeError, distributed
from clearhead.distributed.launch import RankError, run_ranks
from clearhead.distributed.layout import LAYOUTS, chunks_of


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [0, 1, 7, 64, 65])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_chunks_of_all_ranks_are_the_sequence(layout: str, length: int, ranks: int) -> None:
    chunks = [chunk for rank in range(ranks) for chunk in chunks_of(length, ranks, rank, layout)]
    assert sorted(position for chunk in chunks for position in chunk) == list(range(length))


def _round_trip(layout: str, length: int) -> bool:
    whole = torch.arange(2 * length * 3).view(2, length, 3)
    part = distributed.shard(whole, layout=layout)
    assert part.shape[1] == sum(map(len, chunks_of(length, dist.get_world_size(), dist.get_rank(), layout)))
    return torch.equal(distributed.unshard(part, layout=layout), whole)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [3, 17])
def test_unshard_inverts_shard(layout: str, length: int) -> None:
    assert run_ranks(_round_trip, 2, layout, length) == [True, True]


def _unequal() -> str:
    with pytest.raises(ShapeError) as caught:
        distributed.unshard(torch.zeros(3 + 4 * dist.get_rank(), 1))
    return str(caught.value)


def test_parts_of_wrong_lengths_are_refused_on_every_rank() -> None:
    said = run_ranks(_unequal, 2)
    assert said[0] == said[1]
    assert "lengths [3, 7]" in said[0]


def _fail() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one is broken")
    dist.barrier()


def test_failing_rank_is_named() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 raised.*rank one is broken"):
        run_ranks(_fail, 2)
