"""Sums over texts that do not depend on their order: integers, so that every split of a corpus gives the same bits."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from clearhead.corpus.figures import BlockFigures
from clearhead.observe.head_sums import FIGURES

__all__ = ["PAIRS", "Totals"]

#: Figures whose mean is over the queries after the first of each part, which alone have such a key.
PAIRS: Final = frozenset({"previous", "following", "same"})
#: Sums of floats are multiples of ``2**-_BITS``.
_BITS: Final = 96
_Integers = NDArray[np.object_]


@dataclass
class Totals:
    """Sums over the texts of some blocks.

    ``layers`` has integers ``[heads, figures, 3]`` for each layer: multiples of ``2**-96`` of the sums over texts of a
    figure ``s``, of ``s**2`` and of ``s * n``, where ``n`` is the text's number of queries. A block's sums are floats
    in the order of its texts; blocks are added as integers, exactly, so their order has no influence.

    Attributes:
        blocks: indices of the blocks.
        texts: number of texts.
        bad: number of rows without a readable text.
        first_bad: the error of the first bad row of the first block that has one, with the index of that block.
        tokens: number of tokens of the texts, without special tokens.
        parts: number of parts in which they were read.
        longest: number of tokens and line of the longest text, the first of several.
        counts: sums over texts of ``n`` and of ``n**2``, for all queries and for those after the first of each part.
        layers: the sums.
    """

    blocks: list[int] = field(default_factory=list)
    texts: int = 0
    bad: int = 0
    first_bad: tuple[int, str] | None = None
    tokens: int = 0
    parts: int = 0
    longest: tuple[int, int] = (0, 0)
    counts: list[list[int]] = field(default_factory=lambda: [[0, 0], [0, 0]])
    layers: dict[str, _Integers] = field(default_factory=dict)

    @classmethod
    def of(cls, index: int, block: BlockFigures) -> Self:
        """The totals of one block."""
        texts = block.texts
        queries = np.array([[text.queries, text.queries - len(text.parts)] for text in texts], dtype=np.int64)
        counts = queries.reshape(-1, 2)
        n = np.stack([counts[:, int(name in PAIRS)] for name in FIGURES], axis=-1)[:, None].astype(np.float64)
        layers = {
            name: _integers(np.stack([s.sum(axis=0), (s * s).sum(axis=0), (s * n).sum(axis=0)], axis=-1))
            for name, s in block.layers.items()
        }
        return cls(
            blocks=[index],
            texts=len(texts),
            bad=len(block.bad),
            first_bad=(index, block.bad[0]) if block.bad else None,
            tokens=sum(text.tokens for text in texts),
            parts=sum(len(text.parts) for text in texts),
            longest=min(((text.tokens, text.line) for text in texts), key=_longest_first, default=(0, 0)),
            counts=[[int(column.sum()), int((column * column).sum())] for column in counts.T],
            layers=layers,
        )

    def add(self, other: Totals) -> None:
        """Add the totals of other blocks."""
        self.blocks = sorted([*self.blocks, *other.blocks])
        self.texts += other.texts
        self.bad += other.bad
        errors = [each for each in (self.first_bad, other.first_bad) if each is not None]
        self.first_bad = min(errors, default=None)
        self.tokens += other.tokens
        self.parts += other.parts
        self.longest = min(self.longest, other.longest, key=_longest_first)
        self.counts = (np.array(self.counts, dtype=object) + np.array(other.counts, dtype=object)).tolist()
        for name, sums in other.layers.items():
            self.layers[name] = self.layers[name] + sums if name in self.layers else sums

    def moments(self, layer: str, head: int, figure: str) -> tuple[float, float | None]:
        """The mean of a figure over all queries, and its standard error over texts; None for a single text.

        ``mean = S / N`` with ``S = sum s`` and ``N = sum n`` over texts, and for ``T`` texts
        ``error^2 = T / (T - 1) * sum (s - mean n)^2 / N^2``, that of a ratio of means.
        """
        scale = 1 << _BITS
        s, s_squared, s_n = (Fraction(each, scale) for each in self.layers[layer][head, FIGURES.index(figure)])
        n, n_squared = self.counts[int(figure in PAIRS)]
        if n == 0:
            return 0.0, None
        mean = s / n
        spread = max(s_squared - 2 * mean * s_n + mean * mean * n_squared, Fraction(0))
        error = None if self.texts < 2 else float(spread * self.texts / (self.texts - 1) / n**2) ** 0.5
        return float(mean), error

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON, which has integers of any size."""
        return {**asdict(self), "layers": {name: sums.tolist() for name, sums in self.layers.items()}}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The totals that ``to_dict`` wrote."""
        layers = {name: np.array(sums, dtype=object) for name, sums in values["layers"].items()}
        first_bad = None if values["first_bad"] is None else (values["first_bad"][0], values["first_bad"][1])
        longest = (values["longest"][0], values["longest"][1])
        return cls(**{**values, "layers": layers, "first_bad": first_bad, "longest": longest})


def _integers(sums: NDArray[np.float64]) -> _Integers:
    """Floats as integer multiples of ``2**-96``: the product is exact, the rest is cut off."""
    scaled = [int(each) for each in (sums * 2.0**_BITS).ravel().tolist()]
    return np.array(scaled, dtype=object).reshape(sums.shape)


def _longest_first(longest: tuple[int, int]) -> tuple[int, int]:
    return -longest[0], longest[1]
