"""clearhead lab: a local web page for experiments with attention."""

from __future__ import annotations

import atexit
import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from clearhead.command_process import INTERRUPTED

__all__ = ["command"]


def command(
    models: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[MODEL_FOLDER]...",
            help="Run folders of clearhead train, or folders of Hugging Face models with their tokenizers.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="The port to listen on, on this machine only; 0 takes any free port.")] = 0,
    open_it: Annotated[
        bool,
        typer.Option(
            "--open/--no-open", help="Open the page in your browser; other users of this machine may see the address."
        ),
    ] = False,
) -> None:
    """Start the lab, print its address and serve it until Ctrl-C.

    **Worked example**: a small attention as a worksheet that recomputes every step as you type.
    **Your model**: type a text, inspect every head, switch heads off, change temperature or mask, compare.
    **Variants**: masks and score rules, built in or typed, and their effect on a head.

        clearhead lab
        clearhead lab runs/plays ~/models/gpt2 --port 8123

    Only this machine can reach it, and only with the token in the printed address. It reads models only from the
    folders named here, writes no files, and connects to no other machine. Without a folder it offers a small example
    model, which is trained on first use.
    """
    from clearhead.lab.server import Lab

    lab = Lab(models or [], port)
    typer.echo(lab.url)
    sys.stdout.flush()
    typer.echo("Open this address in a browser on this machine. Ctrl-C ends the lab.", err=True)
    if open_it:
        webbrowser.open(lab.url)
    try:
        lab.run()
    finally:
        if lab.still_working:
            # Interpreter shutdown can crash while a thread computes.
            atexit.register(_leave)


def _leave() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)
