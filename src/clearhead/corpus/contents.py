"""The texts of a corpus file as blocks of consecutive rows, each of which can be read alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

from clearhead.errors import DataError
from clearhead.train.data import RowPlace, TextRow, stream_texts

__all__ = ["Contents", "TextBlock", "read_block", "scan"]

#: A block ends with the row that reaches one of these. They decide which texts share a batch, and so belong to the
#: identity of a corpus: small enough to balance thousands of texts, large enough to fill batches.
BLOCK_ROWS: Final = 64
BLOCK_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class TextBlock:
    """Consecutive rows of a file."""

    start: RowPlace
    rows: int


@dataclass(frozen=True)
class Contents:
    """The blocks of a file; memory grows with the number of blocks, not with the texts."""

    path: Path
    size: int
    sha256: str
    blocks: list[TextBlock] = field(repr=False)

    @property
    def rows(self) -> int:
        """Number of rows, bad ones too."""
        return sum(block.rows for block in self.blocks)


def scan(path: Path, *, text_column: str, skip_bad: bool, function: str) -> Contents:
    """Read a file once, and cut its rows into blocks.

    Raises:
        DataError: the file cannot be read or has no rows, or without ``skip_bad`` a row has no text; the error names
            the line.
    """
    blocks: list[TextBlock] = []
    start, rows = RowPlace(), 0
    for row in stream_texts(path, text_column=text_column, function=function):
        if isinstance(row.text, DataError) and not skip_bad:
            raise row.text
        rows += 1
        if rows == BLOCK_ROWS or row.following.offset - start.offset >= BLOCK_BYTES:
            blocks.append(TextBlock(start, rows))
            start, rows = row.following, 0
    if rows:
        blocks.append(TextBlock(start, rows))
    if not blocks:
        must, then = "have at least one text", "Check the file."
        raise DataError.about(function, str(path), must=must, got="none", then=then)
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return Contents(path, path.stat().st_size, sha256, blocks)


def read_block(contents: Contents, block: TextBlock, *, text_column: str, function: str) -> Iterator[TextRow]:
    """The rows of one block."""
    rows = stream_texts(contents.path, text_column=text_column, start=block.start, function=function)
    return islice(rows, block.rows)
