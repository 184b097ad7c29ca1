"""The options of training: defaults, limits and help texts, which the command line reads too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

import torch

from clearhead.errors import DataError, ShapeError, UnsupportedError

__all__ = ["ClassifierOptions", "LanguageOptions", "ParallelOptions", "TrainingOptions"]


#: Upper limits of widths, depths, lengths and counts.
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


def check_limits(options: Any, function: str) -> None:
    """Raise ``ShapeError`` if an option, a field made by ``_option``, is out of its limits."""
    for item in fields(options):
        value = getattr(options, item.name)
        for rule, (words, holds) in _RULES.items():
            limit = item.metadata.get(rule)
            if limit is not None and not holds(value, limit):
                shown = ", ".join(limit) if rule == "choices" else limit
                flag = f"--{item.name.replace('_', '-')}"
                must, then = words.format(shown), "Choose another value."
                raise ShapeError.about(function, flag, must=must, got=value, then=then)


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """How the processes that torchrun started share a training; their product is the number of processes.

    Attributes:
        data_parallel: number of parts of each batch, each with a whole copy of the model; 0 for what remains.
        shard: number of processes that share one copy of the model and divide a part of the batch again (FSDP2).
        tensor_parallel: number of processes that divide the heads and the feedforward's channels.
        context_parallel: number of processes that divide each sequence.
    """

    data_parallel: int = _option(
        0, "Under torchrun: parts of each batch, each on a copy of the model; 0: all processes that remain.", least=0
    )
    shard: int = _option(1, "Under torchrun: processes that share a copy of the model (FSDP2).", least=1)
    tensor_parallel: int = _option(1, "Under torchrun: processes that divide heads and channels.", least=1)
    context_parallel: int = _option(1, "Under torchrun: processes that divide each sequence.", least=1)

    @property
    def processes(self) -> int:
        """The product of the degrees."""
        return self.data_parallel * self.shard * self.tensor_parallel * self.context_parallel

    def checked(self, function: str, processes: int) -> Self:
        """The options with ``data_parallel`` filled in.

        Args:
            function: name of the caller in error texts.
            processes: number of processes.

        Raises:
            ShapeError: an option is out of its limits, or the product is not the number of processes.
        """
        check_limits(self, function)
        others = replace(self, data_parallel=1).processes
        data = self.data_parallel or max(1, processes // others)
        if data * others != processes:
            names = ("shard", "tensor_parallel", "context_parallel")
            given = [(name, getattr(self, name)) for name in names]
            shown = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given if value > 1)
            must = f"multiply to {processes}, the number of processes"
            got = " ".join(part for part in (f"--data-parallel {data}", shown) if part)
            command = f"torchrun --standalone --nproc-per-node {data * others} -m clearhead train ..."
            then = f"Start {data * others} processes: {command}"
            raise ShapeError.about(function, "the degrees", must=must, got=got, then=then)
        return replace(self, data_parallel=data)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of every training task.

    Attributes:
        lr: the highest learning rate.
        warmup: share of all steps with a rising learning rate.
        final_lr: the last learning rate as a factor of ``lr``.
        weight_decay: weight decay of matrices, not of embeddings, biases or norms.
        beta2: the second moment's decay in AdamW.
        clip: the largest gradient norm.
        accumulate: number of parts of a batch, one after the other, whose gradients are summed; saves memory. Under
            ``clearhead.set_invariant(True)`` any number of parts trains the weights of one batch.
        average: decay of the moving average of weights; 0 for none.
        patience: number of evaluations without improvement before early stopping.
        checkpoint_every: number of steps between checkpoints, besides one at each evaluation.
        precision: ``"fp32"``, or ``"bf16"`` for autocast to bfloat16.
        compile: whether to compile each block with ``torch.compile``.
        checkpoint_activations: whether to recompute activations in backward.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        seed: seed of the split, the weights, the batches and dropout.
    """

    lr: float = _option(1e-3, "Highest learning rate.", above=0)
    warmup: float = _option(0.1, "Share of all steps with a rising learning rate.", least=0, below=1)
    final_lr: float = _option(0.0, "Last learning rate as a factor of the highest.", least=0)
    weight_decay: float = _option(0.01, "Weight decay of the matrices (not of embeddings).", least=0)
    beta2: float = _option(0.99, "Decay of AdamW's second moment.", least=0, below=1)
    clip: float = _option(1.0, "Largest gradient norm.", above=0)
    accumulate: int = _option(
        1, "Parts of a batch whose gradients are summed before a step, to save memory.", least=1, most=_LONG
    )
    average: float = _option(0.0, "Decay of the moving average of weights; 0: none.", least=0, below=1)
    patience: int = _option(8, "Evaluations without improvement before early stopping.", least=1, most=_MANY)
    checkpoint_every: int = _option(
        200, "Steps between checkpoints, besides one at each evaluation.", least=1, most=_MANY
    )
    precision: str = _option("fp32", "fp32, or bf16 autocast.", choices=("fp32", "bf16"))
    compile: bool = _option(False, "Compile each block with torch.compile.")
    checkpoint_activations: bool = _option(False, "Recompute activations in backward to save memory.")
    device: str = _option("auto", "auto, cpu or cuda.", choices=("auto", "cpu", "cuda"))
    seed: int = _option(0, "Seed of the split, the weights, the batches and dropout.", least=0)

    def checked(self, function: str) -> Self:
        """The options themselves, after a check of their limits.

        Args:
            function: name of the caller in error texts.

        Raises:
            ShapeError: an option is out of its limits.
        """
        check_limits(self, function)
        return self

    def chosen_device(self, function: str) -> torch.device:
        """The device to train on; ``"auto"`` is CUDA if it is available, else the CPU.

        Args:
            function: name of the caller in error texts.

        Raises:
            UnsupportedError: the device is not available.
        """
        if self.device == "cuda" and not torch.cuda.is_available():
            must, then = "be usable here", "Use --device cpu."
            raise UnsupportedError.about(function, "--device", must=must, got="cuda without a GPU", then=then)
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    def as_dict(self) -> dict[str, Any]:
        """The options as plain values, as stored in ``config.json``."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any], *, function: str) -> Self:
        """The options from the result of ``as_dict``.

        Args:
            values: options by name.
            function: name of the caller in error texts.

        Raises:
            DataError: an option is unknown or of another type.
        """
        by_name = {item.name: item for item in fields(cls)}
        for name, value in values.items():
            if name not in by_name or not _fits(value, by_name[name].default):
                must, then = "have known options of the right type", "The run is damaged; train it again."
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
    """Options of ``train_classifier`` and of the command ``train classify``, with defaults for small text tables.

    Attributes:
        lr: the highest learning rate.
        warmup: share of all steps with a rising learning rate.
        final_lr: the last learning rate as a factor of ``lr``.
        weight_decay: weight decay of matrices, not of embeddings, biases or norms.
        beta2: the second moment's decay in AdamW.
        clip: the largest gradient norm.
        accumulate: number of parts of a batch, one after the other, whose gradients are summed; saves memory. Under
            ``clearhead.set_invariant(True)`` any number of parts trains the weights of one batch.
        average: decay of the moving average of weights; 0 for none.
        patience: number of evaluations without improvement before early stopping.
        checkpoint_every: number of steps between checkpoints, besides one at each evaluation.
        precision: ``"fp32"``, or ``"bf16"`` for autocast to bfloat16.
        compile: whether to compile each block with ``torch.compile``.
        checkpoint_activations: whether to recompute activations in backward.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        seed: seed of the split, the weights, the batches and dropout.
        embed_dim: width of the model.
        num_heads: number of attention heads.
        num_layers: number of encoder blocks.
        feedforward_dim: width of the feedforward's hidden layer; 0 for ``4 * embed_dim``.
        dropout: dropout within the blocks.
        max_len: the longest sequence in tokens; longer texts are truncated.
        attention_dropout: dropout of attention weights.
        embedding_dropout: dropout of the embeddings.
        embedding_scale: standard deviation of the initial embeddings.
        token_dropout: share of tokens replaced by the unknown token in training.
        neighbours: number of tokens on each side that each token is mixed with before the blocks.
        label_smoothing: label smoothing of the cross-entropy.
        pooling: ``"mean"``, ``"max"``, ``"mean_max"`` or ``"first"``.
        epochs: number of passes over the data; 0 for as many as give about 1,500 steps.
        batch_size: the largest number of sequences in a batch.
        batch_tokens: the largest number of tokens in a batch, including padding.
        held_out: share of the data for early stopping.
        tokenizer: ``"word"`` or ``"bpe"``.
        vocab_size: the largest number of tokens in the vocabulary.
        min_count: how often a word must occur to be in the vocabulary.
        lowercase: whether to convert texts to lower case.
    """

    embed_dim: int = _option(192, "Width of the model.", least=1, most=_WIDE)
    feedforward_dim: int = _option(
        384, "Width inside the feed-forward part; 0: four times the width.", least=0, most=_WIDE
    )
    max_len: int = _option(256, "Longest sequence in tokens; longer texts are truncated.", least=1, most=_LONG)
    attention_dropout: float = _option(
        0.0, "Dropout on attention weights; 0 lets faster kernels run.", least=0, below=1
    )
    embedding_dropout: float = _option(0.4, "Dropout on the embeddings.", least=0, below=1)
    embedding_scale: float = _option(0.1, "Standard deviation of the initial embeddings.", above=0)
    token_dropout: float = _option(0.2, "Share of tokens replaced by the unknown token.", least=0, below=1)
    neighbours: int = _option(
        1, "Tokens on each side that each token is mixed with before attention.", least=0, most=_DEEP
    )
    label_smoothing: float = _option(0.1, "Label smoothing.", least=0, below=1)
    pooling: str = _option("mean_max", "Pooling over tokens.", choices=("mean", "max", "mean_max", "first"))
    epochs: int = _option(0, "Most passes over the data; 0: as many as make about 1,500 steps.", least=0, most=_LONG)
    batch_size: int = _option(50, "Most sequences in a batch.", least=1, most=_LONG)
    batch_tokens: int = _option(8192, "Most tokens in a batch, padding included.", least=1, most=_MANY)
    held_out: float = _option(0.05, "Share of the data held out for early stopping.", above=0, below=1)
    tokenizer: str = _option("word", "word or bpe.", choices=("word", "bpe"))
    vocab_size: int = _option(30_000, "Most tokens in the vocabulary.", least=3, most=_MANY)
    min_count: int = _option(2, "How often a word must occur to be in the vocabulary.", least=1, most=_MANY)
    lowercase: bool = _option(False, "Convert texts to lower case.")


@dataclass(frozen=True, kw_only=True)
class LanguageOptions(_ModelOptions):
    """Options of ``train_language_model`` and of the command ``train lm``.

    The defaults are nanoGPT's small character model with a longer context.

    Attributes:
        lr: the highest learning rate.
        warmup: share of all steps with a rising learning rate.
        final_lr: the last learning rate as a factor of ``lr``.
        weight_decay: weight decay of matrices, not of embeddings, biases or norms.
        beta2: the second moment's decay in AdamW.
        clip: the largest gradient norm.
        accumulate: number of parts of a batch, one after the other, whose gradients are summed; saves memory. Under
            ``clearhead.set_invariant(True)`` any number of parts trains the weights of one batch.
        average: decay of the moving average of weights; 0 for none.
        patience: number of evaluations without improvement before early stopping.
        checkpoint_every: number of steps between checkpoints, besides one at each evaluation.
        precision: ``"fp32"``, or ``"bf16"`` for autocast to bfloat16.
        compile: whether to compile each block with ``torch.compile``.
        checkpoint_activations: whether to recompute activations in backward.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        seed: seed of the weights, the batches and dropout.
        embed_dim: width of the model.
        num_heads: number of attention heads.
        num_layers: number of decoder blocks.
        feedforward_dim: width of the feedforward's hidden layer; 0 for ``4 * embed_dim``.
        dropout: dropout within the blocks.
        tokenizer: ``"chars"``, or ``"bpe"`` for byte-level BPE.
        vocab_size: vocabulary of the bpe tokenizer.
        steps: number of training steps.
        context: number of tokens that the model attends to.
        batch_size: number of windows in a batch.
        eval_every: number of steps between evaluations.
        held_out: share of the text, at its end, for evaluation.
    """

    num_layers: int = _option(4, "Decoder blocks.", least=1, most=_DEEP)
    dropout: float = _option(0.0, "Dropout inside the blocks.", least=0, below=1)
    weight_decay: float = _option(0.1, "Weight decay of the matrices (not of embeddings).", least=0)
    warmup: float = _option(0.05, "Share of all steps with a rising learning rate.", least=0, below=1)
    final_lr: float = _option(0.1, "Last learning rate as a factor of the highest.", least=0)
    tokenizer: str = _option("chars", "chars or bpe (byte-level).", choices=("chars", "bpe"))
    vocab_size: int = _option(2000, "Vocabulary of the bpe tokenizer.", least=257, most=_MANY)
    steps: int = _option(2000, "Training steps.", least=1, most=_MANY)
    context: int = _option(64, "Tokens that the model attends to.", least=1, most=_LONG)
    batch_size: int = _option(12, "Windows in a batch.", least=1, most=_LONG)
    eval_every: int = _option(250, "Steps between evaluations.", least=1, most=_MANY)
    held_out: float = _option(0.1, "Share of the text, at its end, held out for evaluation.", above=0, below=1)
