"""Tables and texts are read strictly: what is wrong is named with its line."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import pytest

from clearhead.errors import DataError
from clearhead.train.data import read_table, read_text


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
    with pytest.raises(DataError, match=r"must have the column 'label'; got the columns 'text' in line 2"):
        read_table(path)


BAD = {
    "empty.csv": ("", "must have text; got an empty file"),
    "blank.jsonl": ("\n  \n", "must have text; got an empty file"),
    "header.csv": ("label,text\n", "must have at least one row"),
    "column.csv": ("label,words\na,b\n", "must have the column 'text'; got the columns 'label', 'words'"),
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
