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

#: A unit ends with the row that reaches one of these. A block has up to so many units: few in a small file, whose
#: blocks are then enough to balance ranks, many in a large one, whose blocks then fill batches. All of them decide
#: which texts share a batch, and so belong to the identity of a corpus.
UNIT_ROWS: Final = 32
UNIT_BYTES: Final = 1 << 15
UNITS: Final = 8
_BLOCKS: Final = 128


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
    units: list[TextBlock] = []
    start, rows = RowPlace(), 0
    for row in stream_texts(path, text_column=text_column, function=function):
        if isinstance(row.text, DataError) and not skip_bad:
            raise row.text
        rows += 1
        if rows == UNIT_ROWS or row.following.offset - start.offset >= UNIT_BYTES:
            units.append(TextBlock(start, rows))
            start, rows = row.following, 0
    if rows:
        units.append(TextBlock(start, rows))
    if not units:
        must, then = "have at least one text", "Check the file."
        raise DataError.about(function, str(path), must=must, got="none", then=then)
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return Contents(path, path.stat().st_size, sha256, _blocks_of(units))


def _blocks_of(units: list[TextBlock]) -> list[TextBlock]:
    """Units joined to blocks, of which there are at least 128 where that is possible."""
    count = min(UNITS, max(1, len(units) // _BLOCKS))
    groups = [units[first : first + count] for first in range(0, len(units), count)]
    return [TextBlock(group[0].start, sum(unit.rows for unit in group)) for group in groups]


def read_block(contents: Contents, block: TextBlock, *, text_column: str, function: str) -> Iterator[TextRow]:
    """The rows of one block."""
    rows = stream_texts(contents.path, text_column=text_column, start=block.start, function=function)
    return islice(rows, block.rows)
