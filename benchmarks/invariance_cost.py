"""What one order of sums costs: every row of the benchmark suites with and without ch.invariant(), in pairs.

python benchmarks/invariance_cost.py                        every suite, for an idle machine
python benchmarks/invariance_cost.py --suite forward        one suite
python benchmarks/invariance_cost.py --level portable       the same bits on every instruction set too
python benchmarks/invariance_cost.py --quick                tiny sizes and three rounds, to try the script
python benchmarks/invariance_cost.py --write                and write benchmarks/results/invariance.md

A round times each contender with and without the setting, one after the other, and the next round the other way
around. The ratio is that of the medians. Rows that raise under the setting say so.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

import clearhead as ch
from clearhead.benchmark.encoders import SWAPPED
from clearhead.benchmark.peers import OURS
from clearhead.benchmark.suites import SUITES
from clearhead.errors import UnsupportedError
from clearhead.ops.library import isa_name

#: What ``set_invariant`` takes.
Level = bool | Literal["portable"]
REPORT = Path(__file__).resolve().parent / "results" / "invariance.md"
#: Seconds of a sample, and calls before the first one.
SAMPLE, WARMUP = 0.02, 2
#: Largest ratio for each dtype.
ALLOWED = {torch.float32: 1.10, torch.bfloat16: 1.15}


#: The levels of ``set_invariant`` by name.
LEVELS: dict[str, Level] = {"true": True, "portable": "portable"}


def sample(call: Callable[[], object], times: int, level: Level) -> float:
    """Seconds per call in one setting."""
    ch.set_invariant(level)
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) / times


def pair(call: Callable[[], object], rounds: int, level: Level) -> tuple[float, float, float]:
    """The medians without and with the setting, and the median of the rounds' ratios."""
    settings: tuple[Level, Level] = (False, level)
    for setting in settings:
        sample(call, WARMUP, setting)
    times = max(1, round(SAMPLE / max(1e-7, min(sample(call, 1, False), sample(call, 1, False)))))
    without, within = list[float](), list[float]()
    for turn in range(rounds):
        for setting in settings if turn % 2 else settings[::-1]:
            (within if setting else without).append(sample(call, times, setting))
    ratios = [one / other for one, other in zip(within, without, strict=True)]
    return statistics.median(without), statistics.median(within), statistics.median(ratios)


def rows(suite: str, *, quick: bool, rounds: int, level: Level) -> list[str]:
    """The table's lines of a suite."""
    lines = []
    for row in SUITES[suite].rows():
        row = row.small() if quick else row
        for name in (OURS, SWAPPED):
            ch.set_invariant(False)
            call = row.comparison().calls.get(name)
            if call is None:
                continue
            try:
                without, within, ratio = pair(call, rounds, level)
            except UnsupportedError as error:
                lines.append(f"| {suite} | {row.title} | {name} | – | – | refused: {str(error)[:80]} |")
                continue
            finally:
                ch.set_invariant(False)
            mark = " **over**" if ratio > ALLOWED.get(row.dtype, 1.10) else ""
            lines.append(
                f"| {suite} | {row.title} | {name} | {without * 1e3:.3f} | {within * 1e3:.3f} | {ratio:.2f}{mark} |"
            )
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="append", choices=[*SUITES], help="one of the suites; repeatable")
    parser.add_argument("--level", choices=[*LEVELS], default="true", help="the level of set_invariant")
    parser.add_argument("--rounds", type=int, default=11, help="pairs of each row")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--write", action="store_true", help=f"write {REPORT.name}")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    lines = [
        "# Cost of one order of sums",
        "",
        f"Made by `python benchmarks/invariance_cost.py --level {options.level} --write` on "
        f"{platform.processor() or platform.machine()} "
        f"({isa_name()}), {torch.get_num_threads()} threads, torch {torch.__version__}. Times are medians in "
        "milliseconds per call; the ratio is the median over pairs. **over**: above 1.10, in bfloat16 1.15.",
        "",
        "| suite | row | contender | without | with | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for suite in options.suite or SUITES:
        lines += rows(
            suite, quick=options.quick, rounds=3 if options.quick else options.rounds, level=LEVELS[options.level]
        )
    text = "\n".join([*lines, ""])
    if options.write and not options.quick and not options.suite and options.level == "true":
        REPORT.write_text(text, encoding="utf-8")
        print(f"wrote {REPORT.name}")
    else:
        print(text)


if __name__ == "__main__":
    main()
