"""Masks by name: what each allows, in plain arithmetic, and the mask of ours that should mean the same."""

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

__all__ = ["KINDS", "Kind", "Spoken", "spoken"]

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_BLOCK = 4


@dataclass(frozen=True)
class Kind:
    """A mask by name.

    Attributes:
        plain: for a case, the predicate ``(batch, head, q_pos, k_pos) -> bool`` over tensors that broadcast.
        ours: for a case, the mask object of clearhead.
        square: needs as many queries as keys.
    """

    plain: Callable[[Case], Predicate]
    ours: Callable[[Case], Mask]
    square: bool = False


@dataclass(frozen=True, eq=False)
class Spoken:
    """A mask in every form a signature may want it in.

    Attributes:
        allowed: bool ``[batch | 1, heads | 1, q_len | 1, k_len]``, True where a query may attend.
        ours: the same as an object of clearhead.
    """

    allowed: Tensor
    ours: Mask


def _lengths(case: Case) -> list[int]:
    """Real tokens of each sequence of a batch: all, two thirds, a third, all, ..."""
    return [case.k_len - (number % 3) * case.k_len // 3 for number in range(case.batch)]


def _none_or_lengths(case: Case) -> list[int]:
    return [0, *_lengths(case)[1:]]


def _documents(case: Case) -> list[int]:
    """The document of each token: one of 1 token, then runs of 3 and 4 by turns."""
    ids = [0]
    while len(ids) < case.k_len:
        number = ids[-1] + 1
        ids += [number] * (3 + number % 2)
    return ids[: case.k_len]


def _scattered(case: Case) -> list[int]:
    """Two documents token by token, with padding here and there."""
    return [-1 if place % 5 == 3 else place % 2 for place in range(case.k_len)]


def _same_document(ids: list[int]) -> Predicate:
    numbers = torch.tensor(ids)
    return lambda b, h, i, j: (numbers[i] == numbers[j]) & (numbers[i] >= 0)


def _shorter(lengths: list[int]) -> Predicate:
    ends = torch.tensor(lengths)
    return lambda b, h, i, j: j < ends[b]


def _noise(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Something without a pattern that a kernel could know; everyone may attend to the first key."""
    return ((7 * i + 13 * j + 4 * h + 3 * b + i * j) % 5 < 2) | (j == 0)


def _gaps(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Every third query may attend to nothing."""
    return (i % 3 != 1) & ((i + j + h) % 3 != 0)


def _table(case: Case) -> Tensor:
    rows = -(-max(case.q_len + case.offset, 1) // _BLOCK)
    i, j = torch.arange(rows)[:, None], torch.arange(-(-case.k_len // _BLOCK))[None]
    return (3 * i + 5 * j + i * j) % 4 != 1


def _dense(predicate: Predicate) -> Callable[[Case], Mask]:
    return lambda case: Dense(_filled(predicate, case))


def _filled(predicate: Predicate, case: Case) -> Tensor:
    """The predicate at every place of a case's call."""
    index = (
        torch.arange(case.batch).view(-1, 1, 1, 1),
        torch.arange(case.heads).view(1, -1, 1, 1),
        torch.arange(case.offset, case.offset + case.q_len).view(1, 1, -1, 1),
        torch.arange(case.k_len).view(1, 1, 1, -1),
    )
    found = predicate(*index)
    return found.expand(*found.shape[:2], case.q_len, case.k_len)


def _fixed(predicate: Predicate) -> Callable[[Case], Predicate]:
    return lambda case: predicate


KINDS: dict[str, Kind] = {
    "causal": Kind(_fixed(lambda b, h, i, j: j <= i), lambda case: Causal()),
    "window": Kind(_fixed(lambda b, h, i, j: (j >= i - 3) & (j <= i + 2)), lambda case: Window(3, 2)),
    "causal window": Kind(_fixed(lambda b, h, i, j: (j >= i - 2) & (j <= i)), lambda case: Causal() & Window(2, 5)),
    "prefix": Kind(_fixed(lambda b, h, i, j: (j < 2) | (j <= i)), lambda case: Prefix(2) | Causal()),
    "padding": Kind(lambda case: _shorter(_lengths(case)), lambda case: Padding(_lengths(case))),
    "padding to nothing": Kind(
        lambda case: _shorter(_none_or_lengths(case)), lambda case: Padding(_none_or_lengths(case))
    ),
    "documents": Kind(
        lambda case: _same_document(_documents(case)),
        lambda case: Documents(lengths=torch.bincount(torch.tensor(_documents(case)))),
        square=True,
    ),
    "interleaved documents": Kind(
        lambda case: _same_document([place % 2 for place in range(case.k_len)]),
        lambda case: Documents(ids=torch.arange(case.k_len) % 2),
        square=True,
    ),
    "document ids": Kind(
        lambda case: _same_document(_scattered(case)),
        lambda case: Documents(ids=torch.tensor(_scattered(case))),
        square=True,
    ),
    "global": Kind(
        _fixed(lambda b, h, i, j: (i < 2) | (j < 2) | ((j >= i - 1) & (j <= i))), lambda case: Global(2) | Window(1)
    ),
    "strided": Kind(_fixed(lambda b, h, i, j: ((i - j) % 3 == 0) & (j <= i)), lambda case: Strided(3) & Causal()),
    "blocks": Kind(
        lambda case: lambda b, h, i, j: _table(case)[i // _BLOCK, j // _BLOCK],
        lambda case: Blocks(_table(case), _BLOCK),
    ),
    "dense": Kind(_fixed(_noise), _dense(_noise)),
    "function": Kind(
        _fixed(lambda b, h, i, j: (i + j + h) % 3 != 0),
        lambda case: MaskFunction(lambda b, h, i, j: (i + j + h) % 3 != 0),
    ),
    "not window": Kind(_fixed(lambda b, h, i, j: (j < i - 1) | (j > i + 1)), lambda case: ~Window(1, 1)),
    "one key": Kind(_fixed(lambda b, h, i, j: j == i), _dense(lambda b, h, i, j: j == i)),
    "empty rows": Kind(_fixed(_gaps), _dense(_gaps)),
    "nothing": Kind(_fixed(lambda b, h, i, j: (i < 0) & (j < 0)), _dense(lambda b, h, i, j: (i < 0) & (j < 0))),
}
"""Every kind of mask that cases name."""


def spoken(case: Case) -> Spoken | None:
    """The mask of a case; None where it has none."""
    if case.mask == "none":
        return None
    kind = KINDS[case.mask]
    return Spoken(_filled(kind.plain(case), case), kind.ours(case))
