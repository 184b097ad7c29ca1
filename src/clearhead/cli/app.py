"""The ``clearhead`` command: the table of its commands, and the handling of errors, each printed on one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Annotated, Any, NoReturn, TextIO

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from clearhead.command_process import (
    INTERRUPTED,
    INTERRUPTED_LINE,
    end_interrupted,
    leave_on_interrupt,
    open_streams,
    raise_on_interrupt,
)
from clearhead.errors import ClearheadError, DataError, UnsupportedError

__all__ = ["COMMANDS", "EXTRAS", "app", "main"]

COMMANDS = (
    "demo",
    "explain",
    "observe",
    "view",
    "lab",
    "train",
    "predict",
    "generate",
    "bench",
    "conform",
    "doctor",
    "run",
)
"""Names of the commands. Each is a module of this package with a function ``command`` or a Typer ``app``."""

EXTRAS = {
    "matplotlib": "bench",
    "safetensors": "train",
    "sklearn": "demo",
    "starlette": "lab",
    "tensorboard": "train",
    "tokenizers": "train",
    "transformers": "hf",
    "uvicorn": "lab",
}
"""The extra that installs each optional package, for the message when the package is missing."""

_WRONG_USE = 2


class _Commands(Mapping[str, Any]):
    """The commands; a command's module is imported on first use."""

    def __getitem__(self, name: str) -> Any:
        if name not in tuple(self):
            raise KeyError(name)
        module = import_module(f"clearhead.cli.{name}")
        command_app = getattr(module, "app", None)
        if command_app is None:
            command_app = _new_typer()
            command_app.command(name)(module.command)
        command = typer.main.get_command(command_app)
        command.name = name
        return command

    def __iter__(self) -> Iterator[str]:
        return (name for name in COMMANDS if find_spec(f"clearhead.cli.{name}") is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _CommandGroup(TyperGroup):
    """The command group; errors are one line on stderr and an exit status."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _Commands()

    def make_context(self, *args: Any, **settings: Any) -> Any:
        # --help imports every command.
        with _interrupted_in_one_line():
            return super().make_context(*args, **settings)

    def invoke(self, ctx: Any) -> Any:
        with _interrupted_in_one_line():
            return super().invoke(ctx)

    def main(self, *args: Any, **settings: Any) -> NoReturn:
        settings["standalone_mode"] = False
        open_streams()
        try:
            result = super().main(*args, **settings)
            sys.stdout.flush()
        except ClearheadError as error:
            _leave(str(error))
        except TyperException as error:
            _leave(_usage(error))
        except typer.Abort:
            _leave("clearhead: aborted.")
        except ModuleNotFoundError as error:
            extra = EXTRAS.get((error.name or "").partition(".")[0])
            if extra is None:
                raise
            _leave(str(_needs(extra, error)))
        except BrokenPipeError:
            _discard(sys.stdout, sys.stderr)
            sys.exit(1)
        except OSError as error:
            _discard(sys.stdout)
            _leave(str(_unusable(error)))
        except (MemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            _leave(str(_too_large(error)))
        sys.exit(result if isinstance(result, int) else 0)


@contextmanager
def _interrupted_in_one_line() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        # A second Ctrl-C may come while this one is reported.
        leave_on_interrupt()
        end_interrupted()
        _leave(INTERRUPTED_LINE, INTERRUPTED)


def _leave(line: str, code: int = _WRONG_USE) -> NoReturn:
    try:
        typer.echo(" ".join(line.split()), err=True)
    except OSError:
        _discard(sys.stderr)
    sys.exit(code)


def _usage(error: TyperException) -> str:
    """Message for a usage error: the command, the error, and how to get help."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "clearhead"
    # A group without a subcommand has printed its help, and its error has no message.
    said = error.format_message().strip() or "a command is missing."
    end = "" if said.endswith((".", "?")) else "."
    return f"{path}: {said}{end} Run '{path} --help' for its options."


def _needs(extra: str, error: ModuleNotFoundError) -> UnsupportedError:
    """The error for a missing extra."""
    name = " ".join(["clearhead", *_command_of(error)])
    return UnsupportedError(f"{name}: needs the extra '{extra}'; install clearhead[{extra}].")


def _command_of(error: BaseException) -> list[str]:
    """The command whose module is in the traceback of an error, if any."""
    trace = error.__traceback__
    while trace is not None:
        parent, _, name = str(trace.tb_frame.f_globals.get("__name__", "")).rpartition(".")
        if parent == "clearhead.cli" and name in COMMANDS:
            return [name]
        trace = trace.tb_next
    return []


def _unusable(error: OSError) -> DataError:
    """The error for a file that cannot be read or written, or for a full disk."""
    name, got = "".join(_command_of(error)) or "clearhead", error.strerror or str(error)
    if error.filename is None:
        return DataError.about(
            name, "output", must="be writable", got=got, then="Free some space, or write to another place."
        )
    must, then = "be a file that can be read or written", "Check the path."
    return DataError.about(name, str(error.filename), must=must, got=got, then=then)


def _out_of_memory(error: BaseException) -> bool:
    said = str(error)
    return isinstance(error, MemoryError) or "can't allocate memory" in said or "out of memory" in said


def _too_large(error: BaseException) -> UnsupportedError:
    name, got = "".join(_command_of(error)) or "clearhead", "more than the free memory"
    return UnsupportedError.about(name, "work", must="fit into memory", got=got, then="Choose smaller sizes.")


def _discard(*streams: TextIO) -> None:
    """Redirect streams to the null device, so that the flush at exit does not fail again."""
    for stream in streams:
        with suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def _new_typer(**settings: Any) -> typer.Typer:
    return typer.Typer(
        add_completion=False,
        # Any other exception is a bug of clearhead: Python's own traceback reports it best.
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
        **settings,
    )


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"clearhead {metadata.version('clearhead')}")
        raise typer.Exit


app = _new_typer(name="clearhead", cls=_CommandGroup, invoke_without_command=True)


@app.callback()
def _clearhead(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop."),
    ] = False,
) -> None:
    """Attention you can run, extend, inspect and trust.

    Start here; no preparation is needed:

        clearhead demo
        clearhead explain --text "The cat sat on the mat"

    With your own table that has the columns label and text:

        clearhead train classify --data reviews.csv
        clearhead predict RUN --text "A film to see twice"
        clearhead explain --run RUN --text "A film to see twice"
        clearhead observe RUN --text "A film to see twice"

    With any text file:

        clearhead train lm --data plays.txt
        clearhead generate RUN --prompt "Enter the king"

    RUN is the folder that training printed when it finished. `clearhead COMMAND --help` lists a command's options.
    """
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main() -> None:
    """Run the command line. Exit status: 0, 2 after wrong usage or input, 130 when interrupted."""
    try:
        with _interrupted_in_one_line():
            raise_on_interrupt()
            app()
    finally:
        # Only the end of the interpreter is left.
        leave_on_interrupt()
