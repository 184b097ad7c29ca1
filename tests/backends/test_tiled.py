"""What only the tiles promise: memory that grows with the length, and no work on empty tiles."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import clearhead as ch
from clearhead.backends import tiled, tiled_statistics
from clearhead.dispatch import choose
from clearhead.problem import Problem
from clearhead.statistics import Want

PEAK = """
import resource, sys, torch, clearhead as ch
length, backward = int(sys.argv[1]), sys.argv[2] == "backward"
query, key, value = (torch.randn(1, 4, length, 16, requires_grad=backward) for _ in range(3))
small = torch.randn(1, 4, 64, 16, requires_grad=backward)
def run(query, key, value):
    output = ch.attention(query, key, value, mask=ch.Causal() & ch.Window(300), scores=ch.Alibi(4), backend="tiled")
    if backward:
        output.sum().backward()
run(small, small, small)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(query, key, value)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_memory_grows_with_the_length_alone(direction: str) -> None:
    """16,384 tokens of 4 heads: T x T scores would take 4 GB. What is measured here is mostly the allocator."""
    command = [sys.executable, "-c", PEAK, "16384", direction]
    megabytes = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert megabytes < 300


STATISTICS = """
import resource, torch, clearhead as ch
def run(length):
    query, key, value = (torch.randn(1, 2, length, 16) for _ in range(3))
    want = ch.Want(
        lse=True, max_score=True, entropy=True, top_k=8, received=True, heatmap=100, sink=4, distance=True,
        rows=[0, length - 1], row_weights=torch.rand(1, 1, 2, length),
    )
    return ch.observe_attention(query, key, value, want=want, mask=ch.Causal(), backend="tiled")
run(600)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(8192)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.slow
def test_memory_of_statistics_grows_with_the_length_alone() -> None:
    """8,192 tokens of 2 heads: T x T weights would take 512 MiB.

    Inputs, output and statistics are 10 MiB, a tile's scores half a MiB, of which sorting and pooling hold a dozen
    at a time; the rest is room for the allocator.
    """
    found = subprocess.run([sys.executable, "-c", STATISTICS], check=True, capture_output=True, text=True).stdout
    assert float(found) < 64


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
def test_second_order_gradients_are_refused(name: str) -> None:
    query = torch.randn(1, 1, 5, 4, requires_grad=True)
    want = ch.Want(entropy=True, received=True)
    seen = ch.observe_attention(query, query, query, want=want, scores=ch.SoftCap(1.0), backend="tiled")
    (grad,) = torch.autograd.grad(getattr(seen, name).square().sum(), query, create_graph=True)
    with pytest.raises(ch.UnsupportedError, match="create_graph must be False"):
        grad.sum().backward()


def test_statistics_without_a_gradient_say_so() -> None:
    query = torch.randn(1, 1, 5, 4, requires_grad=True)
    for backend in ("tiled", "reference"):
        seen = ch.observe_attention(query, query, query, want=ch.Want(top_k=2, heatmap=2), backend=backend)
        assert seen.output.requires_grad
        assert not any(each.requires_grad for each in (seen.top_weights, seen.heatmap_max, seen.heatmap_mean))


def test_auto_takes_tiles_for_long_rows() -> None:
    query = torch.randn(1, 1, 5000, 4)
    mask = ch.MaskFunction(lambda batch, head, q_pos, k_pos: q_pos - k_pos < 4)
    problem = Problem.of("attention", query, query, query, mask=mask)
    assert choose("attention", problem, Want()).name == "tiled"
