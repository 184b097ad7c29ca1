"""clearhead demo: train, explain, check and time a classifier of scikit-learn's digits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["command"]


def command(
    out: Annotated[Path, typer.Option(help="Folder for the page and its numbers.")] = Path("clearhead-demo"),
    seed: Annotated[int, typer.Option(help="Seed of the weights, the batches and dropout.")] = 0,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training digits.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One epoch and short timings, to see every step.")] = False,
) -> None:
    """Train a classifier of handwritten digits, explain it, check it against float64, time it, and write one page.

    Everything runs offline on the 1,797 digits of scikit-learn, in at most three minutes on two cores.
    Exit status: 1 if the attention is less exact than float32 allows.
    """
    from clearhead.demo import Settings, run

    result = run(Settings(out=out, seed=seed, epochs=epochs, quick=quick), say=typer.echo)
    if not result.agreement.holds:
        raise typer.Exit(1)
