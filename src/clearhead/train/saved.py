"""A run, loaded for inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clearhead.errors import DataError
from clearhead.train.batches import Sequences
from clearhead.train.classify import build_classifier, class_scores
from clearhead.train.language import build_language_model
from clearhead.train.options import ClassifierOptions, LanguageOptions
from clearhead.train.run import RunFolder
from clearhead.train.text import TextTokenizer

__all__ = ["Run", "load_run"]


@dataclass(frozen=True)
class Run:
    """A trained model with its tokenizer, labels and options.

    Attributes:
        path: the run folder.
        task: ``"classify"`` or ``"lm"``.
        model: the model with its best weights, in evaluation mode.
        tokenizer: the tokenizer, from text to ids and back.
        labels: the classes of a classifier; empty for a language model.
        options: the options of the run.
    """

    path: Path
    task: str
    model: nn.Module
    tokenizer: TextTokenizer
    labels: list[str]
    options: ClassifierOptions | LanguageOptions

    @property
    def max_len(self) -> int:
        """The largest number of tokens that the model reads at once."""
        options = self.options
        return options.max_len if isinstance(options, ClassifierOptions) else options.context

    def encode(self, text: str) -> list[int]:
        """The ids of a text as the model reads it; for a classifier truncated to ``max_len``.

        Raises:
            DataError: the text has no token, or characters that are not in the vocabulary.
        """
        self.check(text)
        ids = self.tokenizer.encode(text)
        if not ids:
            must, got = "have at least one token", repr(text)
            raise DataError.about("encode", "text", must=must, got=got, then="Give some words.")
        return ids[: self.max_len] if self.task == "classify" else ids

    def check(self, text: str) -> None:
        """Raise ``DataError`` if the text has characters that are not in the vocabulary."""
        lost = self.tokenizer.cannot_write(text)
        if lost:
            must, got = "have only characters of the training text", ", ".join(map(repr, lost[:5]))
            raise DataError.about("encode", "text", must=must, got=got, then="Leave them out.")

    def predict(self, texts: Sequence[str]) -> list[tuple[str, list[float]]]:
        """Classify texts.

        Args:
            texts: the texts.

        Returns:
            For each text the most probable label, and the probabilities of all ``labels`` in their order.

        Raises:
            DataError: the run is not of ``train classify``, a text has no token, or a score is NaN.
        """
        self.require("classify", "predict")
        if not texts:
            return []
        rows = Sequences([self.encode(text) for text in texts], [0] * len(texts))
        device = next(self.model.parameters()).device
        chances = class_scores(self.model, rows, device).double().exp()
        if not bool(chances.isfinite().all()):
            must, then = "have finite weights", "Its training has diverged; train again with a lower learning rate."
            raise DataError.about("predict", str(self.path), must=must, got="scores of NaN", then=then)
        best = chances.argmax(-1).tolist()
        return [(self.labels[place], row) for place, row in zip(best, chances.tolist(), strict=True)]

    def require(self, task: str, function: str) -> None:
        """Raise ``DataError`` if the run is of another task than ``task``, ``"classify"`` or ``"lm"``."""
        if self.task != task:
            wanted = {"classify": "a run of train classify", "lm": "a run of train lm"}
            must, got = f"be {wanted[task]}", wanted[self.task]
            then = "Name another run folder."
            raise DataError.about(function, str(self.path), must=must, got=got, then=then)


def load_run(path: Path | str, *, function: str = "load_run", device: str = "cpu") -> Run:
    """Load a run folder: the model with its best weights in evaluation mode, the tokenizer and the labels.

    Args:
        path: the run folder.
        function: name of the caller in error texts.
        device: device of the model, the CPU by default.

    Returns:
        A ``Run``.

    Raises:
        DataError: the folder is not a run, or one of its files is absent, damaged or inconsistent.
    """
    folder = RunFolder(Path(path))
    if not folder.path.is_dir():
        must, then = "be a run folder", "Give the folder that clearhead train named with --out."
        got = "a file" if folder.path.is_file() else "no such folder"
        raise DataError.about(function, str(path), must=must, got=got, then=then)
    # Looked at first: where weights exist, a training replaces neither the config nor the tokenizer.
    trained = folder.weights.exists()
    config = folder.read_config(function=function)
    if config["task"] not in _READERS:
        must, then = "be of the task classify or lm", "The run is damaged; train it again."
        raise DataError.about(function, str(folder.config), must=must, got=repr(config["task"]), then=then)
    if not trained:
        must, then = "have trained weights", "Let the training reach its first evaluation, or resume it with --resume."
        raise DataError.about(function, str(folder.path), must=must, got="none yet", then=then)
    tokenizer = TextTokenizer.load(folder.tokenizer, function=function)
    model, options, labels = _READERS[config["task"]](folder, config, function)
    if len(tokenizer) != config["vocab_size"]:
        must, then = f"have {config['vocab_size']} tokens", "The run is damaged; train it again."
        raise DataError.about(function, str(folder.tokenizer), must=must, got=len(tokenizer), then=then)
    folder.load_best(model, function=function)
    return Run(folder.path, config["task"], model.to(torch.device(device)).eval(), tokenizer, labels, options)


_Read = tuple[nn.Module, ClassifierOptions | LanguageOptions, list[str]]


def _classifier(folder: RunFolder, config: dict[str, Any], function: str) -> _Read:
    options = ClassifierOptions.from_dict(_part(folder, config, "options", dict, function), function=function)
    labels = [str(label) for label in _part(folder, config, "labels", list, function)]
    vocab_size = _part(folder, config, "vocab_size", int, function)
    options.checked(function)
    return build_classifier(options, vocab_size=vocab_size, num_classes=len(labels)), options, labels


def _language_model(folder: RunFolder, config: dict[str, Any], function: str) -> _Read:
    options = LanguageOptions.from_dict(_part(folder, config, "options", dict, function), function=function)
    vocab_size = _part(folder, config, "vocab_size", int, function)
    options.checked(function)
    return build_language_model(options, vocab_size=vocab_size), options, []


_READERS: dict[str, Callable[[RunFolder, dict[str, Any], str], _Read]] = {
    "classify": _classifier,
    "lm": _language_model,
}


def _part(folder: RunFolder, config: dict[str, Any], name: str, kind: type, function: str) -> Any:
    value = config.get(name)
    if not isinstance(value, kind) or not value:
        must, then = f"have {name!r}", "The run is damaged; train it again."
        raise DataError.about(function, str(folder.config), must=must, got=repr(value), then=then)
    return value
