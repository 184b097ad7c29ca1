"""Sheets of suites and of the grid: a table with notes, for a terminal or as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clearhead.benchmark.lines import Line, Verdict, product_rates, unjudged, verdicts
from clearhead.benchmark.peers import OURS, short_name
from clearhead.benchmark.product import PRODUCT
from clearhead.benchmark.suites import SUITES
from clearhead.benchmark.sweep import SLOWEST_ALLOWED, Point
from clearhead.benchmark.table import contenders, milliseconds
from clearhead.benchmark.timing import Timing, geometric_mean

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["GRID", "Sheet", "floors_sheet", "grid_sheet", "suite_sheet"]

GRID = "grid"


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A table with notes below it."""

    title: str
    about: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]

    def table(self) -> Table:
        """The table for a terminal, without the notes."""
        from rich.table import Table

        table = Table(title=f"{self.title}: {self.about}", title_justify="left", show_lines=True)
        for place, name in enumerate(self.header):
            table.add_column(name, justify="right" if place else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """The sheet as a Markdown section with a third-level heading."""
        lines = [f"### {self.title}", "", f"{self.about[0].upper()}{self.about[1:]}.", ""]
        if self.rows:
            lines += [_bars(self.header), _bars(["---"] * len(self.header)), *map(_bars, self.rows), ""]
        return "\n".join([*lines, *(f"- {note}" for note in self.notes), ""])


def _bars(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def suite_sheet(name: str, lines: Sequence[Line], *, judged: bool = True) -> Sheet:
    """A suite's medians in ms with quartiles, how many times clearhead's, rates, and its floors below."""
    suite = SUITES[name]
    peers = [peer for peer in contenders(lines) if peer not in (OURS, PRODUCT)]
    extra = {
        "GFLOP/s": any(line.operations for line in lines),
        "of product rate": any(PRODUCT in line.timings for line in lines),
        "of limit": any(line.limit for line in lines),
        "GB/s": any(line.memory_read for line in lines),
        "MiB above inputs": any(line.memory for line in lines),
    }
    shown = [column for column, there in extra.items() if there]
    rows = []
    for line in lines:
        figures = {
            "GFLOP/s": _number(line.rate(OURS), "{:.0f}"),
            "of product rate": _number(line.share(OURS), "{:.2f}"),
            "of limit": _number(line.share_of_limit(OURS), "{:.2f}"),
            "GB/s": _bandwidths(line, peers),
            "MiB above inputs": _memories(line, peers),
        }
        cells = [_cell(line, peer) for peer in (OURS, *peers)]
        rows.append([f"{line.title} ({line.backend})", *cells, *(figures[column] for column in shown)])
    notes = [
        f"{PRODUCT} 2048x2048x2048 {group}: {middle:.0f} GFLOP/s ({low:.0f} to {high:.0f})"
        for group, (middle, low, high) in product_rates(lines).items()
    ]
    notes += _means(lines, peers)
    if judged:
        notes += [*map(str, verdicts(suite, lines)), *unjudged(suite, lines)]
    else:
        notes.append("small sizes: floors are not judged")
    notes += dict.fromkeys(
        f"left out: {short_name(who)}, {why}" for line in lines for who, why in line.left_out.items()
    )
    return Sheet(
        title=name, about=suite.about, header=["work", OURS, *map(short_name, peers), *shown], rows=rows, notes=notes
    )


def _cell(line: Line, name: str) -> str:
    if name not in line.timings:
        return "left out" if name in line.left_out else ""
    timing = line.timings[name]
    times = "" if name == OURS else f" ({line.ratio(name):.2f}x)"
    return f"{milliseconds(timing.median)}{times} [{milliseconds(timing.q1)}, {milliseconds(timing.q3)}]"


def _number(value: float | None, shape: str) -> str:
    return "" if value is None else shape.format(value)


def _bandwidths(line: Line, peers: Sequence[str]) -> str:
    bandwidths = [line.bandwidth(name) for name in (OURS, *peers) if name in line.timings]
    return " against ".join(f"{one:.1f}" for one in bandwidths if one is not None)


def _memories(line: Line, peers: Sequence[str]) -> str:
    return " against ".join(f"{line.memory[name] / 2**20:.0f}" for name in (OURS, *peers) if name in line.memory)


def _means(lines: Sequence[Line], peers: Sequence[str]) -> list[str]:
    notes = []
    for group in dict.fromkeys(line.group for line in lines):
        for peer in peers:
            ratios = [line.ratio(peer) for line in lines if line.group == group and peer in line.timings]
            if ratios:
                mean, low, high = geometric_mean(ratios), min(ratios), max(ratios)
                notes.append(f"{group}, {short_name(peer)}: geometric mean {mean:.2f}x ({low:.2f} to {high:.2f})")
    return notes


def floors_sheet(measured: Mapping[str, Sequence[Line]]) -> Sheet:
    """Every floor of the measured suites, one per row: the measured figure and the verdict."""
    judged = [(name, verdict) for name, lines in measured.items() for verdict in verdicts(SUITES[name], lines)]
    short = sum(not verdict.met for _, verdict in judged)
    notes = [f"{len(judged)} floors, {short} short"] + [
        "at the limit: the figure of a short row if it ran at the rate of the kernels' product in the "
        "first-level caches, about the most that this machine allows"
    ] * any(_reach(verdict) for _, verdict in judged)
    return Sheet(
        title="floors",
        about="each floor and the measured figure",
        header=["suite", "rows", "against", "figure", "measured", "at the limit", "floor", ""],
        rows=[[name, *_floor_cells(verdict)] for name, verdict in judged],
        notes=notes,
    )


def _reach(verdict: Verdict) -> str:
    return "" if verdict.met else _number(verdict.reach, "{:.2f}")


def _floor_cells(verdict: Verdict) -> list[str]:
    floor = verdict.floor
    return [
        floor.label,
        verdict.against,
        f"mean of {verdict.rows}" if verdict.kind == "mean" else f"lowest of {verdict.rows}",
        f"{verdict.figure:.2f}",
        _reach(verdict),
        f"{verdict.wanted:.3g}",
        "met" if verdict.met else "SHORT",
    ]


def grid_sheet(points: Sequence[Point]) -> Sheet:
    """The grid's calls where clearhead is slower, and a summary of all calls."""
    slower = sorted((point for point in points if point.slower), key=lambda point: point.ratio)
    rows = [
        [
            f"{point.title} ({point.backend})",
            _microseconds(point.ours),
            _microseconds(point.theirs),
            f"{point.ratio:.3f}x",
            f"{point.noise:.3f}",
            str(point.rounds),
            _number(point.against_itself, "{:.3f}x"),
        ]
        for point in slower
    ]
    ratios = [point.ratio for point in points]
    worst = min(points, key=lambda point: point.ratio)
    doubtful = sum(point.doubtful and not point.slower for point in points)
    equals = [abs(point.against_itself - 1.0) for point in points if point.against_itself is not None]
    notes = [
        f"{len(points)} calls, {len(slower)} slower than SDPA by more than 3 % (ratio below {SLOWEST_ALLOWED:.3f}x)",
        f"worst {worst.ratio:.3f}x at {worst.title}; median {Timing.of(tuple(ratios)).median:.2f}x; "
        f"geometric mean {geometric_mean(ratios):.2f}x",
        f"largest standard error of a ratio {max(point.noise for point in points):.3f}; {doubtful} further calls "
        "within two standard errors of the limit",
        *_grid_means(points),
    ]
    if equals:
        notes.append(f"SDPA against itself in {len(equals)} calls timed again: off by at most {max(equals):.3f}")
    header = ["work", f"{OURS}, us", "SDPA, us", "ratio", "standard error", "rounds", "SDPA against itself"]
    return Sheet(
        title=GRID,
        about="calls where clearhead is slower than SDPA by more than 3 %",
        header=header,
        rows=rows,
        notes=notes,
    )


def _grid_means(points: Sequence[Point]) -> list[str]:
    groups = dict.fromkeys(point.group for point in points)
    by_group = {group: [point.ratio for point in points if point.group == group] for group in groups}
    return [
        f"{group}: geometric mean {geometric_mean(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
        for group, ratios in by_group.items()
    ]


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:.3g}" if seconds < 1e-3 else f"{1e6 * seconds:.0f}"
