"""A sweep over a grid of calls, from tiny to large, that finds calls where "auto" is slower than torch's function.

Each call is timed against ``scaled_dot_product_attention`` in rounds that run both, in alternating order; calls of
microseconds are repeated within a sample. The two samples of a round are milliseconds apart, so slow drifts of the
machine cancel in their ratio. The figure is the median of these ratios. Calls that look slower, or whose ratio is too
noisy to decide, are timed again with more rounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Self

import torch

from clearhead.benchmark.peers import OURS, SDPA
from clearhead.benchmark.results import timed
from clearhead.benchmark.rows import TensorRow
from clearhead.benchmark.timing import Timing

__all__ = ["SLOWEST_ALLOWED", "Point", "grid_rows", "measure_point", "walk"]

#: 3 % slower than torch's function.
SLOWEST_ALLOWED = 1 / 1.03
_OURS_AGAIN, _SDPA_AGAIN = f"{OURS}, again", f"{SDPA}, again"
_DTYPES = (torch.float32, torch.bfloat16)
_MOST_CHECKED = 2**22
#: Rounds, seconds after which they stop, and smallest number of rounds.
FIRST, RETRY = (41, 1.0, 5), (401, 4.0, 15)

#: (batch, heads, length, head_dim)
_SQUARE = (
    (1, 1, 8, 8), (16, 4, 32, 16), (2, 4, 16, 32), (1, 8, 64, 64), (4, 8, 100, 64), (8, 12, 128, 64), (1, 4, 256, 256),
    (1, 12, 512, 64), (2, 8, 384, 80), (1, 8, 1024, 128), (1, 12, 2048, 64), (1, 12, 4096, 64),
)  # fmt: skip
#: The same with another number of keys: ((batch, heads, q_len, head_dim), kv_heads, k_len, with training)
_OBLONG = (
    ((1, 32, 1, 128), 8, 1024, False),
    ((16, 8, 1, 64), None, 512, False),
    ((8, 8, 32, 64), None, 256, True),
    ((1, 8, 16, 64), None, 2048, True),
)


def grid_rows() -> list[TensorRow]:
    """Every call of the grid."""
    square = [
        TensorRow(shape=shape, dtype=dtype, causal=causal, training=training, most_checked=_MOST_CHECKED)
        for shape, dtype, causal, training in product(_SQUARE, _DTYPES, (False, True), (False, True))
    ]
    oblong = [
        TensorRow(shape=shape, dtype=dtype, kv_heads=kv_heads, k_len=k_len, training=training)
        for (shape, kv_heads, k_len, trains), dtype in product(_OBLONG, _DTYPES)
        for training in ((False, True) if trains else (False,))
    ]
    return square + oblong


@dataclass(frozen=True, kw_only=True)
class Point:
    """One call of the grid.

    Attributes:
        title: description of the call.
        group: mode and dtype.
        backend: the backend that "auto" selected.
        ours: median seconds of clearhead's call.
        theirs: median seconds of torch's call.
        ratio: how many times as fast clearhead is: the median of the rounds' ratios.
        noise: standard error of ``ratio``, from the quartiles of the rounds' ratios.
        rounds: number of rounds.
        against_itself: median ratio of torch's function to itself in the same rounds; None where it was not repeated.
    """

    title: str
    group: str
    backend: str
    ours: float
    theirs: float
    ratio: float
    noise: float
    rounds: int
    against_itself: float | None = None

    @property
    def slower(self) -> bool:
        """Whether clearhead is slower by more than 3 %."""
        return self.ratio < SLOWEST_ALLOWED

    @property
    def doubtful(self) -> bool:
        """Whether clearhead may be slower by more than 3 %, within two standard errors."""
        return self.ratio - 2 * self.noise < SLOWEST_ALLOWED

    def to_dict(self) -> dict[str, Any]:
        """The point as JSON values."""
        return {**asdict(self), "slower": self.slower}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The point that ``to_dict`` wrote."""
        return cls(**{name: value for name, value in values.items() if name != "slower"})


def measure_point(row: TensorRow, *, retry: bool = False) -> Point:
    """Check and time one call of the grid.

    Args:
        row: the call.
        retry: whether to use many rounds and run each call twice per round, which shows how equal calls compare.

    Raises:
        UnsupportedError: the contenders do not compute the same numbers.
    """
    repeats, seconds, fewest = RETRY if retry else FIRST
    comparison = row.comparison()
    if retry:
        # Both run twice: a call that follows itself finds warm caches, and this must happen equally often for both.
        comparison = replace(
            comparison, yardsticks={_OURS_AGAIN: comparison.calls[OURS], _SDPA_AGAIN: comparison.calls[SDPA]}
        )
    result = timed(comparison, repeats=repeats, seconds=seconds, fewest=fewest)
    ours, theirs = (_both(result.timings, *names) for names in ((OURS, _OURS_AGAIN), (SDPA, _SDPA_AGAIN)))
    ratios = paired(theirs, ours)
    return Point(
        title=row.title,
        group=f"{'training' if row.training else 'forward'} {row.group}",
        backend=result.backend,
        ours=ours.median,
        theirs=theirs.median,
        ratio=ratios.median,
        noise=standard_error(ratios),
        rounds=len(ratios.runs),
        against_itself=paired(result.timings[_SDPA_AGAIN], result.timings[SDPA]).median if retry else None,
    )


def _both(timings: Mapping[str, Timing], name: str, repeated: str) -> Timing:
    """The timing of a contender; the mean of the two samples of a round where it ran twice."""
    if repeated not in timings:
        return timings[name]
    return Timing.of(tuple((a + b) / 2 for a, b in zip(timings[name].runs, timings[repeated].runs, strict=True)))


def paired(one: Timing, other: Timing) -> Timing:
    """Ratios of two contenders per round, with their median and quartiles."""
    return Timing.of(tuple(a / b for a, b in zip(one.runs, other.runs, strict=True)))


def standard_error(ratios: Timing) -> float:
    """Standard error of the median: sqrt(pi / 2) times that of the mean, the spread taken from the quartiles."""
    spread = (ratios.q3 - ratios.q1) / 1.349
    return math.sqrt(math.pi / 2) * spread / math.sqrt(len(ratios.runs))


def walk(
    rows: Sequence[TensorRow],
    *,
    keep: Callable[[Point], None],
    report: Callable[[str], None] = lambda title: None,
    measured: Iterable[Point] = (),
    retry_seconds: float = 180.0,
) -> list[Point]:
    """Measure every row once, then the doubtful ones again, slowest first, until the time is over.

    Args:
        rows: the calls.
        keep: called with each point as soon as it is measured, also when it is measured again.
        report: called with the title of the next measurement.
        measured: points of an earlier run; their first measurement is skipped.
        retry_seconds: how long doubtful points may be measured again.
    """
    points = {point.title: point for point in measured}
    by_title = {row.title: row for row in rows}
    for title, row in by_title.items():
        if title not in points:
            report(title)
            points[title] = measure_point(row)
            keep(points[title])
    started = time.perf_counter()
    doubtful = [points[title] for title in by_title if points[title].doubtful and points[title].against_itself is None]
    for point in sorted(doubtful, key=lambda point: point.ratio):
        if time.perf_counter() - started > retry_seconds:
            break
        report(f"again: {point.title}")
        points[point.title] = measure_point(by_title[point.title], retry=True)
        keep(points[point.title])
    return [points[title] for title in by_title]
