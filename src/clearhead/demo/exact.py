"""The model's attention against the formula in float64, written with NumPy alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead.demo.inside import Layer

__all__ = ["Agreement", "Exact", "compare", "exact"]

_Array = NDArray[np.float64]

# A backend may sum in another order than the textbook formula, so its error can be a few times larger.
_TIMES_TEXTBOOK = 4.0


@dataclass(frozen=True)
class Exact:
    """Every step of ``softmax(scale q k^T) v`` in float64, all ``[batch, heads, tokens, ...]``."""

    scores: _Array
    scaled: _Array
    lse: _Array
    weights: _Array
    output: _Array


def exact(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Exact:
    """Attention on float64 copies, without code of the library."""
    q, k, v = (np.asarray(part.detach().cpu(), dtype=np.float64) for part in (query, key, value))
    scores = np.einsum("bhid,bhjd->bhij", q, k)
    scaled = scores * scale
    largest = scaled.max(axis=-1, keepdims=True)
    grown = np.exp(scaled - largest)
    total = grown.sum(axis=-1, keepdims=True)
    weights = grown / total
    return Exact(
        scores=scores,
        scaled=scaled,
        lse=(largest + np.log(total))[..., 0],
        weights=weights,
        output=np.einsum("bhij,bhjd->bhid", weights, v),
    )


@dataclass(frozen=True)
class Agreement:
    """Errors of every layer and head against float64, and those of the textbook formula in float32.

    ``worst`` has a row for each layer and a number for each head: the largest error of its output over the sequences.
    ``textbook`` has the same for ``softmax(scale q k^T) v`` in torch.
    """

    sequences: int
    worst: tuple[tuple[float, ...], ...]
    textbook: tuple[tuple[float, ...], ...]

    @property
    def largest(self) -> float:
        """The largest error."""
        return max(map(max, self.worst))

    @property
    def largest_textbook(self) -> float:
        """The largest error of the textbook formula."""
        return max(map(max, self.textbook))

    @property
    def place(self) -> tuple[int, int]:
        """Layer and head of the largest error."""
        return max(
            ((layer, head) for layer, row in enumerate(self.worst) for head in range(len(row))),
            key=lambda at: self.worst[at[0]][at[1]],
        )

    @property
    def holds(self) -> bool:
        """Whether the attention is as exact as float32 allows; False for NaN."""
        return self.largest <= _TIMES_TEXTBOOK * self.largest_textbook + float(np.finfo(np.float32).eps)

    def to_dict(self) -> dict[str, Any]:
        """The agreement as JSON values."""
        return {
            "sequences": self.sequences,
            "worst_difference": self.largest,
            "layer": self.place[0],
            "head": self.place[1],
            "textbook_float32_worst_difference": self.largest_textbook,
            "holds": self.holds,
            "by_layer_and_head": [list(row) for row in self.worst],
        }


def compare(layers: list[Layer]) -> Agreement:
    """Compare the attention of each module, on its queries, keys and values, with ``exact``."""
    ours, textbook = [], []
    for layer in layers:
        expected = exact(layer.query, layer.key, layer.value, layer.scale).output
        scores = layer.query @ layer.key.transpose(-2, -1) * layer.scale
        plain = torch.softmax(scores, dim=-1) @ layer.value
        ours.append(_by_head(layer.heads, expected))
        textbook.append(_by_head(plain, expected))
    return Agreement(len(layers[0].query), tuple(ours), tuple(textbook))


def _by_head(output: Tensor, expected: _Array) -> tuple[float, ...]:
    difference = np.abs(np.asarray(output.detach().cpu(), dtype=np.float64) - expected)
    return tuple(float(worst) for worst in difference.max(axis=(0, 2, 3)))
