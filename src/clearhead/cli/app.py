"""The ``clearhead`` command: one table of verbs, and one place where errors become one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from clearhead.errors import ClearheadError, UnsupportedError

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
        sys.exit(result if isinstance(result, int) else 0)


def _leave(line: str, code: int = _WRONG_USE) -> NoReturn:
    typer.echo(" ".join(line.split()), err=True)
    sys.exit(code)


def _usage(error: TyperException) -> str:
    """The command, what is wrong with how it was called, and where to look."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "clearhead"
    said = error.format_message()
    end = "" if said.endswith((".", "?")) else "."
    return f"{path}: {said}{end} Run '{path} --help' for what it takes."


def _needs(extra: str, error: ModuleNotFoundError) -> UnsupportedError:
    """The sentence for an absent extra, naming the verb whose file was running when it was missed."""
    verb = "clearhead"
    trace = error.__traceback__
    while trace is not None:
        parent, _, name = str(trace.tb_frame.f_globals.get("__name__", "")).rpartition(".")
        if parent == "clearhead.cli" and name in VERBS:
            verb = f"clearhead {name}"
            break
        trace = trace.tb_next
    return UnsupportedError(f"{verb}: needs the extra '{extra}'; install clearhead[{extra}].")


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
