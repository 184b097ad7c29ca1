"""clearhead observe: statistics of every head of a trained model on a text of any length."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.reading import layers_of, read_text
from clearhead.errors import DataError, ShapeError
from clearhead.readers import Reader, read_ids, reader_of

if TYPE_CHECKING:
    from clearhead.observe.summary import HeadSummary, Summary

__all__ = ["command"]

_FUNCTION = "observe"
_STDOUT = Path("-")
_LINE_EVERY = 10.0


def command(
    model: Annotated[
        Path,
        typer.Argument(help="Run folder of clearhead train, or folder of a Hugging Face model with its tokenizer."),
    ],
    text: Annotated[str | None, typer.Option(help="The text to read.")] = None,
    file: Annotated[Path | None, typer.Option(help="A text file to read, UTF-8, of any length.")] = None,
    layer: Annotated[
        list[str] | None, typer.Option(help="Only this layer: number, name or glob such as '*.0.*'. Repeatable.")
    ] = None,
    edges: Annotated[int, typer.Option(help="Number of the strongest edges to show for each head.")] = 3,
    chunk: Annotated[
        int | None, typer.Option(help="Most tokens to read at once; by default the model's limit.")
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write every number as JSON; - prints it instead of the table.")
    ] = None,
    safetensors: Annotated[Path | None, typer.Option(help="Write the statistics of every token as tensors.")] = None,
) -> None:
    """Show what each head attends to: one line per head, means over all tokens of the text.

    **entropy**: how spread out its attention is, in nats; 0 for one key, ln(n) for n equal keys.
    **distance**: mean distance between a query and the keys it attends to, in tokens.
    **first**: weight on the first token, which often serves as an attention sink.
    **strongest edges**: query > key with the weight between them.

    A text that is longer than the model's limit is read in parts, and the first line says so. Nothing is downloaded.

        clearhead train lm --data plays.txt --out runs/plays
        clearhead observe runs/plays --file plays.txt
        clearhead observe runs/plays --text "Enter the king" --layer 0 --json heads.json
    """
    from clearhead.train.files import check_writable, write_bytes, write_tensors

    written = read_text(_FUNCTION, text, file)
    if edges < 1:
        raise ShapeError.about(_FUNCTION, "--edges", must="be at least 1", got=edges, then="Leave it out for 3.")
    for option, path in (("--json", as_json), ("--safetensors", safetensors)):
        if path is not None and path.is_dir():
            raise DataError.about(_FUNCTION, option, must="be a file", got=f"the folder {path}", then="Add a name.")
        if path is not None and path != _STDOUT:
            check_writable(path, function=_FUNCTION, argument=option)
    reader = reader_of(_FUNCTION, model)
    ids = read_ids(_FUNCTION, reader, written)
    size = _chunk(reader, chunk)
    summary, tokens = _observed(reader, ids, size, layers_of(layer), edges, safetensors is not None)
    said = _reading_line(reader, len(ids), size, chunk)
    if safetensors is not None:
        write_tensors(safetensors, summary.tensors(), {"model": reader.name, "read": said})
    if as_json is not None:
        content = json.dumps(_as_dict(said, summary.heads(), tokens), ensure_ascii=False, indent=1) + "\n"
        if as_json == _STDOUT:
            sys.stdout.write(content)
            return
        write_bytes(as_json, content.encode())
    typer.echo(said)
    _print(summary.heads(), tokens)
    for path in (as_json, safetensors):
        if path is not None:
            typer.echo(f"wrote {path}", err=True)


def _chunk(reader: Reader, chunk: int | None) -> int:
    if chunk is not None and not 1 <= chunk <= reader.limit:
        raise ShapeError.about(
            _FUNCTION,
            "--chunk",
            must=f"lie from 1 to {reader.limit}, the model's limit",
            got=chunk,
            then="Leave it out to use the limit.",
        )
    return reader.limit if chunk is None else chunk


def _reading_line(reader: Reader, count: int, size: int, chunk: int | None) -> str:
    """One line: the model, the number of tokens, and the parts."""
    tokens = f"{count:,} token{'' if count == 1 else 's'}"
    if count <= size:
        return f"{reader.name}: {tokens}"
    why = "as --chunk says" if chunk is not None else "the model's limit"
    parts = -(-count // size)
    return f"{reader.name}: {tokens} in {parts:,} parts of at most {size:,}, {why}; no edge goes from part to part"


def _observed(
    reader: Reader, ids: list[int], size: int, layers: list[int | str] | None, edges: int, keep_tensors: bool
) -> tuple[Summary, list[str]]:
    """The summary of all parts, and every token that the model read."""
    import torch

    from clearhead.observe import observe
    from clearhead.observe.summary import Summary

    summary, tokens = Summary(edges, keep_tensors=keep_tensors), list[str]()
    starts = range(0, len(ids), size)
    with torch.no_grad(), _progress(len(starts)) as done:
        for start in starts:
            part = reader.framed(ids[start : start + size])
            with observe(reader.model, summary.want(len(part)), layers=layers, keep="all") as observed:
                reader.run(torch.tensor([part]))
            summary.add(observed, len(tokens))
            tokens += reader.words(part)
            done()
    return summary, tokens


@contextmanager
def _progress(parts: int) -> Iterator[Callable[[], None]]:
    """Report progress: a bar on a terminal, otherwise a line every ten seconds."""
    if sys.stderr.isatty() and parts > 1:
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("reading", total=parts)
            yield lambda: bar.advance(task)
        return
    last, finished = time.monotonic(), 0

    def done() -> None:
        nonlocal last, finished
        finished += 1
        if time.monotonic() - last >= _LINE_EVERY:
            last = time.monotonic()
            typer.echo(f"read {finished:,} of {parts:,} parts", err=True)

    yield done


def _as_dict(said: str, heads: Sequence[HeadSummary], tokens: list[str]) -> dict[str, Any]:
    return {"read": said, "heads": [head.to_dict() for head in heads], "tokens": tokens}


def _print(heads: Sequence[HeadSummary], tokens: list[str]) -> None:
    from clearhead.observe.text import printable, table

    def word(place: int) -> str:
        return printable(tokens[place].strip() or repr(tokens[place])[1:-1])

    rows = []
    for head in heads:
        edges = "  ".join(f"{word(pair.query)} > {word(pair.key)} {pair.weight:.2f}" for pair in head.edges)
        numbers = [f"{head.entropy:.2f}", f"{head.distance:.1f}", f"{head.first:.2f}"]
        rows.append([head.layer or "attention", str(head.head), *numbers, edges])
    typer.echo(table(["layer", "head", "entropy", "distance", "first", "strongest edges"], rows, right={1, 2, 3, 4}))
