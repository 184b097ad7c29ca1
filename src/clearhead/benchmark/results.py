"""Measurement of settings, and the results as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

import torch

from clearhead.benchmark.cases import Comparison, Setting, comparison_of
from clearhead.benchmark.machine import machine, threads, torch_build, versions
from clearhead.benchmark.memory import peak_extra_bytes
from clearhead.benchmark.peers import OURS
from clearhead.benchmark.timing import Timing, interleaved
from clearhead.ops.library import isa_name
from clearhead.ops.throughput import product_rate

__all__ = ["SettingResult", "Timed", "facts", "measure", "report", "timed"]


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Contenders that were timed together.

    Attributes:
        backend: the backend that clearhead ran on.
        timings: the timing of each contender, in seconds per call.
        errors: largest relative error of each contender against float64; contenders that do different work have none.
        left_out: the reason for each contender that was left out.
        extra_bytes: peak memory of each contender beyond its inputs; empty where it was not measured.
    """

    backend: str
    timings: Mapping[str, Timing]
    errors: Mapping[str, float]
    left_out: Mapping[str, str]
    extra_bytes: Mapping[str, int] = field(default_factory=dict)

    def ratio(self, name: str, ours: str = OURS) -> float:
        """A contender's median time divided by clearhead's."""
        return self.timings[name].median / self.timings[ours].median


@dataclass(frozen=True, kw_only=True)
class SettingResult(Timed):
    """One setting, measured.

    Attributes:
        setting: what was measured.
    """

    setting: Setting

    def rate(self, name: str) -> float:
        """GFLOP/s of a contender, from its median."""
        return self.setting.operations / self.timings[name].median / 1e9

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
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
) -> SettingResult:
    """Check that the contenders do the same work, then time them in interleaved rounds.

    Args:
        setting: what to measure.
        repeats: rounds of the interleaved timing.
        seconds: time after which the rounds stop, but not before the third.
        after_round: called with the number of rounds done.

    Raises:
        UnsupportedError: the contenders do not compute the same numbers.
    """
    comparison = comparison_of(setting)
    result = timed(
        comparison, repeats=repeats, seconds=seconds, memory=setting.level == "attention", after_round=after_round
    )
    return SettingResult(setting=setting, **{one.name: getattr(result, one.name) for one in fields(result)})


def timed(
    comparison: Comparison,
    *,
    repeats: int,
    seconds: float | None = None,
    fewest: int = 3,
    memory: bool = False,
    after_round: Callable[[int], None] = lambda done: None,
) -> Timed:
    """Check a comparison, then time its contenders and yardsticks in interleaved rounds.

    Args:
        comparison: the contenders.
        repeats: rounds of the interleaved timing.
        seconds: time after which the rounds stop.
        fewest: smallest number of rounds, whatever ``seconds`` says.
        memory: whether to measure the contenders' peak memory first.
        after_round: called with the number of rounds done.
    """
    comparison, errors = comparison.examine()
    sizes = {name: peak_extra_bytes(call) for name, call in comparison.calls.items()} if memory else {}
    # The check has warmed the contenders up.
    timings = interleaved(
        comparison.timed,
        repeats=repeats,
        warmup=0,
        seconds=seconds,
        fewest=fewest,
        min_seconds=comparison.block_seconds,
        after_round=after_round,
        isolated=comparison.isolated,
    )
    return Timed(
        backend=comparison.backend(),
        timings=timings,
        errors=errors,
        left_out=comparison.left_out,
        extra_bytes={name: size for name, size in sizes.items() if size is not None},
    )


def report(results: Sequence[SettingResult], *, command: str, load_before: float | None = None) -> dict[str, Any]:
    """The results with the facts of ``facts``: machine, load, versions, threads."""
    return {**facts(command=command, load_before=load_before), "results": [result.to_dict() for result in results]}


def facts(*, command: str, load_before: float | None = None) -> dict[str, Any]:
    """Command, date, machine, load, versions and threads, recorded with the results.

    ``kernels`` is the instruction set of clearhead's native kernels, None without them. ``limits`` has the GFLOP/s of
    their product in the first-level caches, an upper limit for the work that they do.
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
