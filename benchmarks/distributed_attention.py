"""Attention of two ranks of one thread beside one process of two threads, forward and backward.

    python benchmarks/distributed_attention.py                1x12x8192x64, causal, zigzag
    python benchmarks/distributed_attention.py --quick        a small size, to see that it runs

The same two processes compute both in turns: all ranks compute a sharded call, then rank 0 computes the whole call with
as many threads as there are ranks while the others wait. A figure is the median over rounds. The ratio is the time of
one process over that of the slowest rank, so 1.00 is as fast. Bytes are what rank 0 sent forward and backward.
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
from clearhead.distributed.launch import run_ranks

METHODS = ("gather", "ring", "heads")
Passes = tuple[float, float]


def passes(call: Callable[[], Tensor], inputs: list[Tensor], grad: Tensor) -> Passes:
    """Seconds of forward, and of forward and backward."""
    start = time.perf_counter()
    output = call()
    forward = time.perf_counter() - start
    torch.autograd.grad(output, inputs, grad)
    return forward, time.perf_counter() - start


def measured(length: int, heads: int, kv_heads: int, rounds: int) -> dict[str, list[Passes]]:
    """Times of each round: the slowest rank's by method, and those of one process."""
    torch.manual_seed(0)
    whole = [torch.randn(1, count, length, 64) for count in (heads, kv_heads, kv_heads, heads)]
    parts = [ch.distributed.shard(tensor, layout="zigzag").requires_grad_() for tensor in whole]
    single = [tensor.requires_grad_() for tensor in whole[:3]]
    ranks, mask = dist.get_world_size(), ch.Causal()
    methods = [name for name in METHODS if name != "heads" or kv_heads >= ranks]
    times: dict[str, list[Passes]] = {name: [] for name in (*methods, "one process")}
    for _ in range(rounds + 1):
        for method in methods:
            dist.barrier()

            def sharded(method: str = method) -> Tensor:
                return ch.distributed.attention(*parts[:3], mask=mask, layout="zigzag", method=method)

            mine = torch.tensor(passes(sharded, parts[:3], parts[3].detach()), dtype=torch.float64)
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            times[method].append((float(mine[0]), float(mine[1])))
        dist.barrier()
        if dist.get_rank() == 0:
            torch.set_num_threads(ranks)
            times["one process"].append(passes(lambda: ch.attention(*single, mask=mask), single, whole[3]))
            torch.set_num_threads(1)
        dist.barrier()
    return times


def sent(length: int, heads: int, kv_heads: int, method: str) -> int:
    """Bytes that a rank sends forward and backward."""
    shapes = [(1, count, length, 64) for count in (heads, kv_heads, kv_heads)]
    parts = [ch.distributed.shard(torch.zeros(shape), layout="zigzag").requires_grad_() for shape in shapes]
    with traffic() as counted:
        ch.distributed.attention(*parts, mask=ch.Causal(), layout="zigzag", method=method).sum().backward()
    return counted.bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small size, to see that it runs")
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    length, rounds = (512, 1) if arguments.quick else (8192, arguments.rounds)
    print(
        f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {arguments.ranks} ranks of 1 thread"
    )
    print(f"{'call':<22} {'method':<12} {'forward ms':>11} {'both ms':>9} {'forward':>8} {'both':>6} {'MiB sent':>9}")
    for heads, kv_heads in ((12, 12), (12, 2)):
        times = run_ranks(measured, arguments.ranks, length, heads, kv_heads, rounds, timeout=1_800)[0]
        median = {
            name: [statistics.median(one[place] for one in every[1:]) for place in (0, 1)]
            for name, every in times.items()
        }
        for name, (forward, both) in median.items():
            ratios = [single / sharded for single, sharded in zip(median["one process"], (forward, both), strict=True)]
            alone = name == "one process"
            bytes_sent = 0 if alone else run_ranks(sent, arguments.ranks, length, heads, kv_heads, name, timeout=600)[0]
            print(
                f"1x{heads}/{kv_heads}x{length}x64 causal".ljust(22), f"{name:<12}", f"{1e3 * forward:11.1f}",
                f"{1e3 * both:9.1f}", f"{ratios[0]:8.2f}", f"{ratios[1]:6.2f}", f"{bytes_sent / 2**20:9.1f}",
            )  # fmt: skip


if __name__ == "__main__":
    main()
