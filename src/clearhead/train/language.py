"""Language modelling: the task for the engine, and training from a text file to a run folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.errors import DataError
from clearhead.nn import LanguageModel
from clearhead.train.batches import Batch
from clearhead.train.data import read_known
from clearhead.train.engine import Engine, Keeper, Trained, Weighed, metrics_of, seeded
from clearhead.train.files import write_json
from clearhead.train.keeper import FolderKeeper
from clearhead.train.options import LanguageOptions, ParallelOptions
from clearhead.train.progress import ProgressReporter
from clearhead.train.ranks import Ranks, opened
from clearhead.train.run import RunFolder, entered, versions
from clearhead.train.text import TextTokenizer, train_bytes, train_characters

__all__ = ["LanguageTask", "build_language_model", "train_language_model", "train_text_language_model"]

_FUNCTION = "train lm"
_EVALUATION_TOKENS = 16_384


class LanguageTask:
    """Next-token cross-entropy on random windows; evaluated on every token of the held-out tail."""

    monitor = "loss"
    larger_is_better = False

    def __init__(
        self, train: Tensor, held_out: Tensor, options: LanguageOptions, function: str, ranks: Ranks | None = None
    ) -> None:
        for part, ids in (("training part", train), ("held-out part", held_out)):
            if len(ids) <= options.context:
                must, got = f"have more than --context {options.context} tokens in its {part}", len(ids)
                then = "Give a longer text or a smaller --context."
                raise DataError.about(function, "data", must=must, got=got, then=then)
        self._train, self._held_out, self._options = train, held_out, options
        self._ranks = Ranks() if ranks is None else ranks
        self.steps = options.steps

    def batch(self, step: int) -> Batch:
        """The windows of one step."""
        options = self._options
        random = np.random.default_rng([options.seed, step])
        starts = random.integers(0, len(self._train) - options.context, size=options.batch_size)
        places = torch.from_numpy(starts)[:, None] + torch.arange(options.context + 1)
        return _windows(self._train[places])

    def slack(self, value: float) -> float:
        """0, as the held-out tail has many tokens."""
        return 0.0

    def evaluates_after(self, steps: int) -> bool:
        """Whether the number of steps is a multiple of ``eval_every``."""
        return steps % self._options.eval_every == 0

    def weigh(self, model: nn.Module, batch: Batch) -> Weighed:
        """Cross-entropy of each next token."""
        logits = model(batch.ids).float().flatten(0, 1)
        targets = batch.targets.flatten()
        loss = F.cross_entropy(logits, targets)
        return Weighed(loss, (logits.argmax(-1) == targets).sum(), targets.numel())

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Loss and accuracy on the held-out tail, in adjacent windows."""
        context = self._options.context
        count = (len(self._held_out) - 1) // context
        places = torch.arange(count)[:, None] * context + torch.arange(context + 1)
        rows = self._held_out[places]
        by_row: list[Tensor] = []
        for part in rows.split(max(1, _EVALUATION_TOKENS // context)):
            for share in self._ranks.shares(_windows(part)):
                batch = share.batch.to(device)
                logits = model(batch.ids).float()
                losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
                # Sums of each row in one order, so that every division of the rows gives the same loss.
                loss = losses.view(batch.targets.shape).double().cumsum(1)[:, -1]
                correct = (logits.argmax(-1) == batch.targets).sum(1)
                by_row.append(share.among(torch.stack([loss, correct.double()]).T).cpu())
        sums = self._ranks.total(torch.cat(by_row).flatten().tolist())
        loss_sum, correct_sum = math.fsum(sums[::2]), sum(sums[1::2])
        counted = count * context
        return {"loss": loss_sum / counted, "accuracy": correct_sum / counted}


def _windows(rows: Tensor) -> Batch:
    lengths = torch.full((len(rows),), rows.shape[1] - 1)
    return Batch(rows[:, :-1].contiguous(), lengths, rows[:, 1:].contiguous())


def build_language_model(options: LanguageOptions, *, vocab_size: int) -> LanguageModel:
    """The model that ``options`` describe, with random weights from ``options.seed``."""
    with seeded(options.seed):
        return LanguageModel(
            vocab_size,
            options.embed_dim,
            options.num_heads,
            options.num_layers,
            max_len=options.context,
            dropout=options.dropout,
            feedforward_dim=options.feedforward_dim or None,
            checkpoint_activations=options.checkpoint_activations,
        )


def train_language_model(
    train: Tensor,
    held_out: Tensor,
    *,
    vocab_size: int,
    options: LanguageOptions,
    keeper: Keeper | None = None,
    watcher: ProgressReporter | None = None,
    function: str = _FUNCTION,
    ranks: Ranks | None = None,
) -> Trained:
    """Train a ``LanguageModel`` on token ids.

    Args:
        train: the ids to train on, int64 ``[tokens]``.
        held_out: the ids for early stopping and the reported metrics, int64 ``[tokens]``.
        vocab_size: number of token ids.
        options: options of the model and of training.
        keeper: stores results and checkpoints; by default in memory.
        watcher: shows progress; by default nothing is shown.
        function: name of the caller in error texts.
        ranks: the processes that share the training; by default this one alone.

    Returns:
        A ``Trained``: the model with its best weights, and the outcome.

    Raises:
        ShapeError: an option is out of range.
        UnsupportedError: the device is not available.
        DataError: the ids are too few for ``options.context``, or the loss is NaN or infinite.

    >>> ids = torch.arange(60) % 3
    >>> options = LanguageOptions(embed_dim=8, num_heads=2, num_layers=1, context=8, steps=2)
    >>> trained = train_language_model(ids, ids, vocab_size=3, options=options)
    >>> trained.outcome.steps
    2
    """
    options.checked(function)
    device = options.chosen_device(function)
    task = LanguageTask(train, held_out, options, function, ranks)
    model = build_language_model(options, vocab_size=vocab_size).to(device)
    if options.compile:
        model.compile_blocks()
    engine = Engine(model, task, options, keeper=keeper, watcher=watcher, function=function, ranks=ranks)
    outcome = engine.fit()
    return Trained(model.eval(), outcome)


def train_text_language_model(
    data: Path | str,
    *,
    out: Path | str,
    options: LanguageOptions | None = None,
    resume: bool = False,
    watcher: ProgressReporter | None = None,
    parallel: ParallelOptions | None = None,
) -> dict[str, Any]:
    """Train a language model on a text file and write a run folder.

    The last tenth of the characters (``options.held_out``) is held out. A run that was interrupted continues with
    ``resume=True`` and the same arguments, to bitwise identical results.

    Args:
        data: a UTF-8 text file.
        out: the run folder, new or empty.
        options: options of the model and of training; by default ``LanguageOptions()``.
        resume: whether to continue an interrupted run.
        watcher: shows progress; by default nothing is shown.
        parallel: how the processes that torchrun started share the work; by default each has a part of the batch.

    Returns:
        The contents of ``metrics.json``: the held-out metrics, ``best_step``, ``steps`` and ``seconds``.

    Raises:
        DataError: the text cannot be read or is too short, the folder has another run, another training writes into
            it, or the loss is NaN or infinite.
        ShapeError: an option is out of range.
        UnsupportedError: the device or a package of the extra ``train`` is not available.
    """
    options = options or LanguageOptions()
    with opened(parallel, options.chosen_device(_FUNCTION), _FUNCTION) as ranks:
        ranks.check(_FUNCTION, options.checked(_FUNCTION), options.context)
        folder, watcher = RunFolder(Path(out)), ranks.watcher(watcher)
        path = Path(data)
        text, sha256 = read_known(path, function=_FUNCTION)
        config = {
            "task": "lm",
            "data": {"file": path.name, "sha256": sha256, "characters": len(text)},
            "options": options.as_dict(),
            "versions": versions(),
            "threads": torch.get_num_threads(),
            "job": ranks.job,
        }
        with entered(folder, config, ranks, resume=resume, watcher=watcher, function=_FUNCTION) as (begun, done):
            return done if done is not None else _run(text, folder, options, config, watcher, ranks, begun=begun)


def _run(
    text: str,
    folder: RunFolder,
    options: LanguageOptions,
    config: dict[str, Any],
    watcher: ProgressReporter,
    ranks: Ranks,
    *,
    begun: bool,
) -> dict[str, Any]:
    cut = len(text) - round(len(text) * options.held_out)
    tokenizer = _tokenizer(text, cut, options, folder if begun else None)
    train, held_out = (torch.tensor(tokenizer.encode_long(part)) for part in (text[:cut], text[cut:]))
    ranks.check_same(_FUNCTION, "the tokenizer", tokenizer.sha256())
    LanguageTask(train, held_out, options, _FUNCTION)  # raises for a short text before anything is written
    watcher.said(f"{len(train)} tokens to train on, {len(held_out)} held out, vocabulary of {len(tokenizer)} tokens")
    ranks.check_same(_FUNCTION, "data", config["data"])
    if not begun and ranks.first:
        tokenizer.save(folder.tokenizer)
        folder.begin(config | {"vocab_size": len(tokenizer)})
    with FolderKeeper(folder, function=_FUNCTION, ranks=ranks) as keeper:
        trained = train_language_model(
            train,
            held_out,
            vocab_size=len(tokenizer),
            options=options,
            keeper=keeper,
            watcher=watcher,
            ranks=ranks,
        )
    bits = trained.outcome.held_out["loss"] / math.log(2) * len(held_out) / (len(text) - cut)
    metrics = metrics_of(trained.outcome, tokens=len(held_out), bits_per_character=bits)
    if ranks.first:
        write_json(folder.metrics, metrics)
    return metrics


def _tokenizer(text: str, cut: int, options: LanguageOptions, begun: RunFolder | None) -> TextTokenizer:
    if begun is not None:
        return TextTokenizer.load(begun.tokenizer, function=_FUNCTION)
    if options.tokenizer == "chars":
        # The alphabet is that of the whole file, as in nanoGPT, so that losses are comparable.
        return train_characters(text)
    return train_bytes(text[:cut], vocab_size=options.vocab_size)
