"""The heads on which a variant is tried: small, seeded, each with one visible pattern."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from clearhead.shapes import Float

__all__ = ["DIM", "HEADS", "Head", "heads", "words"]

DIM: Final = 16
_SEED: Final = 7
_TEXT: Final = (
    "the cat saw the dog and the dog saw the cat so the cat ran up the tree and the dog sat by the tree until "
    "the bird in the tree saw the cat and the dog and sang to the cat and the dog"
)
_SENTENCE: Final = _TEXT.split()


@dataclass(frozen=True)
class Head:
    """One head: its name, its pattern, and its queries and keys ``[tokens, DIM]``."""

    name: str
    says: str
    make: Callable[[int], tuple[Tensor, Tensor]]


def words(tokens: int) -> list[str]:
    """The words of the heads' text."""
    return [_SENTENCE[place % len(_SENTENCE)] for place in range(tokens)]


def heads(tokens: int) -> tuple[Float[Tensor, "1 heads tokens dim"], ...]:
    """Queries, keys and values of all heads, in float64."""
    pairs = [head.make(tokens) for head in HEADS]
    query, key = (torch.stack([pair[place] for pair in pairs])[None] for place in (0, 1))
    value = torch.randn(1, len(HEADS), tokens, DIM, generator=_generator(), dtype=torch.float64)
    return query, key, value


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(_SEED)


def _waves(places: Tensor, strength: float) -> Tensor:
    """Features of positions, whose dot products are a Gaussian of the distance.

    Frequencies are quantiles of a normal distribution, whose transform is a Gaussian (Rahimi and Recht 2007, sec. 3).
    """
    shares = (torch.arange(DIM // 2, dtype=torch.float64) + 0.5) / (DIM // 2)
    angle = places[:, None] * (0.9 * torch.erfinv(shares))
    return torch.cat([angle.cos(), angle.sin()], dim=1) * math.sqrt(strength)


def _near(tokens: int) -> tuple[Tensor, Tensor]:
    places = torch.arange(tokens, dtype=torch.float64)
    return _waves(places, 2.5), _waves(places, 2.5)


def _before(tokens: int) -> tuple[Tensor, Tensor]:
    places = torch.arange(tokens, dtype=torch.float64)
    return _waves(places - 1, 5.0), _waves(places, 5.0)


def _same_word(tokens: int) -> tuple[Tensor, Tensor]:
    vocabulary = sorted(set(_SENTENCE))
    table = 1.2 * torch.randn(len(vocabulary), DIM, generator=_generator(), dtype=torch.float64)
    rows = table[[vocabulary.index(word) for word in words(tokens)]]
    return rows, rows


def _uniform(tokens: int) -> tuple[Tensor, Tensor]:
    _, key = _same_word(tokens)
    return torch.zeros_like(key), key


def _first(tokens: int) -> tuple[Tensor, Tensor]:
    query, key = (0.5 * part for part in _same_word(tokens))
    query[:, 0], key[:, 0] = 4.0, 0.0
    key[0, 0] = 3.0
    return query, key


HEADS: Final = (
    Head("near tokens", "attends to its own position and those around it", _near),
    Head("token before", "attends to the previous position", _before),
    Head("same word", "attends to occurrences of its own word", _same_word),
    Head("first token", "puts much of its weight on the first token, the rest on its own word", _first),
    Head("uniform", "has zero queries, so every key has the same score", _uniform),
)
