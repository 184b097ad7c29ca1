"""Measuring a list of settings, and the result as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from clearhead.benchmark.cases import OURS, Setting, case_of, chosen_backend
from clearhead.benchmark.machine import machine, threads, torch_build, versions
from clearhead.benchmark.memory import peak_extra_bytes
from clearhead.benchmark.timing import Timing, interleaved

__all__ = ["Result", "measure", "report"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One setting, measured.

    Attributes:
        setting: what was measured.
        backend: the backend that clearhead ran it on.
        timings: of each contender, in seconds per call.
        errors: each contender's largest relative error against float64.
        extra_bytes: peak memory of each contender beyond its inputs; empty where it was not measured.
        left_out: contenders that did not take part, and why.
    """

    setting: Setting
    backend: str
    timings: Mapping[str, Timing]
    errors: Mapping[str, float]
    extra_bytes: Mapping[str, int]
    left_out: Mapping[str, str]

    def ratio(self, name: str) -> float:
        """How many times as long a contender takes as clearhead, by medians."""
        return self.timings[name].median / self.timings[OURS].median

    def rate(self, name: str) -> float:
        """GFLOP/s of a contender, by its median."""
        return self.setting.operations / self.timings[name].median / 1e9

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values."""
        contenders = {
            name: {
                "seconds": timing.to_dict(), "times_clearhead": self.ratio(name), "gflops": self.rate(name),
                "relative_error": self.errors[name], "extra_bytes": self.extra_bytes.get(name),
            }
            for name, timing in self.timings.items()
        }  # fmt: skip
        return {
            **self.setting.to_dict(), "backend": self.backend, "contenders": contenders,
            "left_out": dict(self.left_out),
        }  # fmt: skip


def measure(
    setting: Setting, *, repeats: int = 9, seconds: float | None = None,
    after_round: Callable[[int], None] = lambda done: None,
) -> Result:  # fmt: skip
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
    errors = case.check()
    extra = {}
    if setting.level == "attention":
        found = {name: peak_extra_bytes(call) for name, call in case.calls.items()}
        extra = {name: size for name, size in found.items() if size is not None}
    # The check has warmed every contender up.
    timings = interleaved(case.calls, repeats=repeats, warmup=0, seconds=seconds, after_round=after_round)
    return Result(
        setting=setting, backend=chosen_backend(setting), timings=timings, errors=errors, extra_bytes=extra,
        left_out=case.left_out,
    )  # fmt: skip


def report(results: Sequence[Result], *, command: str, load_before: float | None = None) -> dict[str, Any]:
    """The results with what a figure needs beside it: machine, its load before the start, versions, threads."""
    return {
        "command": command,
        "taken": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "load_before": load_before,
        "versions": versions(),
        "torch": torch_build(),
        "threads": threads(),
        "results": [result.to_dict() for result in results],
    }
