"""clearhead observe --data: the same figures over a file of texts, in this process or as one rank of torchrun's."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Final

from clearhead.errors import DataError, UnsupportedError

if TYPE_CHECKING:
    from clearhead.corpus import CorpusOptions, CorpusSummary
    from clearhead.corpus.ranks import CorpusRanks

__all__ = ["observe_corpus", "world_size"]

_FUNCTION: Final = "observe"
_STDIN: Final = Path("-")


def world_size() -> int:
    """The number of processes that torchrun started; 1 without torchrun."""
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if size.isdecimal() and "RANK" in os.environ else 1


def observe_corpus(model: Path, data: Path, out: Path | None, options: CorpusOptions) -> CorpusSummary | None:
    """The summary of a corpus on rank 0; None on other ranks, which print nothing."""
    from clearhead.corpus.run import CorpusJob, run_job
    from clearhead.train.progress import Silent, watcher_for

    with _ranks() as ranks, _file(data) as file:
        first = ranks.rank == 0
        watcher = watcher_for() if first else Silent()
        name = None if file == data else "standard input"
        job = CorpusJob(model, file, out, options, _FUNCTION, name)
        try:
            summary = run_job(job, ranks, progress=watcher.stepped, say=watcher.said)
        finally:
            watcher.closed()
        return summary if first else None


@contextmanager
def _ranks() -> Iterator[CorpusRanks]:
    from clearhead.corpus.ranks import AFTER_A_DEATH, CorpusRanks
    from clearhead.distributed.liveness import launched

    with launched(_FUNCTION, AFTER_A_DEATH) if world_size() > 1 else nullcontext() as liveness:
        yield CorpusRanks(liveness)


@contextmanager
def _file(data: Path) -> Iterator[Path]:
    """The file of the texts; standard input is written to a temporary one, as it is read twice."""
    if data != _STDIN:
        yield data
        return
    if world_size() > 1:
        must, then = "be a file for several processes", "Write the texts to a file that all of them read."
        raise UnsupportedError.about(_FUNCTION, "--data", must=must, got="standard input", then=then)
    if sys.stdin is None or sys.stdin.isatty():
        must, then = "have texts on standard input", "Pipe JSON lines into it."
        raise DataError.about(_FUNCTION, "--data", must=must, got="a terminal", then=then)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "standard_input.jsonl"
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield path
