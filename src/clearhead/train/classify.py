"""Sequence classification: the task for the engine, and training from a table of texts to a run folder."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.batch_part import drawn_for_part
from clearhead.errors import DataError
from clearhead.nn import SequenceClassifier
from clearhead.train.batches import Batch, Sequences, batch_of, bucketed, packed_by_size, split
from clearhead.train.data import Table, read_table
from clearhead.train.engine import Engine, Keeper, Trained, Weighed, metrics_of, seeded
from clearhead.train.files import write_json
from clearhead.train.keeper import FolderKeeper
from clearhead.train.options import ClassifierOptions, ParallelOptions
from clearhead.train.progress import ProgressReporter
from clearhead.train.ranks import Ranks, opened
from clearhead.train.run import RunFolder, entered, versions
from clearhead.train.text import TRAINERS, TextTokenizer

__all__ = ["build_classifier", "class_scores", "train_classifier", "train_text_classifier"]

_FUNCTION = "train classify"
_EVALUATION_ROWS = 256
_USUAL_STEPS = 1500


class ClassifierTask:
    """Cross-entropy over classes, in length-bucketed batches; evaluated once per epoch."""

    monitor = "accuracy"
    larger_is_better = True

    def __init__(
        self, train: Sequences, held_out: Sequences, options: ClassifierOptions, unknown_id: int | None,
        ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        self._ranks = ranks
        self._train, self._held_out = train.cut(options.max_len), held_out.cut(options.max_len)
        self._options, self._unknown_id = options, unknown_id
        self._lengths = self._train.lengths()
        epochs = options.epochs or max(1, round(_USUAL_STEPS / len(self._plan(0))))
        sizes = [len(self._plan(epoch)) for epoch in range(epochs)]
        self._ends = list(accumulate(sizes))
        self._cached = (-1, self._plan(0))
        self.steps = self._ends[-1]

    def _plan(self, epoch: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
        return bucketed(
            self._lengths,
            batch_size=self._options.batch_size,
            batch_tokens=self._options.batch_tokens,
            seed=self._options.seed,
            epoch=epoch,
        )

    def batch(self, step: int) -> Batch:
        """The batch of one step, from its epoch's plan."""
        epoch = bisect_right(self._ends, step)
        if self._cached[0] != epoch:
            self._cached = (epoch, self._plan(epoch))
        start = self._ends[epoch - 1] if epoch else 0
        return batch_of(self._train, self._cached[1][step - start])

    def slack(self, value: float) -> float:
        """One standard error of the held-out accuracy."""
        return math.sqrt(value * (1 - value) / len(self._held_out))

    def evaluates_after(self, steps: int) -> bool:
        """Whether an epoch ends after this number of steps."""
        return steps in self._ends

    def weigh(self, model: nn.Module, batch: Batch) -> Weighed:
        """Cross-entropy with label smoothing and token dropout."""
        ids = batch.ids
        if self._unknown_id is not None and self._options.token_dropout:
            hidden = drawn_for_part(ids.shape, ids.device) < self._options.token_dropout
            ids = ids.masked_fill(hidden, self._unknown_id)
        logits = model(ids, lengths=batch.lengths).float()
        smoothing, count = self._options.label_smoothing, len(batch.targets)
        # The mean of torch divides the smoothed part's gradient, whose bits would then depend on the number of rows.
        loss = F.cross_entropy(logits, batch.targets, label_smoothing=smoothing, reduction="sum") / max(count, 1)
        return Weighed(loss, (logits.argmax(-1) == batch.targets).sum(), len(batch.targets))

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Accuracy, and cross-entropy without label smoothing, on the held-out part."""
        return measured(model, self._held_out, device, self._ranks)


def class_scores(model: nn.Module, examples: Sequences, device: torch.device, ranks: Ranks | None = None) -> Tensor:
    """Log-probabilities ``[examples, classes]`` in the order given; rows of similar length are batched together."""
    lengths = examples.lengths()
    order = np.argsort(lengths, kind="stable")
    parts = packed_by_size(order, lengths, batch_size=_EVALUATION_ROWS, batch_tokens=1 << 16)
    ranks = Ranks() if ranks is None else ranks
    scores_by_batch = []
    model.eval()
    with torch.no_grad():
        for places in parts:
            for share in ranks.shares(batch_of(examples, places)):
                batch = share.batch.to(device)
                scores = model(batch.ids, lengths=batch.lengths).float().log_softmax(-1).cpu()
                scores_by_batch.append(share.among(scores))
    scores = ranks.rows_of_all(torch.cat(scores_by_batch))
    in_order: Tensor = scores[torch.from_numpy(np.argsort(order, kind="stable"))]
    return in_order


def measured(
    model: nn.Module, examples: Sequences, device: torch.device, ranks: Ranks | None = None
) -> dict[str, float]:
    """Accuracy and mean cross-entropy in nats."""
    scores = class_scores(model, examples, device, ranks)
    targets = torch.tensor(list(examples.targets))
    accuracy = (scores.argmax(-1) == targets).double().mean().item()
    return {"accuracy": accuracy, "loss": F.nll_loss(scores.double(), targets).item()}


def build_classifier(options: ClassifierOptions, *, vocab_size: int, num_classes: int) -> SequenceClassifier:
    """The model that ``options`` describe, with random weights from ``options.seed``."""
    with seeded(options.seed):
        model = SequenceClassifier(
            vocab_size,
            options.embed_dim,
            options.num_heads,
            options.num_layers,
            num_classes,
            max_len=options.max_len,
            dropout=options.dropout,
            attention_dropout=options.attention_dropout,
            feedforward_dim=options.feedforward_dim or None,
            pooling=options.pooling,
            embedding_dropout=options.embedding_dropout,
            neighbours=options.neighbours,
            checkpoint_activations=options.checkpoint_activations,
        )
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=options.embedding_scale)
    return model


def train_classifier(
    train: Sequences,
    held_out: Sequences,
    *,
    vocab_size: int,
    num_classes: int,
    options: ClassifierOptions,
    unknown_id: int | None = None,
    keeper: Keeper | None = None,
    watcher: ProgressReporter | None = None,
    function: str = _FUNCTION,
    ranks: Ranks | None = None,
) -> Trained:
    """Train a ``SequenceClassifier`` on encoded sequences.

    Args:
        train: the examples to train on.
        held_out: the examples for early stopping and the reported metrics.
        vocab_size: number of token ids.
        num_classes: number of classes.
        options: options of the model and of training.
        unknown_id: the id that replaces tokens in token dropout; None for no token dropout.
        keeper: stores results and checkpoints; by default in memory.
        watcher: shows progress; by default nothing is shown.
        function: name of the caller in error texts.
        ranks: the processes that share the training; by default this one alone.

    Returns:
        A ``Trained``: the model with its best weights, and the outcome.

    Raises:
        ShapeError: an option is out of range.
        UnsupportedError: the device is not available.
        DataError: the loss is NaN or infinite.

    >>> rows = Sequences([[1, 2], [2, 1], [3, 3], [3]] * 4, [0, 0, 1, 1] * 4)
    >>> options = ClassifierOptions(embed_dim=8, num_heads=2, epochs=1, token_dropout=0.0)
    >>> trained = train_classifier(rows, rows, vocab_size=4, num_classes=2, options=options)
    >>> sorted(trained.outcome.held_out)
    ['accuracy', 'loss']
    """
    options.checked(function)
    device = options.chosen_device(function)
    model = build_classifier(options, vocab_size=vocab_size, num_classes=num_classes).to(device)
    if options.compile:
        model.compile_blocks()
    task = ClassifierTask(train, held_out, options, unknown_id, ranks)
    engine = Engine(model, task, options, keeper=keeper, watcher=watcher, function=function, ranks=ranks)
    outcome = engine.fit()
    return Trained(model.eval(), outcome)


@dataclass(frozen=True)
class _Prepared:
    """An encoded table: its parts as ids, the tokenizer and the labels."""

    train: Sequences
    held_out: Sequences
    test: Sequences | None
    tokenizer: TextTokenizer
    labels: list[str]


def train_text_classifier(
    data: Path | str,
    *,
    out: Path | str,
    test: Path | str | None = None,
    text_column: str = "text",
    label_column: str = "label",
    options: ClassifierOptions | None = None,
    resume: bool = False,
    watcher: ProgressReporter | None = None,
    parallel: ParallelOptions | None = None,
) -> dict[str, Any]:
    """Train a classifier on a table of texts and write a run folder.

    A run that was interrupted continues with ``resume=True`` and the same arguments, to bitwise identical results.

    Args:
        data: a table, ``.csv`` with a header or ``.jsonl`` with one object per line.
        out: the run folder, new or empty.
        test: another table, evaluated at the end.
        text_column: name of the column with the texts.
        label_column: name of the column with the labels.
        options: options of the model and of training; by default ``ClassifierOptions()``.
        resume: whether to continue an interrupted run.
        watcher: shows progress; by default nothing is shown.
        parallel: how the processes that torchrun started share the work; by default each has a part of the batch.

    Returns:
        The contents of ``metrics.json``: the held-out metrics, ``best_step``, ``steps``, ``seconds``, and ``test`` if
        a test table was given.

    Raises:
        DataError: a table cannot be read, the folder has another run, another training writes into it, or the loss is
            NaN or infinite.
        ShapeError: an option is out of range.
        UnsupportedError: the device or a package of the extra ``train`` is not available.
    """
    options = options or ClassifierOptions()
    with opened(parallel, options.chosen_device(_FUNCTION), _FUNCTION) as ranks:
        ranks.check(_FUNCTION, options.checked(_FUNCTION), options.max_len)
        folder, watcher = RunFolder(Path(out)), ranks.watcher(watcher)
        columns = {"text_column": text_column, "label_column": label_column}
        read = partial(read_table, text_column=text_column, label_column=label_column, function=_FUNCTION)
        table = read(data)
        tested = read(test) if test is not None else None
        labels = _labels(table, tested)
        config = _config(table, tested, columns, options, labels) | {"job": ranks.job}
        with entered(folder, config, ranks, resume=resume, watcher=watcher, function=_FUNCTION) as (begun, done):
            if done is not None:
                return done
            ready = _prepare(table, tested, labels, options, folder if begun else None)
            ranks.check_same(_FUNCTION, "the tokenizer", ready.tokenizer.sha256())
            ranks.check_same(_FUNCTION, "data", config["data"])
            _say_cut(ready, options, watcher)
            if not begun and ranks.first:
                ready.tokenizer.save(folder.tokenizer)
                folder.begin(config | {"vocab_size": len(ready.tokenizer)})
            return _run(ready, folder, options, watcher, ranks)


def _run(
    ready: _Prepared, folder: RunFolder, options: ClassifierOptions, watcher: ProgressReporter, ranks: Ranks
) -> dict[str, Any]:
    with FolderKeeper(folder, function=_FUNCTION, ranks=ranks) as keeper:
        trained = train_classifier(
            ready.train,
            ready.held_out,
            vocab_size=len(ready.tokenizer),
            num_classes=len(ready.labels),
            options=options,
            unknown_id=ready.tokenizer.unknown_id,
            keeper=keeper,
            watcher=watcher,
            ranks=ranks,
        )
    metrics = metrics_of(trained.outcome, examples=len(ready.held_out))
    if ready.test is not None:
        device = options.chosen_device(_FUNCTION)
        results = measured(trained.model, ready.test.cut(options.max_len), device, ranks)
        metrics["test"] = results | {"examples": len(ready.test)}
    if ranks.first:
        write_json(folder.metrics, metrics)
    return metrics


def _labels(table: Table, tested: Table | None) -> list[str]:
    assert table.labels is not None
    labels = sorted(set(table.labels))
    if len(labels) < 2:
        must, got = "have two classes or more", f"one, {labels[0]!r}"
        raise DataError.about(_FUNCTION, str(table.path), must=must, got=got, then="Check --label-column.")
    if tested is not None:
        assert tested.labels is not None
        for label, line in zip(tested.labels, tested.lines, strict=True):
            if label not in labels:
                must, got = "have only labels of the training data", f"{label!r} in line {line}"
                then = "Correct the label, or add examples of it to the training data."
                raise DataError.about(_FUNCTION, str(tested.path), must=must, got=got, then=then)
    return labels


def _config(
    table: Table,
    tested: Table | None,
    columns: dict[str, str],
    options: ClassifierOptions,
    labels: list[str],
) -> dict[str, Any]:
    data: dict[str, Any] = {"file": table.path.name, "sha256": table.sha256, "rows": len(table)}
    if tested is not None:
        data |= {"test_file": tested.path.name, "test_sha256": tested.sha256}
    return {
        "task": "classify",
        "data": data | columns,
        "options": options.as_dict(),
        "labels": labels,
        "versions": versions(),
        "threads": torch.get_num_threads(),
    }


def _prepare(
    table: Table,
    tested: Table | None,
    labels: list[str],
    options: ClassifierOptions,
    begun: RunFolder | None,
) -> _Prepared:
    assert table.labels is not None
    number = {label: place for place, label in enumerate(labels)}
    targets = [number[label] for label in table.labels]
    training, held_out = split(targets, options.held_out, seed=options.seed)
    if begun is not None:
        tokenizer = TextTokenizer.load(begun.tokenizer, function=_FUNCTION)
    else:
        tokenizer = TRAINERS[options.tokenizer](
            [table.texts[place] for place in training],
            vocab_size=options.vocab_size,
            min_count=options.min_count,
            lowercase=options.lowercase,
        )
    examples = Sequences(encoded(table, tokenizer, _FUNCTION), targets)
    test = None
    if tested is not None:
        assert tested.labels is not None
        test = Sequences(encoded(tested, tokenizer, _FUNCTION), [number[label] for label in tested.labels])
    return _Prepared(examples.taken(training), examples.taken(held_out), test, tokenizer, labels)


def encoded(table: Table, tokenizer: TextTokenizer, function: str) -> list[list[int]]:
    """The ids of every text of a table; raises ``DataError`` with the line of a text without a token."""
    rows = tokenizer.encode_many(table.texts)
    for ids, line in zip(rows, table.lines, strict=True):
        if not ids:
            must, got = "have a token in every text", f"none in {table.unit} {line}"
            raise DataError.about(function, str(table.path), must=must, got=got, then=f"Remove that {table.unit}.")
    return rows


def _say_cut(ready: _Prepared, options: ClassifierOptions, watcher: ProgressReporter) -> None:
    rows = [*ready.train.ids, *ready.held_out.ids]
    cut = sum(len(row) > options.max_len for row in rows)
    watcher.said(
        f"{len(ready.train)} texts to train on, {len(ready.held_out)} held out, "
        f"{len(ready.labels)} classes, vocabulary of {len(ready.tokenizer)} tokens"
    )
    if cut:
        watcher.said(f"{cut} of {len(rows)} texts are longer than --max-len {options.max_len} and were truncated")
