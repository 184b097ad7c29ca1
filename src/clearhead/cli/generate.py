"""clearhead generate: stream text from a trained language model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.reading import checked_text

__all__ = ["command"]

_FUNCTION = "generate"


def command(
    run: Annotated[Path, typer.Argument(help="Run folder of clearhead train lm.")],
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(help="Number of tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(help="Below 1, unlikely tokens become rarer; 0 is greedy.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample only from the k most likely tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
) -> None:
    """Continue a text: print the prompt and each generated token as soon as it is sampled."""
    from clearhead.train.sampling import stream
    from clearhead.train.saved import load_run

    checked_text(_FUNCTION, "--prompt", prompt)
    loaded = load_run(run, function=_FUNCTION)
    pieces = stream(loaded, prompt, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed)
    first = next(pieces)  # raises for a bad prompt or option before anything is printed
    sys.stdout.write(prompt + first)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
