"""Batches as a pure function of seed and step, so that a resumed run has the same batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead.errors import DataError, ShapeError

__all__ = ["Batch", "Sequences", "bucketed", "padded", "split"]

_CHUNK = 20  # batches whose sequences are sorted by length together


@dataclass(frozen=True)
class Batch:
    """A batch of sequences and their targets.

    Attributes:
        ids: token ids ``[batch, len]``, int64, padded with 0.
        lengths: number of real tokens of each row, ``[batch]``.
        targets: what to predict: classes ``[batch]``, or next tokens ``[batch, len]``.
    """

    ids: Tensor
    lengths: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        return Batch(self.ids.to(device), self.lengths.to(device), self.targets.to(device))


@dataclass(frozen=True)
class Sequences:
    """Encoded examples, each with one row of ids and one class.

    Attributes:
        ids: the token ids of each example, in rows of any length above 0.
        targets: the class of each example.

    Raises:
        ShapeError: the numbers of rows and targets differ.
        DataError: a row is empty.

    >>> len(Sequences([[1, 2], [3]], [0, 1]))
    2
    """

    ids: Sequence[Sequence[int]]
    targets: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.targets):
            must, got = f"match the {len(self.ids)} rows of ids", f"{len(self.targets)} targets"
            raise ShapeError.about("Sequences", "targets", must=must, got=got, then="Give one target per row.")
        empty = next((place for place, row in enumerate(self.ids) if not len(row)), None)
        if empty is not None:
            then = "Leave out rows without a token."
            raise DataError.about("Sequences", "ids", must="have no empty row", got=f"row {empty}", then=then)

    def __len__(self) -> int:
        return len(self.targets)

    def taken(self, places: Sequence[int]) -> Sequences:
        """The examples at the indices ``places``, in that order."""
        return Sequences([self.ids[place] for place in places], [self.targets[place] for place in places])

    def cut(self, max_len: int) -> Sequences:
        """The examples, each truncated to ``max_len`` tokens."""
        return Sequences([row[:max_len] for row in self.ids], self.targets)

    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each example, int64."""
        return np.array([len(row) for row in self.ids], dtype=np.int64)


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Rows of ids as one zero-padded tensor ``[batch, len]`` and their lengths ``[batch]``."""
    lengths = [len(row) for row in rows]
    ids = np.zeros((len(rows), max(lengths)), dtype=np.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
    return torch.from_numpy(ids), torch.tensor(lengths)


def batch_of(examples: Sequences, places: Sequence[int] | NDArray[np.int64]) -> Batch:
    """The examples at ``places`` as one padded batch."""
    chosen = examples.taken([int(place) for place in places])
    ids, lengths = padded(chosen.ids)
    return Batch(ids, lengths, torch.tensor(list(chosen.targets)))


def packed_by_size(
    order: NDArray[np.int64], lengths: NDArray[np.int64], *, batch_size: int, batch_tokens: int
) -> list[NDArray[np.int64]]:
    """Cut ``order`` into batches of at most ``batch_size`` rows and ``batch_tokens`` padded tokens."""
    cuts = [0]
    longest = 0
    for place, row in enumerate(order):
        longest = max(longest, int(lengths[row]))
        rows = place + 1 - cuts[-1]
        if rows > 1 and (rows > batch_size or rows * longest > batch_tokens):
            cuts.append(place)
            longest = int(lengths[row])
    cuts.append(len(order))
    return [order[start:stop] for start, stop in pairwise(cuts)]


def bucketed(
    lengths: NDArray[np.int64], *, batch_size: int, batch_tokens: int, seed: int, epoch: int
) -> list[NDArray[np.int64]]:
    """The batches of one epoch, as indices: rows of similar length together, batches in shuffled order.

    The same arguments give the same batches.

    Cost: one sort of the data.

    >>> [batch.tolist() for batch in bucketed(np.array([1, 5, 1, 5]), batch_size=2, batch_tokens=99, seed=0, epoch=0)]
    [[1, 3], [2, 0]]
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    batches: list[NDArray[np.int64]] = []
    for start in range(0, len(order), batch_size * _CHUNK):
        chunk = order[start : start + batch_size * _CHUNK]
        chunk = chunk[np.argsort(lengths[chunk], kind="stable")]
        batches += packed_by_size(chunk, lengths, batch_size=batch_size, batch_tokens=batch_tokens)
    return [batches[place] for place in random.permutation(len(batches))]


def split(targets: Sequence[int], part: float, *, seed: int) -> tuple[list[int], list[int]]:
    """Split examples into training and held-out ones, stratified by class.

    Args:
        targets: the class of each example.
        part: the share of each class to hold out; at least one example of a class that has two.
        seed: seed of the random choice.

    Returns:
        The sorted indices to train on, and the sorted indices to hold out.

    Raises:
        DataError: no class has two examples.
    """
    random = np.random.default_rng(seed)
    training: list[int] = []
    held_out: list[int] = []
    values = np.asarray(targets)
    for target in np.unique(values):
        places = random.permutation(np.flatnonzero(values == target))
        count = min(max(1, round(part * len(places))), len(places) - 1)
        held_out += places[:count].tolist()
        training += places[count:].tolist()
    if not held_out:
        must, then = "have two examples of some class", "Add examples."
        raise DataError.about("split", "data", must=must, got="one of each", then=then)
    return sorted(training), sorted(held_out)
