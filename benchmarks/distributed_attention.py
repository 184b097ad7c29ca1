"""Attention of two ranks of one thread beside one process of two threads, forward and backward.

    python benchmarks/distributed_attention.py                1x12x8192x64, causal, zigzag
    python benchmarks/distributed_attention.py --quick        a small size, to see that it runs

Ranks and the one process compute in turns. A figure is the median over rounds; a sharded call takes as long as its
slowest rank. The ratio is the time of one process over that of the ranks, so 1.00 is as fast. Bytes are what a rank
sends forward and backward.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import clearhead as ch
from clearhead.distributed import traffic
from clearhead.distributed.launch import LocalRanks

METHODS = ("gather", "ring", "heads")
Passes = tuple[float, float]


def passes(call: Callable[[], Tensor], inputs: list[Tensor], grad: Tensor) -> Passes:
    """Seconds of forward, and of forward and backward."""
    start = time.perf_counter()
    output = call()
    forward = time.perf_counter() - start
    torch.autograd.grad(output, inputs, grad)
    return forward, time.perf_counter() - start


def tensors(length: int, heads: int, kv_heads: int) -> list[Tensor]:
    """Query, key, value, and a gradient of the output."""
    torch.manual_seed(0)
    return [torch.randn(1, count, length, 64) for count in (heads, kv_heads, kv_heads, heads)]


def on_rank(length: int, heads: int, kv_heads: int, method: str) -> tuple[float, float, int]:
    """Seconds of forward, and of forward and backward, of this rank; and the bytes that it sends."""
    parts = [ch.distributed.shard(whole, layout="zigzag") for whole in tensors(length, heads, kv_heads)]
    inputs = [part.requires_grad_() for part in parts[:3]]
    dist.barrier()
    with traffic() as sent:
        forward, both = passes(
            lambda: ch.distributed.attention(*inputs, mask=ch.Causal(), layout="zigzag", method=method),
            inputs,
            parts[3],
        )
    return forward, both, sent.bytes


def in_one_process(length: int, heads: int, kv_heads: int) -> tuple[float, float, int]:
    """The same of the whole call in this process."""
    *inputs, grad = tensors(length, heads, kv_heads)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    return (*passes(lambda: ch.attention(*leaves, mask=ch.Causal()), leaves, grad), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small size, to see that it runs")
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    length, rounds = (512, 1) if arguments.quick else (8192, arguments.rounds)
    ranks = arguments.ranks
    torch.set_num_threads(ranks)
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}; {ranks} ranks of 1 thread,")
    print(f"one process of {ranks} threads")
    print(f"{'call':<22} {'method':<12} {'forward ms':>11} {'both ms':>9} {'forward':>8} {'both':>6} {'MiB sent':>9}")
    with LocalRanks(ranks, timeout=600) as local:
        for sizes in ((length, 12, 12), (length, 12, 2)):
            methods = [name for name in METHODS if name != "heads" or sizes[2] >= ranks]
            times: dict[str, list[tuple[float, float, int]]] = {name: [] for name in (*methods, "one process")}
            for _ in range(rounds + 1):
                for name in methods:
                    every = local.run(on_rank, *sizes, name)
                    times[name].append((max(one[0] for one in every), max(one[1] for one in every), every[0][2]))
                times["one process"].append(in_one_process(*sizes))
            show(f"1x{sizes[1]}/{sizes[2]}x{length}x64 causal", times)


def show(call: str, times: dict[str, list[tuple[float, float, int]]]) -> None:
    """Print the medians of all rounds but the first."""
    median = {
        name: [statistics.median(column) for column in zip(*every[1:], strict=True)] for name, every in times.items()
    }
    for name, (forward, both, sent) in median.items():
        ratios = [single / sharded for single, sharded in zip(median["one process"], (forward, both), strict=False)]
        print(
            f"{call:<22} {name:<12} {1e3 * forward:11.1f} {1e3 * both:9.1f} {ratios[0]:8.2f} {ratios[1]:6.2f} "
            f"{sent / 2**20:9.1f}"
        )


if __name__ == "__main__":
    main()
