"""clearhead train: a model from a table of texts, or from one long text."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from clearhead.train.options import ClassifierOptions, LanguageOptions, ParallelOptions

__all__ = ["app"]

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Train a classifier of texts or a language model.")

Data = Annotated[Path, typer.Option(help="The training file.")]
Out = Annotated[Path | None, typer.Option(help="Run folder to write; runs/<task>-<name of the data> by default.")]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Continue the run in --out, with the same result as an uninterrupted run."),
]


def _with_options(*kinds: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option for each field of some options classes."""

    def widen(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        declared = [item for item in signature.parameters.values() if item.kind is not item.VAR_KEYWORD]
        added = [_parameter(item) for kind in kinds for item in dataclasses.fields(kind)]
        everything = [*declared, *added]
        command.__signature__ = signature.replace(parameters=everything)  # type: ignore[attr-defined]
        command.__annotations__ = {item.name: item.annotation for item in everything}
        return command

    return widen


def _parameter(field: dataclasses.Field[Any]) -> inspect.Parameter:
    flag = typer.Option(field.default, help=field.metadata["help"])
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=flag, annotation=type(field.default))


@app.command()
@_with_options(ClassifierOptions, ParallelOptions)
def classify(
    *,
    data: Data,
    test: Annotated[Path | None, typer.Option(help="A file for the final test.")] = None,
    text_column: Annotated[str, typer.Option(help="The column of texts.")] = "text",
    label_column: Annotated[str, typer.Option(help="The column of labels.")] = "label",
    out: Out = None,
    resume: Resume = False,
    **options: Any,
) -> None:
    """Train a classifier of texts on a table (.csv with a header, or .jsonl).

    A part of the data is held out, stratified by label; the weights that are best on it are saved.
    To continue an interrupted run, run the same command with --resume.
    """
    from clearhead.train.classify import train_text_classifier
    from clearhead.train.progress import watcher_for

    folder, parallel = _folder(out, "classify", data), _parallel(options)
    metrics = train_text_classifier(
        data,
        out=folder,
        test=test,
        text_column=text_column,
        label_column=label_column,
        options=ClassifierOptions(**options),
        resume=resume,
        watcher=watcher_for(),
        parallel=parallel,
    )
    _report(metrics, f'run: {folder}  (try: clearhead predict {folder} --text "...")')


@app.command()
@_with_options(LanguageOptions, ParallelOptions)
def lm(*, data: Data, out: Out = None, resume: Resume = False, **options: Any) -> None:
    """Train a language model on a text file, by characters or byte-level BPE.

    The end of the text is held out, and the weights that are best on it are saved.
    To continue an interrupted run, run the same command with --resume.
    """
    from clearhead.train.language import train_text_language_model
    from clearhead.train.progress import watcher_for

    folder, parallel = _folder(out, "lm", data), _parallel(options)
    metrics = train_text_language_model(
        data,
        out=folder,
        options=LanguageOptions(**options),
        resume=resume,
        watcher=watcher_for(),
        parallel=parallel,
    )
    _report(metrics, f'run: {folder}  (try: clearhead generate {folder} --prompt "...")')


def _parallel(options: dict[str, Any]) -> ParallelOptions:
    """Take the degrees from among the options."""
    return ParallelOptions(**{item.name: options.pop(item.name) for item in dataclasses.fields(ParallelOptions)})


def _folder(out: Path | None, task: str, data: Path) -> Path:
    return Path("runs") / f"{task}-{data.stem}" if out is None else out


def _report(metrics: dict[str, Any], run: str) -> None:
    from clearhead.train.ranks import is_first_process

    if not is_first_process():
        return
    for part in ("held_out", "test"):
        numbers = metrics.get(part, {})
        shown = (f"{name} {f'{value:.4f}' if isinstance(value, float) else value}" for name, value in numbers.items())
        if numbers:
            typer.echo(f"{part.replace('_', '-')}: {', '.join(shown)}")
    best, steps, seconds = metrics["best_step"], metrics["steps"], metrics["seconds"]
    typer.echo(f"best weights: step {best} of {steps}, {seconds:.0f} s of training")
    typer.echo(run)
