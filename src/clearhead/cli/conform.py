"""clearhead conform: any attention function through the conformance suite."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.errors import DataError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from clearhead.verify import Report

__all__ = ["command"]

_BROKEN = 1


def command(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:FUNCTION", help="A module, or a file that ends in .py, and a name in it.")
    ],
    signature: Annotated[
        str,
        typer.Option(help="How it is called: sdpa (as torch's function), clearhead, or mha (a class of modules)."),
    ] = "sdpa",
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    laws: Annotated[list[str] | None, typer.Option("--law", help="Try this law only; may be repeated.")] = None,
    examples: Annotated[
        int, typer.Option(min=0, help="Further cases drawn for each law; 0 also leaves failing examples as they are.")
    ] = 20,
    linear_memory: Annotated[bool, typer.Option(help="Hold it to memory that grows with the length.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Try an attention function, yours or anyone's, against the laws that attention obeys.

    Leaves with 0 where all laws that apply hold, with 1 where one fails, with 2 after a wrong call.

        clearhead conform torch.nn.functional:scaled_dot_product_attention
        clearhead conform mine.py:attention --dtype bfloat16
        clearhead conform torch.nn:MultiheadAttention --signature mha

    What a function's parameters cannot say is not tried; a function that raises NotImplementedError says that it does
    not do this, which does not count against it.
    """
    from clearhead.verify import verify
    from clearhead.verify.process import undisturbed

    with _shown_progress() as progress, _to_stderr(), undisturbed(), _importable(target):
        report = verify(
            _found(target),
            signature=signature,
            dtype=_dtype(dtype),
            device=_device(device),
            laws=laws or None,
            examples=examples,
            linear_memory=linear_memory,
            name=target,
            progress=progress,
        )
    if as_json:
        typer.echo(report.to_json())
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(_BROKEN)


@contextmanager
def _shown_progress() -> Iterator[Callable[[str], None] | None]:
    """Which law is being tried, on one line of a terminal that is gone in the end; nothing where nobody watches."""
    stream = sys.stderr
    if not stream.isatty():
        yield None
        return
    clear = f"\r{'':40}\r"

    def show(law: str) -> None:
        stream.write(f"{clear}trying: {law}"[: len(clear) + 39])
        stream.flush()

    try:
        yield show
    finally:
        stream.write(clear)
        stream.flush()


@contextmanager
def _to_stderr() -> Iterator[None]:
    """What the subject prints goes to stderr, also where it or a program that it starts writes to the descriptor."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def _importable(target: str) -> Iterator[None]:
    """Modules beside the target's file, or in the working folder, can be imported."""
    place = target.rpartition(":")[0]
    folder = str(Path(place).resolve().parent if place.endswith(".py") else Path.cwd())
    before = list(sys.path)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path[:] = before


def _found(target: str) -> Callable[..., Any]:
    """The function that ``MODULE:FUNCTION`` names."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise DataError.about(
            "clearhead conform",
            "target",
            must="be MODULE:FUNCTION",
            got=repr(target),
            then="For example torch.nn.functional:scaled_dot_product_attention, or mine.py:attention.",
        )
    found: Any = _module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise DataError.about(
                "clearhead conform",
                "target",
                must=f"name something in {place}",
                got=repr(name),
                then="Check the spelling after the colon.",
            )
        found = getattr(found, part)
    if not callable(found):
        raise DataError.about(
            "clearhead conform",
            "target",
            must="be callable",
            got=type(found).__name__,
            then="Name a function or class.",
        )
    return found  # type: ignore[no-any-return]


def _module(place: str) -> Any:
    """A module by its name or from a file."""
    try:
        return _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise DataError.about(
            "clearhead conform",
            "target",
            must=f"name a module that can be imported, here {place}",
            got=f"{type(error).__name__}: {error}",
            then="Give a module, or the path of a file that ends in .py.",
        ) from error


def _from_file(path: Path) -> Any:
    name = path.stem
    if _means_another(name, path):
        name = f"conform_{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Where classes of the file look for it, dataclasses among them.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _means_another(name: str, path: Path) -> bool:
    """Whether importing a file's name would give, or has given, another module than the file."""
    elsewhere = [folder for folder in sys.path if Path(folder).resolve() != path.resolve().parent]
    return name in (*sys.modules, *sys.builtin_module_names) or PathFinder.find_spec(name, elsewhere) is not None


def _dtype(name: str) -> torch.dtype:
    from clearhead.problem import DTYPES

    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    if name not in known:
        raise UnsupportedError.about(
            "clearhead conform", "--dtype", must=f"be one of {', '.join(known)}", got=repr(name), then="Try float32."
        )
    return known[name]


def _device(name: str) -> torch.device:
    import torch

    try:
        torch.empty(1, device=name)
        return torch.device(name)
    except Exception as error:
        raise UnsupportedError.about(
            "clearhead conform",
            "--device",
            must="be a device that torch can use here",
            got=repr(name),
            then=" ".join(str(error).split())[:120],
        ) from error


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.text import Text

    width = None if sys.stdout.isatty() else 118
    console = Console(markup=False, highlight=False, width=width)
    styles = {"  ok ": "green", "  FAIL": "bold red", "  - ": "dim"}
    for line in report.lines(min(console.width, 140) - 2):
        style = next((style for mark, style in styles.items() if line.startswith(mark)), "")
        console.print(Text(line, style=style), soft_wrap=True)
