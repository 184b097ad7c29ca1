"""``observe_corpus``: figures of every head over all texts of a file, on the ranks of a process group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from clearhead.corpus.contents import UNIT_BYTES, UNIT_ROWS, UNITS, Contents, read_block, scan
from clearhead.corpus.figures import BlockReader
from clearhead.corpus.folder import CorpusFolder, fingerprint
from clearhead.corpus.options import CorpusOptions, CorpusProgress
from clearhead.corpus.ranks import AFTER_A_DEATH, CorpusRanks
from clearhead.corpus.schedule import assign, linear_share, work_of
from clearhead.corpus.summary import CorpusSummary, summary_of
from clearhead.corpus.totals import Totals
from clearhead.distributed.liveness import Liveness
from clearhead.errors import DataError, ShapeError
from clearhead.observe.layers import choose_layers
from clearhead.readers import Reader, reader_of
from clearhead.train.data import TextRow

__all__ = ["CorpusJob", "observe_corpus", "run_job"]

#: Seconds between writes of the totals, and so the most work that a killed job loses, besides the current block.
SAVE_EVERY: Final = 5.0


@dataclass(frozen=True)
class CorpusJob:
    """What ``observe_corpus`` was asked for; ``function`` names the caller in errors, ``data_name`` data of no file."""

    model: Path
    data: Path
    out: Path | None
    options: CorpusOptions
    function: str
    data_name: str | None = None


def observe_corpus(
    model: Path | str,
    data: Path | str,
    *,
    out: Path | str | None = None,
    options: CorpusOptions | None = None,
    progress: Callable[[CorpusProgress], None] | None = None,
) -> CorpusSummary:
    """Means of entropy, distance and weights of every attention head of a model over all texts of a file.

    A mean is over all queries of all texts: ``mean = sum_t s_t / sum_t n_t``, where ``s_t`` is a text's sum over its
    ``n_t`` queries. The standard error takes texts as the sample. A text longer than the model's limit is read in
    parts of at most the limit, and no query attends to another part.

    If ``torch.distributed`` is initialised, the ranks of the default process group share the work, and every rank calls
    this function with the same arguments. The figures are the same bits whatever the number of ranks and
    interruptions: texts that share a batch depend on the file alone, and sums over batches are exact. They do not
    depend on the number of threads either where clearhead's kernels compute the model; torch's may. The work of texts
    of ``n`` tokens, ``n^2 + c n`` with a constant ``c`` of the model, is balanced over the ranks.

    With ``out`` finished texts are saved every few seconds. The same call with the same ``out`` goes on after the
    last saved ones, also with another number of ranks; after the end it returns the summary that is there. On several
    machines ``out`` and ``data`` are on a file system that all of them read. If a rank dies or hangs, a line names it,
    and the processes of all other ranks exit with status 1 within a minute.

    Args:
        model: a run folder of ``clearhead train``, or the folder of a model of transformers with its tokenizer.
        data: a file of texts: ``.jsonl``, ``.csv`` or ``.txt`` with one text per line. It is never loaded whole.
        out: a new folder, or the folder of an interrupted call; None to write nothing. ``summary.json``,
            ``summary.txt`` and, if asked for, ``texts.jsonl`` are written to it.
        options: a ``CorpusOptions``: the column, the layers, the length of parts, bad rows, figures per text.
        progress: receives a ``CorpusProgress`` on rank 0 after each block of texts.

    Returns:
        A ``CorpusSummary``, the same on every rank.

    Raises:
        DataError: a file cannot be read or written, a row has no text that the model reads (the line is named), or
            ``out`` belongs to another model, other data or other options, or is in use.
        ShapeError: there is no such layer, or ``chunk`` is out of range.

    Cost: for each text a forward pass and the statistics of its attention. Memory: the model and one batch of 2,048
    tokens or one part; about 200 bytes for each 32 rows or 32 KiB of the file. With several ranks every text is
    tokenized twice.

    >>> import tempfile
    >>> from clearhead.corpus import observe_corpus
    >>> from clearhead.train import LanguageOptions, Silent, train_text_language_model
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "play.txt").write_text("Enter the king. " * 20)
    >>> sizes = LanguageOptions(steps=1, embed_dim=8, num_heads=2, num_layers=1, context=8)
    >>> _ = train_text_language_model(folder / "play.txt", out=folder / "run", options=sizes, watcher=Silent())
    >>> _ = (folder / "texts.txt").write_text("Enter\\nthe king\\n")
    >>> summary = observe_corpus(folder / "run", folder / "texts.txt")
    >>> summary.texts, summary.tokens, len(summary.heads)
    (2, 13, 2)
    """
    job = CorpusJob(
        model=Path(model),
        data=Path(data),
        out=None if out is None else Path(out),
        options=options or CorpusOptions(),
        function="observe_corpus",
    )
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    with Liveness(job.function, AFTER_A_DEATH) if several else nullcontext() as liveness:
        return run_job(job, CorpusRanks(liveness), progress=progress or (lambda _: None), say=lambda _: None)


def run_job(
    job: CorpusJob, ranks: CorpusRanks, *, progress: Callable[[CorpusProgress], None], say: Callable[[str], object]
) -> CorpusSummary:
    """Run a job on all ranks; ``progress`` and ``say``, which receives permanent lines, are called on rank 0."""
    if job.options.per_text and job.out is None:
        must, then = "be given with figures per text", "Name a folder."
        raise DataError.about(job.function, "out", must=must, got="none", then=then)
    reader, model = ranks.together(lambda: _loaded(job))
    options = job.options
    contents = ranks.together(
        lambda: scan(job.data, text_column=options.text_column, skip_bad=options.skip_bad, function=job.function),
        only=0,
    )
    asked = {"model": model, "data": contents.sha256, **_identity(job)}
    mine = {**asked, "out": None if job.out is None else str(job.out), "size of data": _size(job.data)}
    everyone = ranks.gather(mine)
    ranks.together(lambda: _require_equal(job.function, everyone, ranks.rank))
    folder = None if job.out is None else CorpusFolder(job.out, job.function)
    with ExitStack() as stack:

        def opened() -> CorpusSummary | Totals:
            if folder is None:
                return Totals()
            stack.enter_context(folder.opened(asked, say=say))
            return folder.finished() or folder.resumed()

        base = ranks.together(opened, only=0)
        if isinstance(base, CorpusSummary):
            if ranks.rank == 0:
                say("this corpus has already been read")
            return base
        if base.blocks and ranks.rank == 0:
            say(f"going on after {base.texts + base.bad:,} of {contents.rows:,} texts")
        return _Work(job, ranks, reader, contents, folder, progress).summary(base)


def _loaded(job: CorpusJob) -> tuple[Reader, str]:
    """The model, and the fingerprint of its files."""
    reader = reader_of(job.function, job.model)
    choose_layers(job.function, reader.model, job.options.layers)
    chunk = job.options.chunk
    if chunk is not None and not 1 <= chunk <= reader.limit:
        must, then = f"lie from 1 to {reader.limit}, the model's limit", "Leave it out to use the limit."
        raise ShapeError.about(job.function, "chunk", must=must, got=chunk, then=then)
    return reader, fingerprint(job.model)


def _identity(job: CorpusJob) -> dict[str, Any]:
    """What decides the figures besides model and data, as JSON reads it back."""
    options = asdict(job.options)
    # Rows that raise without it have no figures in either case.
    del options["skip_bad"]
    layers = options["layers"]
    return {
        **options,
        "layers": list(layers) if isinstance(layers, (list, tuple)) else layers,
        "block": [UNIT_ROWS, UNIT_BYTES, UNITS],
    }


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.exists() else None


def _require_equal(function: str, everyone: list[dict[str, Any]], rank: int) -> None:
    """Raise if a rank was given other arguments than rank 0, or sees other files."""
    for name, value in everyone[0].items():
        if everyone[rank][name] != value:
            must, then = "be the same on every rank", "Start all ranks with one command."
            got = f"{everyone[rank][name]!r} on rank {rank} and {value!r} on rank 0"
            raise DataError.about(function, name, must=must, got=got, then=then)


class _Work:
    """The blocks of one rank."""

    def __init__(
        self,
        job: CorpusJob,
        ranks: CorpusRanks,
        reader: Reader,
        contents: Contents,
        folder: CorpusFolder | None,
        progress: Callable[[CorpusProgress], None],
    ) -> None:
        options = job.options
        self._job, self._ranks, self._contents, self._folder = job, ranks, contents, folder
        self._progress, self._model = progress, reader.model
        size = reader.limit if options.chunk is None else options.chunk
        layers = choose_layers(job.function, reader.model, options.layers)
        self._reader = BlockReader(reader, size, layers, options.skip_bad, job.function)
        self._totals = Totals()
        self._began = self._saved = time.monotonic()

    def summary(self, base: Totals) -> CorpusSummary:
        """Compute all blocks that ``base`` does not have, and return the summary of all."""
        finished = set(base.blocks)
        todo = [index for index in range(len(self._contents.blocks)) if index not in finished]
        parts = self._ranks.gather(self._ranks.together(lambda: self._work_of(todo)))
        work = {index: each for part in parts for index, each in part.items()}
        mine = assign(work, self._ranks.size)[self._ranks.rank]
        self._ranks.together(lambda: self._compute(mine, base))
        for totals in self._ranks.gather(self._totals):
            base.add(totals)
        return self._ranks.together(lambda: self._finished(base), only=0)

    def _work_of(self, todo: list[int]) -> dict[int, int]:
        """The work of this rank's share of the blocks, whose texts it tokenizes; a single rank needs to know none."""
        ranks = self._ranks
        if ranks.size == 1:
            return dict.fromkeys(todo, 1)
        linear, work = linear_share(self._model), dict[int, int]()
        for index in todo[ranks.rank :: ranks.size]:
            ranks.check()
            texts, _ = self._reader.texts(self._rows(index))
            work[index] = work_of([len(part) for text in texts for part in text.parts], linear)
        return work

    def _rows(self, index: int) -> Iterator[TextRow]:
        contents, column = self._contents, self._job.options.text_column
        return read_block(contents, contents.blocks[index], text_column=column, function=self._job.function)

    def _compute(self, mine: list[int], base: Totals) -> None:
        before = base.texts + base.bad
        try:
            for index in mine:
                block = self._reader.figures(self._rows(index), self._ranks.check)
                if self._folder is not None and self._job.options.per_text:
                    self._folder.save_texts(index, block)
                self._totals.add(Totals.of(index, block))
                self._ranks.report(self._totals.texts + self._totals.bad)
                self._show(before)
                self._save(SAVE_EVERY)
        finally:
            self._save(0.0)
        self._ranks.wait(lambda: self._show(before))

    def _save(self, every: float) -> None:
        """Write this rank's totals if the last time is at least ``every`` seconds ago."""
        if self._folder is None or not self._totals.blocks or time.monotonic() - self._saved < every:
            return
        self._folder.save(self._ranks.rank, self._totals)
        self._saved = time.monotonic()

    def _show(self, before: int) -> None:
        if self._ranks.rank != 0:
            return
        texts, seconds = self._ranks.texts(), max(time.monotonic() - self._began, 1e-9)
        left = self._contents.rows - before - texts
        rate = texts / seconds
        self._progress(CorpusProgress(before + texts, self._contents.rows, rate, left / rate if rate else 0.0))

    def _finished(self, totals: Totals) -> CorpusSummary:
        job = self._job
        if not totals.texts:
            must, then = "have at least one text that the model reads", "Check the file."
            raise DataError.about(job.function, str(job.data), must=must, got=totals.first_bad, then=then)
        summary = summary_of(totals, model=str(job.model), data=job.data_name or str(job.data))
        if self._folder is not None:
            self._folder.finish(summary, totals.blocks, per_text=job.options.per_text)
        return summary
