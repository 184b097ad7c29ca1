"""Measured time of attention over ranks beside the time that ``ch.distributed.simulate`` computes.

    python benchmarks/distributed_model.py                    2 and 4 ranks, 1x12x8192x64, causal and a window
    python benchmarks/distributed_model.py --quick            a small size, to see that it runs

Ranks are processes of this machine, of one thread each, over gloo on the loopback. Small probes measure the figures of
the machine first: FLOP/s of attention of one process with this mask, bandwidth and latency of messages that all ranks
send at once, and how far messages hide behind computing. Then each method runs forward and backward; methods are
interleaved, and a figure is the median over rounds of the slowest rank's time. The last column is simulated over
measured: the cost model holds where it is from 0.8 to 1.2.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from clearhead.distributed.exchange import traffic
from torch import Tensor

import clearhead as ch
from clearhead.distributed import AttentionSizes, Link, Machine, plan_attention, simulate
from clearhead.distributed.launch import run_ranks
from clearhead.masks import Mask

CORES: Final = len(os.sched_getaffinity(0))
#: Bytes of the two messages from which latency and bandwidth are computed.
SMALL, LARGE = 1 << 10, 1 << 24
#: Seconds until a group of ranks is ended.
LIMIT: Final = 900.0


@dataclass(frozen=True)
class Call:
    """A call that is measured: sizes, mask and layout."""

    length: int
    heads: int
    head_dim: int
    mask: str
    layout: str

    def whole(self) -> Mask:
        window = self.length // 16 - 1
        return ch.Causal() if self.mask == "causal" else ch.Causal() & ch.Window(window)

    def tensors(self) -> list[Tensor]:
        torch.manual_seed(0)
        return [torch.randn(1, self.heads, self.length, self.head_dim) for _ in range(4)]


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call that all ranks begin together."""
    dist.barrier()
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def median(call: Callable[[], Any], repeats: int) -> float:
    """The median seconds of a call that all ranks begin together."""
    return statistics.median([timed(call)[0] for _ in range(repeats)])


def computing(call: Call, repeats: int) -> tuple[float, float, float, float]:
    """On a rank: seconds of the call forward and backward, and of one of 64 tokens; bytes merged per second."""
    query, key, value, grad = call.tensors()
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    mask = call.whole()
    passes = []
    for _ in range(repeats):
        forward, output = timed(lambda: ch.attention(*leaves, mask=mask))
        backward, _ = timed(lambda output=output: torch.autograd.grad(output, leaves, grad))  # type: ignore[misc]
        passes.append((forward, backward))
    short = [tensor[:, :, :64].detach() for tensor in leaves]
    small = median(lambda: ch.attention(*short), 20)
    rows, factor = query.detach()[:, :, : call.length // 4], torch.rand(call.length // 4, 1)
    total = torch.zeros_like(rows)

    def merge() -> None:
        total.mul_(factor).add_(rows * factor)

    # Seven passes over the rows: two reads and a write of each result, but that of mul_ reads one.
    memory = 7 * rows.numel() * 4 / median(merge, 20)
    forward, backward = (statistics.median(times) for times in zip(*passes, strict=True))
    return forward, backward, small, memory


def pass_round(size: int) -> Callable[[], None]:
    """A message of some bytes to the next rank, while one from the rank before arrives."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent, received = torch.zeros(2, size, dtype=torch.uint8)

    def run() -> None:
        operations = [
            dist.P2POp(dist.isend, sent, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return run


def messages(call: Call, repeats: int) -> tuple[float, float, float]:
    """On a rank: bandwidth, latency, and the share of a message that computing hides."""
    small, large = (median(pass_round(size), 4 * repeats) for size in (SMALL, LARGE))
    bandwidth = (LARGE - SMALL) / max(large - small, 1e-9)
    query, key, value, _ = (tensor[:, :, : call.length // 4] for tensor in call.tensors())
    run = pass_round(LARGE)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent, received = torch.zeros(2, LARGE, dtype=torch.uint8)

    def both() -> None:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, (rank + 1) % ranks),
                dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
            ]
        )
        ch.attention(query, key, value)
        for work in works:
            work.wait()

    alone, message, together = (median(one, repeats) for one in (lambda: ch.attention(query, key, value), run, both))
    overlap = (alone + message - together) / min(alone, message)
    return bandwidth, small, min(1.0, max(0.0, overlap))


def measured(call: Call, methods: list[str], repeats: int) -> dict[str, list[tuple[float, float, int, int]]]:
    """On a rank: for each method the rounds' seconds and bytes, forward and backward."""
    mask, layout = call.whole(), call.layout
    query, key, value, grad = (ch.distributed.shard(tensor, layout=layout) for tensor in call.tensors())
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    rounds: dict[str, list[tuple[float, float, int, int]]] = {method: [] for method in methods}
    for turn in range(repeats + 1):
        for method in methods:
            options = {"mask": mask, "layout": layout, "method": method}
            with traffic() as there:
                forward, output = timed(lambda options=options: ch.distributed.attention(*leaves, **options))  # type: ignore[misc]
            with traffic() as back:
                backward, _ = timed(lambda output=output: torch.autograd.grad(output, leaves, grad))  # type: ignore[misc]
            if turn:
                rounds[method].append((forward, backward, there.bytes, back.bytes))
    return rounds


def machine_of(call: Call, ranks: int, repeats: int) -> Machine:
    """The machine's figures, by probes with as many ranks as will run."""
    together = min(ranks, CORES)
    by_rank = run_ranks(computing, together, call, repeats, timeout=LIMIT)
    forward, backward, small, memory = (statistics.median(values) for values in zip(*by_rank, strict=True))
    bandwidth, latency, overlap = (
        statistics.median(values)
        for values in zip(*run_ranks(messages, ranks, call, repeats, timeout=LIMIT), strict=True)
    )
    operations = int(plan_attention(call.whole(), call.length, ranks=1).work) * call.heads * call.head_dim
    return Machine(
        flops=4 * operations / forward,
        backward_flops=10 * operations / backward,
        link=Link(bandwidth, latency),
        overlap=overlap,
        memory=memory,
        call=small,
        cores=CORES,
    )


def compare(call: Call, ranks: int, methods: list[str], repeats: int) -> None:
    """Print a line for each method and pass."""
    machine = machine_of(call, ranks, repeats)
    print(
        f"\n{ranks} ranks, 1x{call.heads}x{call.length}x{call.head_dim} {call.mask}, {call.layout}: "
        f"{machine.flops / 1e9:.1f} GFLOP/s forward, {(machine.backward_flops or 0) / 1e9:.1f} backward, "
        f"{machine.link.bandwidth / 1e9:.2f} GB/s, {machine.link.latency * 1e6:.0f} us, overlap {machine.overlap:.2f}"
    )
    print(
        f"{'method':<8}{'pass':<10}{'measured ms':>12}{'simulated ms':>13}{'ratio':>7}{'MiB sent':>10}{'simulated':>10}"
    )
    plan = plan_attention(call.whole(), call.length, ranks=ranks, layout=call.layout)  # type: ignore[arg-type]
    sizes = AttentionSizes(heads=call.heads, head_dim=call.head_dim, dtype=torch.float32)
    by_rank = run_ranks(measured, ranks, call, methods, repeats, timeout=LIMIT)
    for method in methods:
        simulated = simulate(plan, sizes, machine, method=method)  # type: ignore[arg-type]
        for column, part in enumerate((simulated.forward, simulated.backward)):
            rounds = zip(*(rank[method] for rank in by_rank), strict=True)
            seconds = statistics.median(max(one[column] for one in ranks_of) for ranks_of in rounds)
            sent = max(rank[method][0][2 + column] for rank in by_rank)
            print(
                f"{method:<8}{('forward', 'backward')[column]:<10}{1e3 * seconds:>12.2f}{1e3 * part.seconds:>13.2f}"
                f"{part.seconds / seconds:>7.2f}{sent / 2**20:>10.2f}{float(part.sent.amax()) / 2**20:>10.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--masks", nargs="+", default=["causal", "window"], choices=["causal", "window"])
    parser.add_argument("--layouts", nargs="+", default=["zigzag", "contiguous"], choices=["zigzag", "contiguous"])
    parser.add_argument("--methods", nargs="+", default=["gather", "ring", "heads"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="256 tokens, 2 ranks, 1 round")
    given = parser.parse_args()
    if given.quick:
        given.ranks, given.length, given.heads, given.head_dim, given.repeats = [2], 256, 2, 16, 1
    load = os.getloadavg()[0]
    print(f"torch {torch.__version__}, clearhead {ch.__version__}, Python {platform.python_version()}, gloo on the")
    print(f"loopback, {CORES} processors, load {load:.1f} before the start, 1 thread per rank, float32")
    for ranks in given.ranks:
        for mask in given.masks:
            for layout in given.layouts:
                compare(
                    Call(given.length, given.heads, given.head_dim, mask, layout), ranks, given.methods, given.repeats
                )


if __name__ == "__main__":
    main()
