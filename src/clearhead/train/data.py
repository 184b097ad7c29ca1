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
from typing import BinaryIO, Final

from clearhead.errors import DataError

__all__ = ["RowPlace", "Table", "TextRow", "read_known", "read_table", "read_text", "stream_texts"]

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
        raise _not_utf8(path, error, line, function) from error
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
    readers = {".csv": _csv_table, ".jsonl": _json_table}
    if path.suffix.lower() not in readers:
        must, then = "end in .csv or .jsonl", "Rename or convert the file."
        raise DataError.about(function, str(path), must=must, got=repr(path.suffix), then=then)
    text, sha256 = read_known(path, function=function)
    texts: list[str] = []
    labels: list[str] = []
    lines: list[int] = []
    with_labels = labels_required
    required = (text_column, label_column) if labels_required else (text_column,)
    rows = readers[path.suffix.lower()](text, path, (text_column, label_column), required, function)
    for line, row in rows:
        if isinstance(row, DataError):
            raise row
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


@dataclass(frozen=True)
class RowPlace:
    """Where a row starts: its byte in the file and its line, counted from 1."""

    offset: int = 0
    line: int = 1


@dataclass(frozen=True)
class TextRow:
    """A text of a file, or the error of a row without one; the line of the row, and the place of the next row."""

    text: str | DataError
    line: int
    following: RowPlace


def stream_texts(
    path: Path, *, text_column: str = "text", start: RowPlace | None = None, function: str = "stream_texts"
) -> Iterator[TextRow]:
    """Read the texts of ``.csv``, ``.jsonl`` or ``.txt`` (one text per line) one by one, from the row at ``start`` on.

    Blank lines are no rows. A row that has no text is handed over as its ``DataError``; whatever makes the rows after
    it unreadable (bytes that are not UTF-8, an open quote, no such column in a header) raises.
    """
    kind = path.suffix.lower()
    if kind not in (".csv", ".jsonl", ".txt"):
        must, then = "end in .csv, .jsonl or .txt", "Rename or convert the file."
        raise DataError.about(function, str(path), must=must, got=repr(path.suffix), then=then)
    try:
        with path.open("rb") as file:
            yield from _streamed(file, kind, path, text_column, start or RowPlace(), function)
    except OSError as error:
        must, then = "be a readable file", "Check the path."
        raise DataError.about(function, str(path), must=must, got=error.strerror, then=then) from error


def _streamed(file: BinaryIO, kind: str, path: Path, column: str, start: RowPlace, function: str) -> Iterator[TextRow]:
    header: list[str] | None = None
    if kind == ".csv" and start.offset:
        top = csv.reader(_Lines(file, path, RowPlace(), function, split=True), strict=True)
        header = next((cells for cells in top if cells), None)
    lines = _Lines(file, path, start, function, split=kind == ".csv")
    if kind == ".csv":
        most = path.stat().st_size + 1
        rows = _csv_rows(lines, path, (column,), (column,), function, header=header, line=start.line, longest=most)
    elif kind == ".jsonl":
        rows = _json_rows(lines, path, function, line=start.line)
    else:
        rows = ((line, {column: text.strip("\r\n")}) for line, text in enumerate(lines, start.line) if text.strip())
    for line, row in rows:
        text: str | DataError
        try:
            text = row if isinstance(row, DataError) else _cell(row, column, path, line, function)
        except DataError as error:
            text = error
        yield TextRow(text, line, RowPlace(lines.offset, lines.line))


class _Lines:
    """The decoded lines of a file from a place on; ``offset`` and ``line`` are those of the next line.

    With ``split`` a lone carriage return ends a line too, as ``csv`` counts.
    """

    def __init__(self, file: BinaryIO, path: Path, start: RowPlace, function: str, *, split: bool) -> None:
        self._file, self._path, self._function, self._split = file, path, function, split
        self.offset, self.line = start.offset, start.line
        file.seek(start.offset)

    def __iter__(self) -> Iterator[str]:
        for content in self._file:
            try:
                text = content.decode("utf-8-sig" if self.offset == 0 else "utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf8(self._path, error, self.line, self._function) from error
            mark = len(content) - len(text.encode())
            for part in io.StringIO(text, newline="") if self._split else [text]:
                self.offset += mark + len(part.encode())
                self.line, mark = self.line + 1, 0
                yield part


def _not_utf8(path: Path, error: UnicodeDecodeError, line: int, function: str) -> DataError:
    got = f"byte 0x{error.object[error.start]:02x} in line {line}"
    then = "Convert it, for example with iconv -t UTF-8."
    return DataError.about(function, str(path), must="be UTF-8", got=got, then=then)


#: Rows with their first lines; of a bad row, its error.
_Rows = Iterator[tuple[int, dict[str, object] | DataError]]


def _csv_table(text: str, path: Path, columns: tuple[str, ...], required: tuple[str, ...], function: str) -> _Rows:
    return _csv_rows(io.StringIO(text, newline=""), path, columns, required, function, longest=len(text) + 1)


def _json_table(text: str, path: Path, columns: tuple[str, ...], required: tuple[str, ...], function: str) -> _Rows:
    return _json_rows(text.split("\n"), path, function)


def _csv_rows(
    lines: Iterable[str],
    path: Path,
    columns: tuple[str, ...],
    required: tuple[str, ...],
    function: str,
    *,
    longest: int,
    header: list[str] | None = None,
    line: int = 1,
) -> _Rows:
    reader, before = csv.reader(lines, strict=True), line - 1
    # A cell may be as long as the file.
    usual = csv.field_size_limit(max(csv.field_size_limit(), longest))
    try:
        for cells in reader:
            last = before + reader.line_num
            if cells and header is None:
                header = cells
                _check_header(header, path, columns, required, line, function)
            elif cells and header is not None and len(cells) == len(header):
                yield line, dict(zip(header, cells, strict=True))
            elif cells and header is not None:
                must, then = f"have {len(header)} cells in every row, as its header has", "Quote texts with commas."
                got = f"{len(cells)} cells in {_lines(line, last)}"
                yield line, DataError.about(function, str(path), must=must, got=got, then=then)
            line = last + 1
    except csv.Error as error:
        got, then = f"{error} in {_lines(line, before + reader.line_num)}", "Check the quoting there."
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


def _json_rows(lines: Iterable[str], path: Path, function: str, *, line: int = 1) -> _Rows:
    for number, content in enumerate(lines, start=line):
        if content.strip():
            yield number, _json_row(content, number, path, function)


def _json_row(content: str, line: int, path: Path, function: str) -> dict[str, object] | DataError:
    try:
        row = json.loads(content)
    except (ValueError, RecursionError) as error:
        # ValueError includes numbers of thousands of digits, RecursionError deeply nested lists.
        said = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        must, got, then = "be JSON lines", f"{said} in line {line}", "Check that line."
        return DataError.about(function, str(path), must=must, got=got, then=then)
    if isinstance(row, dict):
        return row
    must, got = "have one object per line", f"{type(row).__name__} in line {line}"
    return DataError.about(function, str(path), must=must, got=got, then='Write rows as {"label": ..., "text": ...}.')


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
