"""Measured time of attention over ranks beside the time that ``ch.distributed.simulate`` computes.

    python benchmarks/distributed_model.py                    2 and 4 ranks, 1x12x8192x64, causal and a window
    python benchmarks/distributed_model.py --quick            a small size, to see that it runs

Ranks are processes of this machine, of one thread each, over gloo on the loopback. A round measures the figures of the
machine by small probes (FLOP/s of attention of one process with this mask, bandwidth and latency of messages that all
ranks send at once, how far messages hide behind computing, bytes merged per second) and then runs each method forward
and backward. A figure is the median over rounds, and a pass takes as long as its slowest rank. The ratio is simulated
over measured: the cost model holds where it is from 0.8 to 1.2.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

import clearhead as ch
from clearhead.distributed import AttentionSizes, Link, Machine, plan_attention, simulate
from clearhead.distributed.exchange import traffic
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


class Rounds:
    """Seconds of what a rank ran, by name, a value for each round; and bytes that it sent."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.bytes: dict[str, int] = {}

    def time(self, name: str, call: Callable[[], Any], times: int = 1) -> Any:
        """Run a call that all ranks begin together, and return its result; the median of ``times`` runs counts."""
        seconds, result = [], None
        for _ in range(times):
            dist.barrier()
            start = time.perf_counter()
            result = call()
            seconds.append(time.perf_counter() - start)
        self.seconds.setdefault(name, []).append(statistics.median(seconds))
        return result


def begin_messages(size: int) -> list[Any]:
    """Begin a message of some bytes to the next rank, and one from the rank before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent, received = torch.zeros(2, size, dtype=torch.uint8)
    return dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, (rank + 1) % ranks), dist.P2POp(dist.irecv, received, (rank - 1) % ranks)]
    )


def finish(works: list[Any]) -> None:
    for work in works:
        work.wait()


def probe(rounds: Rounds, call: Call, tensors: list[Tensor]) -> None:
    """Measure the figures of the machine once."""
    # As many ranks as there are processors compute the whole call, the others wait.
    computes = dist.get_rank() < CORES
    *leaves, grad = tensors
    mask = call.whole()
    output = rounds.time("forward", lambda: ch.attention(*leaves, mask=mask) if computes else None)
    rounds.time("backward", lambda: torch.autograd.grad(output, leaves, grad) if computes else None)
    query, key, value = (tensor.detach()[:, :, : call.length // 4].contiguous() for tensor in leaves)
    short = [tensor[:, :, :64] for tensor in (query, key, value)]
    rounds.time("call", lambda: ch.attention(*short) if computes else None, 9)
    total, factor = torch.zeros_like(query), torch.rand(query.shape[2], 1)
    rounds.time("merge", lambda: total.mul_(factor).add_(query * factor) if computes else None, 9)
    rounds.time("small", lambda: finish(begin_messages(SMALL)), 9)
    rounds.time("large", lambda: finish(begin_messages(LARGE)), 3)
    rounds.time("alone", lambda: ch.attention(query, key, value))

    def both() -> None:
        works = begin_messages(LARGE)
        ch.attention(query, key, value)
        finish(works)

    rounds.time("both", both)


def measured(call: Call, methods: list[str], repeats: int) -> Rounds:
    """On a rank: rounds of probes and of every method."""
    rounds, whole = Rounds(), [tensor.requires_grad_(place < 3) for place, tensor in enumerate(call.tensors())]
    query, key, value, grad = (ch.distributed.shard(tensor.detach(), layout=call.layout) for tensor in whole)  # type: ignore[arg-type]
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    options: dict[str, Any] = {"mask": call.whole(), "layout": call.layout}
    for turn in range(repeats + 1):
        probe(rounds, call, whole)
        for method in methods:
            with traffic() as sent:
                run = partial(ch.distributed.attention, *leaves, method=method, **options)
                output = rounds.time(f"{method} forward", run)
            rounds.bytes[f"{method} forward"] = sent.bytes
            with traffic() as sent:
                rounds.time(f"{method} backward", partial(torch.autograd.grad, output, leaves, grad))
            rounds.bytes[f"{method} backward"] = sent.bytes
        if not turn:
            # The first round warms up.
            rounds.seconds.clear()
    return rounds


def machine_of(call: Call, seconds: Callable[[str], float]) -> Machine:
    """The machine's figures, from the seconds of the probes."""
    operations = int(plan_attention(call.whole(), call.length, ranks=1).work) * call.heads * call.head_dim
    hidden = seconds("alone") + seconds("large") - seconds("both")
    return Machine(
        flops=4 * operations / seconds("forward"),
        backward_flops=10 * operations / seconds("backward"),
        link=Link((LARGE - SMALL) / max(seconds("large") - seconds("small"), 1e-9), seconds("small")),
        overlap=min(1.0, max(0.0, hidden / min(seconds("alone"), seconds("large")))),
        # Seven passes over float32.
        memory=7 * call.heads * (call.length // 4) * call.head_dim * 4 / seconds("merge"),
        call=seconds("call"),
        cores=CORES,
    )


def compare(call: Call, ranks: int, methods: list[str], repeats: int) -> None:
    """Print a line for each method and pass."""
    by_rank = run_ranks(measured, ranks, call, methods, repeats, timeout=LIMIT)

    def seconds(name: str) -> float:
        """The median over rounds of the slowest rank's time."""
        return statistics.median(map(max, zip(*(rounds.seconds[name] for rounds in by_rank), strict=True)))

    machine = machine_of(call, seconds)
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
    for method in methods:
        simulated = simulate(plan, sizes, machine, method=method)  # type: ignore[arg-type]
        for name, part in (("forward", simulated.forward), ("backward", simulated.backward)):
            took = seconds(f"{method} {name}")
            sent = max(rounds.bytes[f"{method} {name}"] for rounds in by_rank)
            print(
                f"{method:<8}{name:<10}{1e3 * took:>12.2f}{1e3 * part.seconds:>13.2f}{part.seconds / took:>7.2f}"
                f"{sent / 2**20:>10.2f}{float(part.sent.amax()) / 2**20:>10.2f}"
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
