"""The walk over a grid of calls, tiny to large: is "auto" anywhere slower than torch's own function?

Each call is timed against ``scaled_dot_product_attention`` in rounds that run both, in alternating order; calls of
microseconds are repeated within a sample. A round's two samples lie milliseconds apart, so their ratio does not see
the machine's slower drifts, and the median of these ratios is the figure. What looks slower, or too noisy to tell,
is timed again with more rounds.
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
from clearhead.benchmark.rows import AttentionRow
from clearhead.benchmark.timing import Timing

__all__ = ["SLOWEST_ALLOWED", "Point", "grid_rows", "measure_point", "walk"]

#: Three in a hundred slower than torch's function.
SLOWEST_ALLOWED = 1 / 1.03
_OURS_AGAIN, _SDPA_AGAIN = f"{OURS}, again", f"{SDPA}, again"
_DTYPES = (torch.float32, torch.bfloat16)
_MOST_CHECKED = 2**22
#: Rounds, seconds after which they stop, and rounds made in any case.
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


def grid_rows() -> list[AttentionRow]:
    """Every call of the grid."""
    square = [
        AttentionRow(shape=shape, dtype=dtype, causal=causal, training=training, most_checked=_MOST_CHECKED)
        for shape, dtype, causal, training in product(_SQUARE, _DTYPES, (False, True), (False, True))
    ]
    oblong = [
        AttentionRow(shape=shape, dtype=dtype, kv_heads=kv_heads, k_len=k_len, training=training)
        for (shape, kv_heads, k_len, trains), dtype in product(_OBLONG, _DTYPES)
        for training in ((False, True) if trains else (False,))
    ]
    return square + oblong


@dataclass(frozen=True, kw_only=True)
class Point:
    """One call of the grid.

    Attributes:
        title: what the call is.
        group: mode and dtype.
        backend: what "auto" chose.
        ours: seconds of clearhead's call, median.
        theirs: seconds of torch's, median.
        ratio: how many times as fast clearhead is: the median of the rounds' ratios.
        noise: standard error of ``ratio``, from the quartiles of the rounds' ratios.
        rounds: how many.
        against_itself: torch's function against itself in the same rounds; None where it was not timed again.
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
        """Whether clearhead is slower by more than three in a hundred."""
        return self.ratio < SLOWEST_ALLOWED

    @property
    def doubtful(self) -> bool:
        """Whether it might be, given the noise."""
        return self.ratio - 2 * self.noise < SLOWEST_ALLOWED

    def to_dict(self) -> dict[str, Any]:
        """The point as plain values."""
        return {**asdict(self), "slower": self.slower}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The point that ``to_dict`` wrote."""
        return cls(**{name: value for name, value in values.items() if name != "slower"})


def measure_point(row: AttentionRow, *, retry: bool = False) -> Point:
    """Check and time one call of the grid.

    Args:
        row: the call.
        retry: with many rounds, and each call twice in a round, which shows how well equals can be told apart.

    Raises:
        UnsupportedError: the contenders do not compute the same numbers.
    """
    repeats, seconds, fewest = RETRY if retry else FIRST
    case = row.case()
    if retry:
        # Both twice and in turns: who follows itself finds its code and memory in the caches, so nobody may do it more.
        case = replace(case, yardsticks={_OURS_AGAIN: case.calls[OURS], _SDPA_AGAIN: case.calls[SDPA]})
    found = timed(case, repeats=repeats, seconds=seconds, fewest=fewest)
    ours, theirs = (_both(found.timings, *names) for names in ((OURS, _OURS_AGAIN), (SDPA, _SDPA_AGAIN)))
    ratios = paired(theirs, ours)
    return Point(
        title=row.title,
        group=f"{'training' if row.training else 'forward'} {row.group}",
        backend=found.backend,
        ours=ours.median,
        theirs=theirs.median,
        ratio=ratios.median,
        noise=standard_error(ratios),
        rounds=len(ratios.runs),
        against_itself=paired(found.timings[_SDPA_AGAIN], found.timings[SDPA]).median if retry else None,
    )


def _both(timings: Mapping[str, Timing], name: str, again: str) -> Timing:
    """A contender's seconds, the mean of a round's two samples where it has two."""
    if again not in timings:
        return timings[name]
    return Timing.of(tuple((a + b) / 2 for a, b in zip(timings[name].runs, timings[again].runs, strict=True)))


def paired(one: Timing, other: Timing) -> Timing:
    """The ratios of two contenders round by round, with their median and quartiles."""
    return Timing.of(tuple(a / b for a, b in zip(one.runs, other.runs, strict=True)))


def standard_error(ratios: Timing) -> float:
    """Of a median: sqrt(pi / 2) times that of a mean, the spread read from the quartiles as for normal numbers."""
    spread = (ratios.q3 - ratios.q1) / 1.349
    return math.sqrt(math.pi / 2) * spread / math.sqrt(len(ratios.runs))


def walk(
    rows: Sequence[AttentionRow],
    *,
    keep: Callable[[Point], None],
    told: Callable[[str], None] = lambda title: None,
    known: Iterable[Point] = (),
    retry_seconds: float = 180.0,
) -> list[Point]:
    """Every row once; then the doubtful ones again, those that look slowest first, while time lasts.

    Args:
        rows: the calls.
        keep: takes each point as soon as it is measured, one measured again too.
        told: hears what is measured next.
        known: points measured before; they are not measured a first time again.
        retry_seconds: how long doubtful points may be measured again.
    """
    points = {point.title: point for point in known}
    by_title = {row.title: row for row in rows}
    for title, row in by_title.items():
        if title not in points:
            told(title)
            points[title] = measure_point(row)
            keep(points[title])
    started = time.perf_counter()
    doubtful = [points[title] for title in by_title if points[title].doubtful and points[title].against_itself is None]
    for point in sorted(doubtful, key=lambda point: point.ratio):
        if time.perf_counter() - started > retry_seconds:
            break
        told(f"again: {point.title}")
        points[point.title] = measure_point(by_title[point.title], retry=True)
        keep(points[point.title])
    return [points[title] for title in by_title]
