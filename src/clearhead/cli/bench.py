"""clearhead bench: speed and memory against torch's attention, on work that is checked to be the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.bench_options import (
    DTYPES,
    FUNCTION,
    dtypes_of,
    selection_of,
    shape_of,
    suite_names,
    time_budget,
)
from clearhead.errors import DataError, UnsupportedError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from clearhead.benchmark import Journal, Line, Setting, SettingResult
    from clearhead.benchmark.selection import Selection
    from clearhead.benchmark.sheets import Sheet

__all__ = ["command"]

_SHAPES = ("8,8,128,64", "1,8,1024,64")
_QUICK_SHAPES = ("1,8,256,64",)
_DEFAULT_DTYPE = "float32,bfloat16"
#: A quick grid leaves out calls with more operations than this.
_QUICK_OPERATIONS = 1e7
#: Seconds for repeating doubtful calls of the grid.
_RETRY_SECONDS, _QUICK_RETRY_SECONDS = 180.0, 8.0
# Width for files and pipes, where wrapped cells would be unreadable.
_TABLE_WIDTH, _SHEET_WIDTH = 140, 200


def command(
    shape: Annotated[
        list[str] | None, typer.Option(help="batch,heads,length,head_dim. Repeatable.", metavar="B,H,T,D")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"One or more of {', '.join(DTYPES)}.")] = _DEFAULT_DTYPE,
    repeats: Annotated[
        int | None, typer.Option(help="Rounds for each setting; by default until the time is up.")
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(help="Suites to measure instead of shapes: names separated by commas, or all.", metavar="NAME"),
    ] = None,
    grid: Annotated[
        bool, typer.Option("--grid", help="Search small to large calls for any that is slower than torch's.")
    ] = False,
    sparse: Annotated[
        bool, typer.Option("--sparse", help="Sparse patterns against full attention, 1k to 32k tokens.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Measure only rows whose title contains this text. Repeatable.", metavar="TEXT"),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="Peers in --suite peers: names or parts of them, separated by commas.", metavar="NAME"),
    ] = None,
    list_suites: Annotated[
        bool, typer.Option("--list", help="List the suites, or the titles of a suite's rows, and exit.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("clearhead-bench"),
    resume: Annotated[bool, typer.Option("--resume", help="Keep the rows that are already in --out.")] = False,
    results: Annotated[
        Path | None,
        typer.Option(help="Markdown file to write all results of --out into, new and earlier ones.", metavar="FILE"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small shapes, few rounds: about 15 seconds.")] = False,
) -> None:
    """Measure clearhead against nn.MultiheadAttention, scaled_dot_product_attention and the textbook formula.

    Forward and training (forward and backward), full and causal. All contenders of a row must compute the same
    numbers before they are timed. Figures are medians of interleaved runs with their quartiles.

    --suite measures the rows of named suites, whose ratios have to reach floors. --grid searches about a hundred calls
    for any that is slower than torch's. --sparse compares patterns of sparse attention with full attention over
    growing lengths. All of them write the results after each row.

    --suite peers runs whole models in clearhead and in torch.compile, ONNX Runtime, OpenVINO, CTranslate2, llama.cpp,
    zentorch and torchao, in float32, bfloat16 and int8: those that are installed, as by
    pip install "clearhead[peers]". A peer that is missing, cannot run a row or computes other numbers than float64 is
    listed with the reason. Set OMP_WAIT_POLICY=passive, so that the threads of one library do not spin while another
    is timed. "all" leaves this suite out.

    --only and --against measure a part, as in: clearhead bench --suite peers --only "a token" --against OpenVINO.
    "clearhead bench --list --suite peers" shows the titles.
    """
    names = suite_names(suite, shape, grid)
    if list_suites:
        return _list_rows(names) if names else _list()
    dtypes, with_suites = dtypes_of(dtype), bool(names or grid or sparse)
    budget = time_budget(repeats, quick=quick, with_suites=with_suites)
    if sparse and shape:
        raise UnsupportedError.about(
            FUNCTION, "--shape", must="not be used with --sparse", got="both", then="Leave one out."
        )
    shapes = [shape_of(text) for text in shape or (_QUICK_SHAPES if quick else _SHAPES)]
    if out.exists() and not out.is_dir():
        raise DataError.about(FUNCTION, "--out", must="be a folder", got=f"the file {out}", then="Use another name.")
    from clearhead.train.files import check_writable

    if results is not None:
        check_writable(results, function=FUNCTION, argument="--results")
    words = [f"--dtype {dtype}"] * (dtype != _DEFAULT_DTYPE) + ["--quick"] * quick
    words += [] if repeats is None else [f"--repeats {repeats}"]
    words += [f"--only {quote(text)}" for text in only or ()]
    words += [] if against is None else [f"--against {quote(against)}"]
    selection = selection_of(dtypes, only, against, names, with_grid=grid, with_sparse=sparse)
    if with_suites:
        measurement = _Measurement(out, words, selection, budget, quick, resume)
        with _one_writer(out):
            return measurement.all(names, with_grid=grid, with_sparse=sparse, results=results)
    if results is not None:
        return _put_together(results, out, shape)
    with _one_writer(out):
        _shapes_measured(shapes, dtypes, budget, out, words)


def _one_writer(out: Path) -> AbstractContextManager[None]:
    """The lock of the folder of results; two runs at once would also disturb each other's times."""
    from clearhead.train.lock import one_writer

    return one_writer(out, function=FUNCTION, say=partial(typer.echo, err=True))


def _put_together(results: Path, out: Path, shape: list[str] | None = None) -> None:
    """Write the results in a folder into a Markdown file, without measuring."""
    from clearhead.benchmark.block import block, measured, write_block

    if shape or not measured(out):
        raise UnsupportedError.about(
            FUNCTION,
            "--results",
            must="have suites, the grid or patterns to show",
            got="--shape" if shape else f"none of them in {out}",
            then="Add --suite all, or name a folder with --out.",
        )
    write_block(results, block(out))
    typer.echo(f"wrote the block 'bench' into {results}")


def _list() -> None:
    from clearhead.benchmark import SUITES, grid_rows

    lines = {name: (len(suite.rows()), suite.about) for name, suite in SUITES.items()}
    for name, (rows, about) in lines.items():
        typer.echo(f"--suite {name:<16} {rows:>3} rows  {about}")
    typer.echo(f"--grid  {'':<16} {len(grid_rows()):>3} calls from tiny to large, against SDPA")


def _list_rows(names: Sequence[str]) -> None:
    from clearhead.benchmark import SUITES

    for name in names:
        for row in SUITES[name].rows():
            typer.echo(row.title if len(names) == 1 else f"{name}: {row.title}")


@dataclass(frozen=True)
class _Measurement:
    """Options of a measurement of suites, the grid or sparse patterns."""

    out: Path
    words: list[str]
    selection: Selection
    budget: tuple[int, float | None]
    quick: bool
    resume: bool

    def all(self, names: Sequence[str], *, with_grid: bool, with_sparse: bool, results: Path | None) -> None:
        """Check the backends, measure, print, and write the Markdown block if requested."""
        from clearhead.benchmark import check_backends, load

        before = load()
        for backend, calls in check_backends().items():
            typer.echo(
                f"backend {backend}: {calls} small calls correct" if calls else f"backend {backend}: not usable here"
            )
        measured = {name: self._suite(name, before) for name in names}
        if len(measured) > 1 and not self.quick:
            _show_floors(measured)
        if with_grid:
            self._grid(before)
        if with_sparse:
            self._sparse(before)
        _warn(before)
        if results is not None:
            _put_together(results, self.out)

    def _suite(self, name: str, before: float | None) -> list[Line]:
        from clearhead.benchmark import SUITES, Line, measure_row
        from clearhead.benchmark.block import source
        from clearhead.benchmark.model_peers.sheets import peers_sheets
        from clearhead.benchmark.sheets import suite_sheet
        from clearhead.benchmark.suites import PEERS_SUITE

        rows = [row.small() if self.quick else row for row in self.selection.of(SUITES[name].rows())]
        by_title = {row.title: row for row in rows}
        journal = self._journal(name, f"--suite {name}", before)
        repeats, seconds = self.budget
        with _progress(len(by_title)) as progress:
            for title, row in by_title.items():
                progress.title(f"{name}: {title}")
                if title not in journal.rows:
                    journal.add(measure_row(row, repeats=repeats, seconds=seconds).to_dict())
                progress.done()
        lines = [Line.from_dict(journal.rows[title]) for title in by_title]
        if lines and name == PEERS_SUITE:
            for sheet in peers_sheets(lines, journal.head, judged=not self.quick):
                _print_sheet(sheet)
            typer.echo(f"{source(journal.head)}\n{name}: wrote {journal.path}")
        elif lines:
            _show_sheet(suite_sheet(name, lines, judged=not self.quick), journal)
        return lines

    def _grid(self, before: float | None) -> None:
        from clearhead.benchmark import Point, grid_rows, walk
        from clearhead.benchmark.sheets import GRID, grid_sheet

        rows = self.selection.of(grid_rows())
        if self.quick:
            rows = [row for row in rows if row.operations < _QUICK_OPERATIONS]
        journal = self._journal(GRID, "--grid", before)
        measured = [Point.from_dict(journal.rows[row.title]) for row in rows if row.title in journal.rows]
        with _progress(len(rows) - len(measured)) as progress:

            def keep(point: Point) -> None:
                journal.add(point.to_dict())
                progress.done()

            retry = _QUICK_RETRY_SECONDS if self.quick else _RETRY_SECONDS
            points = walk(rows, keep=keep, report=progress.title, measured=measured, retry_seconds=retry)
        if points:
            _show_sheet(grid_sheet(points), journal)

    def _sparse(self, before: float | None) -> None:
        from clearhead.benchmark.sparse_rows import SPARSE, SparsePoint, measure_sparse, sparse_rows, sparse_sheet

        rows = [row.small() if self.quick else row for row in self.selection.of(sparse_rows())]
        journal = self._journal(SPARSE, "--sparse", before)
        repeats, seconds = self.budget
        with _progress(len(rows)) as progress:
            for row in rows:
                progress.title(f"{SPARSE}: {row.title}")
                if row.title not in journal.rows:
                    journal.add(measure_sparse(row, repeats=repeats, seconds=seconds).to_dict())
                progress.done()
        if rows:
            points = [SparsePoint.from_dict(journal.rows[row.title]) for row in rows]
            _show_sheet(sparse_sheet(points), journal)

    def _journal(self, name: str, option: str, before: float | None) -> Journal:
        from clearhead.benchmark import Journal

        command = " ".join(["clearhead bench", option, *self.words])
        repeats, seconds = self.budget
        settings = {"small": self.quick, "repeats": repeats, "seconds": seconds, "against": [*self.selection.against]}
        path = self.out / f"{name}.json"
        return Journal(path, command=command, load_before=before, settings=settings, resume=self.resume)


def _show_sheet(sheet: Sheet, journal: Journal) -> None:
    _print_sheet(sheet)
    _console(_SHEET_WIDTH).print(f"{sheet.title}: wrote {journal.path}", soft_wrap=True)


def _show_floors(measured: Mapping[str, Sequence[Line]]) -> None:
    from clearhead.benchmark.sheets import floors_sheet

    sheet = floors_sheet(measured)
    if sheet.rows:
        _print_sheet(sheet)


def _print_sheet(sheet: Sheet) -> None:
    console = _console(_SHEET_WIDTH)
    if sheet.rows:
        console.print(sheet.table())
    for note in sheet.notes:
        console.print(note, soft_wrap=True)


def _shapes_measured(
    shapes: Sequence[tuple[int, int, int, int]],
    dtypes: Sequence[torch.dtype],
    budget: tuple[int, float | None],
    out: Path,
    words: list[str],
) -> None:
    from clearhead.benchmark import grid, load, report

    words = [f"--shape {','.join(map(str, size))}" for size in shapes] + words
    before = load()
    results = _measured(grid(shapes, dtypes), budget)
    _show(results)
    _warn(before)
    _write(out, results, report(results, command=f"clearhead bench {' '.join(words)}", load_before=before))


def _measured(settings: Sequence[Setting], budget: tuple[int, float | None]) -> list[SettingResult]:
    from clearhead.benchmark import measure

    repeats, seconds = budget
    results = []
    with _progress(len(settings)) as progress:
        for setting in settings:
            progress.title(setting.title)
            results.append(measure(setting, repeats=repeats, seconds=seconds))
            progress.done()
    return results


@dataclass(frozen=True)
class _ProgressCallbacks:
    """Callbacks: the title of the next measurement, and its end."""

    title: Callable[[str], None]
    done: Callable[[], None]


@contextmanager
def _progress(total: int) -> Iterator[_ProgressCallbacks]:
    """A progress bar where stderr is a terminal, otherwise one line per setting."""
    if not sys.stderr.isatty():
        # Repeated measurements are counted beyond the total.
        numbers = count(1)
        yield _ProgressCallbacks(lambda title: typer.echo(f"[{next(numbers)}/{total}] {title}", err=True), lambda: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=total)
        yield _ProgressCallbacks(lambda title: bar.update(task, description=title), lambda: bar.advance(task))


def _console(width: int) -> Console:
    from rich.console import Console

    return Console(markup=False, highlight=False, emoji=False, width=None if sys.stdout.isatty() else width)


def _show(results: Sequence[SettingResult]) -> None:
    from clearhead.benchmark.table import summary, tables

    console = _console(_TABLE_WIDTH)
    for table in tables(results):
        console.print(table)
    for line in summary(results):
        console.print(line, soft_wrap=True)
    for reason in dict.fromkeys(f"left out: {n}, {why}" for r in results for n, why in r.left_out.items()):
        console.print(reason, soft_wrap=True)


def _warn(load: float | None) -> None:
    """Warn if other work ran at the start: it disturbs the times, though less the ratios of interleaved runs."""
    from clearhead.benchmark import usable_cores

    if load is not None and load > 0.5 * usable_cores():
        typer.echo(f"other work was running at the start (load {load} on {usable_cores()} cores): expect noise")


def _write(out: Path, results: Sequence[SettingResult], facts: dict[str, object]) -> None:
    from clearhead.benchmark.plot import plot_svg
    from clearhead.train.files import write_bytes, write_json

    write_json(out / "bench.json", facts)
    typer.echo(f"wrote {out / 'bench.json'}")
    try:
        picture = plot_svg(results, caption=_caption(facts))
    except ModuleNotFoundError:
        typer.echo("no plot: it needs the extra 'bench'; install clearhead[bench].")
        return
    write_bytes(out / "bench.svg", picture)
    typer.echo(f"wrote {out / 'bench.svg'}")


def _caption(facts: dict[str, object]) -> str:
    machine, versions, threads = (facts[name] for name in ("machine", "versions", "threads"))
    assert isinstance(machine, dict)
    assert isinstance(versions, dict)
    assert isinstance(threads, dict)
    return f"{machine['processor']}, {threads['intra_op']} threads, torch {versions['torch']}, {facts['taken']}"
