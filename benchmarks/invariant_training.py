"""Whether training ends in the same bits however a batch is divided, and what it takes: one table.

python benchmarks/invariant_training.py             200 steps of each run
python benchmarks/invariant_training.py --steps 20  fewer

A small character model is trained on one batch a step, in micro-batches and on processes. Times are of one run each,
in which a process has one thread: a hint, no measurement.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import clearhead as ch
from clearhead.distributed.launch import run_ranks
from clearhead.train import LanguageOptions, ParallelOptions, train_language_model
from clearhead.train.ranks import Ranks

SEQUENCES, VOCABULARY = 16, 40


@dataclass(frozen=True)
class Division:
    """How the sequences of a batch are divided.

    Attributes:
        title: of the row.
        parts: micro-batches of a process.
        ranks: number of processes.
        precision: of ``LanguageOptions``.
    """

    title: str
    parts: int = 1
    ranks: int = 1
    precision: str = "fp32"


DIVISIONS = (
    Division("one batch of 16"),
    Division("micro-batches of 8", parts=2),
    Division("micro-batches of 6, 5 and 5", parts=3),
    Division("micro-batches of 4 and 3", parts=5),
    Division("micro-batches of 3 and 2", parts=6),
    Division("micro-batches of 1", parts=16),
    Division("2 processes", ranks=2),
    Division("2 processes, micro-batches of 3 and 2", parts=3, ranks=2),
    Division("3 processes", ranks=3),
    Division("4 processes", ranks=4),
)


def train(division: Division, steps: int, invariant: bool) -> tuple[dict[str, Tensor], float]:
    """The weights after some steps, and the seconds that they took; called by each process."""
    torch.set_num_threads(1)
    options = LanguageOptions(
        embed_dim=64, num_heads=4, num_layers=2, context=64, batch_size=SEQUENCES, dropout=0.1, steps=steps,
        eval_every=steps, accumulate=division.parts, precision=division.precision, device="cpu",
    )  # fmt: skip
    ids = torch.randint(0, VOCABULARY, (8_000,), generator=torch.Generator().manual_seed(0))
    ids = torch.where(torch.arange(8_000) % 3 == 0, ids, (torch.arange(8_000) * 7) % VOCABULARY)
    with ch.invariant(invariant):
        ranks = Ranks(ParallelOptions(data_parallel=dist.get_world_size())) if dist.is_initialized() else None
        start = time.perf_counter()
        trained = train_language_model(ids, ids[:200], vocab_size=VOCABULARY, options=options, ranks=ranks)
        seconds = time.perf_counter() - start
    weights = {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in _state(trained.model)}
    return weights, seconds


def _state(model: torch.nn.Module) -> list[tuple[str, Any]]:
    return list(model.state_dict().items())


def run(division: Division, steps: int, invariant: bool) -> tuple[dict[str, Tensor], float]:
    """The same on as many processes as the division has."""
    if division.ranks == 1:
        return train(division, steps, invariant)
    return run_ranks(train, division.ranks, division, steps, invariant, timeout=1800)[0]


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of two weights."""
    return max((one[name] - other[name]).abs().max().item() for name in one)


def table(steps: int, precision: str) -> list[str]:
    """Rows in Markdown."""
    divisions = [replace(division, precision=precision) for division in DIVISIONS]
    lines = [
        "| batch of 16 sequences as | under the setting | seconds | without it | seconds |",
        "|---|---|---|---|---|",
    ]
    wholes = [run(divisions[0], steps, setting)[0] for setting in (True, False)]
    for division in divisions:
        cells = []
        for setting, whole in zip((True, False), wholes, strict=True):
            weights, seconds = run(division, steps, setting)
            far = distance(weights, whole)
            equal = all(torch.equal(weights[name], whole[name]) for name in whole)
            cells += ["equal weights" if equal else f"{far:.1e} apart", f"{seconds:.1f}"]
        lines.append(f"| {division.title} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of each run")
    steps = parser.parse_args().steps
    for precision in ("fp32", "bf16"):
        print(f"\n{precision}, {steps} steps, torch {torch.__version__}, clearhead {ch.__version__}")
        table(steps, precision)


if __name__ == "__main__":
    main()
