"""Masks by name: the predicate of each in plain arithmetic, and the equivalent mask object of clearhead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.masks import (
    Blocks,
    Causal,
    Dense,
    Documents,
    Global,
    Mask,
    MaskFunction,
    Padding,
    Prefix,
    Strided,
    Window,
)
from clearhead.verify.case import Case

__all__ = ["KINDS", "MaskKind", "Spoken", "spoken"]

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_BLOCK = 4


@dataclass(frozen=True)
class MaskKind:
    """A mask by name.

    Attributes:
        plain: for a case, the predicate ``(batch, head, q_pos, k_pos) -> bool`` over tensors that broadcast.
        ours: for a case, the mask object of clearhead.
        square: whether the mask needs as many queries as keys.
    """

    plain: Callable[[Case], Predicate]
    ours: Callable[[Case], Mask]
    square: bool = False


@dataclass(frozen=True, eq=False)
class Spoken:
    """A mask in every form that a calling convention may need.

    Attributes:
        allowed: bool ``[batch | 1, heads | 1, q_len | 1, k_len]``, True where a query may attend.
        ours: the mask as an object of clearhead.
    """

    allowed: Tensor
    ours: Mask


def _lengths(case: Case) -> list[int]:
    """Real tokens of each sequence of a batch: all, two thirds, a third, all, ..."""
    return [case.k_len - (number % 3) * case.k_len // 3 for number in range(case.batch)]


def _none_or_lengths(case: Case) -> list[int]:
    return [0, *_lengths(case)[1:]]


def _documents(case: Case) -> list[int]:
    """The document of each token: documents of 1, 4, 3, 4, 3, ... tokens."""
    ids = [0]
    while len(ids) < case.k_len:
        number = ids[-1] + 1
        ids += [number] * (3 + number % 2)
    return ids[: case.k_len]


def _scattered(case: Case) -> list[int]:
    """Two interleaved documents with padding at every fifth token."""
    return [-1 if place % 5 == 3 else place % 2 for place in range(case.k_len)]


def _same_document(ids: list[int]) -> Predicate:
    numbers = torch.tensor(ids)
    return lambda b, h, i, j: (numbers[i] == numbers[j]) & (numbers[i] >= 0)


def _shorter(lengths: list[int]) -> Predicate:
    ends = torch.tensor(lengths)
    return lambda b, h, i, j: j < ends[b]


def _noise(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """An irregular mask in which every query may attend to the first key."""
    return ((7 * i + 13 * j + 4 * h + 3 * b + i * j) % 5 < 2) | (j == 0)


def _gaps(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Every third query may attend to nothing."""
    return (i % 3 != 1) & ((i + j + h) % 3 != 0)


def _not_every_third(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """A function of a module, so that it can be sent to other processes."""
    return (i + j + h) % 3 != 0


def _table(case: Case) -> Tensor:
    rows = -(-max(case.q_len + case.offset, 1) // _BLOCK)
    i, j = torch.arange(rows)[:, None], torch.arange(-(-case.k_len // _BLOCK))[None]
    return (3 * i + 5 * j + i * j) % 4 != 1


def _dense(predicate: Predicate) -> Callable[[Case], Mask]:
    return lambda case: Dense(_filled(predicate, case))


def _filled(predicate: Predicate, case: Case) -> Tensor:
    """The predicate for every pair of query and key of a case."""
    index = (
        torch.arange(case.batch).view(-1, 1, 1, 1),
        torch.arange(case.heads).view(1, -1, 1, 1),
        torch.arange(case.offset, case.offset + case.q_len).view(1, 1, -1, 1),
        torch.arange(case.k_len).view(1, 1, 1, -1),
    )
    allowed = predicate(*index)
    return allowed.expand(*allowed.shape[:2], case.q_len, case.k_len)


def _fixed(predicate: Predicate) -> Callable[[Case], Predicate]:
    return lambda case: predicate


KINDS: dict[str, MaskKind] = {
    "causal": MaskKind(_fixed(lambda b, h, i, j: j <= i), lambda case: Causal()),
    "window": MaskKind(_fixed(lambda b, h, i, j: (j >= i - 3) & (j <= i + 2)), lambda case: Window(3, 2)),
    "causal window": MaskKind(_fixed(lambda b, h, i, j: (j >= i - 2) & (j <= i)), lambda case: Causal() & Window(2, 5)),
    "prefix": MaskKind(_fixed(lambda b, h, i, j: (j < 2) | (j <= i)), lambda case: Prefix(2) | Causal()),
    "padding": MaskKind(lambda case: _shorter(_lengths(case)), lambda case: Padding(_lengths(case))),
    "padding to nothing": MaskKind(
        lambda case: _shorter(_none_or_lengths(case)), lambda case: Padding(_none_or_lengths(case))
    ),
    "documents": MaskKind(
        lambda case: _same_document(_documents(case)),
        lambda case: Documents(lengths=torch.bincount(torch.tensor(_documents(case)))),
        square=True,
    ),
    "interleaved documents": MaskKind(
        lambda case: _same_document([place % 2 for place in range(case.k_len)]),
        lambda case: Documents(ids=torch.arange(case.k_len) % 2),
        square=True,
    ),
    "document ids": MaskKind(
        lambda case: _same_document(_scattered(case)),
        lambda case: Documents(ids=torch.tensor(_scattered(case))),
        square=True,
    ),
    "global": MaskKind(
        _fixed(lambda b, h, i, j: (i < 2) | (j < 2) | ((j >= i - 1) & (j <= i))), lambda case: Global(2) | Window(1)
    ),
    "strided": MaskKind(_fixed(lambda b, h, i, j: ((i - j) % 3 == 0) & (j <= i)), lambda case: Strided(3) & Causal()),
    "blocks": MaskKind(
        lambda case: lambda b, h, i, j: _table(case)[i // _BLOCK, j // _BLOCK],
        lambda case: Blocks(_table(case), _BLOCK),
    ),
    "dense": MaskKind(_fixed(_noise), _dense(_noise)),
    "function": MaskKind(_fixed(_not_every_third), lambda case: MaskFunction(_not_every_third)),
    "not window": MaskKind(_fixed(lambda b, h, i, j: (j < i - 1) | (j > i + 1)), lambda case: ~Window(1, 1)),
    "one key": MaskKind(_fixed(lambda b, h, i, j: j == i), _dense(lambda b, h, i, j: j == i)),
    "empty rows": MaskKind(_fixed(_gaps), _dense(_gaps)),
    "nothing": MaskKind(_fixed(lambda b, h, i, j: (i < 0) & (j < 0)), _dense(lambda b, h, i, j: (i < 0) & (j < 0))),
}
"""Every kind of mask by name."""


def spoken(case: Case) -> Spoken | None:
    """The mask of a case, or None."""
    if case.mask == "none":
        return None
    kind = KINDS[case.mask]
    return Spoken(_filled(kind.plain(case), case), kind.ours(case))
