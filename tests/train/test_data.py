"""Tables and texts are read strictly: what is wrong is named with its line."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import pytest

from clearhead.errors import DataError
from clearhead.train.data import read_table, read_text, stream_texts


def _written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_csv_keeps_commas_quotes_and_newlines(tmp_path: Path) -> None:
    path = _written(tmp_path, "t.csv", 'label,text\na,"one, ""two""\nthree"\nb,four\n')
    table = read_table(path)
    assert table.texts == ['one, "two"\nthree', "four"]
    assert table.labels == ["a", "b"]
    assert table.lines == [2, 4]


def test_jsonl_equals_csv_and_numbers_are_labels(tmp_path: Path) -> None:
    path = _written(tmp_path, "t.jsonl", '{"label": 1, "text": "one"}\n\n{"text": "two", "label": "x"}\n')
    table = read_table(path)
    assert (table.texts, table.labels, table.lines) == (["one", "two"], ["1", "x"], [1, 3])


def test_byte_order_mark_is_not_part_of_the_header(tmp_path: Path) -> None:
    assert read_table(_written(tmp_path, "t.csv", b"\xef\xbb\xbflabel,text\na,b\n")).labels == ["a"]


def test_labels_may_be_absent_where_they_are_not_required(tmp_path: Path) -> None:
    path = _written(tmp_path, "t.csv", "text\nhello\n")
    assert read_table(path, labels_required=False).labels is None
    with pytest.raises(DataError, match=r"must have the column 'label'; got the columns 'text' in line 1"):
        read_table(path)


BAD = {
    "empty.csv": ("", "must have text; got an empty file"),
    "blank.jsonl": ("\n  \n", "must have text; got an empty file"),
    "header.csv": ("label,text\n", "must have at least one row"),
    "column.csv": ("label,words\na,b\n", "must have the column 'text'; got the columns 'label', 'words' in line 1"),
    "alone.csv": ("label,words\n", "must have the column 'text'; got the columns 'label', 'words' in line 1"),
    "short.csv": ("label,text\na,b\nc\n", "must have 2 cells in every row, as its header has; got 1 cells in line 3"),
    "long.csv": ("label,text\na,b,c\n", "got 3 cells in line 2"),
    "quote.csv": ('label,text\na,"b\n', "must be well-formed CSV"),
    "json.jsonl": ('{"label": "a", "text": "b"}\n{"label": \n', "must be JSON lines; got Expecting value in line 2"),
    "list.jsonl": ("[1, 2]\n", "must have one object per line; got list in line 1"),
    "type.jsonl": ('{"label": "a", "text": null}\n', "must have text in the column 'text'; got NoneType in line 1"),
    "latin.csv": (b"label,text\na,caf\xe9\n", "must be UTF-8; got byte 0xe9 in line 2"),
    "table.txt": ("label,text\n", "must end in .csv or .jsonl; got '.txt'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_table_raises_one_line(tmp_path: Path, name: str) -> None:
    content, expected = BAD[name]
    with pytest.raises(DataError) as caught:
        read_table(_written(tmp_path, name, content))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_absent_file_or_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must be a readable file; got No such file"):
        read_table(tmp_path / "none.csv")
    with pytest.raises(DataError, match=r"must be a readable file; got Is a directory"):
        read_text(tmp_path)


#: A fault in a row, and what is said of it before the line. ``#`` stands for the row in the files below.
FAULTY = {
    "cells": ("a,b,c", " cells in "),
    "label": (" ,x", "got none in "),
    "quote": ('"a"b,x', "',' expected after '\"' in "),
    "bytes": ("caf\udce9,x", "got byte 0xe9 in "),
}
#: Files with a faulty row, and the line of that row.
PLACES = {
    "first": ("label,text\n#\n", 2),
    "after a blank line": ("label,text\n\n\n#\n", 4),
    "under a late header": ("\n\nlabel,text\na,b\n#\n", 5),
    "after quoted newlines": ('label,text\na,"b\n\nc"\n"a\n",b\n#\n', 7),
    "under a header over two lines": ('"la\nbel",label,text\nx,a,b\nx,#\n', 4),
    "without a last newline": ("label,text\na,b\n#", 3),
}
ENDS = {"LF": "\n", "CRLF": "\r\n", "CR": "\r"}


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "BOM"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fault", FAULTY)
def test_line_of_a_faulty_row_is_that_of_an_editor(
    tmp_path: Path, fault: str, place: str, end: str, mark: bytes
) -> None:
    (row, said), (content, line) = FAULTY[fault], PLACES[place]
    text = content.replace("#", row).replace("\n", ENDS[end])
    path = _written(tmp_path, "t.csv", mark + text.encode(errors="surrogateescape"))
    with pytest.raises(DataError) as caught:
        read_table(path)
    assert f"{said}line {line}." in str(caught.value)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("before", "line"), [("", 1), ("\n\n", 3)])
def test_line_of_a_wrong_header_is_its_own(tmp_path: Path, before: str, line: int, end: str) -> None:
    for header in ("label,words", "text,words", "text,label,text"):
        path = _written(tmp_path, "t.csv", f"{before}{header}\na,b\n".replace("\n", ENDS[end]).encode())
        with pytest.raises(DataError, match=rf"in line {line}\."):
            read_table(path)


def test_faulty_row_over_several_lines_has_all_of_them(tmp_path: Path) -> None:
    for row in ('"c\nd"', 'a,"b\n'):
        path = _written(tmp_path, "t.csv", f"label,text\na,b\n{row}\n")
        with pytest.raises(DataError, match="in the row of lines 3 to 4"):
            read_table(path)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_of_a_faulty_object_is_its_own(tmp_path: Path, end: str) -> None:
    for row in ("{", "[1]", '{"text": "a"}', '{"label": "a", "text": null}', '{"label": " ", "text": "a"}'):
        text = end.join(["", '{"label": "a", "text": "a\\nb"}', "", row, ""])
        with pytest.raises(DataError, match="in line 4"):
            read_table(_written(tmp_path, "t.jsonl", text.encode()))


ODD = {
    "number.jsonl": ('{"label":"a","text":' + "1" * 5000 + "}\n", "must be JSON lines; got .*4300.* in line 1"),
    "deep.jsonl": ("[" * 100_000 + "\n", "must be JSON lines; got .*recursion.* in line 1"),
    "half.jsonl": (
        '{"label":"a","text":"x \\ud800"}\n',
        "have text in the column 'text'; got a lone surrogate",
    ),
    "twice.csv": ("text,label,text\na,b,c\n", "have one column 'text'; got 2"),
    "nothing.csv": ("label,text\n,x\n", "have a label in every row; got none in line 2"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_row_raises_with_its_line(tmp_path: Path, name: str) -> None:
    content, said = ODD[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=said):
        read_table(tmp_path / name)


def test_cell_may_be_as_long_as_the_file(tmp_path: Path) -> None:
    (tmp_path / "long.csv").write_text("label,text\na," + "word " * 40_000 + "\n")
    assert len(read_table(tmp_path / "long.csv").texts[0]) == 200_000


def test_sha256_is_that_of_the_content_read(tmp_path: Path) -> None:
    content = b"label,text\na,b\n"
    os.mkfifo(tmp_path / "pipe.csv")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe.csv").write_bytes(content))
    writer.start()
    assert read_table(tmp_path / "pipe.csv").sha256 == hashlib.sha256(content).hexdigest()
    writer.join()


#: Files of rows, with bad ones, as ``stream_texts`` reads them; the lines of rows with a text, and of those without.
STREAMS = {
    "t.jsonl": (b'\xef\xbb\xbf{"text": "a"}\r\n\n{"text": "\xc3\xa9"}\n[1]\n{"text": 7}\n{"no": 1}\n{"text": "z"}',
                [1, 3, 5, 7], [4, 6]),
    "t.csv": (b'\xef\xbb\xbf\ntext,b\n"x\ny, z",1\n\nshort\nq,2\n"",3\n', [3, 7, 8], [6]),
    "r.csv": (b"text,b\rone,1\rtwo,2\r\nthree,3\n", [2, 3, 4], []),
    "t.txt": (b"one\n\n  \ntwo \r\n\xc3\xa9", [1, 4, 5], []),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_stream_starts_again_at_any_row(tmp_path: Path, name: str) -> None:
    content, good, bad = STREAMS[name]
    path = _written(tmp_path, name, content)
    rows = list(stream_texts(path))
    assert [row.line for row in rows if isinstance(row.text, str)] == good
    assert [row.line for row in rows if isinstance(row.text, DataError)] == bad
    for row in rows:
        assert isinstance(row.text, str) or f"in line {row.line}" in str(row.text)
    for place, row in enumerate(rows):
        rest = list(stream_texts(path, start=row.following))
        assert [(each.line, str(each.text)) for each in rest] == [(r.line, str(r.text)) for r in rows[place + 1 :]]


def test_stream_reads_the_texts_of_a_table(tmp_path: Path) -> None:
    for name, content in (
        ("t.csv", b'text,label\n"a, b",x\n"c\r\nd",y\n'),
        ("t.jsonl", b'{"text": "a, b", "label": 1}\n\n{"text": "c\\nd", "label": 2}\n'),
    ):
        path = _written(tmp_path, name, content)
        table = read_table(path)
        rows = list(stream_texts(path))
        assert [(row.text, row.line) for row in rows] == list(zip(table.texts, table.lines, strict=True))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.csv", b"other\na\n", "must have the column 'text'"),
        ("t.csv", b'text\n"open\n', "must be well-formed CSV; got unexpected end of data in line 2"),
        ("t.txt", b"one\ntw\xffo\n", "must be UTF-8; got byte 0xff in line 2"),
        ("t.md", b"one\n", "must end in .csv, .jsonl or .txt"),
    ],
)
def test_stream_raises_where_nothing_after_can_be_read(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    with pytest.raises(DataError, match=words):
        list(stream_texts(_written(tmp_path, name, content)))
