"""Calls of flash-attention's functions: their shared options, checked, and what runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clearhead.arguments import dense, flag, repr_of
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.functional.varlen import PackedCall, VarlenLayout, band, check_heads, compute, window_of
from clearhead.masks.sequences import Ragged
from clearhead.scores import Alibi, ScoreFunction, ScoreRule, SoftCap

__all__ = ["FlashOptions", "Returned", "batched", "check_batch", "packed", "unpacked"]

#: The output; and with ``return_attn_probs`` the log-sum-exp and None in place of the weights.
Returned = Tensor | tuple[Tensor, Tensor, None]


@dataclass(frozen=True, eq=False)
class FlashOptions:
    """The options that flash-attention's functions share, as a caller passes them."""

    softmax_scale: float | None
    dropout_p: float
    causal: object
    window_size: object
    softcap: object
    alibi_slopes: object
    deterministic: object
    return_attn_probs: object

    def wants_lse(self, function: str) -> bool:
        """Whether the log-sum-exp is returned; raises for dropout, whose weights flash-attention returns."""
        flag(function, "deterministic", self.deterministic)
        wanted = flag(function, "return_attn_probs", self.return_attn_probs)
        if wanted and self.dropout_p > 0.0:
            raise UnsupportedError.about(
                function,
                "return_attn_probs",
                must="be False with dropout",
                got=f"dropout_p {self.dropout_p}",
                then="The dropped weights are never stored; pass dropout_p=0.0 for the log-sum-exp.",
            )
        return wanted

    def window(self, function: str) -> tuple[int | None, int | None]:
        """How many keys before and after its own a query attends to; None for all."""
        before, after = window_of(function, self.window_size)
        return before, 0 if flag(function, "causal", self.causal) else after

    def rules(self, function: str, heads: int, bias: Callable[[Tensor], ScoreRule]) -> list[ScoreRule]:
        """The cap of scaled scores, and then ALiBi's bias."""
        if not isinstance(self.softcap, (int, float)) or not self.softcap >= 0.0:
            raise ShapeError.about(
                function,
                "softcap",
                must="be a number of at least 0",
                got=repr_of(self.softcap),
                then="0.0 is no cap.",
            )
        rules: list[ScoreRule] = [SoftCap(self.softcap)] if self.softcap else []
        slopes = self.alibi_slopes
        if slopes is None:
            return rules
        if not isinstance(slopes, Tensor) or slopes.ndim not in (1, 2) or slopes.shape[-1] != heads:
            raise ShapeError.about(
                function,
                "alibi_slopes",
                must=f"be a tensor of shape [{heads}] or [batch, {heads}]",
                got=repr_of(slopes),
                then="Pass one slope for each query head.",
            )
        return [*rules, bias(slopes)]

    def arguments(self) -> dict[str, Any]:
        """Those that are arguments of ``attention`` as they are."""
        return {"scale": self.softmax_scale, "dropout": self.dropout_p}


def batched(function: str, q: Tensor, k: Tensor, v: Tensor, options: FlashOptions) -> Returned:
    """Attention of ``[batch, len, heads, head_dim]`` on behalf of one of the functions."""
    check_batch(function, q, k, v)
    wants_lse = options.wants_lse(function)
    done = compute(
        function,
        *(part.transpose(1, 2) for part in (q, k, v)),
        want_lse=wants_lse,
        mask=band(*options.window(function)),
        scores=options.rules(function, q.shape[2], partial(_alibi, function, q.shape[0])),
        query_offset=k.shape[1] - q.shape[1],
        **options.arguments(),
    )
    output = done.output.transpose(1, 2)
    return output if not wants_lse or done.lse is None else (output, done.lse, None)


def packed(function: str, q: Tensor, k: Tensor, v: Tensor, layout: VarlenLayout, options: FlashOptions) -> Returned:
    """Attention of packed sequences ``[total, heads, head_dim]`` on behalf of one of the functions."""
    check_heads(function, q, k, v, pool=layout.block_table is not None, grouped=True)
    wants_lse = options.wants_lse(function)
    sequences = PackedCall.of(function, q, k, v, layout)
    done = compute(
        function,
        *sequences.tensors,
        want_lse=wants_lse,
        mask=sequences.mask(*options.window(function)),
        scores=options.rules(function, q.shape[1], partial(_packed_alibi, function, sequences)),
        query_offset=0,
        **options.arguments(),
    )
    output = done.output[0].transpose(0, 1)
    return output if not wants_lse or done.lse is None else (output, done.lse[0], None)


def _alibi(function: str, batch: int, slopes: Tensor) -> ScoreRule:
    if slopes.ndim == 1:
        return Alibi(slopes=slopes)
    _check_entries(function, slopes, batch)
    return ScoreFunction(
        lambda score, batch, head, q_pos, k_pos: score - slopes[batch, head].to(score.dtype) * (q_pos - k_pos).abs()
    )


def _packed_alibi(function: str, sequences: PackedCall, slopes: Tensor) -> ScoreRule:
    """ALiBi by the distances within each sequence."""
    if slopes.ndim == 1 and sequences.is_square:
        return Alibi(slopes=slopes)
    if slopes.ndim == 2:
        _check_entries(function, slopes, sequences.cu_seq_q.shape[0] - 1)
    ragged = Ragged(sequences.cu_seq_q, sequences.cu_seq_k, sequences.used_k)
    place = torch.arange(sequences.tensors[0].shape[2], device=slopes.device)
    beside, sequence = place + ragged.shift(place), ragged.sequence(place)

    def biased(score: Tensor, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        slope = slopes[head] if slopes.ndim == 1 else slopes[sequence[q_pos], head]
        return score - slope.to(score.dtype) * (beside[q_pos] - k_pos).abs()

    return ScoreFunction(biased)


def _check_entries(function: str, slopes: Tensor, batch: int) -> None:
    if slopes.shape[0] != batch:
        raise ShapeError.about(
            function,
            "alibi_slopes",
            must=f"have a row for each of {batch} sequences",
            got=f"shape {tuple(slopes.shape)}",
            then="Pass [heads] for slopes that all share.",
        )


def unpacked(function: str, argument: str, packed: Tensor, axes: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The parts of a tensor whose third axis from the end holds 2 or 3 of them."""
    if isinstance(packed, Tensor):
        dense(function, argument, packed)
    if not isinstance(packed, Tensor) or packed.ndim != len(axes) or packed.shape[-3] != int(axes[-3]):
        got = f"shape {tuple(packed.shape)}" if isinstance(packed, Tensor) else type(packed).__name__
        must = f"have axes [{', '.join(axes)}]"
        raise ShapeError.about(function, argument, must=must, got=got, then="torch.stack makes it of its parts.")
    return packed.unbind(-3)


def check_batch(function: str, q: Tensor, k: Tensor, v: Tensor, *, pool: bool = False) -> None:
    """Raise unless the three are dense and have four axes; further checks are those of every call."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if isinstance(tensor, Tensor):
            dense(function, name, tensor)
        if not isinstance(tensor, Tensor) or tensor.ndim != 4:
            got = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ShapeError.about(
                function, name, must="have axes [batch, len, heads, head_dim]", got=got, then="Add a batch axis."
            )
        if not pool and tensor.shape[0] != q.shape[0]:
            raise ShapeError.about(
                function,
                name,
                must=f"have q's batch size {q.shape[0]}",
                got=f"shape {tuple(tensor.shape)}",
                then="Expand it to the batch.",
            )
