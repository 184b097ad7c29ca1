"""The kinds of work in the suites; each row has a size and builds its comparison."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, Self

import torch
from torch import Tensor

from clearhead.benchmark.cases import Comparison, PlainRow
from clearhead.benchmark.encoders import EncoderWork, ragged
from clearhead.benchmark.onnx_runtime import ONNX_OPERATORS, onnx_calls
from clearhead.benchmark.peers import MODULE, OURS, SDPA, Call, Groups, ModuleWork, TensorWork
from clearhead.benchmark.product import PRODUCT, yardsticks

__all__ = ["EncoderRow", "ModuleRow", "SuiteRow", "TensorRow"]


class SuiteRow(Protocol):
    """One line of a suite."""

    @property
    def title(self) -> str:
        """Description of the work, unique within a suite."""

    @property
    def group(self) -> str:
        """Name of the rows that a floor covers together."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensors."""

    @property
    def operations(self) -> float | None:
        """Multiplications and additions, without masked scores; None where they are not counted."""

    @property
    def memory_read(self) -> float | None:
        """Bytes of keys and values, or of a weight, where memory traffic bounds the work."""

    @property
    def memory(self) -> bool:
        """Whether the contenders' peak memory is measured too."""

    def comparison(self) -> Comparison:
        """The contenders."""

    def small(self) -> SuiteRow:
        """The same kind of work at a tiny size, for tests."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _group(dtype: torch.dtype, dropout: float) -> str:
    return _name(dtype) + (f", dropout {dropout:g}" if dropout else "")


@dataclass(frozen=True, kw_only=True)
class TensorRow(PlainRow):
    """Attention on tensors.

    Args:
        shape: ``(batch, heads, q_len, head_dim)``.
        dtype: of the tensors.
        causal: whether the mask is causal.
        training: whether the backward pass is included.
        kv_heads: number of key heads; by default that of the queries.
        k_len: number of keys; by default that of the queries.
        window: number of keys before its own position that a query attends to, by default all.
        dropout: probability of dropping a weight.
        peers: the other contenders; ONNX Runtime's operators support only float32 and forward.
        yardstick: whether the machine's matrix product is timed in the same rounds.
        most_checked: largest number of scores in the heads whose numbers are compared, by default no limit.
    """

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    causal: bool = False
    training: bool = False
    kv_heads: int | None = None
    k_len: int | None = None
    window: int | None = None
    dropout: float = 0.0
    peers: tuple[str, ...] = (SDPA,)
    yardstick: bool = False
    most_checked: float = math.inf

    @property
    def title(self) -> str:
        """Description of the work."""
        batch, heads, q_len, head_dim = self.shape
        all_heads = f"{heads}" if self.kv_heads is None else f"{heads}/{self.kv_heads}"
        lengths = f"{q_len}" if self.k_len is None else f"{q_len}:{self.k_len}"
        kind = "causal" if self.causal else "full"
        if self.window is not None:
            kind = f"causal & Window({self.window})"
        mode = "forward+backward" if self.training else "forward"
        dropout = f" dropout {self.dropout:g}" if self.dropout else ""
        return f"{batch}x{all_heads}x{lengths}x{head_dim} {kind} {mode} {_name(self.dtype)}{dropout}"

    @property
    def operations(self) -> float:
        """Two products forward and five backward (Dao 2023, FlashAttention-2, section 4.1) of the allowed pairs."""
        batch, heads, q_len, head_dim = self.shape
        pairs = float(q_len * (self.k_len or q_len))
        if self.causal:
            window_len = q_len if self.window is None else min(self.window + 1, q_len)
            pairs = window_len * (window_len + 1) / 2 + (q_len - window_len) * window_len
        return (3.5 if self.training else 1.0) * 4.0 * batch * heads * pairs * head_dim

    @property
    def memory_read(self) -> float | None:
        """Bytes of keys and values, where one query attends to many keys."""
        batch, heads, q_len, head_dim = self.shape
        if self.k_len is None or q_len > 1:
            return None
        return 2.0 * batch * (self.kv_heads or heads) * self.k_len * head_dim * self.dtype.itemsize

    def comparison(self) -> Comparison:
        """The contenders."""
        work = TensorWork(
            self.shape,
            self.dtype,
            causal=self.causal,
            training=self.training,
            kv_heads=self.kv_heads,
            k_len=self.k_len,
            window=self.window,
        )
        names = [OURS, *(name for name in self.peers if name not in ONNX_OPERATORS)]
        calls = {name: work.call(name, dropout=self.dropout) for name in names}
        foreign, left_out = self._onnx(work)
        measure, unmeasured = yardsticks(self.dtype) if self.yardstick else ({}, {})
        # Torch's causal attention has no window: it computes different numbers and is timed, not compared.
        same = [name for name in names if self.window is None or name != SDPA]
        pairs = work.pairs(self.most_checked)
        return Comparison(
            title=self.title,
            calls={**calls, **foreign},
            left_out={**left_out, **unmeasured},
            exact=lambda: work.by_rows(torch.float64, pairs),
            plain=lambda: work.by_rows(self.dtype, pairs),
            checked={**{name: work.call(name) for name in same}, **foreign},
            noisy=names if self.dropout else (),
            pick=_picker(work, pairs),
            yardsticks=measure,
            isolated=(PRODUCT, *foreign),
            backend=lambda: work.backend,
        )

    def _onnx(self, work: TensorWork) -> tuple[dict[str, Call], dict[str, str]]:
        asked = any(name in ONNX_OPERATORS for name in self.peers)
        return onnx_calls(work.inputs, causal=self.causal) if asked else ({}, {})

    def small(self) -> Self:
        """At most 40 tokens."""
        batch, heads, q_len, head_dim = self.shape
        return replace(
            self,
            shape=(min(batch, 2), heads if self.kv_heads else min(heads, 3), min(q_len, 40), min(head_dim, 16)),
            k_len=None if self.k_len is None else min(self.k_len, 48),
            window=None if self.window is None else min(self.window, 7),
        )


def _picker(work: TensorWork, pairs: list[tuple[int, int]]) -> Callable[[Groups], Groups]:
    """A function that selects the heads that were computed in float64."""
    if len(pairs) == len(work.pairs()):
        return lambda groups: groups
    assert work.inputs[0].shape[1] == work.inputs[1].shape[1]
    batches, heads = zip(*pairs, strict=True)

    def picked(tensor: Tensor) -> Tensor:
        return tensor[list(batches), list(heads)]

    return lambda groups: tuple(tuple(picked(tensor) for tensor in group) for group in groups)


@dataclass(frozen=True, kw_only=True)
class ModuleRow(PlainRow):
    """``MultiHeadAttention`` with its projections against torch's.

    Args:
        size: ``(batch, len, embed_dim, heads)``.
        dtype: of weights and inputs.
        training: whether the backward pass is included.
        dropout: probability of dropping a weight, while training.
        yardstick: whether the machine's matrix product is timed in the same rounds.
    """

    size: tuple[int, int, int, int]
    dtype: torch.dtype
    training: bool = False
    dropout: float = 0.0
    yardstick: bool = False

    @property
    def title(self) -> str:
        """Description of the work."""
        dropout = f" dropout {self.dropout:g}" if self.dropout else ""
        mode = "training step" if self.training else "forward"
        return f"{'x'.join(map(str, self.size))} {mode} {_name(self.dtype)}{dropout}"

    @property
    def group(self) -> str:
        """The dtype and the dropout."""
        return _group(self.dtype, self.dropout)

    @property
    def operations(self) -> float:
        """Attention's two products and the four projections; in training 3.5 times and 3 times that."""
        batch, length, width, _ = self.size
        attention, projections = 4.0 * batch * length**2 * width, 8.0 * batch * length * width**2
        return 3.5 * attention + 3.0 * projections if self.training else attention + projections

    def comparison(self) -> Comparison:
        """The contenders."""
        batch, length, width, heads = self.size
        work = ModuleWork((batch, heads, length, width // heads), self.dtype, causal=False, training=self.training)
        shape = (batch, heads, length, width // heads)
        probe = TensorWork(shape, self.dtype, causal=False, training=self.training)
        measure, left_out = yardsticks(self.dtype) if self.yardstick else ({}, {})
        return Comparison(
            title=self.title,
            calls={OURS: work.our_call(dropout=self.dropout), MODULE: work.their_call(dropout=self.dropout)},
            exact=work.exact,
            plain=work.textbook_call(),
            left_out=left_out,
            checked={OURS: work.our_call(), MODULE: work.their_call()},
            noisy=(OURS, MODULE) if self.dropout else (),
            yardsticks=measure,
            isolated=(PRODUCT,),
            backend=lambda: probe.backend,
        )

    def small(self) -> Self:
        """At most 24 tokens."""
        batch, length, _, heads = self.size
        return replace(self, size=(min(batch, 2), min(length, 24), 8 * heads, heads))


@dataclass(frozen=True, kw_only=True)
class EncoderRow(PlainRow):
    """A training step of an encoder on a half-padded batch.

    Args:
        batch: number of sequences.
        longest: length of the longest.
        embed_dim: width of a token.
        num_heads: number of heads.
        num_layers: number of layers.
        feedforward_dim: hidden width of the feedforward.
        dtype: of weights and inputs.
        dropout: probability of dropping a weight or a channel.
        activation: of the feedforward, ``"relu"`` or ``"gelu"``.
        yardstick: whether the machine's matrix product is timed in the same rounds.
    """

    batch: int
    longest: int
    embed_dim: int
    num_heads: int
    num_layers: int
    feedforward_dim: int
    dtype: torch.dtype
    dropout: float = 0.0
    activation: str = "relu"
    yardstick: bool = False

    @property
    def title(self) -> str:
        """Description of the work."""
        activation = "" if self.activation == "relu" else f" {self.activation}"
        dropout = f" dropout {self.dropout:g}" if self.dropout else ""
        return (
            f"{self.num_layers} layers {self.embed_dim}/{self.num_heads}/{self.feedforward_dim}, "
            f"{self.batch}x{self.longest} half filled, training step {_name(self.dtype)}{activation}{dropout}"
        )

    @property
    def operations(self) -> float:
        """Operations of the real tokens: 3.5 times attention's two products, three times six linear layers."""
        lengths = ragged(self.batch, self.longest)
        attention = 3.5 * 4.0 * self.embed_dim * sum(length**2 for length in lengths)
        per_token = 8.0 * self.embed_dim**2 + 4.0 * self.embed_dim * self.feedforward_dim
        return self.num_layers * (attention + 3.0 * per_token * sum(lengths))

    def comparison(self) -> Comparison:
        """The contenders; the error of torch's own encoder sets the tolerance of the others."""
        work = EncoderWork(
            ragged(self.batch, self.longest),
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
            num_layers=self.num_layers,
            feedforward_dim=self.feedforward_dim,
            dtype=self.dtype,
            activation=self.activation,
        )
        builders = work.contenders
        measure, left_out = yardsticks(self.dtype) if self.yardstick else ({}, {})
        return Comparison(
            title=self.title,
            calls={name: build(self.dropout) for name, build in builders.items()},
            exact=work.exact,
            plain=work.their_call(),
            left_out=left_out,
            checked={name: partial(_run_without_dropout, build) for name, build in builders.items()},
            noisy=tuple(builders) if self.dropout else (),
            yardsticks=measure,
            isolated=(PRODUCT,),
            backend=lambda: work.backend,
        )

    def small(self) -> Self:
        """At most 24 tokens of 32 channels."""
        return replace(
            self, batch=4, longest=24, embed_dim=32, num_heads=4, feedforward_dim=64, num_layers=min(2, self.num_layers)
        )


def _run_without_dropout(build: Callable[[float], Call]) -> Groups:
    """Build a contender without dropout, run it once, and free it."""
    return build(0.0)()
