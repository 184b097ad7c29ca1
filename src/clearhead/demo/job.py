"""The demo from data to page, in the order of its printed output."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from clearhead.demo import words
from clearhead.demo.contents import page_of, pick
from clearhead.demo.digits import CLASSES, TOKENS, Digits, load, token_name
from clearhead.demo.exact import Agreement, compare
from clearhead.demo.inside import Layer, influence, layers_on, most_influential
from clearhead.demo.speed import Speed, measure
from clearhead.demo.threads import threads
from clearhead.demo.training import Recipe, log_probabilities, new_model, train
from clearhead.errors import DataError, ShapeError
from clearhead.functional.exact import observe_attention
from clearhead.inspector import Page
from clearhead.nn import SequenceClassifier
from clearhead.observe.explain import explain
from clearhead.statistics import Want
from clearhead.train.files import write_json
from clearhead.train.lock import one_writer
from clearhead.train.progress import ProgressReporter, watcher_for

__all__ = ["METRICS", "PAGE", "Result", "Settings", "run"]

PAGE, METRICS = "index.html", "metrics.json"
_FUNCTION = "clearhead demo"
_Say = Callable[[str], object]
_CHECKED = 64  # held-out digits on which every head is checked, and the batch that is timed
_MISTAKES = 4


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of the demo: the output folder, the seed, the number of epochs, and ``quick`` for a short run."""

    out: Path = Path("clearhead-demo")
    seed: int = 0
    epochs: int | None = None
    quick: bool = False

    def checked(self) -> Settings:
        """Return the settings; raises for invalid ones before the training starts."""
        for flag, value, least in (("--seed", self.seed, 0), ("--epochs", self.epochs, 1)):
            if value is not None and value < least:
                must, then = f"be at least {least}", "Choose another number."
                raise ShapeError.about(_FUNCTION, flag, must=must, got=value, then=then)
        existing = next(folder for folder in (self.out, *self.out.absolute().parents) if folder.exists())
        if not existing.is_dir():
            raise _no_folder(f"a file, {existing}")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise _no_folder(f"{existing}, which is not writable")
        return self

    def recipe(self) -> Recipe:
        """The recipe with the requested number of epochs."""
        usual = Recipe()
        epochs = self.epochs if self.epochs is not None else 1 if self.quick else usual.epochs
        return replace(usual, epochs=epochs)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The results of the demo and the files that it wrote."""

    accuracy: float
    correct: int
    agreement: Agreement
    speed: Speed
    page: Path
    metrics: Path


def run(settings: Settings, *, say: Callable[[str], object] = print, watcher: ProgressReporter | None = None) -> Result:
    """Train, explain, check, time and write the page; all files are written at the end.

    Raises:
        ShapeError, DataError: invalid settings.
    """
    settings = settings.checked()
    # Steps this small gain little from a second thread, and become several times slower when another program uses
    # its core. With one thread the numbers also do not depend on the number of cores.
    with one_writer(settings.out, function=_FUNCTION, say=say), threads(1) as usual:
        return _run(settings, say, watcher_for() if watcher is None else watcher, usual)


def _run(settings: Settings, say: _Say, watcher: ProgressReporter, usual_threads: int) -> Result:
    started = time.monotonic()
    recipe = settings.recipe()
    digits, held_out = load()
    model = new_model(recipe, settings.seed)
    _say_start(say, model, recipe, digits, held_out, settings)
    outcome = train(model, digits, held_out, recipe, seed=settings.seed, watcher=watcher)
    accuracy = outcome.held_out["accuracy"]
    correct = round(accuracy * len(held_out))
    _section(say, "Test accuracy", [_accuracy_line(accuracy, correct, len(held_out), outcome.seconds)])

    shown = held_out.select(torch.tensor(pick(model, held_out, mistakes=_MISTAKES)))
    explained = _explain(say, model, shown)
    layers = layers_on(model, held_out.ids[:_CHECKED])
    agreement = compare(layers)
    _section(say, "Attention against float64", words.agreement_lines(agreement))
    with threads(usual_threads):
        speed = measure(layers[0], repeats=9 if settings.quick else 41, seconds=2.0 if settings.quick else 8.0)
    _section(say, "Speed of layer 0's attention", words.speed_lines(speed))

    result = Result(
        accuracy=accuracy,
        correct=correct,
        agreement=agreement,
        speed=speed,
        page=settings.out / PAGE,
        metrics=settings.out / METRICS,
    )
    page = page_of(model, shown, _facts(result, len(held_out)))
    metrics = {
        "format": "clearhead-demo", "version": 1, "seed": settings.seed, "recipe": asdict(recipe),
        "test_accuracy": accuracy, "test_correct": correct, "test_digits": len(held_out), "train_digits": len(digits),
        "train_seconds": round(outcome.seconds, 3), "seconds": round(time.monotonic() - started, 3),
        "explained": explained, "float64": agreement.to_dict(), "speed": speed.to_dict(), "page": PAGE,
    }  # fmt: skip
    _write(result, page, metrics)
    _section(
        say,
        "Page",
        [
            f"{result.page.resolve()}  ({result.page.stat().st_size / 2**20:.1f} MB, opens offline in any browser)",
            f"{result.metrics.resolve()}  (the numbers above)",
            f"all of it took {time.monotonic() - started:.0f} s",
        ],
    )
    return result


def _write(result: Result, page: Page, metrics: dict[str, Any]) -> None:
    try:
        page.save(result.page)
        write_json(result.metrics, metrics)
    except OSError as error:
        raise _no_folder(f"{error.strerror or error}") from error


def _no_folder(got: str) -> DataError:
    must, then = "be a writable folder, or the name of a new one", "Choose another folder."
    return DataError.about(_FUNCTION, "--out", must=must, got=got, then=then)


def _accuracy_line(accuracy: float, correct: int, count: int, seconds: float) -> str:
    return f"{accuracy:.4f} on the held-out fifth ({correct} of {count}), after {seconds:.0f} s of training"


def _section(say: _Say, title: str, lines: Iterable[str]) -> None:
    say("\n".join(["", title, *(f"  {line}".rstrip() for line in lines)]))


def _say_start(
    say: _Say,
    model: SequenceClassifier,
    recipe: Recipe,
    digits: Digits,
    held_out: Digits,
    settings: Settings,
) -> None:
    total = len(digits) + len(held_out)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(
        f"{total:,} handwritten digits (scikit-learn), each a sequence of {TOKENS} intensity tokens; "
        f"{len(digits):,} to train, {len(held_out)} held out"
    )
    say(
        f"ch.nn.SequenceClassifier from scratch: {recipe.num_layers} layers x {recipe.num_heads} heads, width "
        f"{recipe.embed_dim}, {parameters:,} parameters; {recipe.epochs} epochs, seed {settings.seed}"
    )


def _explain(say: _Say, model: SequenceClassifier, shown: Digits) -> dict[str, Any]:
    """Explain the least certain of the shown predictions, print it, and return it as JSON values."""
    every = log_probabilities(model, shown.ids[:CLASSES]).exp()
    place = int(every.amax(dim=-1).argmin())
    ids, truth, number = shown.ids[place], int(shown.labels[place]), int(shown.numbers[place])
    chances = every[place].tolist()
    predicted = max(range(len(chances)), key=lambda label: chances[label])
    lost = influence(model, ids, predicted)
    layers = layers_on(model, ids[None])
    focus = most_influential(layers, lost, 0)
    names = [token_name(token) for token in range(TOKENS)]
    explanation = explain(model, ids[None], layer=focus.layer, head=focus.head, token=focus.token, tokens=names)
    received = _received(layers[focus.layer], focus.head)
    head_lost = lost[focus.layer][focus.head]
    _section(
        say,
        "One prediction, explained",
        [
            *words.explained_lines(
                ids, number, truth, chances, focus, head_lost, received, explanation.weights.tolist()
            ),
            "",
            *str(explanation).splitlines(),
        ],
    )
    return {
        "digit": number,
        "truth": truth,
        "predicted": predicted,
        "probability": chances[predicted],
        **asdict(focus),
        "log_probability_lost_without_the_head": head_lost,
        "worst_difference": explanation.difference,
    }


def _received(layer: Layer, head: int) -> list[float]:
    """Mean weight over the queries that each token receives in one head."""
    observation = observe_attention(layer.query, layer.key, layer.value, want=Want(received=True), scale=layer.scale)
    assert observation.received is not None
    received: list[float] = (observation.received[0, head] / TOKENS).tolist()
    return received


def _facts(result: Result, count: int) -> list[dict[str, str]]:
    agreement, speed = result.agreement, result.speed
    layer, head = agreement.place
    return [
        {
            "label": "Test accuracy",
            "value": f"{100 * result.accuracy:.1f}%",
            "note": f"{result.correct} of {count} held-out digits",
        },
        {
            "label": "Worst difference from float64",
            "value": f"{agreement.largest:.1e}",
            "note": f"head {head} of layer {layer}; every head on {agreement.sequences} held-out digits; "
            f"the textbook formula in float32: {agreement.largest_textbook:.1e}",
        },
        {
            "label": "Attention speed",
            "value": f"{speed.times:.2f} × torch",
            "note": f"{1e3 * speed.ours.median:.2f} ms against {1e3 * speed.torch.median:.2f} ms of "
            f"torch.nn.MultiheadAttention; {speed.conditions()}",
        },
    ]
