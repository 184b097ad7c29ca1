"""Attention for one query, recomputed in NumPy and float64 from the formula.

``explain`` compares with this recomputation; it shares no arithmetic with the backends, the masks or the rules.
Only a user's mask, rule or function is called directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clearhead.masks import Blocks, Causal, Dense, Documents, Global, Mask, Padding, Prefix, Strided, Window
from clearhead.masks.base import Both, Either, Not
from clearhead.scores import Alibi, DenseBias, RelativeBias, ScoreRule, Sink, SoftCap

__all__ = [
    "Array", "ScoreRow", "allowed", "as_array", "project", "rotated", "ruled", "sink_logit", "softmax",
    "weighted_sum",
]  # fmt: skip

Array: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class ScoreRow:
    """A row of scores: sequence, query head, absolute position of the query, number of keys."""

    batch: int
    head: int
    query: int
    num_keys: int

    @property
    def keys(self) -> npt.NDArray[np.int64]:
        """Positions of the keys."""
        return np.arange(self.num_keys)


def as_array(tensor: Tensor) -> Array:
    """The elements of a tensor in float64."""
    array: Array = tensor.detach().to("cpu", torch.float64).numpy()
    return array


def project(x: Array, weight: Array, bias: Array | None) -> Array:
    """``x W^T + b`` for rows ``x``."""
    projected: Array = np.einsum("...i,oi->...o", x, weight)
    return projected if bias is None else projected + bias


def rotated(x: Array, positions: npt.NDArray[np.int64], base: float) -> Array:
    """Rows rotated by position, channels ``i`` and ``i + d / 2`` as one complex number (Su et al. 2021, 3.2)."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * np.power(base, -np.arange(half) / half)
    rotated_pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([rotated_pairs.real, rotated_pairs.imag], axis=-1)


def ruled(scores: Array, rule: ScoreRule, place: ScoreRow) -> Array:
    """The scores after one rule."""
    formula = _RULES.get(type(rule))
    return formula(rule, scores, place) if formula is not None else _as_given(rule, scores, place)


def allowed(mask: Mask | None, place: ScoreRow) -> Flags:
    """Which keys the query may attend to."""
    if mask is None:
        return np.ones(place.num_keys, dtype=np.bool_)
    formula = _MASKS.get(type(mask))
    flags = formula(mask, place) if formula is not None else _asked(mask, place)
    return np.broadcast_to(flags, (place.num_keys,)).copy()


def softmax(masked: Array, sink: float | None) -> Array:
    """``exp(s) / sum exp(s)``, with a sink's logit in the sum; all 0 if every key is masked."""
    terms = masked if sink is None else np.append(masked, sink)
    largest = terms.max(initial=-np.inf)
    if largest == -np.inf:
        return np.zeros_like(masked)
    weights: Array = np.exp(masked - largest) / math.fsum(np.exp(terms - largest))
    return weights


def weighted_sum(weights: Array, values: Array, may: Flags) -> Array:
    """``sum_j p_j v_j`` over the allowed keys; a masked value never counts, not even a NaN."""
    total: Array = np.einsum("j,jd->d", weights[may], values[may])
    return total


def _as_given(rule: ScoreRule, scores: Array, place: ScoreRow) -> Array:
    result = rule.apply(torch.as_tensor(scores).view(1, 1, 1, -1), *_indices(place))
    return as_array(result.reshape(-1))


def _asked(mask: Mask, place: ScoreRow) -> Flags:
    answer: Flags = mask.allows(*_indices(place)).cpu().numpy().reshape(-1)
    return answer


def _indices(place: ScoreRow) -> list[Tensor]:
    """Index tensors of the one row, as a rule or a mask is called with them."""
    single = (torch.full((1, 1, 1, 1), at) for at in (place.batch, place.head, place.query))
    return [*single, torch.arange(place.num_keys).view(1, 1, 1, -1)]


def _entry(table: Tensor, *index: int | npt.NDArray[np.int64]) -> Any:
    """An entry of a table whose axes of size 1 broadcast."""
    return (
        table.detach()
        .cpu()
        .numpy()[tuple(at if size > 1 else np.zeros_like(at) for at, size in zip(index, table.shape, strict=True))]
    )


def _documents(mask: Any, place: ScoreRow) -> Flags:
    ids = mask.ids.cpu().numpy()
    ids = ids[place.batch if ids.shape[0] > 1 else 0]
    same: Flags = (ids[: place.num_keys] == ids[place.query]) & (ids[place.query] >= 0)
    return same


_MASKS: dict[type[Mask], Callable[[Any, ScoreRow], Flags]] = {
    Causal: lambda mask, at: at.keys <= at.query,
    Window: lambda mask, at: (at.keys >= at.query - mask.before) & (at.keys <= at.query + mask.after),
    Prefix: lambda mask, at: at.keys < mask.length,
    Global: lambda mask, at: (at.keys < mask.num_tokens) | (at.query < mask.num_tokens),
    Strided: lambda mask, at: (at.query - at.keys) % mask.stride == 0,
    Padding: lambda mask, at: at.keys < _entry(mask.lengths, at.batch),
    Documents: _documents,
    Blocks: lambda mask, at: _entry(mask.table, at.batch, at.head, at.query // mask.size, at.keys // mask.size),
    Dense: lambda mask, at: _entry(mask.allowed, at.batch, at.head, at.query - mask.first, at.keys),
    Both: lambda mask, at: allowed(mask.left, at) & allowed(mask.right, at),
    Either: lambda mask, at: allowed(mask.left, at) | allowed(mask.right, at),
    Not: lambda mask, at: ~allowed(mask.part, at),
}


def _relative_bias(rule: Any, scores: Array, place: ScoreRow) -> Array:
    table = as_array(rule.table)
    reach = table.shape[1] // 2
    distance = np.clip(place.query - place.keys, -reach, reach)
    biased: Array = scores + table[place.head if table.shape[0] > 1 else 0, distance + reach]
    return biased


_RULES: dict[type[ScoreRule], Callable[[Any, Array, ScoreRow], Array]] = {
    Alibi: lambda rule, s, at: s - float(_entry(rule.slopes, at.head)) * np.abs(at.query - at.keys),
    RelativeBias: _relative_bias,
    SoftCap: lambda rule, s, at: rule.cap * np.tanh(s / rule.cap),
    DenseBias: lambda rule, s, at: s + _entry(rule.bias.double(), at.batch, at.head, at.query - rule.first, at.keys),
    Sink: lambda rule, s, at: s,
}


def sink_logit(rules: tuple[ScoreRule, ...], head: int) -> float | None:
    """The logit of the head's sink, or None without a sink."""
    for rule in rules:
        if isinstance(rule, Sink):
            return float(_entry(rule.logits.double(), head))
    return None
