"""What a corpus shows of each head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from clearhead.corpus.totals import Totals
from clearhead.observe.head_sums import FIGURES
from clearhead.observe.text import table

__all__ = ["CorpusSummary", "HeadFigures", "summary_of"]

_DECIMALS: Final = {"entropy": 2, "distance": 1}


@dataclass(frozen=True)
class HeadFigures:
    """Means of one head over the queries of all texts.

    Attributes:
        layer: the module's dotted name, and the number of the call if a model uses it several times.
        head: index of the head.
        entropy: mean entropy of a query's weights in nats; its ``exp`` is the effective number of keys.
        distance: mean distance between a query and the keys it attends to, in tokens.
        first: mean weight on the first token of the text or of its part.
        previous: mean weight on the token before the query, over queries after the first token.
        following: mean weight on the token after the query, over queries that have one.
        same: mean weight on the query's own token, over queries after the first token.
        errors: the standard error of each figure by its name, with texts as the sample; None for fewer than two texts.
    """

    layer: str
    head: int
    entropy: float
    distance: float
    first: float
    previous: float
    following: float
    same: float
    errors: Mapping[str, float | None]


@dataclass(frozen=True)
class CorpusSummary:
    """Figures of every head of a model on a corpus; ``str()`` is a table.

    Attributes:
        model: the folder of the model.
        data: the file of the texts.
        texts: number of texts.
        bad: number of rows that were skipped, because they have no text that the model reads.
        first_bad: the error of the first such row; None without one.
        tokens: number of tokens of all texts, without special tokens.
        parts: number of parts of at most the model's limit in which the texts were read.
        longest: number of tokens of the longest text.
        longest_line: line of the longest text, the first of several.
        heads: one ``HeadFigures`` for each layer and head, in the model's order.
    """

    model: str
    data: str
    texts: int
    bad: int
    first_bad: str | None
    tokens: int
    parts: int
    longest: int
    longest_line: int
    heads: tuple[HeadFigures, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**asdict(self), "heads": [asdict(head) for head in self.heads]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The summary that ``to_dict`` wrote."""
        return cls(**{**values, "heads": tuple(HeadFigures(**head) for head in values["heads"])})

    def __str__(self) -> str:
        rows = []
        for head in self.heads:
            numbers = [f"{getattr(head, figure):.{_DECIMALS.get(figure, 2)}f}" for figure in FIGURES]
            rows.append([head.layer or "attention", str(head.head), *numbers])
        columns = ["layer", "head", *FIGURES]
        return "\n".join([*self._lines(), table(columns, rows, right=set(range(1, len(columns))))])

    def _lines(self) -> list[str]:
        texts = f"{self.texts:,} text{'' if self.texts == 1 else 's'}"
        longest = f"the longest has {self.longest:,}, in line {self.longest_line:,}"
        lines = [f"{self.model}: {texts} of {self.data}, {self.tokens:,} tokens; {longest}"]
        if self.parts != self.texts:
            lines.append(f"read in {self.parts:,} parts; no edge goes from part to part")
        if self.bad:
            lines.append(f"skipped {self.bad:,} row{'' if self.bad == 1 else 's'}; the first: {self.first_bad}")
        return lines


def summary_of(totals: Totals, *, model: str, data: str) -> CorpusSummary:
    """The summary of the totals of a whole corpus."""
    heads = []
    for layer, sums in totals.layers.items():
        for head in range(sums.shape[0]):
            moments = {figure: totals.moments(layer, head, figure) for figure in FIGURES}
            means = {figure: mean for figure, (mean, _) in moments.items()}
            errors = {figure: error for figure, (_, error) in moments.items()}
            heads.append(HeadFigures(layer, head, **means, errors=errors))
    return CorpusSummary(
        model=model,
        data=data,
        texts=totals.texts,
        bad=totals.bad,
        first_bad=None if totals.first_bad is None else totals.first_bad[1],
        tokens=totals.tokens,
        parts=totals.parts,
        longest=totals.longest[0],
        longest_line=totals.longest[1],
        heads=tuple(heads),
    )
