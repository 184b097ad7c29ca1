"""Layouts that balance the work of any mask."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import clearhead as ch
from clearhead import MaskError, ShapeError, distributed
from clearhead.distributed import ShardLayout, balanced, plan_attention
from clearhead.distributed.launch import run_ranks
from clearhead.masks import Documents, Mask


def _documents(length: int, mean: int, seed: int) -> Documents:
    """Documents of exponentially distributed lengths."""
    lengths = torch.empty(length).exponential_(1 / mean, generator=torch.Generator().manual_seed(seed)).long() + 1
    lengths = lengths[: int((lengths.cumsum(0) < length).sum())]
    return ch.Documents(lengths=[*lengths.tolist(), length - int(lengths.sum())])


def _balance(mask: Mask | None, length: int, ranks: int) -> tuple[float, ShardLayout]:
    layout = balanced(mask, length, ranks=ranks)
    return plan_attention(mask, length, ranks=ranks, layout=layout).balance, layout


@pytest.mark.parametrize("window", [1023, 8191])
@pytest.mark.parametrize("mean", [512, 4096, 16384])
def test_busiest_of_64_ranks_has_at_most_1_05_of_the_mean(mean: int, window: int) -> None:
    length = 131_072
    mask = ch.Causal() & ch.Window(window) & _documents(length, mean, seed=window)
    balance, layout = _balance(mask, length, 64)
    assert balance <= 1.05
    assert {sum(map(len, chunks)) for chunks in layout.chunks} == {length // 64}


@pytest.mark.slow
@pytest.mark.parametrize("length", [65_536, 131_072, 524_288])
@pytest.mark.parametrize("seed", range(10))
def test_busiest_of_64_ranks_is_near_the_mean_for_many_documents(length: int, seed: int) -> None:
    for mean in (512, 4096, 16384):
        for window in (1023, 8191, length):
            mask = ch.Causal() & ch.Window(window) & _documents(length, mean, seed)
            assert _balance(mask, length, 64)[0] <= 1.05


def test_balanced_layout_of_a_causal_mask_is_zigzag() -> None:
    layout = balanced(ch.Causal(), 8192, ranks=4, chunks=2)
    zigzag = [distributed.layout.chunks_of(8192, 4, rank, "zigzag") for rank in range(3)]
    assert list(layout.chunks[:3]) == zigzag


def test_balanced_layout_of_a_window_is_contiguous() -> None:
    assert all(len(chunks) == 1 for chunks in balanced(ch.Causal() & ch.Window(15), 8192, ranks=4).chunks)


@pytest.mark.parametrize(("length", "ranks", "chunks"), [(0, 3, None), (5, 8, None), (1001, 7, 5), (640, 1, 4)])
def test_ranks_have_equal_tokens_within_their_chunks(length: int, ranks: int, chunks: int | None) -> None:
    layout = balanced(ch.Causal(), length, ranks=ranks, chunks=chunks)
    counts = [sum(map(len, part)) for part in layout.chunks]
    assert sum(counts) == length
    assert max(counts) - min(counts) <= (chunks or 1)


def _round_trip(layout: ShardLayout) -> bool:
    whole = torch.arange(2 * layout.length * 3).view(2, layout.length, 3)
    part = distributed.shard(whole, layout=layout)
    assert part.shape[1] == sum(map(len, layout.chunks[dist.get_rank()]))
    return torch.equal(distributed.unshard(part, layout=layout), whole)


def test_unshard_inverts_shard_for_a_layout_of_chunks() -> None:
    uneven = ShardLayout(((range(9, 17), range(0, 2)), (range(2, 9),)))
    without = ShardLayout(((), (range(0, 17),)))
    for layout in (uneven, without, balanced(ch.Causal(), 17, ranks=2, chunks=4)):
        assert run_ranks(_round_trip, 2, layout) == [True, True]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ShapeError, match="balanced: chunks must be a whole number of at least 1"):
        balanced(None, 10, ranks=2, chunks=0)
    with pytest.raises(ShapeError, match="balanced: length"):
        balanced(None, -1, ranks=2)
    with pytest.raises(MaskError, match="balanced: mask must be a mask or None"):
        balanced("causal", 10, ranks=2)  # type: ignore[arg-type]
