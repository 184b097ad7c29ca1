"""The plan of an exchange against the dense mask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead import MaskError, ShapeError
from clearhead.distributed import ShardLayout, plan_attention
from clearhead.distributed.layout import LAYOUTS, LayoutName, layout_of
from clearhead.distributed.plan import computed
from clearhead.masks import Mask

LENGTH = 61


def _random(*shape: int, chance: float = 0.05) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape))) < chance


def _cut() -> ShardLayout:
    """Unequal chunks, in no order, a rank without a token and a rank with an empty chunk."""
    return ShardLayout(((range(40, 61), range(3, 5)), (), (range(0, 3), range(7, 7)), (range(20, 40), range(5, 20))))


EXACT: dict[str, Callable[[], Mask | None]] = {
    "none": lambda: None,
    "causal": ch.Causal,
    "window": lambda: ch.Window(5, 2),
    "causal window": lambda: ch.Causal() & ch.Window(4),
    "prefix": lambda: ch.Causal() | ch.Prefix(9),
    "global": lambda: (ch.Global(2) | ch.Window(3)) & ch.Causal(),
    "not window": lambda: ~ch.Window(6, 3),
    "nothing": lambda: ch.Prefix(0),
    "padding": lambda: ch.Padding([61, 0, 17]),
    "not padding": lambda: ~ch.Padding([30, 50]),
    "documents": lambda: ch.Documents(lengths=[10, 1, 0, 30, 20]) & ch.Causal(),
    "documents of a batch": lambda: ch.Documents(ids=torch.tensor([[0] * 20 + [-1] * 41, [0] * 50 + [1] * 11])),
    "dense": lambda: ch.Dense(_random(LENGTH, LENGTH)),
    "dense of heads": lambda: ch.Dense(_random(2, 3, LENGTH, LENGTH, chance=0.02)) & ch.Causal(),
    "dense row": lambda: ch.Dense(_random(1, LENGTH)) & ch.Dense(_random(LENGTH, 1, chance=0.5)),
    "blocks": lambda: ch.Blocks(_random(9, 9, chance=0.3), 7) & ch.Window(20, 20),
    "blocks of heads": lambda: ch.Blocks(_random(2, 3, 8, 8, chance=0.2), 8) & ch.Padding([20, 61]),
    "function": lambda: ch.MaskFunction(lambda batch, head, q_pos, k_pos: (q_pos - k_pos).abs() < 4),
}
BOUNDED: dict[str, Callable[[], Mask]] = {
    "strided": lambda: ch.Strided(3) & ch.Window(7),
    "scattered documents": lambda: ch.Documents(ids=torch.arange(LENGTH) % 3) & ch.Causal(),
    "odd function": lambda: ch.MaskFunction(lambda batch, head, q_pos, k_pos: (q_pos * k_pos) % 5 == 1) & ch.Causal(),
    "not dense": lambda: ~ch.Dense(_random(LENGTH, LENGTH)) & ch.Window(3),
}
PLACES = [(name, 4) for name in LAYOUTS] + [("zigzag", 1), ("contiguous", 64)]


every_layout = pytest.mark.parametrize(
    "layout",
    [*(layout_of(LENGTH, ranks, name) for name, ranks in PLACES), _cut()],
    ids=[*(f"{name}, {ranks} ranks" for name, ranks in PLACES), "cut"],
)


def _dense(mask: Mask | None) -> Tensor:
    """The mask's values, ``[variants, queries, keys]``."""
    if mask is None:
        return torch.ones(1, LENGTH, LENGTH, dtype=torch.bool)
    return mask.dense(LENGTH, LENGTH).reshape(-1, LENGTH, LENGTH)


def _positions(chunks: tuple[range, ...]) -> list[int]:
    return [position for chunk in chunks for position in chunk]


@every_layout
@pytest.mark.parametrize("name", EXACT)
def test_plan_equals_the_dense_mask(name: str, layout: ShardLayout) -> None:
    mask = EXACT[name]()
    allowed = _dense(mask)
    plan = plan_attention(mask, LENGTH, ranks=layout.ranks, layout=layout)
    assert plan.exact
    assert plan.variants % allowed.shape[0] == 0
    places = [torch.tensor(_positions(chunks), dtype=torch.int64) for chunks in layout.chunks]
    for query_rank, queries in enumerate(places):
        rows = allowed[:, queries]
        for key_rank, keys in enumerate(places):
            block = rows[:, :, keys]
            needed = keys[block.any(dim=0).any(dim=0)]
            assert _positions(plan.needs(query_rank, key_rank)) == needed.tolist()
            assert plan.tokens[query_rank, key_rank] == len(needed)
            assert plan.work[query_rank, key_rank] == block.sum() * (plan.variants // allowed.shape[0])


@every_layout
@pytest.mark.parametrize("name", EXACT)
def test_queries_that_keys_need_are_whole_blocks(
    name: str, layout: ShardLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clearhead.distributed.plan.QUERY_BLOCK", 8)
    mask = EXACT[name]()
    allowed = _dense(mask).any(dim=0)
    # A plan of another block size must not be cached.
    plan = computed(None if mask is None else mask.to(torch.device("cpu")).placed(0), layout)
    for key_rank, keys in enumerate(layout.chunks):
        attends = allowed[:, _positions(keys)].any(dim=1).tolist()
        needed = {place for place in range(LENGTH) if any(attends[place // 8 * 8 : place // 8 * 8 + 8])}
        for query_rank, queries in enumerate(layout.chunks):
            asked = [place for place in _positions(queries) if place in needed]
            assert _positions(plan.asked_by(key_rank, query_rank)) == asked
            assert plan.rows[key_rank, query_rank] == len(asked)
        for chunk in keys:
            rows = allowed[:, chunk.start : chunk.stop].any(dim=1).nonzero().flatten().tolist()
            span = range(rows[0] // 8 * 8, min(rows[-1] // 8 * 8 + 8, LENGTH)) if rows else range(0)
            assert not len(chunk) or plan.queries_of(chunk) == span


@every_layout
@pytest.mark.parametrize("name", EXACT)
def test_chunks_that_meet_are_those_of_the_dense_mask(name: str, layout: ShardLayout) -> None:
    mask = EXACT[name]()
    allowed = _dense(mask).any(dim=0)
    plan = plan_attention(mask, LENGTH, ranks=layout.ranks, layout=layout)
    chunks = sorted((chunk for part in layout.chunks for chunk in part if len(chunk)), key=lambda one: one.start)
    assert plan.chunk_sizes.tolist() == [len(chunk) for chunk in chunks]
    assert all(chunk in layout.chunks[rank] for chunk, rank in zip(chunks, plan.chunk_ranks, strict=True))
    meeting = [[bool(allowed[q.start : q.stop, k.start : k.stop].any()) for k in chunks] for q in chunks]
    assert plan.meeting.tolist() == meeting


@every_layout
@pytest.mark.parametrize("name", BOUNDED)
def test_plan_of_a_mask_without_intervals_contains_the_dense_mask(name: str, layout: ShardLayout) -> None:
    mask = BOUNDED[name]()
    allowed = _dense(mask)
    plan = plan_attention(mask, LENGTH, ranks=layout.ranks, layout=layout)
    assert not plan.exact
    assert "upper bounds" in str(plan)
    for query_rank, queries in enumerate(layout.chunks):
        for key_rank, keys in enumerate(layout.chunks):
            block = allowed[:, _positions(queries)][:, :, _positions(keys)]
            needed = torch.tensor(_positions(keys), dtype=torch.int64)[block.any(dim=0).any(dim=0)]
            assert set(needed.tolist()) <= set(_positions(plan.needs(query_rank, key_rank)))
            assert plan.work[query_rank, key_rank] >= block.sum()


def test_parts_with_intervals_bound_a_mask_without_intervals() -> None:
    window = plan_attention(ch.Window(3), LENGTH, ranks=4)
    assert torch.equal(plan_attention(ch.Window(3) & ch.Strided(2), LENGTH, ranks=4).tokens, window.tokens)


def test_blocks_of_queries_do_not_change_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = [EXACT[name]() for name in ("documents of a batch", "dense of heads", "global", "blocks of heads")]
    whole = [plan_attention(mask, LENGTH, ranks=4, layout="zigzag") for mask in masks]
    monkeypatch.setattr("clearhead.distributed.needed_keys.BLOCK", 13)
    monkeypatch.setattr("clearhead.distributed.needed_keys.STRIP", 5 * LENGTH)
    for mask, expected in zip(masks, whole, strict=True):
        plan = plan_attention(mask, LENGTH, ranks=4, layout="zigzag")
        assert plan == expected
        assert torch.equal(plan.work, expected.work)
        assert torch.equal(plan.tokens, expected.tokens)


def test_masks_of_numbers_share_a_plan_and_others_do_not() -> None:
    class Everything(ch.Causal):
        def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
            return (k_pos <= q_pos) | (k_pos >= 0)

    plans = [plan_attention(mask, LENGTH, ranks=4) for mask in (ch.Window(4), ch.Window(4), ch.Window(5))]
    assert plans[0] is plans[1]
    assert plans[0] != plans[2]
    assert plan_attention(Everything(), LENGTH, ranks=4).share == 1.0
    ids = torch.zeros(LENGTH, dtype=torch.int64)
    one = plan_attention(ch.Documents(ids=ids), LENGTH, ranks=4)
    ids[30:] = 1
    assert plan_attention(ch.Documents(ids=ids), LENGTH, ranks=4) != one


def test_causal_window_sends_the_window_alone() -> None:
    plan = plan_attention(ch.Causal() & ch.Window(255), 65536, ranks=8)
    assert plan.received.tolist() == [0, *[255] * 7]
    assert plan.share < 0.15


@pytest.mark.parametrize(("layout", "balance"), [("contiguous", 1.75), ("zigzag", 1.0)])
def test_balance_of_a_causal_mask(layout: LayoutName, balance: float) -> None:
    assert plan_attention(ch.Causal(), 4096, ranks=4, layout=layout).balance == pytest.approx(balance, rel=1e-3)


def test_empty_sequence_has_a_plan() -> None:
    plan = plan_attention(ch.Causal(), 0, ranks=3)
    assert plan.balance == 1.0
    assert plan.share == 0.0
    assert plan.needs(0, 1) == ()


def test_plan_prints_every_rank_of_few_and_some_of_many() -> None:
    few, many = (str(plan_attention(ch.Causal(), 640, ranks=ranks)) for ranks in (4, 64))
    assert few.count("\n") == 2 + 4
    assert many.count("\n") == 2 + 17


def test_layout_that_misses_a_position_is_refused() -> None:
    for chunks in [((range(0, 2),), (range(3, 4),)), ((range(0, 2),), (range(1, 3),)), ((range(0, 4, 2),),), ()]:
        with pytest.raises(ShapeError, match="contain every position of the sequence once"):
            ShardLayout(chunks)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ShapeError, match="be for 60 tokens on 4 ranks; got one for 61 tokens on 4 ranks"):
        plan_attention(None, 60, ranks=4, layout=_cut())
    with pytest.raises(ShapeError, match="'contiguous', 'zigzag' or a ShardLayout"):
        plan_attention(None, 60, ranks=4, layout="striped")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="ranks must be a whole number of at least 1"):
        plan_attention(None, 60, ranks=0)
    with pytest.raises(MaskError, match="mask must be a mask or None"):
        plan_attention(torch.ones(60, 60), 60, ranks=2)  # type: ignore[arg-type]
    with pytest.raises(MaskError, match="plan_attention: mask must cover"):
        plan_attention(ch.Documents(lengths=[3, 4]), 60, ranks=2)
