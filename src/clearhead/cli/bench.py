"""clearhead bench: speed and memory against torch's own attention, on work checked to be the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.errors import DataError, ShapeError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from clearhead.benchmark import Result, Setting

__all__ = ["command"]

_FUNCTION = "bench"
_SHAPES = ("8,8,128,64", "1,8,1024,64")
_QUICK_SHAPES = ("1,8,256,64",)
_DTYPES = ("float32", "bfloat16", "float16")
_LONGEST = 2**15
_MOST_NUMBERS = 2**27
#: Rounds, and seconds after which a setting's rounds stop.
_PACE, _QUICK_PACE = (15, 2.0), (5, 0.25)


def command(
    shape: Annotated[
        list[str] | None, typer.Option(help="batch,heads,length,head_dim; may be given again.", metavar="B,H,T,D")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"One or more of {', '.join(_DTYPES)}.")] = "float32,bfloat16",
    repeats: Annotated[int | None, typer.Option(help="Rounds for each setting; chosen by time if left out.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for bench.json and bench.svg.")] = Path("clearhead-bench"),
    quick: Annotated[bool, typer.Option("--quick", help="One small shape, few rounds: about 15 seconds.")] = False,
) -> None:
    """Measure clearhead against nn.MultiheadAttention, scaled_dot_product_attention and the textbook formula.

    Forward and training (forward and backward), full and causal. Before a clock starts, all contenders of a row
    must give the same numbers. Figures are medians of interleaved runs with their quartiles.
    """
    shapes = [_shape(text) for text in shape or (_QUICK_SHAPES if quick else _SHAPES)]
    dtypes = _dtypes(dtype)
    pace = _pace(repeats, quick)
    if out.exists() and not out.is_dir():
        raise DataError.about(_FUNCTION, "--out", must="be a folder", got=f"the file {out}", then="Name another.")
    from clearhead.benchmark import grid, load, report

    words = [f"--shape {','.join(map(str, size))}" for size in shapes] + [f"--dtype {dtype}"]
    words += ["--quick"] * quick + ([] if repeats is None else [f"--repeats {repeats}"])
    before = load()
    results = _measured(grid(shapes, dtypes), pace)
    _show(results)
    _warn(before)
    _write(out, results, report(results, command=f"clearhead bench {' '.join(words)}", load_before=before))


def _shape(text: str) -> tuple[int, int, int, int]:
    parts = text.replace("x", ",").split(",")
    sizes = [int(part) for part in parts if part.strip().isascii() and part.strip().isdigit()]
    if len(parts) != 4 or len(sizes) != 4 or min(sizes) < 1:
        raise ShapeError.about(
            _FUNCTION, "--shape", must="be four whole numbers of at least 1", got=repr(text)[:80],
            then="Write batch,heads,length,head_dim, as in 1,8,512,64.",
        )  # fmt: skip
    batch, heads, length, head_dim = sizes
    if length > _LONGEST or batch * heads * length * head_dim > _MOST_NUMBERS:
        raise ShapeError.about(
            _FUNCTION, "--shape", must=f"have a length of at most {_LONGEST} and {_MOST_NUMBERS} numbers in all",
            got=repr(text)[:80], then="Measure a smaller one.",
        )  # fmt: skip
    return batch, heads, length, head_dim


def _dtypes(text: str) -> list[torch.dtype]:
    import torch

    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in _DTYPES:
            raise UnsupportedError.about(
                _FUNCTION, "--dtype", must=f"hold only {', '.join(_DTYPES)}", got=repr(name)[:80],
                then="Separate them by commas.",
            )  # fmt: skip
    return [getattr(torch, name) for name in dict.fromkeys(names)]


def _pace(repeats: int | None, quick: bool) -> tuple[int, float | None]:
    if repeats is None:
        return _QUICK_PACE if quick else _PACE
    if repeats < 1:
        raise ShapeError.about(_FUNCTION, "--repeats", must="be at least 1", got=repeats, then="Use 5 or more.")
    return repeats, None


def _measured(settings: Sequence[Setting], pace: tuple[int, float | None]) -> list[Result]:
    from clearhead.benchmark import measure

    repeats, seconds = pace
    results = []
    with _progress(len(settings)) as told:
        for setting in settings:
            told.title(setting.title)
            results.append(measure(setting, repeats=repeats, seconds=seconds))
            told.done()
    return results


@dataclass(frozen=True)
class _Told:
    """Who hears what is being measured."""

    title: Callable[[str], None]
    done: Callable[[], None]


@contextmanager
def _progress(total: int) -> Iterator[_Told]:
    """A live bar where stderr is a terminal, else one plain line for each setting."""
    if not sys.stderr.isatty():
        count = iter(range(1, total + 1))
        yield _Told(lambda title: typer.echo(f"[{next(count)}/{total}] {title}", err=True), lambda: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=total)
        yield _Told(lambda title: bar.update(task, description=title), lambda: bar.advance(task))


def _show(results: Sequence[Result]) -> None:
    from rich.console import Console

    from clearhead.benchmark.table import summary, tables

    # A file or a pipe has no width of its own; wrapped cells would be unreadable there.
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 140)
    for table in tables(results):
        console.print(table)
    for line in summary(results):
        console.print(line, soft_wrap=True)
    for reason in dict.fromkeys(f"left out: {n}, {why}" for r in results for n, why in r.left_out.items()):
        console.print(reason, soft_wrap=True)


def _warn(load: float | None) -> None:
    """Say so where other work ran: interleaving keeps ratios honest then, not the times themselves."""
    from clearhead.benchmark import usable_cores

    if load is not None and load > 0.5 * usable_cores():
        typer.echo(f"other work was running at the start (load {load} on {usable_cores()} cores): expect noise")


def _write(out: Path, results: Sequence[Result], facts: dict[str, object]) -> None:
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
