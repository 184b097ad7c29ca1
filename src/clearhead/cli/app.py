"""The ``clearhead`` command: one table of verbs, and one place where errors become one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from clearhead.errors import ClearheadError, DataError, UnsupportedError

__all__ = ["EXTRAS", "VERBS", "app", "main"]

VERBS = ("demo", "explain", "observe", "view", "lab", "train", "predict", "generate", "bench", "conform", "doctor")
"""Each verb is the file of that name beside this one: a function ``command``, or a Typer ``app``."""

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
"""The extra that brings each optional package, for the sentence a user reads when it is absent."""

_WRONG_USE = 2
_INTERRUPTED = 130


class _Verbs(Mapping[str, Any]):
    """The table as commands; a verb's file is imported when the command line names it."""

    def __getitem__(self, verb: str) -> Any:
        if verb not in tuple(self):
            raise KeyError(verb)
        module = import_module(f"clearhead.cli.{verb}")
        verb_app = getattr(module, "app", None)
        if verb_app is None:
            verb_app = _new_typer()
            verb_app.command(verb)(module.command)
        command = typer.main.get_command(verb_app)
        command.name = verb
        return command

    def __iter__(self) -> Iterator[str]:
        return (verb for verb in VERBS if find_spec(f"clearhead.cli.{verb}") is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _VerbGroup(TyperGroup):
    """The verbs as one command whose errors are one line on stderr and an exit code."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _Verbs()

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _leave("clearhead: interrupted.", _INTERRUPTED)

    def main(self, *args: Any, **settings: Any) -> NoReturn:
        settings["standalone_mode"] = False
        try:
            result = super().main(*args, **settings)
            if sys.stdout is not None:
                sys.stdout.flush()
        except ClearheadError as error:
            _leave(str(error))
        except TyperException as error:
            _leave(_usage(error))
        except typer.Abort:
            _leave("clearhead: stopped before an answer was given.")
        except ModuleNotFoundError as error:
            extra = EXTRAS.get((error.name or "").partition(".")[0])
            if extra is None:
                raise
            _leave(str(_needs(extra, error)))
        except BrokenPipeError:
            _let_go()
            sys.exit(1)
        except OSError as error:
            _let_go()
            _leave(str(_unusable(error)))
        except (MemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            _leave(str(_too_large(error)))
        sys.exit(result if isinstance(result, int) else 0)


def _leave(line: str, code: int = _WRONG_USE) -> NoReturn:
    typer.echo(" ".join(line.split()), err=True)
    sys.exit(code)


def _usage(error: TyperException) -> str:
    """The command, what is wrong with how it was called, and where to look."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "clearhead"
    # A group that is called alone has shown its help, and gives no reason.
    said = error.format_message().strip() or "a command is missing."
    end = "" if said.endswith((".", "?")) else "."
    return f"{path}: {said}{end} Run '{path} --help' for what it takes."


def _needs(extra: str, error: ModuleNotFoundError) -> UnsupportedError:
    """The sentence for an absent extra."""
    verb = " ".join(["clearhead", *_verb(error)])
    return UnsupportedError(f"{verb}: needs the extra '{extra}'; install clearhead[{extra}].")


def _verb(error: BaseException) -> list[str]:
    """The verb whose file was running when an error was met, if one was."""
    trace = error.__traceback__
    while trace is not None:
        parent, _, name = str(trace.tb_frame.f_globals.get("__name__", "")).rpartition(".")
        if parent == "clearhead.cli" and name in VERBS:
            return [name]
        trace = trace.tb_next
    return []


def _unusable(error: OSError) -> DataError:
    """The sentence for a file that the system refuses, or an output that takes no more."""
    name, got = "".join(_verb(error)) or "clearhead", error.strerror or str(error)
    if error.filename is None:
        return DataError.about(name, "output", must="be writable", got=got, then="Make room, or write elsewhere.")
    must, then = "be a file that can be read or written", "Check the path."
    return DataError.about(name, str(error.filename), must=must, got=got, then=then)


def _out_of_memory(error: BaseException) -> bool:
    said = str(error)
    return isinstance(error, MemoryError) or "can't allocate memory" in said or "out of memory" in said


def _too_large(error: BaseException) -> UnsupportedError:
    name, got = "".join(_verb(error)) or "clearhead", "more than there is"
    return UnsupportedError.about(name, "work", must="fit into memory", got=got, then="Choose smaller sizes.")


def _let_go() -> None:
    """What standard output still holds goes nowhere, so that the end of the process does not fail at it once more."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _new_typer(**settings: Any) -> typer.Typer:
    return typer.Typer(
        add_completion=False,
        # A failure that is not a ClearheadError is a bug of ours: Python's own traceback reports it best.
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
        **settings,
    )


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"clearhead {metadata.version('clearhead')}")
        raise typer.Exit


app = _new_typer(name="clearhead", cls=_VerbGroup, invoke_without_command=True)


@app.callback()
def _clearhead(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop."),
    ] = False,
) -> None:
    """Attention you can run, write, see into and trust.

    Start here, nothing to prepare:

        clearhead demo
        clearhead explain --text "The cat sat on the mat"

    With a table of your own that has the columns label and text:

        clearhead train classify --data reviews.csv
        clearhead predict RUN --text "A film to see twice"
        clearhead explain --run RUN --text "A film to see twice"
        clearhead observe RUN --text "A film to see twice"

    With any text file:

        clearhead train lm --data plays.txt
        clearhead generate RUN --prompt "Enter the king"

    RUN is the folder that training named when it finished. `clearhead VERB --help` lists what a verb takes.
    """
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main() -> None:
    """Run the command line; leaves with 0, with 2 after a wrong call or input, with 130 when interrupted."""
    app()
