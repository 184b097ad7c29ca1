"""The figures of the texts of one block: reading in parts of the model's limit, in batches of equal lengths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clearhead.errors import ClearheadError, DataError
from clearhead.observe.head_sums import FIGURES, head_sums
from clearhead.readers import Reader
from clearhead.train.data import TextRow

__all__ = ["BlockFigures", "BlockReader", "Text"]

#: Most tokens of a batch.
_BATCH_TOKENS: Final = 2048


@dataclass(frozen=True)
class Text:
    """A text that was read: its line, its number of tokens, and the ids of its parts with special tokens."""

    line: int
    tokens: int
    parts: list[list[int]] = field(repr=False)

    @property
    def queries(self) -> int:
        """Number of queries: the tokens with the special tokens of every part."""
        return sum(map(len, self.parts))


@dataclass(frozen=True)
class BlockFigures:
    """Sums over the queries of each text.

    Attributes:
        texts: the texts of the block.
        bad: errors of the rows without a readable text.
        layers: for each attention layer, float64 ``[texts, heads, figures]``.
    """

    texts: list[Text]
    bad: list[str]
    layers: dict[str, NDArray[np.float64]]


@dataclass(frozen=True)
class BlockReader:
    """Computes figures of texts with a model.

    ``size`` is the largest number of tokens of a part, and ``layers`` are the attention layers by name. Unless
    ``skip_bad``, a text that cannot be read raises.
    """

    reader: Reader
    size: int
    layers: dict[str, nn.Module]
    skip_bad: bool
    function: str

    def texts(self, rows: Iterable[TextRow]) -> tuple[list[Text], list[str]]:
        """The texts of some rows, and the errors of those that cannot be read."""
        texts: list[Text] = []
        bad: list[str] = []
        for row in rows:
            try:
                texts.append(self._text(row))
            except ClearheadError as error:
                if not self.skip_bad:
                    raise
                bad.append(str(error))
        return texts, bad

    def _text(self, row: TextRow) -> Text:
        if isinstance(row.text, DataError):
            raise row.text
        try:
            ids = self.reader.encode(row.text)
        except ClearheadError as error:
            # The error of a tokenizer does not know the line.
            raise DataError(f"{self.function}: line {row.line}: {str(error).partition(': ')[2]}") from error
        if not ids:
            raise self._about(row.line, must="have at least one token", got="none")
        parts = [self.reader.framed(ids[start : start + self.size]) for start in range(0, len(ids), self.size)]
        return Text(row.line, len(ids), parts)

    def _about(self, line: int, *, must: str, got: str) -> DataError:
        then = "Correct that row, or skip such rows (--skip-bad)."
        return DataError.about(self.function, f"text in line {line}", must=must, got=got, then=then)

    def figures(self, rows: Iterable[TextRow], check: Callable[[], None]) -> BlockFigures:
        """The figures of the texts of some rows; ``check`` is called before each batch."""
        texts, bad = self.texts(rows)
        owners = [place for place, text in enumerate(texts) for _ in text.parts]
        parts = [part for text in texts for part in text.parts]
        sums: dict[str, NDArray[np.float64]] = {}
        for batch in _batches([len(part) for part in parts]):
            check()
            ids = torch.tensor([parts[place] for place in batch])
            for name, values in head_sums(self.function, self.reader.model, ids, self.layers).items():
                whole = sums.setdefault(name, np.zeros((len(parts), *values.shape[1:])))
                whole[batch] = values
        layers = {name: _by_text(values, owners, len(texts)) for name, values in sums.items()}
        return self._finite(BlockFigures(texts, bad, layers))

    def _finite(self, block: BlockFigures) -> BlockFigures:
        """The block without the texts on which the model gives NaN or infinity."""
        finite = np.ones(len(block.texts), dtype=bool)
        for values in block.layers.values():
            finite &= np.isfinite(values).all(axis=(1, 2))
        if finite.all():
            return block
        errors = [
            self._about(text.line, must="give finite weights of attention", got="NaN or infinity")
            for text, good in zip(block.texts, finite, strict=True)
            if not good
        ]
        if not self.skip_bad:
            raise errors[0]
        texts = [text for text, good in zip(block.texts, finite, strict=True) if good]
        layers = {name: values[finite] for name, values in block.layers.items()}
        return BlockFigures(texts, [*block.bad, *map(str, errors)], layers)


def _batches(lengths: list[int]) -> list[list[int]]:
    """Parts of equal length together, so that no batch has padding; the result depends on the lengths alone."""
    groups: dict[int, list[int]] = defaultdict(list)
    for place, length in enumerate(lengths):
        groups[length].append(place)
    batches = []
    for length, places in sorted(groups.items()):
        rows = max(1, _BATCH_TOKENS // length)
        batches += [places[start : start + rows] for start in range(0, len(places), rows)]
    return batches


def _by_text(values: NDArray[np.float64], owners: list[int], texts: int) -> NDArray[np.float64]:
    """Sums over the parts of each text, in their order."""
    total = np.zeros((texts, values.shape[1], len(FIGURES)))
    np.add.at(total, owners, values)
    return total
