"""clearhead run: run an unmodified program with torch's attention and linear layers on clearhead's kernels."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from clearhead.errors import DataError

__all__ = ["app"]

_FAILED: Final = 1


class _Python(TyperCommand):
    """A command whose options end at the script, or at ``-m MODULE``, as those of ``python`` do."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        place = next((place for place, word in enumerate(args) if word == "-m" or word[:1] != "-"), None)
        if place is not None:
            place += 2 if args[place] == "-m" else 0
            args = [*args[:place], "--", *args[place:]]
        return super().parse_args(ctx, args)


app = typer.Typer(add_completion=False)


@app.command(cls=_Python)
def run(
    context: typer.Context,
    program: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT [ARGUMENTS]...", help="A script, and its arguments; with -m, arguments alone."),
    ] = None,
    module: Annotated[
        str | None, typer.Option("-m", metavar="MODULE", help="Run a module, as python -m does, and not a script.")
    ] = None,
    attention: Annotated[bool, typer.Option(help="Accelerate scaled_dot_product_attention.")] = True,
    linear: Annotated[bool, typer.Option(help="Accelerate the matrix multiplications of linear layers.")] = True,
) -> None:
    """Run a Python program with torch's attention and linear layers on clearhead's kernels.

    The program is not changed: ch.accelerate() is called before it starts. Everything after the script's name, or
    after -m MODULE, is the program's. Its exit status is returned.

        clearhead run train.py --epochs 3
        clearhead run -m my_package.train --epochs 3
        clearhead run --no-linear infer.py photo.png
    """
    from clearhead.integrations.accelerate import accelerate

    arguments = list(program or ())
    if module is None and not arguments:
        raise typer.BadParameter("Name a script, or a module with -m.", ctx=context)
    script = None if module is not None else Path(arguments.pop(0))
    if script is not None and not script.is_file():
        raise DataError.about(
            "clearhead run", "script", must="be a file", got=str(script), then="Check the path, or use -m for a module."
        )
    if module is not None and not _exists(module):
        raise DataError.about(
            "clearhead run", "-m", must="name a module", got=module, then="Install it, or run from its folder."
        )
    with accelerate(attention=attention, linear=linear):
        raise typer.Exit(_run(script, module, arguments))


def _run(script: Path | None, module: str | None, arguments: Sequence[str]) -> int:
    """Run the program as ``__main__``, as Python would; its exit status."""
    sys.argv = [str(script or module), *arguments]
    sys.path.insert(0, str(script.resolve().parent) if script is not None else os.getcwd())
    try:
        if script is not None:
            runpy.run_path(str(script), run_name="__main__")
        else:
            assert module is not None
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        return _status(stop)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # The program's own error, as Python shows it.
        traceback.print_exception(type(error), error, _of_program(error))
        return _FAILED
    return 0


def _exists(module: str) -> bool:
    sys.path.insert(0, os.getcwd())
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        # A package that contains it is missing.
        return False
    finally:
        sys.path.pop(0)


def _of_program(error: BaseException) -> TracebackType | None:
    """The error's traceback from the program's first frame on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def _status(stop: SystemExit) -> int:
    """The exit status of a program that called ``sys.exit``; a text goes to stderr, as Python does it."""
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return _FAILED
