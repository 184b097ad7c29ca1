"""What the ranks of the tests run, and what stops them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from clearhead.corpus import CorpusOptions, observe_corpus, run
from clearhead.corpus.folder import CorpusFolder
from clearhead.corpus.totals import Totals
from clearhead.errors import ClearheadError


def figures(model: Path, data: Path, out: Path | None = None, **options: Any) -> tuple[dict[str, Any], int]:
    """The summary of a rank, and the first row that this run reported."""
    steps: list[int] = []
    given = CorpusOptions(**options)
    summary = observe_corpus(model, data, out=out, options=given, progress=lambda shown: steps.append(shown.step))
    return summary.to_dict(), min(steps, default=0)


def error(model: Path, data: Path, out: Path | None = None, **options: Any) -> str:
    """The error of a rank."""
    try:
        figures(model, data, out, **options)
    except ClearheadError as failure:
        return str(failure)
    return "no error"


def killed(model: Path, data: Path, out: Path) -> None:
    """Save after each block, and kill the process that saves its second time."""
    saves: list[int] = []
    save = CorpusFolder.save

    def dying(folder: CorpusFolder, rank: int, totals: Totals) -> None:
        save(folder, rank, totals)
        saves.append(rank)
        if len(saves) == 2:
            os._exit(9)

    run.SAVE_EVERY = 0.0  # type: ignore[misc]
    CorpusFolder.save = dying  # type: ignore[method-assign]
    observe_corpus(model, data, out=out)
