"""clearhead explain: the attention of one token, step by step, each step checked against float64."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.reading import checked_text
from clearhead.errors import DataError, UnsupportedError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["command"]

_FUNCTION = "explain"
_WIDTH, _HEADS, _LAYERS = 32, 4, 2


def command(
    text: Annotated[str, typer.Option(help="The text to read.")],
    run: Annotated[Path | None, typer.Option(help="Run folder of clearhead train; without it, random weights.")] = None,
    layer: Annotated[int, typer.Option(help="Which attention layer, counted from 0.")] = 0,
    head: Annotated[int, typer.Option(help="Which head, counted from 0.")] = 0,
    token: Annotated[str | None, typer.Option(help="A word of the text, or its index; by default the last.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random weights, without --run.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print every number as JSON.")] = False,
    all_rows: Annotated[bool, typer.Option("--all-rows", help="Show every key, not only the largest weights.")] = False,
) -> None:
    """Explain one head's attention of one token: scores, scaling, mask, softmax, weighted sum, output.

    Every step is recomputed in float64 from the weights and the input, and the difference is printed.
    Without --run the model is a small untrained encoder, enough to follow the arithmetic.
    """
    import torch

    from clearhead.observe import explain

    checked_text(_FUNCTION, "--text", text)
    checked_text(_FUNCTION, "--token", token or "")

    if run is None:
        model, ids, words = _untrained(text, seed)
        source = f"an untrained encoder of {_LAYERS} layers: its weights are random (seed {seed})"
    else:
        model, ids, words = _trained(run, text)
        source = f"the trained model in {run}"
    explanation = explain(model, torch.tensor([ids]), token=_token(words, token), head=head, layer=layer, tokens=words)
    if as_json:
        typer.echo(json.dumps({"source": source, **explanation.to_dict()}, ensure_ascii=False, allow_nan=False))
    else:
        typer.echo(f"{source}\n{explanation.text(all_rows=all_rows)}")


def _untrained(text: str, seed: int) -> tuple[nn.Module, list[int], list[str]]:
    """A small untrained classifier whose vocabulary is the words of the text; deterministic for a seed."""
    import torch

    from clearhead.nn import SequenceClassifier

    words = re.findall(r"\w+|[^\w\s]", text)
    if not words:
        raise DataError.about(_FUNCTION, "--text", must="contain a word", got=repr(text)[:80], then="Pass some words.")
    if not 0 <= seed < 2**63:
        raise UnsupportedError.about(_FUNCTION, "--seed", must="lie from 0 to 2**63 - 1", got=seed, then="Use 0.")
    vocabulary = {word: place for place, word in enumerate(sorted(set(words)))}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SequenceClassifier(
            len(vocabulary), _WIDTH, _HEADS, _LAYERS, num_classes=2, max_len=len(words), dropout=0.0
        )
    return model.eval(), [vocabulary[word] for word in words], words


def _trained(run: Path, text: str) -> tuple[nn.Module, list[int], list[str]]:
    from clearhead.train.saved import load_run

    loaded = load_run(run, function=_FUNCTION)
    ids = loaded.encode(text)
    return loaded.model, ids, [loaded.tokenizer.decode([identity]) for identity in ids]


def _token(words: list[str], token: str | None) -> int | str:
    """The index of --token: by default the last token; a word of the text in any case, or a number."""
    if token is None:
        return len(words) - 1
    if token not in words:
        if re.fullmatch(r"-?\d{1,18}", token):
            return int(token)
        matches = [word for word in words if word.strip().casefold() == token.strip().casefold()]
        return matches[0] if matches else token
    return token
