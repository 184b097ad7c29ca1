"""Strict readers of labelled tables (CSV, JSON lines) and plain text: a bad line raises and is never skipped."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clearhead.errors import DataError

__all__ = ["Table", "read_known", "read_table", "read_text"]

#: The ends of lines that an editor, and csv, count.
_LINE_ENDS: Final = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True)
class Table:
    """The rows of one file: texts, labels (None without such a column) and line numbers.

    A row over several lines has the number of its first one. ``sha256`` is the SHA-256 of the file, and ``unit`` what
    the numbers count, for texts that come from elsewhere.
    """

    path: Path
    texts: list[str]
    labels: list[str] | None
    lines: list[int]
    sha256: str = ""
    unit: str = "line"

    def __len__(self) -> int:
        return len(self.texts)


def read_text(path: Path | str, *, function: str = "read_text") -> str:
    """Read a whole UTF-8 file without newline conversion; raises ``DataError`` if it is absent, empty or not UTF-8."""
    return read_known(path, function=function)[0]


def read_known(path: Path | str, *, function: str = "read_text") -> tuple[str, str]:
    """``read_text``, and the SHA-256 of the file, by which a resumed run checks its data."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        must, then = "be a readable file", "Check the path."
        raise DataError.about(function, str(path), must=must, got=error.strerror, then=then) from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The position does not count a byte order mark.
        line = len(_LINE_ENDS.findall(error.object[: error.start])) + 1
        got = f"byte 0x{error.object[error.start]:02x} in line {line}"
        then = "Convert it, for example with iconv -t UTF-8."
        raise DataError.about(function, str(path), must="be UTF-8", got=got, then=then) from error
    if not text.strip():
        must, then = "have text", "Check the file."
        raise DataError.about(function, str(path), must=must, got="an empty file", then=then)
    return text, hashlib.sha256(content).hexdigest()


def read_table(
    path: Path | str,
    *,
    text_column: str = "text",
    label_column: str = "label",
    labels_required: bool = True,
    function: str = "read_table",
) -> Table:
    """Read ``.csv`` (with a header) or ``.jsonl`` (one object per line) as texts and labels.

    Every row must have the text column, and with ``labels_required`` the label column; otherwise labels are read if the
    first row has them. Raises ``DataError`` with the file and the line.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "t.csv"
    >>> _ = path.write_text('label,text\\nyes,"good, really"\\n')
    >>> read_table(path).texts
    ['good, really']
    """
    path = Path(path)
    readers = {".csv": _csv_rows, ".jsonl": _json_rows}
    if path.suffix.lower() not in readers:
        must, then = "end in .csv or .jsonl", "Rename or convert the file."
        raise DataError.about(function, str(path), must=must, got=repr(path.suffix), then=then)
    text, sha256 = read_known(path, function=function)
    texts: list[str] = []
    labels: list[str] = []
    lines: list[int] = []
    with_labels = labels_required
    required = (text_column, label_column) if labels_required else (text_column,)
    for line, row in readers[path.suffix.lower()](text, path, (text_column, label_column), required, function):
        if not lines:
            with_labels = labels_required or label_column in row
        texts.append(_cell(row, text_column, path, line, function))
        if with_labels:
            labels.append(_cell(row, label_column, path, line, function))
            if labels_required and not labels[-1].strip():
                must, then = "have a label in every row", "Write one, or remove that row."
                raise DataError.about(function, str(path), must=must, got=f"none in line {line}", then=then)
        lines.append(line)
    if not lines:
        must, then = "have at least one row", "Check the file."
        raise DataError.about(function, str(path), must=must, got="a header and no rows", then=then)
    return Table(path, texts, labels if with_labels else None, lines, sha256)


def _csv_rows(
    text: str, path: Path, columns: tuple[str, ...], required: tuple[str, ...], function: str
) -> Iterator[tuple[int, dict[str, object]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    line = 1
    # A cell may be as long as the file.
    usual = csv.field_size_limit(max(csv.field_size_limit(), len(text) + 1))
    try:
        for cells in reader:
            if cells and header is None:
                header = cells
                _check_header(header, path, columns, required, line, function)
            elif cells and header is not None:
                if len(cells) != len(header):
                    must, then = f"have {len(header)} cells in every row, as its header has", "Quote texts with commas."
                    got = f"{len(cells)} cells in {_lines(line, reader.line_num)}"
                    raise DataError.about(function, str(path), must=must, got=got, then=then)
                yield line, dict(zip(header, cells, strict=True))
            line = reader.line_num + 1
    except csv.Error as error:
        got, then = f"{error} in {_lines(line, reader.line_num)}", "Check the quoting there."
        raise DataError.about(function, str(path), must="be well-formed CSV", got=got, then=then) from error
    finally:
        csv.field_size_limit(usual)


def _check_header(
    header: list[str], path: Path, columns: tuple[str, ...], required: tuple[str, ...], line: int, function: str
) -> None:
    for column in columns:
        if header.count(column) > 1:
            must, then = f"have one column {column!r}", "Rename the others."
            got = f"{header.count(column)} in line {line}"
            raise DataError.about(function, str(path), must=must, got=got, then=then)
    for column in required:
        if column not in header:
            raise _missing(column, header, path, line, function)


def _missing(column: str, present: Iterable[str], path: Path, line: int, function: str) -> DataError:
    got = f"the columns {', '.join(map(repr, present)) or 'none'} in line {line}"
    then = "Name the right one with --text-column or --label-column."
    return DataError.about(function, str(path), must=f"have the column {column!r}", got=got, then=then)


def _lines(first: int, last: int) -> str:
    """The lines of one row, in which csv may report a quote at the end of the file that opens in the first line."""
    return f"line {first}" if last <= first else f"the row of lines {first} to {last}"


def _json_rows(
    text: str, path: Path, columns: tuple[str, ...], required: tuple[str, ...], function: str
) -> Iterator[tuple[int, dict[str, object]]]:
    for line, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except (ValueError, RecursionError) as error:
            # ValueError includes numbers of thousands of digits, RecursionError deeply nested lists.
            said = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            got, then = f"{said} in line {line}", "Check that line."
            raise DataError.about(function, str(path), must="be JSON lines", got=got, then=then) from error
        if not isinstance(row, dict):
            got, then = f"{type(row).__name__} in line {line}", 'Write rows as {"label": ..., "text": ...}.'
            raise DataError.about(function, str(path), must="have one object per line", got=got, then=then)
        yield line, row


def writable(text: str) -> bool:
    """Whether a text can be encoded as UTF-8, that is, has no lone surrogates."""
    return not any("\ud800" <= sign <= "\udfff" for sign in text)


def _cell(row: dict[str, object], column: str, path: Path, line: int, function: str) -> str:
    if column not in row:
        raise _missing(column, row, path, line, function)
    value = row[column]
    if isinstance(value, str) and writable(value):
        return value
    if isinstance(value, bool | int):
        return json.dumps(value)
    must = f"have text in the column {column!r}"
    kind = "a lone surrogate" if isinstance(value, str) else type(value).__name__
    got, then = f"{kind} in line {line}", "Correct that row."
    raise DataError.about(function, str(path), must=must, got=got, then=then)
