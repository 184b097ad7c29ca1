"""The 1,797 handwritten digits of scikit-learn, each as a sequence of 64 intensity tokens.

Data: Alpaydin and Kaynak 1998, "Optical recognition of handwritten digits", UCI machine learning repository; the
copy in scikit-learn is its test part, 8 x 8 pixels of 17 intensities.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from clearhead.shapes import Int

__all__ = ["CLASSES", "INTENSITIES", "SIDE", "TOKENS", "Digits", "jittered", "load", "shifted", "token_name"]

SIDE = 8
TOKENS = SIDE * SIDE
INTENSITIES = 17
CLASSES = 10

_HELD_OUT = 0.2
_SPLIT_SEED = 0


@dataclass(frozen=True)
class Digits:
    """Some digits: ``ids [count, 64]`` from 0 to 16, ``labels [count]``, and their numbers in scikit-learn's order."""

    ids: Int[Tensor, "count tokens"]
    labels: Int[Tensor, " count"]
    numbers: Int[Tensor, " count"]

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, places: Tensor) -> Digits:
        """The digits at these indices, or under this boolean mask."""
        return Digits(self.ids[places], self.labels[places], self.numbers[places])


def load() -> tuple[Digits, Digits]:
    """The training digits and the held-out fifth.

    The split is fixed: a fifth of each class, drawn with one seed. It does not depend on the training seed, so the
    accuracies of all runs are comparable.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    labels = np.asarray(bunch.target, dtype=np.int64)
    random = np.random.Generator(np.random.PCG64(_SPLIT_SEED))
    held_out = np.zeros(len(labels), dtype=bool)
    for label in range(CLASSES):
        places = np.flatnonzero(labels == label)
        # Sorting random numbers, not Generator.permutation: only the raw stream is guaranteed to be stable.
        order = np.argsort(random.random(len(places)), kind="stable")
        held_out[places[order[: round(_HELD_OUT * len(places))]]] = True
    every = Digits(
        torch.from_numpy(np.asarray(bunch.images, dtype=np.int64).reshape(-1, TOKENS)),
        torch.from_numpy(labels),
        torch.arange(len(labels)),
    )
    return every.select(torch.from_numpy(~held_out)), every.select(torch.from_numpy(held_out))


def shifted(ids: Int[Tensor, "count tokens"], part: float) -> Int[Tensor, "count tokens"]:
    """Shift a fraction ``part`` of the digits by up to one pixel in each direction; new pixels are empty."""
    count = len(ids)
    padded = torch.nn.functional.pad(ids.view(count, SIDE, SIDE), (1, 1, 1, 1))
    start = torch.randint(0, 3, (count, 2))
    start[torch.rand(count) >= part] = 1
    rows = (torch.arange(SIDE) + start[:, :1])[:, :, None]
    columns = (torch.arange(SIDE) + start[:, 1:])[:, None, :]
    return padded[torch.arange(count)[:, None, None], rows, columns].view(count, TOKENS)


def jittered(ids: Int[Tensor, "count tokens"], part: float, most: int) -> Int[Tensor, "count tokens"]:
    """Change a fraction ``part`` of the non-empty pixels by up to ``most`` intensities.

    Token ids have no order; this augmentation teaches the model that intensity 9 is close to 10.
    """
    chosen = (torch.rand(ids.shape) < part) & (ids > 0)
    change = torch.randint(-most, most + 1, ids.shape)
    return torch.where(chosen, (ids + change).clamp(0, INTENSITIES - 1), ids)


def token_name(token: int) -> str:
    """Row and column of a token, counted from 0.

    >>> token_name(10)
    '(1, 2)'
    """
    return f"({token // SIDE}, {token % SIDE})"
