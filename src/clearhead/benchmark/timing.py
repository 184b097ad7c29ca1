"""Fair timing: every contender runs once in each round, so that a slow second of the machine hits all alike."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clearhead.errors import ShapeError

__all__ = ["Timing", "geometric_mean", "interleaved"]

_FEWEST_ROUNDS = 3
#: Threads of ONNX Runtime that found no more work were seen to wait for it some 50 ms before they slept.
_PAUSE_SECONDS = 0.1
#: What is called a second time before it is decided how often a sample repeats it.
_BRIEF_SECONDS = 0.1


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median of the runs, their quartiles, and the runs themselves in the order taken."""

    median: float
    q1: float
    q3: float
    runs: tuple[float, ...]

    @classmethod
    def of(cls, runs: tuple[float, ...]) -> Timing:
        """The summary of some runs.

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
    apart: Collection[str] = (),
) -> dict[str, Timing]:
    """Time several calls in turns: a, b, c, then c, b, a, then b, c, a, and so on.

    Args:
        calls: what to time, by name. Build what they need before, outside the clock.
        repeats: rounds; in each one every call gives one sample.
        warmup: calls of each before the clock starts.
        min_seconds: a sample repeats a shorter call until it has lasted this long, and counts the mean.
        seconds: stop after the round in which this much time has passed, but not before ``fewest`` rounds.
        fewest: rounds that are made in any case, if ``repeats`` allows.
        after_round: told the number of rounds done, for a progress bar.
        apart: names of calls that bring threads of their own or empty the caches. Before and after them there is a
            pause, in which waiting threads go to sleep, and one call that no clock sees, which wakes the next one's.

    Returns:
        A ``Timing`` for each name, in seconds per call.

    Raises:
        ShapeError: nothing to time, or fewer than one round.

    >>> sorted(interleaved({"sum": lambda: sum(range(10)), "max": lambda: max(range(10))}, repeats=3))
    ['max', 'sum']
    """
    if not calls or repeats < 1:
        raise ShapeError.about(
            "interleaved",
            "calls" if repeats >= 1 else "repeats",
            must="be at least one",
            got="none" if repeats >= 1 else repeats,
            then="Name what to time and how often.",
        )
    inner = {name: _settle(call, warmup, min_seconds) for name, call in calls.items()}
    names = list(calls)
    runs: dict[str, list[float]] = {name: [] for name in names}
    started = time.perf_counter()
    before = names[-1]
    for turn in range(repeats):
        for name in _order(names, turn):
            if name in apart or before in apart:
                time.sleep(_PAUSE_SECONDS)
                calls[name]()
            runs[name].append(_sample(calls[name], inner[name]))
            before = name
        after_round(turn + 1)
        late = seconds is not None and time.perf_counter() - started > seconds
        if late and turn + 1 >= fewest:
            break
    return {name: Timing.of(tuple(taken)) for name, taken in runs.items()}


def _order(names: list[str], turn: int) -> list[str]:
    """Every second round runs backwards, so that nobody always follows the same one."""
    first = turn // 2 % len(names)
    rotated = names[first:] + names[:first]
    return rotated[::-1] if turn % 2 else rotated


def _settle(call: Callable[[], object], warmup: int, min_seconds: float) -> int:
    """Warm a call up; how often a sample must repeat it to last ``min_seconds``.

    One call cannot tell where calls take microseconds: the first is much slower than the others, and who is repeated
    less often for it is timed with colder caches.
    """
    for _ in range(warmup):
        call()
    times, once = 1, _sample(call, 1)
    if once < _BRIEF_SECONDS:
        once = min(once, _sample(call, 1))
    while times * (once := max(once, 1e-9)) < min_seconds / 2:
        times = min(10 * times, max(times + 1, round(min_seconds / once)))
        once = _sample(call, times)
    return max(1, round(min_seconds / once))


def _sample(call: Callable[[], object], times: int) -> float:
    """Seconds per call over ``times`` calls, with the garbage collector held back as in ``timeit``."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        started = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - started) / times
    finally:
        if collecting:
            gc.enable()
