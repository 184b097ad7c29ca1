"""clearhead observe: statistics of every head of a trained model on a text of any length, or on a file of texts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.observe_corpus import observe_corpus, world_size
from clearhead.cli.reading import layers_of, read_text
from clearhead.errors import DataError, ShapeError
from clearhead.readers import Reader, read_ids, reader_of

if TYPE_CHECKING:
    from clearhead.observe.summary import HeadSummary, Summary

__all__ = ["command"]

_FUNCTION = "observe"
_STDOUT = Path("-")
_LINE_EVERY = 10.0
_EDGES = 3


def command(
    model: Annotated[
        Path,
        typer.Argument(help="Run folder of clearhead train, or folder of a Hugging Face model with its tokenizer."),
    ],
    text: Annotated[str | None, typer.Option(help="The text to read.")] = None,
    file: Annotated[Path | None, typer.Option(help="A text file to read, UTF-8, of any length.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A file of many texts: .jsonl, .csv, or .txt with a text per line; - for JSON lines on stdin."
        ),
    ] = None,
    text_column: Annotated[str, typer.Option(help="With --data: the field or column of the text.")] = "text",
    out: Annotated[
        Path | None, typer.Option(help="With --data: folder of the results. The same command goes on after a stop.")
    ] = None,
    per_text: Annotated[bool, typer.Option(help="With --out: write each text's figures too, as texts.jsonl.")] = False,
    skip_bad: Annotated[
        bool, typer.Option(help="With --data: skip rows without a text that the model reads, and count them.")
    ] = False,
    layer: Annotated[
        list[str] | None, typer.Option(help="Only this layer: number, name or glob such as '*.0.*'. Repeatable.")
    ] = None,
    edges: Annotated[
        int | None, typer.Option(help="Number of the strongest edges to show for each head, 3 by default.")
    ] = None,
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

    With **--data** the means are over all texts of a file, and three more figures take the place of the edges:

    **previous**, **following**, **same**: weight on the token before the query, after it, and on itself.

    torchrun shares the texts over processes. The figures are the same bits with any number of processes.

        clearhead train lm --data plays.txt --out runs/plays
        clearhead observe runs/plays --file plays.txt
        clearhead observe runs/plays --text "Enter the king" --layer 0 --json heads.json
        torchrun --standalone --nproc-per-node 4 -m clearhead observe runs/plays --data texts.jsonl --out runs/heads
    """
    if text is None and file is None and data is None:
        must, then = "be given, one of the three", "See --help."
        raise ShapeError.about(_FUNCTION, "--text, --file or --data", must=must, got="none", then=then)
    one_text: Mapping[str, object] = {"--text": text, "--file": file, "--edges": edges, "--safetensors": safetensors}
    many_texts: Mapping[str, object] = {"--out": out, "--per-text": per_text or None, "--skip-bad": skip_bad or None}
    _refuse(one_text if data is not None else many_texts, with_data=data is not None)
    _check_files({"--json": as_json, "--safetensors": safetensors})
    if data is None:
        _observe_text(model, read_text(_FUNCTION, text, file), (layer, edges, chunk), as_json, safetensors)
        return
    from clearhead.corpus import CorpusOptions

    options = CorpusOptions(
        text_column=text_column, layers=layers_of(layer), chunk=chunk, skip_bad=skip_bad, per_text=per_text
    )
    summary = observe_corpus(model, data, out, options)
    if summary is not None:
        _write(as_json, summary.to_dict(), str(summary))
        if out is not None:
            typer.echo(f"wrote {out}", err=True)


def _refuse(options: Mapping[str, object], *, with_data: bool) -> None:
    """Raise if an option is given that belongs to the other kind of input."""
    for option, value in options.items():
        if value is not None:
            must = f"be left out {'with' if with_data else 'without'} --data"
            raise ShapeError.about(_FUNCTION, option, must=must, got=value, then="See --help.")
    if not with_data and world_size() > 1:
        must, got = "be given for several processes", "none"
        then = "A single text needs one process: leave torchrun out."
        raise ShapeError.about(_FUNCTION, "--data", must=must, got=got, then=then)


def _check_files(files: dict[str, Path | None]) -> None:
    from clearhead.train.files import check_writable

    for option, path in files.items():
        if path is not None and path.is_dir():
            raise DataError.about(_FUNCTION, option, must="be a file", got=f"the folder {path}", then="Add a name.")
        if path is not None and path != _STDOUT:
            check_writable(path, function=_FUNCTION, argument=option)


def _write(as_json: Path | None, values: dict[str, Any], table: str) -> None:
    """Print the table, or write the values as JSON, or both."""
    from clearhead.train.files import write_bytes

    if as_json is not None:
        content = json.dumps(values, ensure_ascii=False, indent=1) + "\n"
        if as_json == _STDOUT:
            sys.stdout.write(content)
            return
        write_bytes(as_json, content.encode())
    typer.echo(table)
    if as_json is not None:
        typer.echo(f"wrote {as_json}", err=True)


def _observe_text(
    model: Path,
    written: str,
    chosen: tuple[list[str] | None, int | None, int | None],
    as_json: Path | None,
    safetensors: Path | None,
) -> None:
    from clearhead.train.files import write_tensors

    layer, given_edges, chunk = chosen
    edges = _EDGES if given_edges is None else given_edges
    if edges < 1:
        raise ShapeError.about(_FUNCTION, "--edges", must="be at least 1", got=edges, then="Leave it out for 3.")
    reader = reader_of(_FUNCTION, model)
    ids = read_ids(_FUNCTION, reader, written)
    size = _chunk(reader, chunk)
    summary, tokens = _observed(reader, ids, size, layers_of(layer), edges, safetensors is not None)
    said = _reading_line(reader, len(ids), size, chunk)
    if safetensors is not None:
        write_tensors(safetensors, summary.tensors(), {"model": reader.name, "read": said})
    heads = summary.heads()
    _write(as_json, _as_dict(said, heads, tokens), f"{said}\n{_table(heads, tokens)}")
    if safetensors is not None and as_json != _STDOUT:
        typer.echo(f"wrote {safetensors}", err=True)


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


def _table(heads: Sequence[HeadSummary], tokens: list[str]) -> str:
    from clearhead.observe.text import printable, table

    def word(place: int) -> str:
        return printable(tokens[place].strip() or repr(tokens[place])[1:-1])

    rows = []
    for head in heads:
        edges = "  ".join(f"{word(pair.query)} > {word(pair.key)} {pair.weight:.2f}" for pair in head.edges)
        numbers = [f"{head.entropy:.2f}", f"{head.distance:.1f}", f"{head.first:.2f}"]
        rows.append([head.layer or "attention", str(head.head), *numbers, edges])
    return table(["layer", "head", "entropy", "distance", "first", "strongest edges"], rows, right={1, 2, 3, 4})
