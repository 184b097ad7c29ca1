"""A data-parallel training step of several processes beside the step of one process with as many threads.

    python benchmarks/distributed_training.py              2 processes of 1 thread, a language model of 10 M parameters
    python benchmarks/distributed_training.py --quick      a small model, to see that it runs

Processes are on this machine, over gloo on the loopback. Rounds alternate between the two; each round builds the model
and trains it, and its figure is the median time of a step without the first three. The speed is the ratio of the
medians over rounds: 1 means that a process gives as much as a thread. Use an idle machine.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from clearhead.distributed.launch import run_ranks
from clearhead.train import LanguageOptions
from clearhead.train.engine import Engine
from clearhead.train.language import LanguageTask, build_language_model
from clearhead.train.options import ParallelOptions
from clearhead.train.ranks import Ranks

#: Steps in which buffers are allocated and the choices of kernels are read.
WARM_UP: Final = 3
VOCABULARY: Final = 256
LIMIT: Final = 900.0
USUAL: Final = {"embed_dim": 384, "num_heads": 6, "num_layers": 6, "context": 256, "batch_size": 16}
QUICK: Final = {"embed_dim": 64, "num_heads": 2, "num_layers": 2, "context": 64, "batch_size": 8}


class Clock:
    """Keeps the time at the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def stepped(self, shown: object) -> None:
        self.ends.append(time.perf_counter())

    def said(self, line: str) -> None:
        """Do nothing."""

    def closed(self) -> None:
        """Do nothing."""


def step_time(sizes: dict[str, Any], steps: int, degrees: ParallelOptions) -> float:
    """The median time of a step on this rank, in seconds."""
    options = LanguageOptions(**sizes, steps=steps, eval_every=10 * steps, device="cpu")
    ids = torch.randint(0, VOCABULARY, (100_000,), generator=torch.Generator().manual_seed(0))
    ranks, clock = Ranks(degrees), Clock()
    task = LanguageTask(ids, ids[: options.context + 1], options, "benchmark", ranks)
    Engine(build_language_model(options, vocab_size=VOCABULARY), task, options, watcher=clock, ranks=ranks).fit()
    times = [last - first for first, last in zip(clock.ends, clock.ends[1:], strict=False)]
    return statistics.median(times[WARM_UP:])


def measured(name: str, degrees: ParallelOptions, threads: int, sizes: dict[str, Any], steps: int) -> float:
    """The time of a step of the slowest rank, in seconds."""
    if degrees.processes == 1:
        # Not on a rank: after a fork the kernels compute with one thread.
        torch.set_num_threads(threads)
        slowest = step_time(sizes, steps, degrees)
    else:
        slowest = max(run_ranks(step_time, degrees.processes, sizes, steps, degrees, threads=threads, timeout=LIMIT))
    print(f"{name}: {1000 * slowest:.1f} ms a step", flush=True)
    return slowest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    sizes, ranks = QUICK if arguments.quick else USUAL, arguments.ranks
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {sizes}")
    cases: dict[str, Callable[[], float]] = {
        f"1 process of {ranks} threads": lambda: measured(
            "one", ParallelOptions(data_parallel=1), ranks, sizes, arguments.steps
        ),
        f"--data-parallel {ranks}": lambda: measured(
            "data", ParallelOptions(data_parallel=ranks), 1, sizes, arguments.steps
        ),
        f"--shard {ranks}": lambda: measured(
            "shard", ParallelOptions(data_parallel=1, shard=ranks), 1, sizes, arguments.steps
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(arguments.rounds):
        for name, case in cases.items():
            times[name].append(case())
    base = statistics.median(next(iter(times.values())))
    for name, each in times.items():
        median = statistics.median(each)
        print(f"{name:<28} {1000 * median:9.1f} ms a step   speed {base / median:.2f}")


if __name__ == "__main__":
    main()
