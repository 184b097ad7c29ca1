"""The tables of the suite ``peers``: an overview by format, and every contender's time, error or reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from clearhead.benchmark.lines import Line, unjudged, verdicts
from clearhead.benchmark.model_peers.contenders import INT8, PEERS
from clearhead.benchmark.peers import OURS
from clearhead.benchmark.sheets import Sheet
from clearhead.benchmark.suites import PEERS_SUITE, SUITES
from clearhead.benchmark.table import contenders, milliseconds

__all__ = ["peers_sheets"]

#: The formats of each overview, and clearhead's contender there.
_OVERVIEWS: Final = ((("float32", "bfloat16"), OURS), (("int8",), INT8))
_ABSENT: Final = "–"


def peers_sheets(lines: Sequence[Line], head: Mapping[str, Any], *, judged: bool = True) -> tuple[Sheet, ...]:
    """The overviews, and a table with a row for each contender of each work.

    Args:
        lines: the measured rows.
        head: the head of the result file, for what it says about threads.
        judged: whether the sizes are those of the floors.
    """
    overviews = []
    for formats, ours in _OVERVIEWS:
        rows = [line for line in lines if line.group in formats and ours in line.timings]
        overviews += [_overview(rows, ours)] if rows else []
    return (*overviews, _details(lines, head, judged))


def _overview(lines: Sequence[Line], ours: str) -> Sheet:
    others = [name for name in contenders(lines) if name != ours]
    rows = []
    for line in lines:
        ratios = {name: line.ratio(name, ours) for name in others if name in line.timings}
        first = min((ratio for name, ratio in ratios.items() if not name.startswith(OURS)), default=1.0)
        cells = [f"{ratios[name]:.2f}" if name in ratios else _ABSENT for name in others]
        rows.append([line.title, milliseconds(line.timings[ours].median), *cells, f"{first:.2f}"])
    return Sheet(
        title=f"peers, {' and '.join(dict.fromkeys(line.group for line in lines))}",
        about=f"each other contender's median time divided by that of {ours}; above 1 {ours} is faster",
        header=["work", f"{ours}, ms", *others, "fastest peer"],
        rows=rows,
        notes=[f"{_ABSENT}: not timed; the table below says why"],
    )


def _details(lines: Sequence[Line], head: Mapping[str, Any], judged: bool) -> Sheet:
    rows = [_detail(line, name) for line in lines for name in contenders([line])]
    suite = SUITES[PEERS_SUITE]
    floors = [*map(str, verdicts(suite, lines)), *unjudged(suite, lines)]
    return Sheet(
        title="peers, every contender",
        about="medians of alternating blocks with quartiles, and the largest error against float64, relative to the "
        "largest exact output",
        header=["work", "contender", "ms", "quartiles", f"times {OURS}'s", "error", "remark"],
        rows=rows,
        notes=[
            *(floors if judged else ["small sizes: floors are not judged"]),
            *_pools(lines, head),
        ],
    )


def _detail(line: Line, name: str) -> list[str]:
    if name not in line.timings:
        return [line.title, name, "", "", "", "", line.left_out[name]]
    timing, error = line.timings[name], line.errors.get(name)
    remark = _number_format(line, name)
    return [
        line.title,
        name,
        milliseconds(timing.median),
        f"{milliseconds(timing.q1)}, {milliseconds(timing.q3)}",
        "" if name == OURS else f"{line.ratio(name):.2f}",
        "" if error is None else f"{error:.1e}",
        "" if remark == line.group else remark,
    ]


def _number_format(line: Line, name: str) -> str:
    formats = [peer.number_format for peer in PEERS if peer.name == name and peer.rows == line.group]
    return formats[0] if formats else line.group


def _pools(lines: Sequence[Line], head: Mapping[str, Any]) -> list[str]:
    """What is to be said about the threads of the contenders that were timed."""
    timed = {name for line in lines for name in line.timings}
    peers = {peer.name: peer for peer in PEERS if peer.name in timed}
    notes = [f"{name}: threads by {peer.threads}; spinning: {peer.spinning}" for name, peer in peers.items()]
    policy = head.get("threads", {}).get("variables", {}).get("OMP_WAIT_POLICY", "not set")
    return [*notes, f"OMP_WAIT_POLICY: {policy}"]
