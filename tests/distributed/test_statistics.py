"""Statistics of attention over a sharded sequence against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.distributed.launch import run_ranks
from clearhead.distributed.statistics import AXES
from tests.distributed.test_attention import drawn_tensors

LENGTH = 40


def _want(weights: Tensor) -> ch.Want:
    return ch.Want(
        lse=True, max_score=True, entropy=True, top_k=3, received=True, row_weights=weights, heatmap=7, sink=2,
        distance=True, rows=[39, 0, 13],
    )  # fmt: skip


def _observed(method: str, layout: Any) -> list[str]:
    """The names of the statistics that differ from those of one process."""
    tensors = drawn_tensors(LENGTH)[:3]
    weights = torch.rand(2, 4, 3, LENGTH, generator=torch.Generator().manual_seed(0))
    options = {"mask": ch.Causal() & ch.Window(11), "scores": ch.Alibi(4)}
    whole = ch.observe_attention(*tensors, want=_want(weights), **options)
    parts = [ch.distributed.shard(tensor, layout=layout) for tensor in tensors]
    want = _want(ch.distributed.shard(weights, dim=-1, layout=layout))
    sharded = ch.distributed.observe_attention(*parts, want=want, layout=layout, method=method, **options)
    differing = []
    for name, axes in AXES.items():
        right, mine = getattr(whole, name), getattr(sharded, name)
        if axes.sharded is not None:
            right = axes.restored(ch.distributed.shard(axes.tokens_first(right), layout=layout))
        if mine.shape != right.shape or not torch.equal(mine, right):
            differing.append(name)
    return differing


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("method", ["gather", "heads"])
def test_statistics_are_those_of_one_process(method: str, layout: str) -> None:
    assert run_ranks(_observed, 2, method, layout) == [[], []]


def _rows(method: str) -> list[bool]:
    tensors = drawn_tensors(LENGTH)[:3]
    want = ch.Want(entropy=True, distance=True)
    whole = ch.observe_attention(*tensors, want=want, mask=ch.Causal())
    parts = [ch.distributed.shard(tensor, layout="zigzag") for tensor in tensors]
    sharded = ch.distributed.observe_attention(*parts, want=want, mask=ch.Causal(), layout="zigzag", method=method)
    pairs = ((sharded.entropy, whole.entropy), (sharded.distance, whole.distance))
    return [torch.equal(a, ch.distributed.shard(b[..., None], layout="zigzag")[..., 0]) for a, b in pairs]


@pytest.mark.parametrize("method", ["gather", "heads"])
def test_statistics_of_rows(method: str) -> None:
    assert run_ranks(_rows, 3, method) == [[True, True]] * 3


def _entropy_gradient() -> bool:
    whole = [tensor.requires_grad_() for tensor in drawn_tensors(LENGTH)[:3]]
    parts = [ch.distributed.shard(tensor.detach()).requires_grad_() for tensor in whole]
    want = ch.Want(entropy=True)
    one = torch.autograd.grad(ch.observe_attention(*whole, want=want).entropy.square().sum(), whole[:2])
    mine = torch.autograd.grad(ch.distributed.observe_attention(*parts, want=want).entropy.square().sum(), parts[:2])
    return all(torch.equal(a, ch.distributed.shard(b)) for a, b in zip(mine, one, strict=True))


def test_statistics_by_heads_have_gradients() -> None:
    assert run_ranks(_entropy_gradient, 2) == [True, True]


def _refused(method: str, gradient: bool) -> str:
    parts = [ch.distributed.shard(tensor).requires_grad_(gradient) for tensor in drawn_tensors(LENGTH)[:3]]
    with pytest.raises(ch.UnsupportedError) as caught:
        ch.distributed.observe_attention(*parts, want=ch.Want(entropy=True), method=method)
    return str(caught.value)


def test_ring_refuses_statistics_of_weights() -> None:
    texts = run_ranks(_refused, 2, "ring", False)
    assert texts[0] == texts[1]
    assert "computes entropy" in texts[0]


def test_gather_refuses_gradients_of_statistics() -> None:
    texts = run_ranks(_refused, 2, "gather", True)
    assert texts[0] == texts[1]
    assert "differentiates statistics" in texts[0]
