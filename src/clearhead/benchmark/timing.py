"""Interleaved timing: every contender runs once per round, so a slow phase of the machine affects all equally."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clearhead.errors import ShapeError
from clearhead.garbage_collector import collector_off

__all__ = ["Timing", "geometric_mean", "interleaved"]

_FEWEST_ROUNDS = 3
#: Idle threads of ONNX Runtime were measured to spin for about 50 ms before they sleep.
_PAUSE_SECONDS = 0.1
#: Calls shorter than this run a second time before the repetitions per sample are chosen.
_BRIEF_SECONDS = 0.1


@dataclass(frozen=True)
class Timing:
    """Seconds per call: median and quartiles of the runs, and the runs in measured order."""

    median: float
    q1: float
    q3: float
    runs: tuple[float, ...]

    @classmethod
    def of(cls, runs: tuple[float, ...]) -> Timing:
        """Median and quartiles of some runs.

        >>> Timing.of((3.0, 1.0, 2.0))
        Timing(median=2.0, q1=1.5, q3=2.5, runs=(3.0, 1.0, 2.0))
        """
        if len(runs) == 1:
            return cls(runs[0], runs[0], runs[0], runs)
        q1, median, q3 = statistics.quantiles(runs, n=4, method="inclusive")
        return cls(median, q1, q3, runs)

    def to_dict(self) -> dict[str, Any]:
        """The numbers for JSON, in seconds."""
        return {"median": self.median, "q1": self.q1, "q3": self.q3, "runs": list(self.runs)}


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive numbers.

    >>> geometric_mean([1.0, 4.0])
    2.0
    """
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 9,
    warmup: int = 2,
    min_seconds: float = 0.005,
    seconds: float | None = None,
    fewest: int = _FEWEST_ROUNDS,
    after_round: Callable[[int], None] = lambda done: None,
    isolated: Collection[str] = (),
) -> dict[str, Timing]:
    """Time several calls in interleaved rounds: a, b, c, then c, b, a, then b, c, a, and so on.

    Args:
        calls: the calls to time, by name. Build their inputs beforehand.
        repeats: number of rounds; each call gives one sample per round.
        warmup: untimed calls of each contender.
        min_seconds: shortest duration of a sample; shorter calls are repeated and their mean is the sample.
        seconds: stop after the round in which this much time has passed, but not before ``fewest`` rounds.
        fewest: smallest number of rounds, at most ``repeats``.
        after_round: called with the number of rounds done, for a progress bar.
        isolated: names of calls that start their own threads or clear the caches. Before and after them there is a
            pause, in which spinning threads go to sleep, and one untimed call of the next contender.

    Returns:
        A ``Timing`` for each name, in seconds per call.

    Raises:
        ShapeError: ``calls`` is empty, or ``repeats`` is less than 1.

    >>> sorted(interleaved({"sum": lambda: sum(range(10)), "max": lambda: max(range(10))}, repeats=3))
    ['max', 'sum']
    """
    if not calls or repeats < 1:
        raise ShapeError.about(
            "interleaved",
            "calls" if repeats >= 1 else "repeats",
            must="be at least one",
            got="none" if repeats >= 1 else repeats,
            then="Pass at least one call and one round.",
        )
    inner = {name: _settle(call, warmup, min_seconds) for name, call in calls.items()}
    names = list(calls)
    runs: dict[str, list[float]] = {name: [] for name in names}
    started = time.perf_counter()
    before = names[-1]
    for turn in range(repeats):
        for name in _order(names, turn):
            if name in isolated or before in isolated:
                time.sleep(_PAUSE_SECONDS)
                calls[name]()
            runs[name].append(_sample(calls[name], inner[name]))
            before = name
        after_round(turn + 1)
        late = seconds is not None and time.perf_counter() - started > seconds
        if late and turn + 1 >= fewest:
            break
    return {name: Timing.of(tuple(samples)) for name, samples in runs.items()}


def _order(names: list[str], turn: int) -> list[str]:
    """Order of a round: every second round runs backwards, so no call always follows the same one."""
    first = turn // 2 % len(names)
    rotated = names[first:] + names[:first]
    return rotated[::-1] if turn % 2 else rotated


def _settle(call: Callable[[], object], warmup: int, min_seconds: float) -> int:
    """Warm a call up and return the repetitions of a sample that make it last ``min_seconds``.

    One call is not enough where calls take microseconds: the first is much slower than the others, and too few
    repetitions would time the call with colder caches.
    """
    for _ in range(warmup):
        call()
    times, duration = 1, _sample(call, 1)
    if duration < _BRIEF_SECONDS:
        duration = min(duration, _sample(call, 1))
    while times * (duration := max(duration, 1e-9)) < min_seconds / 2:
        times = min(10 * times, max(times + 1, round(min_seconds / duration)))
        duration = _sample(call, times)
    return max(1, round(min_seconds / duration))


def _sample(call: Callable[[], object], times: int) -> float:
    """Seconds per call over ``times`` calls, with the garbage collector off as in ``timeit``."""
    with collector_off():
        started = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - started) / times
