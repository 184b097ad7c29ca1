"""What is asked of a corpus, and how far its reading is."""

from __future__ import annotations

from dataclasses import dataclass

from clearhead.observe.layers import Layers

__all__ = ["CorpusOptions", "CorpusProgress"]


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """How ``observe_corpus`` reads a corpus.

    Attributes:
        text_column: name of the field (``.jsonl``) or of the column (``.csv``) that has the text.
        layers: which attention layers, by number, name or glob such as ``"*.0.*"``, or several; by default all.
        chunk: most tokens to read at once; by default the model's limit. A longer text is read in parts.
        skip_bad: whether to skip rows without a text that the model reads, instead of raising.
        per_text: whether to write each text's figures too, as ``texts.jsonl``.
    """

    text_column: str = "text"
    layers: Layers = None
    chunk: int | None = None
    skip_bad: bool = False
    per_text: bool = False


@dataclass(frozen=True)
class CorpusProgress:
    """How far the reading of a corpus is.

    Attributes:
        step: number of rows of the file that are finished.
        steps: number of rows of the file.
        per_second: rows per second of all processes in this run.
        seconds_left: estimate of the remaining time.
    """

    step: int
    steps: int
    per_second: float
    seconds_left: float

    def words(self) -> str:
        """The progress as one line.

        >>> CorpusProgress(1200, 40000, 35.2, 4000.0).words()
        'read 1,200 of 40,000 texts  35.2 texts/s  1:06:40 left'
        """
        left = int(self.seconds_left + 0.5)
        hours, minutes = divmod(left // 60, 60)
        clock = f"{hours}:{minutes:02d}:{left % 60:02d}" if hours else f"{minutes}:{left % 60:02d}"
        return f"read {self.step:,} of {self.steps:,} texts  {self.per_second:,.1f} texts/s  {clock} left"
