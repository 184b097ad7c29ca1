"""The options of training, stated once: defaults, limits and help texts that the command line reads too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

import torch

from clearhead.errors import DataError, ShapeError, UnsupportedError

__all__ = ["ClassifierOptions", "LanguageOptions", "TrainingOptions"]


#: Numbers beyond these are no setting: widths, depths, lengths, and counts.
_WIDE, _DEEP, _LONG, _MANY = 2**16, 2**10, 2**20, 2**31 - 1


def _option(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    limits = {"least": least, "most": most, "above": above, "below": below, "choices": choices}
    return field(default=default, metadata={"help": help, **limits})


_RULES: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "least": ("be at least {}", lambda value, limit: value >= limit),
    "most": ("be at most {:,}", lambda value, limit: value <= limit),
    "above": ("be above {}", lambda value, limit: value > limit),
    "below": ("be below {}", lambda value, limit: value < limit),
    "choices": ("be one of {}", lambda value, limit: value in limit),
}


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """What the engine needs to know, whatever the task."""

    lr: float = _option(1e-3, "Highest learning rate.", above=0)
    warmup: float = _option(0.1, "Part of all steps over which the learning rate rises.", least=0, below=1)
    final_lr: float = _option(0.0, "Learning rate at the end, as a part of the highest.", least=0)
    weight_decay: float = _option(0.01, "Weight decay of the matrices (not of embeddings).", least=0)
    beta2: float = _option(0.99, "AdamW's second decay.", least=0, below=1)
    clip: float = _option(1.0, "Largest gradient norm.", above=0)
    average: float = _option(0.0, "Decay of the running average of weights; 0: none.", least=0, below=1)
    patience: int = _option(8, "Evaluations without a better result before stopping.", least=1, most=_MANY)
    checkpoint_every: int = _option(
        200, "Steps between checkpoints, besides one at each evaluation.", least=1, most=_MANY
    )
    precision: str = _option("fp32", "fp32, or bf16 autocast.", choices=("fp32", "bf16"))
    compile: bool = _option(False, "Compile each block with torch.compile.")
    checkpoint_activations: bool = _option(False, "Recompute activations in backward to save memory.")
    device: str = _option("auto", "auto, cpu or cuda.", choices=("auto", "cpu", "cuda"))
    seed: int = _option(0, "Seed of the split, the weights, the batches and dropout.", least=0)

    def checked(self, function: str) -> Self:
        """The same options; raises ``ShapeError`` naming the first one out of its limits."""
        for item in fields(self):
            value = getattr(self, item.name)
            for rule, (words, holds) in _RULES.items():
                limit = item.metadata.get(rule)
                if limit is not None and not holds(value, limit):
                    shown = ", ".join(limit) if rule == "choices" else limit
                    flag = f"--{item.name.replace('_', '-')}"
                    must, then = words.format(shown), "Choose another value."
                    raise ShapeError.about(function, flag, must=must, got=value, then=then)
        return self

    def chosen_device(self, function: str) -> torch.device:
        """The device to train on; raises ``UnsupportedError`` where it is not there."""
        if self.device == "cuda" and not torch.cuda.is_available():
            must, then = "be usable here", "Use --device cpu."
            raise UnsupportedError.about(function, "--device", must=must, got="cuda without a GPU", then=then)
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    def as_dict(self) -> dict[str, Any]:
        """The options as plain values, for ``config.json``."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any], *, function: str) -> Self:
        """Read back what ``as_dict`` gave; raises ``DataError`` for a field that is unknown or of another type."""
        known = {item.name: item for item in fields(cls)}
        for name, value in values.items():
            if name not in known or not _fits(value, known[name].default):
                must, then = "hold known options of the right type", "The run is damaged; train it again."
                raise DataError.about(function, "config.json", must=must, got=f"{name} = {value!r}", then=then)
        return cls(**values)


def _fits(value: object, default: object) -> bool:
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(default)


@dataclass(frozen=True, kw_only=True)
class _ModelOptions(TrainingOptions):
    embed_dim: int = _option(128, "Width of the model.", least=1, most=_WIDE)
    num_heads: int = _option(4, "Attention heads.", least=1, most=_WIDE)
    num_layers: int = _option(1, "Encoder blocks.", least=1, most=_DEEP)
    feedforward_dim: int = _option(
        0, "Width inside the feed-forward part; 0: four times the width.", least=0, most=_WIDE
    )
    dropout: float = _option(0.2, "Dropout inside the blocks.", least=0, below=1)

    def checked(self, function: str) -> Self:
        super().checked(function)
        if self.embed_dim % self.num_heads:
            must, then = f"be divisible by --num-heads {self.num_heads}", "Choose a multiple of it."
            raise ShapeError.about(function, "--embed-dim", must=must, got=self.embed_dim, then=then)
        return self


@dataclass(frozen=True, kw_only=True)
class ClassifierOptions(_ModelOptions):
    """Options of ``train classify``; the defaults are those of small text tables."""

    embed_dim: int = _option(192, "Width of the model.", least=1, most=_WIDE)
    feedforward_dim: int = _option(
        384, "Width inside the feed-forward part; 0: four times the width.", least=0, most=_WIDE
    )
    max_len: int = _option(256, "Longest sequence in tokens; longer texts are cut.", least=1, most=_LONG)
    attention_dropout: float = _option(
        0.0, "Dropout on attention weights; 0 lets faster kernels run.", least=0, below=1
    )
    embedding_dropout: float = _option(0.4, "Dropout on the embeddings.", least=0, below=1)
    embedding_scale: float = _option(0.1, "Deviation of the embeddings at the start.", above=0)
    token_dropout: float = _option(0.2, "Part of the tokens replaced by the unknown one.", least=0, below=1)
    neighbours: int = _option(
        1, "Tokens on each side that each token is mixed with before attention.", least=0, most=_DEEP
    )
    label_smoothing: float = _option(0.1, "Label smoothing.", least=0, below=1)
    pooling: str = _option("mean_max", "What of the tokens is kept.", choices=("mean", "max", "mean_max", "first"))
    epochs: int = _option(0, "Most passes over the data; 0: as many as make about 1,500 steps.", least=0, most=_LONG)
    batch_size: int = _option(50, "Most sequences in a batch.", least=1, most=_LONG)
    batch_tokens: int = _option(8192, "Most tokens in a batch, padding included.", least=1, most=_MANY)
    held_out: float = _option(0.05, "Part of the data kept for early stopping.", above=0, below=1)
    tokenizer: str = _option("word", "word or bpe.", choices=("word", "bpe"))
    vocab_size: int = _option(30_000, "Most tokens in the vocabulary.", least=3, most=_MANY)
    min_count: int = _option(2, "How often a word must occur to be known.", least=1, most=_MANY)
    lowercase: bool = _option(False, "Read texts in lower case.")


@dataclass(frozen=True, kw_only=True)
class LanguageOptions(_ModelOptions):
    """Options of ``train lm``; the defaults are nanoGPT's small character setting with more context."""

    num_layers: int = _option(4, "Decoder blocks.", least=1, most=_DEEP)
    dropout: float = _option(0.0, "Dropout inside the blocks.", least=0, below=1)
    weight_decay: float = _option(0.1, "Weight decay of the matrices (not of embeddings).", least=0)
    warmup: float = _option(0.05, "Part of all steps over which the learning rate rises.", least=0, below=1)
    final_lr: float = _option(0.1, "Learning rate at the end, as a part of the highest.", least=0)
    tokenizer: str = _option("chars", "chars or bpe (byte-level).", choices=("chars", "bpe"))
    vocab_size: int = _option(2000, "Vocabulary of the bpe tokenizer.", least=257, most=_MANY)
    steps: int = _option(2000, "Training steps.", least=1, most=_MANY)
    context: int = _option(64, "Tokens the model sees.", least=1, most=_LONG)
    batch_size: int = _option(12, "Windows in a batch.", least=1, most=_LONG)
    eval_every: int = _option(250, "Steps between evaluations.", least=1, most=_MANY)
    held_out: float = _option(0.1, "Part at the end of the text kept for evaluation.", above=0, below=1)
