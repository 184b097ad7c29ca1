"""clearhead conform: run the conformance suite on any attention function."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
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
        str,
        typer.Argument(metavar="MODULE:FUNCTION", help="A module or .py file, and a function or class in it."),
    ],
    signature: Annotated[
        str,
        typer.Option(help="Calling convention: sdpa (torch's function), clearhead, or mha (a module class)."),
    ] = "sdpa",
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    laws: Annotated[list[str] | None, typer.Option("--law", help="Try only this law. Repeatable.")] = None,
    examples: Annotated[
        int, typer.Option(min=0, help="Random cases for each law; with 0, failing examples are not minimised either.")
    ] = 20,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Run it in so many processes, each with its part of the sequence.")
    ] = None,
    layout: Annotated[str, typer.Option(help="Of the parts under --ranks: contiguous or zigzag.")] = "contiguous",
    linear_memory: Annotated[bool, typer.Option(help="Require memory that grows linearly with the length.")] = False,
    invariance: Annotated[
        bool, typer.Option("--invariance", help="Try the laws of bits instead: alone, batched, chunked, decoded, ...")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Test any attention function against the laws of attention.

    Exit status: 0 if all applicable laws pass, 1 if one fails, 2 after wrong usage.

        clearhead conform torch.nn.functional:scaled_dot_product_attention
        clearhead conform mine.py:attention --dtype bfloat16
        clearhead conform torch.nn:MultiheadAttention --signature mha
        clearhead conform mine.py:ring_attention --ranks 2 --layout zigzag
        clearhead conform mine.py:attention --invariance
        clearhead conform mine.py:make_model --invariance

    With --invariance a sequence must have the same bits alone, in any batch, padded, packed, prefilled in chunks and
    decoded token by token, on any number of threads. clearhead's own functions run under ch.invariant() then. A module,
    or a function without arguments that makes one, is tried as a whole model.

    A law is skipped where the function has no parameter for it, or raises NotImplementedError for it; this does not
    count as a failure.
    """
    from clearhead.verify import Distributed, verify, verify_model
    from clearhead.verify.process import undisturbed

    with _shown_progress() as progress, _to_stderr(), undisturbed(), _importable(target):
        function = _resolved_target(target)
        where, model = "", _model(function) if invariance else None
        if ranks is not None:
            function, where = Distributed(function, ranks=ranks, layout=layout), f" on {ranks} ranks, {layout}"  # type: ignore[arg-type]
        report = (
            verify_model(model, name=target, progress=progress)
            if model is not None
            else verify(
                function,
                signature=signature,
                dtype=_dtype(dtype),
                device=_device(device),
                laws=laws or None,
                examples=examples,
                linear_memory=linear_memory,
                invariance=invariance,
                name=target + where,
                progress=progress,
            )
        )
    if as_json:
        typer.echo(report.to_json())
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(_BROKEN)


def _model(target: Callable[..., Any]) -> torch.nn.Module | None:
    """The model that the target is, or that it makes without arguments; None for an attention function."""
    from torch import nn

    if isinstance(target, nn.Module):
        return target
    try:
        needed = [one for one in inspect.signature(target).parameters.values() if one.default is one.empty]
    except (TypeError, ValueError):
        return None
    if any(one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in needed):
        return None
    made = target()
    return made if isinstance(made, nn.Module) else None


@contextmanager
def _shown_progress() -> Iterator[Callable[[str], None] | None]:
    """Show the current law on one line of a terminal and clear it at the end; no output elsewhere."""
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
    """Redirect the function's output to stderr, including writes to the file descriptor by child processes."""
    sys.stdout.flush()
    saved_stdout = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)


@contextmanager
def _importable(target: str) -> Iterator[None]:
    """Add the folder of the target's file, or the working folder, to the import path."""
    place = target.rpartition(":")[0]
    folder = str(Path(place).resolve().parent if place.endswith(".py") else Path.cwd())
    before = list(sys.path)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path[:] = before


def _resolved_target(target: str) -> Callable[..., Any]:
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
    attribute: Any = _module(place)
    for part in name.split("."):
        if not hasattr(attribute, part):
            raise DataError.about(
                "clearhead conform",
                "target",
                must=f"name something in {place}",
                got=repr(name),
                then="Check the spelling after the colon.",
            )
        attribute = getattr(attribute, part)
    if not callable(attribute):
        raise DataError.about(
            "clearhead conform",
            "target",
            must="be callable",
            got=type(attribute).__name__,
            then="Name a function or class.",
        )
    return attribute  # type: ignore[no-any-return]


def _module(place: str) -> Any:
    """Import a module by its name or from a file."""
    try:
        return _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise DataError.about(
            "clearhead conform",
            "target",
            must=f"name a module that can be imported, here {place}",
            got=f"{type(error).__name__}: {error}",
            then="Pass a module, or the path of a file that ends in .py.",
        ) from error


def _from_file(path: Path) -> Any:
    name = path.stem
    if _is_other_module(name, path):
        name = f"conform_{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Classes look their module up here, for example dataclasses.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _is_other_module(name: str, path: Path) -> bool:
    """Whether the file's name is taken by another module."""
    elsewhere = [folder for folder in sys.path if Path(folder).resolve() != path.resolve().parent]
    return name in (*sys.modules, *sys.builtin_module_names) or PathFinder.find_spec(name, elsewhere) is not None


def _dtype(name: str) -> torch.dtype:
    from clearhead.problem import DTYPES

    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    if name not in dtypes:
        raise UnsupportedError.about(
            "clearhead conform", "--dtype", must=f"be one of {', '.join(dtypes)}", got=repr(name), then="Try float32."
        )
    return dtypes[name]


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
