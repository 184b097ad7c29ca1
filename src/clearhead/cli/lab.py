"""clearhead lab: a page of this machine to work with attention in."""

from __future__ import annotations

import atexit
import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer

__all__ = ["command"]

_INTERRUPTED: Final = 130


def command(
    models: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[MODEL_FOLDER]...",
            help="Run folders of clearhead train, or folders of Hugging Face models with their tokenizers.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="The port to listen on, of this machine alone; 0 takes any free one.")] = 0,
    open_it: Annotated[
        bool,
        typer.Option(
            "--open/--no-open", help="Open the page in your browser, which other users of this machine may see."
        ),
    ] = False,
) -> None:
    """Start the lab, print its address and serve it until Ctrl-C.

    **Worked example**: a small attention as a sheet whose every step recomputes as you type.
    **Your model**: type a text, look at every head, switch heads off, change temperature or mask, compare.
    **Variants**: masks and score rules, ready made or typed, and what they do to a head.

        clearhead lab
        clearhead lab runs/plays ~/models/gpt2 --port 8123

    Only this machine can reach it, and only with the token in the printed address. It reads models from the folders
    named here and from nowhere else, writes nothing, and asks nothing of any other machine. Without a folder there is
    a small example, trained as you first look at it.
    """
    from clearhead.lab.server import Lab

    lab = Lab(models or [], port)
    typer.echo(lab.url)
    sys.stdout.flush()
    typer.echo("Open this address in a browser of this machine. Ctrl-C ends the lab.", err=True)
    if open_it:
        webbrowser.open(lab.url)
    try:
        lab.run()
    finally:
        if lab.still_working:
            # Interpreters do not end well under a thread that computes.
            atexit.register(_leave)


def _leave() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_INTERRUPTED)
