"""Measuring a list of settings, and the result as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

import torch

from clearhead.benchmark.cases import Case, Setting, case_of
from clearhead.benchmark.machine import machine, threads, torch_build, versions
from clearhead.benchmark.memory import peak_extra_bytes
from clearhead.benchmark.peers import OURS
from clearhead.benchmark.timing import Timing, interleaved
from clearhead.ops.library import isa_name
from clearhead.ops.throughput import product_rate

__all__ = ["Result", "Timed", "facts", "measure", "report", "timed"]


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Contenders that were timed together.

    Attributes:
        backend: the backend that clearhead ran on.
        timings: of each contender, in seconds per call.
        errors: each contender's largest relative error against float64; none for those that do other work.
        left_out: contenders that did not take part, and why.
        extra_bytes: peak memory of each contender beyond its inputs; empty where it was not measured.
    """

    backend: str
    timings: Mapping[str, Timing]
    errors: Mapping[str, float]
    left_out: Mapping[str, str]
    extra_bytes: Mapping[str, int] = field(default_factory=dict)

    def ratio(self, name: str, ours: str = OURS) -> float:
        """How many times as long a contender takes as clearhead, by medians."""
        return self.timings[name].median / self.timings[ours].median


@dataclass(frozen=True, kw_only=True)
class Result(Timed):
    """One setting, measured.

    Attributes:
        setting: what was measured.
    """

    setting: Setting

    def rate(self, name: str) -> float:
        """GFLOP/s of a contender, by its median."""
        return self.setting.operations / self.timings[name].median / 1e9

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values."""
        contenders = {
            name: {
                "seconds": timing.to_dict(),
                "times_clearhead": self.ratio(name),
                "gflops": self.rate(name),
                "relative_error": self.errors.get(name),
                "extra_bytes": self.extra_bytes.get(name),
            }
            for name, timing in self.timings.items()
        }
        return {
            **self.setting.to_dict(),
            "backend": self.backend,
            "contenders": contenders,
            "left_out": dict(self.left_out),
        }


def measure(
    setting: Setting,
    *,
    repeats: int = 9,
    seconds: float | None = None,
    after_round: Callable[[int], None] = lambda done: None,
) -> Result:
    """Check that the contenders do the same work, then time them in turns.

    Args:
        setting: what to measure.
        repeats: rounds of the interleaved timing.
        seconds: time after which rounds stop; three are always made.
        after_round: told the number of rounds done.

    Raises:
        UnsupportedError: the contenders do not compute the same numbers.
    """
    case = case_of(setting)
    found = timed(case, repeats=repeats, seconds=seconds, memory=setting.level == "attention", after_round=after_round)
    return Result(setting=setting, **{one.name: getattr(found, one.name) for one in fields(found)})


def timed(
    case: Case,
    *,
    repeats: int,
    seconds: float | None = None,
    fewest: int = 3,
    memory: bool = False,
    after_round: Callable[[int], None] = lambda done: None,
) -> Timed:
    """Check a case, then time its contenders and yardsticks in turns; see ``measure``.

    Args:
        case: the contenders.
        repeats: rounds of the interleaved timing.
        seconds: time after which rounds stop.
        fewest: rounds that are made in any case.
        memory: whether to measure the contenders' peak memory before.
        after_round: told the number of rounds done.
    """
    errors = case.check()
    sizes = {name: peak_extra_bytes(call) for name, call in case.calls.items()} if memory else {}
    # The check has warmed the contenders up.
    timings = interleaved(
        case.timed,
        repeats=repeats,
        warmup=0,
        seconds=seconds,
        fewest=fewest,
        after_round=after_round,
        apart=case.apart,
    )
    return Timed(
        backend=case.backend(),
        timings=timings,
        errors=errors,
        left_out=case.left_out,
        extra_bytes={name: size for name, size in sizes.items() if size is not None},
    )


def report(results: Sequence[Result], *, command: str, load_before: float | None = None) -> dict[str, Any]:
    """The results with what a figure needs beside it: machine, its load before the start, versions, threads."""
    return {**facts(command=command, load_before=load_before), "results": [result.to_dict() for result in results]}


def facts(*, command: str, load_before: float | None = None) -> dict[str, Any]:
    """What a figure needs beside it.

    ``kernels`` is the instruction set that clearhead's run on, None without them, ``limits`` the GFLOP/s of their
    product in the first caches, which hardly anything that is made of it exceeds.
    """
    return {
        "command": command,
        "taken": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "load_before": load_before,
        "versions": versions(),
        "torch": torch_build(),
        "kernels": isa_name(),
        "limits": {str(dtype)[6:]: product_rate(dtype) for dtype in (torch.float32, torch.bfloat16)},
        "threads": threads(),
    }
