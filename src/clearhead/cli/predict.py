"""clearhead predict: labels and probabilities from a trained classifier."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.reading import checked_text
from clearhead.errors import DataError, ShapeError

if TYPE_CHECKING:
    from clearhead.train.data import Table
    from clearhead.train.saved import Run

__all__ = ["command"]

_FUNCTION = "predict"
# Width for files and pipes.
_TABLE_WIDTH = 200


def command(
    run: Annotated[Path, typer.Argument(help="Run folder of clearhead train classify.")],
    text: Annotated[list[str] | None, typer.Option(help="A text. Repeatable.")] = None,
    data: Annotated[Path | None, typer.Option(help="A table of texts, .csv or .jsonl.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write predictions here, .csv or .jsonl.")] = None,
    text_column: Annotated[str, typer.Option(help="The column of texts in --data.")] = "text",
    label_column: Annotated[str, typer.Option(help="The column of labels in --data, if any.")] = "label",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines instead of a table.")] = False,
) -> None:
    """Predict the labels of texts; with --data, also measure the accuracy if the file has labels."""
    from clearhead.train.data import Table, read_table
    from clearhead.train.files import check_writable
    from clearhead.train.saved import load_run

    if bool(text) == (data is not None):
        must, then = "be given, one of the two", "Give --text or --data."
        got = "both" if text else "neither"
        raise ShapeError.about(_FUNCTION, "--text or --data", must=must, got=got, then=then)
    if out is not None and out.suffix.lower() not in _WRITERS:
        must, then = "end in .csv or .jsonl", "Choose another name."
        raise ShapeError.about(_FUNCTION, "--out", must=must, got=repr(out.name), then=then)
    if out is not None:
        if data is not None and out.exists() and data.exists() and out.samefile(data):
            must, then = "not be the file of --data", "Choose another name."
            raise DataError.about(_FUNCTION, "--out", must=must, got=str(out), then=then)
        check_writable(out, function=_FUNCTION, argument="--out")
    loaded = load_run(run, function=_FUNCTION)
    loaded.require("classify", _FUNCTION)
    if data is not None:
        table = read_table(
            data,
            text_column=text_column,
            label_column=label_column,
            labels_required=False,
            function=_FUNCTION,
        )
    else:
        texts = [checked_text(_FUNCTION, "--text", each) for each in text or []]
        table = Table(Path("--text"), texts, None, list(range(1, len(texts) + 1)), unit="text")
    rows = _rows(loaded, table)
    _deliver(rows, out, as_json)
    if table.labels is not None:
        right = sum(row["label"] == row["prediction"] for row in rows)
        typer.echo(f"accuracy: {right / len(rows):.4f} ({right} of {len(rows)})", err=as_json)


def _rows(run: Run, table: Table) -> list[dict[str, Any]]:
    from clearhead.train.classify import encoded

    encoded(table, run.tokenizer, _FUNCTION)  # raises with the line number of an empty text
    rows = []
    for place, (label, chances) in enumerate(run.predict(table.texts)):
        row: dict[str, Any] = {"text": table.texts[place]}
        if table.labels is not None:
            row["label"] = table.labels[place]
        probabilities = {name: round(chance, 6) for name, chance in zip(run.labels, chances, strict=True)}
        rows.append(row | {"prediction": label, "probabilities": probabilities})
    return rows


def _deliver(rows: list[dict[str, Any]], out: Path | None, as_json: bool) -> None:
    if out is not None:
        from clearhead.train.files import write_bytes

        write_bytes(out, _WRITERS[out.suffix.lower()](rows).encode())
        typer.echo(f"wrote {len(rows)} predictions to {out}", err=True)
    elif as_json:
        sys.stdout.write(_json_lines(rows))
    else:
        _print_table(rows)


def _json_lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _csv(rows: list[dict[str, Any]]) -> str:
    flat = [
        {name: value for name, value in row.items() if name != "probabilities"}
        | {f"p({label})": chance for label, chance in row["probabilities"].items()}
        for row in rows
    ]
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, fieldnames=list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return stream.getvalue()


_WRITERS = {".csv": _csv, ".jsonl": _json_lines}


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("text", "prediction", "probabilities", box=None)
    for row in rows:
        ranked = sorted(row["probabilities"].items(), key=lambda item: -item[1])
        shown = "  ".join(f"{label} {chance:.3f}" for label, chance in ranked)
        table.add_row(row["text"], row["prediction"], shown)
    width = None if sys.stdout.isatty() else _TABLE_WIDTH
    Console(markup=False, highlight=False, emoji=False, width=width).print(table)
