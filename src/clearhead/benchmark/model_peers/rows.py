"""The rows of the suite ``peers``, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import torch

from clearhead.benchmark.cases import Comparison
from clearhead.benchmark.model_peers.contenders import peers_of
from clearhead.benchmark.model_peers.peer import Peer, reason_of
from clearhead.benchmark.model_peers.work import MODELS, ModelWork
from clearhead.benchmark.peers import OURS, Call

__all__ = ["HALF_FILLED", "ModelRow", "comparison_of", "peer_rows"]

HALF_FILLED: Final = "half filled"
#: Shortest sample of a contender in a round.
_BLOCK_SECONDS: Final = 0.1
_SMALL_SIZE: Final = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 96,
}


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """A model's forward pass, one decoded token, or a training step, in clearhead and all peers.

    Args:
        kind: a kind of ``ModelWork``.
        model: a name in ``MODELS``.
        batch: number of sequences.
        length: tokens of each sequence, of the longest, or of the prompt.
        number_format: ``"float32"``, ``"bfloat16"``, or ``"int8"`` for quantised models.
        half_filled: whether the lengths are spread from 1 to ``length``.
        dropout: probability of the dropout in training.
        tiny: whether the model has two small layers, for tests.
        against: parts of the names of the peers that take part; without any, all do.
    """

    kind: str
    model: str
    batch: int
    length: int
    number_format: str
    half_filled: bool = False
    dropout: float = 0.0
    tiny: bool = False
    memory: bool = False
    against: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Description of the work."""
        what = {
            "encoder": f"{self.batch}x{self.length}{f' {HALF_FILLED}' * self.half_filled}",
            "prefill": f"prefill {self.length}",
            "token": f"a token at {self.length}, batch {self.batch}",
            "training": f"training {self.batch}x{self.length}, dropout {self.dropout:g}",
        }[self.kind]
        return f"{self.model} {what}, {self.number_format}"

    @property
    def group(self) -> str:
        """The number format."""
        return self.number_format

    @property
    def dtype(self) -> torch.dtype:
        """float32, or bfloat16, in which quantised models compute what is not quantised."""
        return torch.float32 if self.number_format == "float32" else torch.bfloat16

    @property
    def operations(self) -> None:
        """None: the operations are not counted."""

    @property
    def memory_read(self) -> None:
        """None: it is not counted."""

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The contenders, clearhead first."""
        wanted = (OURS, *self.against) if self.against else ("",)
        return tuple(peer for peer in peers_of(self.number_format) if any(part in peer.name for part in wanted))

    @property
    def work(self) -> ModelWork:
        """The model and its inputs, made anew: a list of rows keeps no model alive."""
        size = dict(MODELS[self.model])
        if self.tiny:
            size |= _SMALL_SIZE | ({"num_key_value_heads": 2} if "num_key_value_heads" in size else {})
        return ModelWork(
            kind=self.kind,
            size=size,
            batch=self.batch,
            length=self.length,
            half_filled=self.half_filled,
            dropout=self.dropout,
        )

    def comparison(self) -> Comparison:
        """The contenders that are installed and can run the row; the others with the reason."""
        return comparison_of(self, self.peers)

    def small(self) -> Self:
        """Two small layers, a few tokens."""
        return replace(self, batch=min(self.batch, 4), length=8 if self.kind != "token" else 12, tiny=True)


def comparison_of(row: ModelRow, peers: Sequence[Peer]) -> Comparison:
    """The comparison of some peers; the first is clearhead, whose failure is an error."""
    # Compiled calls of other rows count toward a limit, beyond which torch.compile gives up.
    torch.compiler.reset()
    work, training = row.work, row.kind == "training"
    without_dropout = replace(work, dropout=0.0)
    left_out = _load(peers)
    calls: dict[str, Call] = {}
    checked: dict[str, Call] = {}
    for peer in peers:
        if peer.name in left_out:
            continue
        try:
            call = peer.call(work)
            checked[peer.name] = peer.call(without_dropout) if training else call
            calls[peer.name] = call
        except Exception as error:
            if peer.name == OURS:
                raise
            left_out[peer.name] = reason_of(error)
    return Comparison(
        title=row.title,
        calls=calls,
        checked=checked,
        noisy=tuple(calls) if training else (),
        left_out=left_out,
        exact=work.exact,
        plain=lambda: work.eager(row.dtype),
        pick=work.pick,
        budgets={peer.name: peer.budget for peer in peers if peer.name in calls and peer.name != OURS},
        # All begin alike, with an untimed call: each has weights of its own.
        isolated=tuple(calls),
        block_seconds=0.0 if row.tiny else _BLOCK_SECONDS,
        backend=lambda: "model",
    )


def _load(peers: Sequence[Peer]) -> dict[str, str]:
    """Import the peers' libraries in the order that they need; returns the reason for each that fails."""
    reasons = {}
    for peer in sorted(peers, key=lambda peer: peer.loaded_last):
        try:
            peer.load()
        except Exception as error:
            reasons[peer.name] = reason_of(error)
    return reasons


#: Kind, model, batch, length, half filled, dropout, formats.
_ALL: Final = ("float32", "bfloat16", "int8")
_FLOATS: Final = _ALL[:2]
_TABLE: Final[tuple[tuple[str, str, int, int, bool, float, tuple[str, ...]], ...]] = (
    ("encoder", "BERT base", 1, 128, False, 0.0, _ALL),
    ("encoder", "BERT base", 8, 128, False, 0.0, _ALL),
    ("encoder", "BERT base", 32, 128, False, 0.0, _ALL),
    ("encoder", "BERT base", 32, 128, True, 0.0, _ALL),
    ("encoder", "MiniLM 6x384", 32, 128, False, 0.0, _ALL),
    ("prefill", "Llama 8x1024", 1, 512, False, 0.0, _ALL),
    ("token", "Llama 8x1024", 1, 512, False, 0.0, _ALL),
    ("token", "Llama 8x1024", 8, 512, False, 0.0, _ALL),
    ("training", "BERT 4x768", 8, 128, False, 0.1, _FLOATS),
)


def peer_rows() -> list[ModelRow]:
    """All rows, ordered by format."""
    return [
        ModelRow(
            kind=kind,
            model=model,
            batch=batch,
            length=length,
            half_filled=half_filled,
            dropout=dropout,
            number_format=number_format,
        )
        for number_format in _ALL
        for kind, model, batch, length, half_filled, dropout, formats in _TABLE
        if number_format in formats
    ]
