"""One Markdown block of all results in a folder, and its insertion into a Markdown file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from clearhead.benchmark.journal import Journal
from clearhead.benchmark.lines import Line
from clearhead.benchmark.model_peers.sheets import peers_sheets
from clearhead.benchmark.sheets import GRID, Sheet, floors_sheet, grid_sheet, suite_sheet
from clearhead.benchmark.sparse_rows import SPARSE, SparsePoint, sparse_sheet
from clearhead.benchmark.suites import PEERS_SUITE, SUITES
from clearhead.benchmark.sweep import Point

__all__ = ["block", "measured", "source", "write_block"]

_BEGIN, _END = "<!-- bench: begin -->", "<!-- bench: end -->"


def _lines(journal: Mapping[str, Any]) -> list[Line]:
    return [Line.from_dict(row) for row in journal["rows"]]


def _is_small(journal: Mapping[str, Any]) -> bool:
    return bool(journal["head"].get("small"))


def _suite(name: str, journal: Mapping[str, Any]) -> tuple[Sheet, ...]:
    return (suite_sheet(name, _lines(journal), judged=not _is_small(journal)),)


def _grid(name: str, journal: Mapping[str, Any]) -> tuple[Sheet, ...]:
    return (grid_sheet([Point.from_dict(row) for row in journal["rows"]]),)


def _sparse(name: str, journal: Mapping[str, Any]) -> tuple[Sheet, ...]:
    return (sparse_sheet([SparsePoint.from_dict(row) for row in journal["rows"]]),)


def _peers(name: str, journal: Mapping[str, Any]) -> tuple[Sheet, ...]:
    return peers_sheets(_lines(journal), journal["head"], judged=not _is_small(journal))


#: The function that builds the sheets of each result file, in the order of the block.
_SHEETS: Final[Mapping[str, Callable[[str, Mapping[str, Any]], tuple[Sheet, ...]]]] = {
    **dict.fromkeys(SUITES, _suite),
    PEERS_SUITE: _peers,
    SPARSE: _sparse,
    GRID: _grid,
}


def measured(folder: Path) -> dict[str, Path]:
    """The result files in ``folder`` (suites, sparse patterns, grid), in the order of the block."""
    return {name: path for name in _SHEETS if (path := folder / f"{name}.json").exists()}


def block(folder: Path) -> str:
    """All results in ``folder`` as one Markdown block between its markers: the floors first, then each suite."""
    journals = {name: Journal.read(path) for name, path in measured(folder).items()}
    floors = floors_sheet(
        {name: _lines(journal) for name, journal in journals.items() if name in SUITES and not _is_small(journal)}
    )
    sections = ["## Speed", "", _HOW, ""]
    if floors.rows:
        sections += [floors.markdown()]
    for name, journal in journals.items():
        sections += [*(sheet.markdown() for sheet in _SHEETS[name](name, journal)), source(journal["head"]), ""]
    return "\n".join([_BEGIN, *sections, _END])


_HOW = (
    "Medians in milliseconds with quartiles in square brackets, and in round brackets how many times clearhead's\n"
    "median that is. All contenders of a row gave the same numbers first, and ran in turns."
)


def source(head: Mapping[str, Any]) -> str:
    """The command, the machine and the versions of a result file, in one sentence."""
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items() if name != "clearhead")
    # Older result files do not record the instruction set of the kernels.
    machine, kernels = head["machine"], f"kernels {head['kernels']}{_limits(head)}, " if head.get("kernels") else ""
    return (
        f"`{head['command']}`, {head['taken']}: {head['threads']['intra_op']} threads, {machine['cores']} cores "
        f"{machine['processor']} ({', '.join(machine['instructions'])}), {kernels}"
        f"load before {head['load_before']}; {versions}."
    )


def _limits(head: Mapping[str, Any]) -> str:
    rates = [f"{rate:.0f} GFLOP/s in {dtype}" for dtype, rate in head.get("limits", {}).items() if rate is not None]
    return f" (at most {' and '.join(rates)})" if rates else ""


def write_block(path: Path, text: str) -> None:
    """Write a block into a Markdown file: it replaces the old block, or is appended where there is none."""
    from clearhead.train.files import write_bytes

    old = path.read_text(encoding="utf-8") if path.exists() else "# Results\n"
    before, marker, rest = old.partition(_BEGIN)
    tail = rest.partition(_END)[2] if marker else "\n"
    write_bytes(path, f"{before.rstrip()}\n\n{text}{tail}".encode())
