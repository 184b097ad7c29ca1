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


@dataclass(frozen=True)
class _Source:
    """The file that a public function reads."""

    path: Path
    function: str

    def error(self, must: str, got: object, then: str) -> DataError:
        return DataError.about(self.function, str(self.path), must=must, got=got, then=then)


def read_text(path: Path | str, *, function: str = "read_text") -> str:
    """Read a whole UTF-8 file without newline conversion; raises ``DataError`` if it is absent, empty or not UTF-8."""
    return read_known(path, function=function)[0]


def read_known(path: Path | str, *, function: str = "read_text") -> tuple[str, str]:
    """``read_text``, and the SHA-256 of the file, by which a resumed run checks its data."""
    source = _Source(Path(path), function)
    try:
        content = source.path.read_bytes()
    except OSError as error:
        raise source.error("be a readable file", error.strerror, "Check the path.") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The position does not count a byte order mark.
        line = len(_LINE_ENDS.findall(error.object[: error.start])) + 1
        raise _not_utf8(source, error, line) from error
    if not text.strip():
        raise source.error("have text", "an empty file", "Check the file.")
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
    source = _Source(path, function)
    readers = {".csv": _csv_table, ".jsonl": _json_table}
    if path.suffix.lower() not in readers:
        raise source.error("end in .csv or .jsonl", repr(path.suffix), "Rename or convert the file.")
    text, sha256 = read_known(path, function=function)
    texts: list[str] = []
    labels: list[str] = []
    lines: list[int] = []
    with_labels = labels_required
    required = (text_column, label_column) if labels_required else (text_column,)
    rows = readers[path.suffix.lower()](text, source, (text_column, label_column), required)
    for line, row in rows:
        if isinstance(row, DataError):
            raise row
        if not lines:
            with_labels = labels_required or label_column in row
        texts.append(_cell(row, text_column, source, line))
        if with_labels:
            labels.append(_cell(row, label_column, source, line))
            if labels_required and not labels[-1].strip():
                then = "Write one, or remove that row."
                raise source.error("have a label in every row", f"none in line {line}", then)
        lines.append(line)
    if not lines:
        raise source.error("have at least one row", "a header and no rows", "Check the file.")
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
    kind, source = path.suffix.lower(), _Source(path, function)
    if kind not in (".csv", ".jsonl", ".txt"):
        raise source.error("end in .csv, .jsonl or .txt", repr(path.suffix), "Rename or convert the file.")
    try:
        with path.open("rb") as file:
            yield from _streamed(file, kind, source, text_column, start or RowPlace())
    except OSError as error:
        raise source.error("be a readable file", error.strerror, "Check the path.") from error


def _streamed(file: BinaryIO, kind: str, source: _Source, column: str, start: RowPlace) -> Iterator[TextRow]:
    header: list[str] | None = None
    if kind == ".csv" and start.offset:
        top = csv.reader(_Lines(file, source, RowPlace(), split=True), strict=True)
        header = next((cells for cells in top if cells), None)
    lines = _Lines(file, source, start, split=kind == ".csv")
    if kind == ".csv":
        most = source.path.stat().st_size + 1
        rows = _csv_rows(lines, source, (column,), (column,), header=header, line=start.line, longest=most)
    elif kind == ".jsonl":
        rows = _json_rows(lines, source, line=start.line)
    else:
        rows = ((line, {column: text.strip("\r\n")}) for line, text in enumerate(lines, start.line) if text.strip())
    for line, row in rows:
        text: str | DataError
        try:
            text = row if isinstance(row, DataError) else _cell(row, column, source, line)
        except DataError as error:
            text = error
        yield TextRow(text, line, RowPlace(lines.offset, lines.line))


class _Lines:
    """The decoded lines of a file from a place on; ``offset`` and ``line`` are those of the next line.

    With ``split`` a lone carriage return ends a line too, as ``csv`` counts.
    """

    def __init__(self, file: BinaryIO, source: _Source, start: RowPlace, *, split: bool) -> None:
        self._file, self._source, self._split = file, source, split
        self.offset, self.line = start.offset, start.line
        file.seek(start.offset)

    def __iter__(self) -> Iterator[str]:
        for content in self._file:
            try:
                text = content.decode("utf-8-sig" if self.offset == 0 else "utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf8(self._source, error, self.line) from error
            mark = len(content) - len(text.encode())
            for part in io.StringIO(text, newline="") if self._split else [text]:
                self.offset += mark + len(part.encode())
                self.line, mark = self.line + 1, 0
                yield part


def _not_utf8(source: _Source, error: UnicodeDecodeError, line: int) -> DataError:
    got = f"byte 0x{error.object[error.start]:02x} in line {line}"
    return source.error("be UTF-8", got, "Convert it, for example with iconv -t UTF-8.")


#: Rows with their first lines; of a bad row, its error.
_Rows = Iterator[tuple[int, dict[str, object] | DataError]]


def _csv_table(text: str, source: _Source, columns: tuple[str, ...], required: tuple[str, ...]) -> _Rows:
    return _csv_rows(io.StringIO(text, newline=""), source, columns, required, longest=len(text) + 1)


def _json_table(text: str, source: _Source, columns: tuple[str, ...], required: tuple[str, ...]) -> _Rows:
    return _json_rows(text.split("\n"), source)


def _csv_rows(
    lines: Iterable[str], source: _Source, columns: tuple[str, ...], required: tuple[str, ...], *, longest: int,
    header: list[str] | None = None, line: int = 1,
) -> _Rows:  # fmt: skip
    reader, before = csv.reader(lines, strict=True), line - 1
    # A cell may be as long as the file.
    usual = csv.field_size_limit(max(csv.field_size_limit(), longest))
    try:
        for cells in reader:
            last = before + reader.line_num
            if cells and header is None:
                header = cells
                _check_header(header, source, columns, required, line)
            elif cells and header is not None and len(cells) == len(header):
                yield line, dict(zip(header, cells, strict=True))
            elif cells and header is not None:
                must, then = f"have {len(header)} cells in every row, as its header has", "Quote texts with commas."
                got = f"{len(cells)} cells in {_lines(line, last)}"
                yield line, source.error(must, got, then)
            line = last + 1
    except csv.Error as error:
        got, then = f"{error} in {_lines(line, before + reader.line_num)}", "Check the quoting there."
        raise source.error("be well-formed CSV", got, then) from error
    finally:
        csv.field_size_limit(usual)


def _check_header(
    header: list[str], source: _Source, columns: tuple[str, ...], required: tuple[str, ...], line: int
) -> None:
    for column in columns:
        if header.count(column) > 1:
            got = f"{header.count(column)} in line {line}"
            raise source.error(f"have one column {column!r}", got, "Rename the others.")
    for column in required:
        if column not in header:
            raise _missing(column, header, source, line)


def _missing(column: str, present: Iterable[str], source: _Source, line: int) -> DataError:
    got = f"the columns {', '.join(map(repr, present)) or 'none'} in line {line}"
    then = "Name the right one with --text-column or --label-column."
    return source.error(f"have the column {column!r}", got, then)


def _lines(first: int, last: int) -> str:
    """The lines of one row, in which csv may report a quote at the end of the file that opens in the first line."""
    return f"line {first}" if last <= first else f"the row of lines {first} to {last}"


def _json_rows(lines: Iterable[str], source: _Source, *, line: int = 1) -> _Rows:
    for number, content in enumerate(lines, start=line):
        if content.strip():
            yield number, _json_row(content, number, source)


def _json_row(content: str, line: int, source: _Source) -> dict[str, object] | DataError:
    try:
        row = json.loads(content)
    except (ValueError, RecursionError) as error:
        # ValueError includes numbers of thousands of digits, RecursionError deeply nested lists.
        said = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        return source.error("be JSON lines", f"{said} in line {line}", "Check that line.")
    if isinstance(row, dict):
        return row
    got, then = f"{type(row).__name__} in line {line}", 'Write rows as {"label": ..., "text": ...}.'
    return source.error("have one object per line", got, then)


def writable(text: str) -> bool:
    """Whether a text can be encoded as UTF-8, that is, has no lone surrogates."""
    return not any("\ud800" <= sign <= "\udfff" for sign in text)


def _cell(row: dict[str, object], column: str, source: _Source, line: int) -> str:
    if column not in row:
        raise _missing(column, row, source, line)
    value = row[column]
    if isinstance(value, str) and writable(value):
        return value
    if isinstance(value, bool | int):
        return json.dumps(value)
    kind = "a lone surrogate" if isinstance(value, str) else type(value).__name__
    raise source.error(f"have text in the column {column!r}", f"{kind} in line {line}", "Correct that row.")
