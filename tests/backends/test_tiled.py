"""Guarantees of the tiled backend: memory linear in the length, and no work on empty tiles."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.backends import tiled, tiled_statistics
from clearhead.dispatch import choose
from clearhead.problem import Problem
from clearhead.statistics import Want
from tests.processes import with_torch_alone

#: The kernel's own mark of this process: getrusage's also counts the parent that it was forked from.
HIGH_WATER = """
import re
def high_water():
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read())[1]) / 1024
"""
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")

PEAK = (
    HIGH_WATER
    + """
import sys, torch, clearhead as ch
length, backward = int(sys.argv[1]), sys.argv[2] == "backward"
mask, rule = ch.Causal() & ch.Window(300), ch.Alibi(4)
if sys.argv[3] == "functions":
    mask = ch.MaskFunction(lambda b, h, i, j: (j <= i) & (i - j <= 300))
    rule = ch.ScoreFunction(lambda s, b, h, i, j: s - 0.1 * (h + 1) * (i - j).abs())
query, key, value = (torch.randn(1, 4, length, 16, requires_grad=backward) for _ in range(3))
small = torch.randn(1, 4, 64, 16, requires_grad=backward)
def run(query, key, value):
    output = ch.attention(query, key, value, mask=mask, scores=rule, backend="tiled")
    if backward:
        output.sum().backward()
run(small, small, small)
before = high_water()
run(query, key, value)
print(high_water() - before)
"""
)


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize("by", ["kinds", "functions"])
@pytest.mark.parametrize("direction", ["backward", "forward"])
def test_memory_is_linear_in_the_length(direction: str, by: str) -> None:
    """16,384 tokens of 4 heads: T x T scores would take 4 GB. What is measured here is mostly the allocator."""
    done = with_torch_alone(PEAK, ["16384", direction, by])
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 200


STATISTICS = (
    HIGH_WATER
    + """
import torch, clearhead as ch
def run(length):
    query, key, value = (torch.randn(1, 2, length, 16) for _ in range(3))
    want = ch.Want(
        lse=True, max_score=True, entropy=True, top_k=8, received=True, heatmap=100, sink=4, distance=True,
        rows=[0, length - 1], row_weights=torch.rand(1, 1, 2, length),
    )
    return ch.observe_attention(query, key, value, want=want, mask=ch.Causal(), backend="tiled")
run(600)
before = high_water()
run(8192)
print(high_water() - before)
"""
)


@on_linux
@pytest.mark.slow
def test_memory_of_statistics_is_linear_in_the_length() -> None:
    """8,192 tokens of 2 heads: T x T weights would take 512 MiB.

    Inputs, output and statistics are 10 MiB, a tile's scores half a MiB, of which sorting and pooling need a dozen
    at a time; the rest is a margin for the allocator.
    """
    done = with_torch_alone(STATISTICS)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 64


def test_statistics_skip_empty_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    visited = []
    raw_scores = tiled_statistics.raw_scores

    def counting(problem, layout, queries, tile):  # type: ignore[no-untyped-def]
        visited.append((queries.start, tile.keys.start))
        return raw_scores(problem, layout, queries, tile)

    monkeypatch.setattr(tiled_statistics, "raw_scores", counting)
    query = torch.randn(1, 1, 2048, 4)
    want = ch.Want(entropy=True, heatmap=100, top_k=3)
    ch.observe_attention(query, query, query, want=want, mask=ch.Causal() & ch.Window(100), backend="tiled")
    assert len(visited) == 16 + 3  # one tile a strip, and two where the window crosses a border


def test_empty_tiles_are_not_visited(monkeypatch: pytest.MonkeyPatch) -> None:
    visited = []
    raw_scores = tiled.raw_scores

    def counting(problem, layout, queries, tile):  # type: ignore[no-untyped-def]
        visited.append((queries.start, tile.keys.start))
        return raw_scores(problem, layout, queries, tile)

    monkeypatch.setattr(tiled, "raw_scores", counting)
    query = torch.randn(1, 1, 2048, 4)
    ch.attention(query, query, query, mask=ch.Causal() & ch.Window(100), backend="tiled")
    whole = (2048 // 128) * (2048 // 512)
    assert len(visited) == 16 + 3  # one tile a strip, and two where the window crosses a border
    assert len(visited) < whole / 3


@pytest.mark.parametrize("name", ["output", "entropy", "received"])
def test_second_order_gradients_are_the_references(name: str) -> None:
    def second(backend: str) -> Tensor:
        query = torch.linspace(-1.0, 1.0, 20).view(1, 1, 5, 4).requires_grad_()
        want = ch.Want(entropy=True, received=True)
        observation = ch.observe_attention(query, query, query, want=want, scores=ch.SoftCap(1.0), backend=backend)
        (grad,) = torch.autograd.grad(getattr(observation, name).square().sum(), query, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), query)[0]

    torch.testing.assert_close(second("tiled"), second("reference"), rtol=1e-4, atol=1e-5)


def test_statistics_without_gradient_do_not_require_one() -> None:
    query = torch.randn(1, 1, 5, 4, requires_grad=True)
    for backend in ("tiled", "reference"):
        observation = ch.observe_attention(query, query, query, want=ch.Want(top_k=2, heatmap=2), backend=backend)
        assert observation.output.requires_grad
        assert not any(
            each.requires_grad for each in (observation.top_weights, observation.heatmap_max, observation.heatmap_mean)
        )


def test_auto_takes_tiles_for_long_rows() -> None:
    query = torch.randn(1, 1, 9000, 4)
    mask = ch.MaskFunction(lambda batch, head, q_pos, k_pos: q_pos * k_pos % 7 < 4)
    problem = Problem.of("attention", query, query, query, mask=mask)
    assert choose("attention", problem, Want()).name == "tiled"


def test_a_function_runs_once_a_tile_in_each_direction() -> None:
    calls, probed = [], []

    def counting(score: Tensor, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        # One call on one place finds the learned tensors that the function reads.
        places = probed if score.numel() == 1 else calls
        places.append((int(q_pos[0, 0, 0, 0]), int(k_pos[0, 0, 0, 0]), score.requires_grad))
        return score * 0.5

    query = torch.randn(1, 1, 2048, 4, requires_grad=True)
    mask = ch.MaskFunction(lambda batch, head, q_pos, k_pos: (k_pos <= q_pos) & (q_pos - k_pos <= 100))
    output = ch.attention(query, query, query, mask=mask, scores=ch.ScoreFunction(counting), backend="tiled")
    assert len(calls) == len(set(calls)) == 16 + 3, "the tiles that the mask empties are left out"
    assert not any(with_gradient for *_, with_gradient in calls)
    output.sum().backward()
    assert len(calls) == len(set(calls)) == 2 * (16 + 3)
    assert len(probed) == 1


@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 4), (3, 4), (3, 2), (3, 1)])
def test_inputs_of_any_layout_agree(batch: int, kv_heads: int) -> None:
    """Layouts [batch, len, heads, dim] and [batch, heads, len, dim]: equal gradients, summed in place or not."""
    sizes = (4, kv_heads, kv_heads)
    plain = [torch.randn(batch, heads, 150, 8, requires_grad=True) for heads in sizes]
    results = []
    for inputs in (plain, [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in plain]):
        output = ch.attention(*inputs, mask=ch.Causal(), scores=ch.SoftCap(3.0), dropout=0.2, seed=1, backend="tiled")
        results.append([output, *torch.autograd.grad(output.square().sum(), plain)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_statistics_do_not_change_the_output() -> None:
    inputs = [torch.randn(2, 3, 700, 8) for _ in range(3)]
    rule = ch.ScoreFunction(lambda s, b, h, i, j: s - 0.01 * (i - j).abs())
    options = {"mask": ch.Causal(), "scores": rule, "backend": "tiled"}
    want = ch.Want(entropy=True, received=True, top_k=3)
    assert torch.equal(ch.attention(*inputs, **options), ch.observe_attention(*inputs, want=want, **options).output)
