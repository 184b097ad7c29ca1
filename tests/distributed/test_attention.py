"""Attention over a sharded sequence against one process and against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import clearhead as ch
from clearhead.distributed import traffic
from clearhead.distributed.launch import run_ranks
from clearhead.distributed.layout import LAYOUTS, ShardLayout
from tests.budget import excess, rounding
from tests.distributed.cases import CASES

HEADS, DIM = 4, 8
METHODS = ("gather", "ring", "heads")


def drawn_tensors(
    length: int, *, batch: int = 2, kv_heads: int = HEADS, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Query, key, value, and a gradient of the output; equal on all ranks."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(HEADS, DIM), (kv_heads, DIM), (kv_heads, DIM + 2), (HEADS, DIM + 2)]
    return [torch.randn(batch, heads, length, dim, generator=generator).to(dtype) for heads, dim in shapes]


def _results(attend: Any, tensors: list[Tensor], learned: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Output and gradients of query, key, value and the learned tensors."""
    *inputs, grad = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = attend(*leaves, **options)
    computed = torch.autograd.grad(output, [*leaves, *learned], grad, allow_unused=True)
    return [output.detach(), *(torch.zeros_like(one) if one is None else one for one in computed)]


def _compare(
    methods: tuple[str, ...], layout: Any, length: int, names: list[str], dtype: torch.dtype, kv_heads: int
) -> list[str]:
    """What differs from float64 on this rank, and from the bits that the kernels give in one process."""
    complaints = []
    for name in names:
        torch.manual_seed(0)
        options, learned = CASES[name](HEADS, length)
        whole = drawn_tensors(length, kv_heads=kv_heads, dtype=dtype)
        single = _results(ch.attention, whole, learned, options)
        doubled = [tensor.double() for tensor in whole]
        exact = _results(ch.attention, doubled, learned, {**options, "backend": "reference"})
        parts = [ch.distributed.shard(tensor, layout=layout) for tensor in whole]
        for method in methods:
            given = {**options, "layout": layout, "method": method}
            sharded = _results(ch.distributed.attention, parts, learned, given)
            for place, (mine, one, right) in enumerate(zip(sharded, single, exact, strict=True)):
                if place < 4:
                    one, right = (ch.distributed.shard(tensor, layout=layout) for tensor in (one, right))
                if not right.numel():
                    continue
                by_kernels = dtype != torch.float64 and name != "learned slopes"
                if method != "ring" and by_kernels and place < 4 and not torch.equal(mine, one):
                    complaints.append(f"{method}, {name}, result {place}: other bits than in one process")
                floor = rounding(right, length, 4.0, dtype=dtype, largest_score=10.0)
                if (text := excess(mine, one, right, floor)) is not None:
                    complaints.append(f"{method}, {name}, result {place}: {text}")
    return complaints


@pytest.mark.covering(0)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_output_and_gradients_are_those_of_one_process(layout: str, ranks: int) -> None:
    assert run_ranks(_compare, ranks, METHODS, layout, 66, list(CASES), torch.float32, HEADS) == [[]] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    names = ["causal", "rules", "dropout"]
    assert run_ranks(_compare, 2, METHODS, "zigzag", 66, names, dtype, HEADS) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_longer_than_a_tile_and_a_piece(layout: str) -> None:
    names = ["causal", "window", "documents", "rules", "dropout"]
    assert run_ranks(_compare, 2, METHODS, layout, 1_301, names, torch.float32, HEADS, timeout=400) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("length", [97, 2 * 96 + 66])
def test_parts_that_end_within_a_block_of_queries(length: int) -> None:
    names = ["full", "causal", "window", "dropout", "rules"]
    assert run_ranks(_compare, 3, ("gather",), "zigzag", length, names, torch.float32, HEADS) == [[]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("length", [1_100, 1_301])
def test_chunks_that_read_some_tiles_of_keys(length: int) -> None:
    assert run_ranks(_compare, 3, ("gather",), "contiguous", length, ["window"], torch.float32, HEADS) == [[]] * 3


def test_grouped_heads() -> None:
    assert run_ranks(_compare, 4, ("gather", "ring"), "zigzag", 37, ["causal", "rules"], torch.float32, 2) == [[]] * 4


@pytest.mark.covering(0)
@pytest.mark.parametrize("length", [3, 5])
def test_ranks_without_tokens(length: int) -> None:
    names = ["full", "causal", "padding"]
    assert run_ranks(_compare, 4, METHODS, "contiguous", length, names, torch.float32, 4) == [[]] * 4


LISTED = ShardLayout(((range(40, 66), range(3)), (range(3, 9),), (range(9, 40),)))


def test_listed_layout() -> None:
    assert run_ranks(_compare, 3, METHODS, LISTED, 66, ["causal", "documents"], torch.float32, 4) == [[]] * 3


def _nan(method: str) -> list[bool]:
    query, key, value, grad = drawn_tensors(48)
    query[0, 1, 5, 0] = key[0, 2, 20, 1] = value[1, 0, 30, 2] = key[1, 3, 47, 0] = torch.nan
    value[0, 0, 40, 1] = torch.inf
    options = {"mask": ch.Causal() & ch.Window(7)}
    whole = [query, key, value, grad]
    single = _results(ch.attention, whole, [], options)
    parts = [ch.distributed.shard(tensor) for tensor in whole]
    sharded = _results(ch.distributed.attention, parts, [], {**options, "method": method})
    return [
        bool((torch.isfinite(mine) == torch.isfinite(ch.distributed.shard(one))).all())
        for mine, one in zip(sharded, single, strict=True)
    ]


@pytest.mark.parametrize("method", ["gather", "ring", "heads"])
def test_nan_reaches_the_same_results_as_in_one_process(method: str) -> None:
    assert run_ranks(_nan, 2, method) == [[True] * 4] * 2


def _leading() -> list[Any]:
    whole = [tensor[0, 0] for tensor in drawn_tensors(12)[:3]]
    right = ch.distributed.shard(ch.attention(*whole, mask=ch.Causal()))
    parts = [ch.distributed.shard(tensor) for tensor in whole]
    with torch.no_grad():
        sharded = ch.distributed.attention(*parts, mask=ch.Causal(), method="gather")
    return [sharded.shape == right.shape, torch.equal(sharded, right)]


def test_leading_axes_may_be_missing() -> None:
    assert run_ranks(_leading, 2) == [[True, True]] * 2


def _dropout_without_seed(method: str) -> list[Any]:
    """Rank 0 draws; the others' generators differ."""
    torch.manual_seed(dist.get_rank())
    whole = drawn_tensors(32)
    parts = [ch.distributed.shard(tensor) for tensor in whole[:3]]
    output = ch.distributed.unshard(ch.distributed.attention(*parts, dropout=0.5, method=method))
    torch.manual_seed(0)
    seed = int(torch.randint(2**62, ()).item())
    return [torch.allclose(output, ch.attention(*whole[:3], dropout=0.5, seed=seed), atol=1e-5)]


@pytest.mark.parametrize("method", ["gather", "ring", "heads"])
def test_rank_0_draws_the_seed(method: str) -> None:
    assert run_ranks(_dropout_without_seed, 2, method) == [[True]] * 2


def _repeated() -> bool:
    options, _ = CASES["dropout"](HEADS, 66)
    parts = [ch.distributed.shard(tensor, layout="zigzag") for tensor in drawn_tensors(66)]
    first, second = (
        _results(ch.distributed.attention, parts, [], {**options, "layout": "zigzag", "method": "ring"})
        for _ in range(2)
    )
    return all(map(torch.equal, first, second))


def test_ring_gives_the_same_bits_every_time() -> None:
    assert run_ranks(_repeated, 3) == [True] * 3


def _log_sum_exp(method: str) -> list[bool]:
    *whole, _ = drawn_tensors(30)
    single = [tensor.detach().requires_grad_() for tensor in whole]
    parts = [ch.distributed.shard(tensor).requires_grad_() for tensor in whole]
    options = {"mask": ch.Causal(), "want": ch.Want(lse=True)}
    one = ch.observe_attention(*single, **options)
    sharded = ch.distributed.observe_attention(*parts, method=method, **options)
    assert one.lse is not None
    assert sharded.lse is not None
    right = torch.autograd.grad([one.output.sum(), one.lse.square().sum()], single)
    mine = torch.autograd.grad([sharded.output.sum(), sharded.lse.square().sum()], parts)
    pairs = [(sharded.lse, ch.distributed.shard(one.lse[..., None])[..., 0])]
    pairs += [(grad, ch.distributed.shard(other)) for grad, other in zip(mine, right, strict=True)]
    return [torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs]


@pytest.mark.parametrize("method", ["gather", "ring", "heads"])
def test_log_sum_exp_and_its_gradient(method: str) -> None:
    assert run_ranks(_log_sum_exp, 2, method) == [[True] * 4] * 2


def _second() -> str:
    parts = [ch.distributed.shard(tensor).requires_grad_() for tensor in drawn_tensors(8)[:3]]
    output = ch.distributed.attention(*parts, method="ring")
    (grad,) = torch.autograd.grad(output.square().sum(), parts[0], create_graph=True)
    with pytest.raises(RuntimeError) as caught:
        grad.sum().backward()
    return str(caught.value)


def test_second_derivative_is_refused() -> None:
    assert all("once_differentiable" in text for text in run_ranks(_second, 2))


def _sent(method: str, mask: ch.Mask | None, length: int) -> int:
    parts = [ch.distributed.shard(tensor) for tensor in drawn_tensors(length, batch=1)[:3]]
    with torch.no_grad(), traffic() as sent:
        ch.distributed.attention(*parts, mask=mask, method=method)
    return sent.bytes


@pytest.mark.covering(0)
@pytest.mark.parametrize("method", ["gather", "ring"])
def test_needed_keys_alone_are_sent(method: str) -> None:
    mask, length, ranks = ch.Causal() & ch.Window(31), 512, 8
    token = HEADS * (DIM + DIM + 2) * 4
    plan = ch.distributed.plan_attention(mask, length, ranks=ranks)
    assert sum(run_ranks(_sent, ranks, method, mask, length)) == int(plan.received.sum()) * token
    assert plan.share < 0.15


def _keys_of_others(length: int) -> list[int]:
    """Keys that a rank holds of others at each visit: those that are here, that arrive and that are sent."""
    from clearhead.distributed import ring

    counts = []
    begin, arrivals = ring.Ring.begin, ring.Ring.arrivals

    def counted_begin(self: Any, visit: Any, tensors: Any) -> Any:
        received, works = begin(self, visit, tensors)
        sent = [part for work in works for part in getattr(work, "tensors", ())]
        counts[-1] += received[0].shape[2] + (sent[0].shape[2] if sent else 0)
        return received, works

    def counted_arrivals(self: Any, *tensors: Any) -> Any:
        counts.append(0)
        for visit, here in arrivals(self, *tensors):
            yield visit, here
            counts.append(here[0].shape[2] if visit.step else 0)

    ring.Ring.begin, ring.Ring.arrivals = counted_begin, counted_arrivals
    parts = [ch.distributed.shard(tensor) for tensor in drawn_tensors(length, batch=1)[:3]]
    with torch.no_grad():
        ch.distributed.attention(*parts, method="ring")
    return counts


def test_ring_holds_one_block_besides_its_own() -> None:
    ranks, length = 3, 3 * 1_536
    for counts in run_ranks(_keys_of_others, ranks, length):
        assert max(counts) <= length // ranks
