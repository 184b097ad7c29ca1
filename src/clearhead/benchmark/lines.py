"""The measured rows of a suite, and the verdicts on its floors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from clearhead.benchmark.memory import peak_extra_bytes
from clearhead.benchmark.peers import short_name
from clearhead.benchmark.product import OPERATIONS, PRODUCT
from clearhead.benchmark.results import Timed, timed
from clearhead.benchmark.rows import SuiteRow
from clearhead.benchmark.suites import Floor, Suite
from clearhead.benchmark.timing import Timing, geometric_mean
from clearhead.ops.throughput import product_rate

__all__ = ["Line", "Verdict", "measure_row", "product_rates", "unjudged", "verdicts"]

_FEWEST_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Line(Timed):
    """One row of a suite, measured.

    Attributes:
        title: description of the work.
        group: name of the rows that a floor covers together.
        operations: multiplications and additions of the work.
        memory_read: bytes of keys and values or of a weight, where memory traffic bounds the work.
        memory: peak bytes of each contender beyond its inputs; empty where not measured.
        limit: GFLOP/s of the kernels' product in the first-level caches, measured just before; None where the
            operations are not counted, where memory traffic bounds the work, and where there are no kernels.
    """

    title: str
    group: str
    operations: float | None
    memory_read: float | None
    memory: Mapping[str, int] = field(default_factory=dict)
    limit: float | None = None

    def rate(self, name: str) -> float | None:
        """GFLOP/s by the median; None where the operations are not counted."""
        operations = OPERATIONS if name == PRODUCT else self.operations
        return None if operations is None else operations / self.timings[name].median / 1e9

    def share(self, name: str) -> float | None:
        """The rate as a share of the machine's product rate; None where the product was not timed."""
        rate = self.rate(name)
        machine = self.rate(PRODUCT) if PRODUCT in self.timings else None
        return None if rate is None or machine is None else rate / machine

    def share_of_limit(self, name: str) -> float | None:
        """The rate as a share of the limit; None where no limit was measured."""
        rate = self.rate(name)
        return None if rate is None or self.limit is None else rate / self.limit

    def bandwidth(self, name: str) -> float | None:
        """GB/s of keys and values by the median."""
        return None if self.memory_read is None else self.memory_read / self.timings[name].median / 1e9

    def fastest(self, names: Sequence[str]) -> str | None:
        """The fastest of ``names`` that was timed; None where none was."""
        present = [name for name in names if name in self.timings]
        return min(present, key=lambda name: self.timings[name].median, default=None)

    def to_dict(self) -> dict[str, Any]:
        """The line as JSON values."""
        contenders = {
            name: {
                "seconds": timing.to_dict(),
                "times_clearhead": self.ratio(name),
                "gflops": self.rate(name),
                "share_of_product_rate": self.share(name),
                "gigabytes_per_second": self.bandwidth(name),
                "relative_error": self.errors.get(name),
                "peak_bytes": self.memory.get(name),
            }
            for name, timing in self.timings.items()
        }
        return {
            "title": self.title,
            "group": self.group,
            "backend": self.backend,
            "operations": self.operations,
            "memory_read": self.memory_read,
            "limit": self.limit,
            "contenders": contenders,
            "left_out": dict(self.left_out),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The line that ``to_dict`` wrote."""
        contenders = values["contenders"]
        errors = {name: one["relative_error"] for name, one in contenders.items()}
        return cls(
            **{name: values[name] for name in ("title", "group", "backend", "operations", "memory_read", "left_out")},
            timings={name: Timing.of(tuple(one["seconds"]["runs"])) for name, one in contenders.items()},
            errors={name: error for name, error in errors.items() if error is not None},
            memory={name: peak for name, one in contenders.items() if (peak := one.get("peak_bytes")) is not None},
            limit=values.get("limit"),
        )


def measure_row(row: SuiteRow, *, repeats: int, seconds: float | None) -> Line:
    """Check that a row's contenders do the same work, then time them in interleaved rounds.

    Args:
        row: what to measure.
        repeats: rounds of the interleaved timing.
        seconds: time after which the rounds stop, but not before the fifth.

    Raises:
        UnsupportedError: the contenders do not compute the same numbers.
    """
    comparison = row.comparison()
    counts = row.operations is not None and row.memory_read is None
    limit = product_rate(row.dtype) if counts else None
    result = timed(comparison, repeats=repeats, seconds=seconds, fewest=_FEWEST_ROUNDS)
    peaks = {name: peak_extra_bytes(call) for name, call in comparison.calls.items()} if row.memory else {}
    return Line(
        title=row.title,
        group=row.group,
        operations=row.operations,
        memory_read=row.memory_read,
        backend=result.backend,
        timings=result.timings,
        errors=result.errors,
        left_out=result.left_out,
        memory={name: peak for name, peak in peaks.items() if peak is not None},
        limit=limit,
    )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A floor and the measured figure.

    Attributes:
        floor: the floor.
        kind: ``"each"``, ``"mean"`` or ``"share"``.
        wanted: the figure to reach.
        figure: the measured figure; for ``"each"`` and ``"share"`` the lowest.
        where: title of the lowest row, empty for a mean.
        rows: number of rows.
        reach: the figure if each row ran at its limit, the rate of the kernels' product in the first-level caches
            (``native_rate``); None where a row has no limit.
    """

    floor: Floor
    kind: str
    wanted: float
    figure: float
    where: str
    rows: int
    reach: float | None = None

    @property
    def met(self) -> bool:
        """Whether the floor was reached."""
        return self.figure >= self.wanted

    @property
    def against(self) -> str:
        """Names of the peers, in words."""
        return " or ".join(map(short_name, self.floor.against)) or "the machine's product rate"

    def __str__(self) -> str:
        unit = "" if self.kind == "share" else "x"
        what = {
            "each": f"lowest of {self.rows}, at {self.where}",
            "share": f"lowest of {self.rows}, at {self.where}",
            "mean": f"geometric mean of {self.rows}",
        }[self.kind]
        verdict = "met" if self.met else "SHORT"
        text = f"{self.figure:.3f}{unit} ({what}); floor {self.wanted:g}{unit}: {verdict}"
        if not self.met and self.reach is not None:
            text += f" (at the machine's limit {self.reach:.3f}{unit})"
        return f"{self.floor.label} against {self.against}: {text}"


def unjudged(suite: Suite, lines: Sequence[Line]) -> list[str]:
    """Descriptions of the floors whose rows were measured without any of their peers."""
    return [
        f"{floor.label} against {' or '.join(map(short_name, floor.against))}: not judged, {_absent(floor, lines)}"
        for floor in suite.floors
        if floor.against and _covered(floor, lines) and not _judging(floor, lines)
    ]


def _absent(floor: Floor, lines: Sequence[Line]) -> str:
    took_part = any(floor.ours in line.timings for line in _covered(floor, lines))
    return "none of them took part" if took_part else f"{floor.ours} did not take part"


def _covered(floor: Floor, lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if floor.covers(line.title, line.group)]


def _judging(floor: Floor, lines: Sequence[Line]) -> list[Line]:
    """The lines of a floor with times of clearhead and of a peer."""
    return [
        line
        for line in _covered(floor, lines)
        if floor.ours in line.timings and line.fastest(floor.against) is not None
    ]


def verdicts(suite: Suite, lines: Sequence[Line]) -> list[Verdict]:
    """The verdict on each floor; floors without measured rows are left out."""
    return [verdict for floor in suite.floors for verdict in _verdicts_of(floor, lines)]


def _verdicts_of(floor: Floor, lines: Sequence[Line]) -> list[Verdict]:
    rows = [line for line in _covered(floor, lines) if floor.ours in line.timings]
    # A verdict names only the peers that were timed.
    present = tuple(peer for peer in floor.against if any(peer in line.timings for line in rows))
    floor = replace(floor, against=present)
    ratios = {
        line.title: line.ratio(peer, floor.ours) for line in rows if (peer := line.fastest(floor.against)) is not None
    }
    shares = {line.title: share for line in rows if (share := line.share(floor.ours)) is not None}
    of_limit = {line.title: share for line in rows if (share := line.share_of_limit(floor.ours)) is not None}
    # A row can exceed a limit that was disturbed while it was measured; it counts as at the limit.
    reached = {title: ratio / min(1.0, of_limit[title]) for title, ratio in ratios.items() if title in of_limit}
    judged = []
    for kind, wanted, figures in (
        ("each", floor.each, ratios),
        ("mean", floor.mean, ratios),
        ("share", floor.share, shares),
    ):
        if wanted is None or not figures:
            continue
        where = "" if kind == "mean" else min(figures, key=lambda title: figures[title])
        figure = geometric_mean(list(figures.values())) if kind == "mean" else figures[where]
        reach = None
        if kind != "share" and reached.keys() == figures.keys():
            reach = geometric_mean(list(reached.values())) if kind == "mean" else min(reached.values())
        judged.append(
            Verdict(floor=floor, kind=kind, wanted=wanted, figure=figure, where=where, rows=len(figures), reach=reach)
        )
    return judged


def product_rates(lines: Sequence[Line]) -> dict[str, tuple[float, float, float]]:
    """For each group the median, lowest and highest GFLOP/s of the yardstick over its rows."""
    rates: dict[str, list[float]] = {}
    for line in lines:
        if PRODUCT in line.timings and (rate := line.rate(PRODUCT)) is not None:
            rates.setdefault(line.group, []).append(rate)
    return {group: (Timing.of(tuple(each)).median, min(each), max(each)) for group, each in rates.items()}
