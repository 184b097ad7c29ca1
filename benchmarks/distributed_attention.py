"""Attention over ranks of one thread: its speed beside one process, and its time beside the simulated one.

    python benchmarks/distributed_attention.py                beside one process: 1x12x8192x64, causal, zigzag
    python benchmarks/distributed_attention.py --simulate     beside the simulator: 2 and 4 ranks, all methods and masks
    python benchmarks/distributed_attention.py --exchange     what a ring of 8 ranks sends and keeps
    python benchmarks/distributed_attention.py --quick        a small size, to see that it runs; also with the others

A figure is the median over rounds, and a sharded pass takes as long as its slowest rank.

Beside one process, ranks and the one process, which has as many threads, compute in turns. The ratio is the time of one
process over that of the ranks, so 1.00 is as fast. Bytes are what a rank sends forward and backward.

With --simulate, the ranks measure the figures of the machine by ch.distributed.measure_machine (FLOP/s of attention in
one process with this mask, bandwidth and latency of messages, copies in memory, fixed costs of calls), from which
ch.distributed.simulate computes the time of each method and layout. The ratio is simulated over measured: the model
holds where it is from 0.80 to 1.20. Rounds alternate between the figures and the calls, and the ratio is the
median over rounds. Takes about five minutes on two idle processors; close other programs.

With --exchange, bytes are of a forward pass of all ranks: what they send, the keys and values that queries of other
ranks may attend to, and the full exchange, in which each rank receives all. A rank keeps its own keys and values and at
most as many of other ranks: what is computed with, what arrives and what is sent.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

import clearhead as ch
from clearhead.distributed import AttentionSizes, Machine, measure_machine, plan_attention, ring, simulate, traffic
from clearhead.distributed.launch import LocalRanks
from clearhead.garbage_collector import collector_off
from clearhead.masks import Mask

METHODS: Final = ("gather", "ring", "heads")
MASKS: Final = ("window", "causal", "full")
LAYOUTS: Final = ("contiguous", "zigzag")
CORES: Final = len(os.sched_getaffinity(0))
#: Simulated over measured time within which the model holds.
LOW, HIGH = 0.8, 1.2
#: Seconds that one function of the ranks may take.
LIMIT: Final = 600.0


@dataclass(frozen=True)
class Case:
    """A call: sizes, and the names of mask, layout and method."""

    length: int
    heads: int
    kv_heads: int
    mask: str
    layout: str
    method: str

    @property
    def whole_mask(self) -> Mask | None:
        return mask_of(self.mask, self.length)

    def tensors(self) -> list[Tensor]:
        """Query, key, value, and a gradient of the output."""
        torch.manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [torch.randn(1, count, self.length, 64) for count in heads]

    def parts(self) -> list[Tensor]:
        """This rank's parts; the first three require gradients."""
        parts = [ch.distributed.shard(whole, layout=self.layout) for whole in self.tensors()]  # type: ignore[arg-type]
        return [part.requires_grad_(place < 3) for place, part in enumerate(parts)]


def mask_of(name: str, length: int) -> Mask | None:
    """A mask by its name; ``"window"`` is a 16th of the sequence."""
    windows = {"window": length // 16 - 1, "window 255": 255}
    return ch.Causal() & ch.Window(windows[name]) if name in windows else {"full": None, "causal": ch.Causal()}[name]


def on_rank(case: Case) -> tuple[float, float, int, int]:
    """Seconds of forward and backward of this rank, each from a common start, and the bytes that it sends."""
    *inputs, grad = case.parts()
    mask = case.whole_mask
    plan_attention(mask, case.length, ranks=dist.get_world_size(), layout=case.layout)  # type: ignore[arg-type]
    with collector_off(), traffic() as forward_sent:
        dist.barrier()
        start = time.perf_counter()
        output = ch.distributed.attention(*inputs, mask=mask, layout=case.layout, method=case.method)  # type: ignore[arg-type]
        forward = time.perf_counter() - start
    with collector_off(), traffic() as backward_sent:
        dist.barrier()
        start = time.perf_counter()
        torch.autograd.grad(output, inputs, grad)
        backward = time.perf_counter() - start
    return forward, backward, forward_sent.bytes, backward_sent.bytes


def in_one_process(case: Case) -> tuple[float, float, int, int]:
    """The same of the whole call in this process."""
    *inputs, grad = case.tensors()
    leaves = [tensor.requires_grad_() for tensor in inputs]
    with collector_off():
        start = time.perf_counter()
        output = ch.attention(*leaves, mask=case.whole_mask)
        forward = time.perf_counter() - start
        torch.autograd.grad(output, leaves, grad)
        return forward, time.perf_counter() - start - forward, 0, 0


def slowest(local: LocalRanks, case: Case) -> tuple[float, float, int, int]:
    """Seconds of the slowest rank and bytes of the rank that sends most, forward and backward."""
    forward, backward, forward_bytes, backward_bytes = zip(*local.run(on_rank, case), strict=True)
    return max(forward), max(backward), max(forward_bytes), max(backward_bytes)


def beside_one_process(ranks: int, length: int, rounds: int) -> None:
    """Print each method's time, and how many times as fast as one process it is."""
    torch.set_num_threads(ranks)
    print(f"{ranks} ranks; one process of {ranks} threads")
    print(f"{'call':<22} {'method':<12} {'forward ms':>11} {'both ms':>9} {'forward':>8} {'both':>6} {'MiB sent':>9}")
    with LocalRanks(ranks, timeout=LIMIT) as local:
        for kv_heads in (12, 2):
            names = [name for name in METHODS if name != "heads" or kv_heads >= ranks]
            cases = {name: Case(length, 12, kv_heads, "causal", "zigzag", name) for name in (*names, "one process")}
            times: dict[str, list[tuple[float, float, int, int]]] = {name: [] for name in cases}
            for _ in range(rounds + 1):
                for name, case in cases.items():
                    times[name].append(in_one_process(case) if name == "one process" else slowest(local, case))
            show(f"1x12/{kv_heads}x{length}x64 causal", times)


def show(call: str, times: dict[str, list[tuple[float, float, int, int]]]) -> None:
    """Print the medians of all rounds but the first."""
    medians = {}
    for name, every in times.items():
        passes = [(forward, forward + backward, sent + returned) for forward, backward, sent, returned in every[1:]]
        medians[name] = [statistics.median(column) for column in zip(*passes, strict=True)]
    for name, (forward, both, sent) in medians.items():
        ratios = [single / sharded for single, sharded in zip(medians["one process"], (forward, both), strict=False)]
        print(
            f"{call:<22} {name:<12} {1e3 * forward:11.1f} {1e3 * both:9.1f} {ratios[0]:8.2f} {ratios[1]:6.2f} "
            f"{sent / 2**20:9.1f}"
        )


class Alive:
    """Bytes of tensors that are alive, and the most so far."""

    def __init__(self) -> None:
        self.bytes = self.most = 0

    def counted(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A function that makes tensors, whose results count unless they are its first argument."""

        def made(tensor: Tensor, *others: Any) -> Tensor:
            result = make(tensor, *others)
            if result.data_ptr() != tensor.data_ptr():
                self.add(result.nbytes)
                weakref.finalize(result, self.add, -result.nbytes)
            return result

        return made

    def add(self, count: int) -> None:
        self.bytes += count
        self.most = max(self.most, self.bytes)


def exchanged(case: Case) -> tuple[int, int]:
    """On a rank: bytes sent forward, and the most bytes of keys and values that are alive."""
    inputs, alive = case.parts()[:3], Alive()
    makers = {name: getattr(ring, name) for name in ("selected", "_rows_like")}
    try:
        for name, make in makers.items():
            setattr(ring, name, alive.counted(make))
        with traffic() as sent, torch.no_grad():
            ch.distributed.attention(*inputs, mask=case.whole_mask, layout=case.layout, method="ring")  # type: ignore[arg-type]
    finally:
        for name, make in makers.items():
            setattr(ring, name, make)
    return sent.bytes, alive.most + sum(one.nbytes for one in inputs[1:])


def beside_needs(ranks: int, length: int) -> None:
    """Print what a ring sends and keeps."""
    print(f"ring, {ranks} ranks, 1x12x{length}x64, keys and values in MiB")
    print(f"{'mask':<14}{'layout':<12}{'sent':>9}{'needed':>9}{'full':>9}{'sent/full':>11}", end="")
    print(f"{'alive':>9}{'part':>8}{'limit':>8}")
    token = AttentionSizes(heads=12, head_dim=64, dtype=torch.float32).key_value_bytes / 2**20
    with LocalRanks(ranks, timeout=LIMIT) as local:
        for mask in ("window 255", "causal", "full"):
            for layout in LAYOUTS:
                case = Case(length, 12, 12, mask, layout, "ring")
                sent, alive = zip(*local.run(exchanged, case), strict=True)
                plan = plan_attention(case.whole_mask, length, ranks=ranks, layout=layout)
                full, part = (ranks - 1) * length * token, length / ranks * token
                needed = int(plan.received.sum()) * token
                print(
                    f"{mask:<14}{layout:<12}{sum(sent) / 2**20:>9.2f}{needed:>9.2f}{full:>9.1f}"
                    f"{100 * sum(sent) / 2**20 / full:>10.2f}%{max(alive) / 2**20:>9.2f}{part:>8.2f}"
                    f"{2 * part:>8.2f}"
                )


def figures(sizes: AttentionSizes, length: int, mask: str) -> Machine:
    """On a rank: the figures of the machine."""
    return measure_machine(sizes, length, mask=mask_of(mask, length), cores=CORES, repeats=1)


def beside_simulator(ranks: int, length: int, rounds: int) -> Iterator[float]:
    """Print measured and simulated times of every case, and yield the ratios."""
    sizes = AttentionSizes(heads=12, head_dim=64, dtype=torch.float32)
    with LocalRanks(ranks, timeout=LIMIT) as local:
        for mask in MASKS:
            cases = [Case(length, 12, 12, mask, layout, method) for layout in LAYOUTS for method in METHODS]
            for case in cases if mask == MASKS[0] else cases[:1]:
                # The ranks' memory and connections grow in the first calls.
                slowest(local, case)
            machines: list[Machine] = []
            times: dict[Case, list[tuple[float, float, int, int]]] = {case: [] for case in cases}
            for _ in range(rounds):
                machines.append(local.run(figures, sizes, length, mask)[0])
                for case in cases:
                    times[case].append(slowest(local, case))
            print(f"\n{ranks} ranks, 1x12x{length}x64 {mask}")
            for machine in machines:
                print(described(machine))
            print(f"{'layout':<12}{'method':<8}{'pass':<10}{'measured ms':>12}{'simulated ms':>13}", end="")
            print(f"{'ratio':>7}{'idle':>6}{'MiB sent':>10}{'simulated':>10}")
            for case, every in times.items():
                yield from compare(case, ranks, sizes, machines, every)


def described(machine: Machine) -> str:
    """The figures in one line."""
    flops = [machine.flops, machine.backward_flops or 0.0, machine.split_flops or 0.0]
    rates = [machine.memory or 0.0, machine.fresh or 0.0, machine.link.bandwidth]
    parts = [machine.row, machine.key]
    fixed = [machine.start, machine.call, machine.backward_call or 0.0, machine.link.latency]
    return (
        f"GFLOP/s {' / '.join(f'{1e-9 * one:.0f}' for one in flops)} forward / backward / split, "
        f"GB/s {' / '.join(f'{1e-9 * one:.2f}' for one in rates)} memory / new memory / link, "
        f"ns {' / '.join(f'{1e9 * one:.0f}' for one in parts)} query / key, "
        f"us {' / '.join(f'{1e6 * one:.0f}' for one in fixed)} start / call / backward call / message, "
        f"overlap {machine.overlap:.2f}"
    )


def compare(
    case: Case,
    ranks: int,
    sizes: AttentionSizes,
    machines: list[Machine],
    times: list[tuple[float, float, int, int]],
) -> Iterator[float]:
    """Print a line for each pass, and yield the median over rounds of simulated over measured time."""
    plan = plan_attention(case.whole_mask, case.length, ranks=ranks, layout=case.layout)  # type: ignore[arg-type]
    simulated = [simulate(plan, sizes, machine, method=case.method) for machine in machines]  # type: ignore[arg-type]
    for place, name in enumerate(("forward", "backward")):
        parts = [getattr(one, name) for one in simulated]
        took = [one[place] for one in times]
        ratio = statistics.median(part.seconds / seconds for part, seconds in zip(parts, took, strict=True))
        print(
            f"{case.layout:<12}{case.method:<8}{name:<10}{1e3 * statistics.median(took):>12.2f}"
            f"{1e3 * statistics.median(part.seconds for part in parts):>13.2f}"
            f"{ratio:>7.2f}{100 * statistics.median(part.idle for part in parts):>5.0f}%"
            f"{times[0][place + 2] / 2**20:>10.2f}{float(parts[0].sent.amax()) / 2**20:>10.2f}"
        )
        yield ratio


def check(run: Callable[[int, int, int], Iterator[float]], counts: list[int], length: int, rounds: int) -> None:
    """Run for each number of ranks, and print how many ratios are within the limits."""
    ratios = [ratio for ranks in counts for ratio in run(ranks, length, rounds)]
    within = sum(LOW <= ratio <= HIGH for ratio in ratios)
    print(f"\nsimulated over measured: {min(ratios):.2f} to {max(ratios):.2f}, {within} of {len(ratios)} within 20 %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="beside the simulator")
    parser.add_argument("--exchange", action="store_true", help="bytes that a ring sends and keeps")
    parser.add_argument("--quick", action="store_true", help="512 tokens, one round")
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        help="processes of one thread; default: 2, with --simulate 2 4, with --exchange 8",
    )
    parser.add_argument("--length", type=int, default=8192, help="tokens of the whole sequence")
    parser.add_argument("--rounds", type=int, help="default: 7, with --simulate 3")
    given = parser.parse_args()
    length, rounds = (512, 1) if given.quick else (given.length, given.rounds or (3 if given.simulate else 7))
    print(f"torch {torch.__version__}, clearhead {ch.__version__}, Python {platform.python_version()}, ", end="")
    print(f"{platform.processor() or platform.machine()}, {CORES} processors, load {os.getloadavg()[0]:.1f}")
    print(f"gloo on the loopback, 1 thread per rank, float32, {rounds} rounds")
    if given.simulate:
        return check(beside_simulator, given.ranks or [2, 4], length, rounds)
    for ranks in given.ranks or [8] if given.exchange else []:
        beside_needs(ranks, length)
    for ranks in [] if given.exchange else given.ranks or [2]:
        beside_one_process(ranks, length, rounds)
    return None


if __name__ == "__main__":
    main()
