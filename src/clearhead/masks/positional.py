"""Masks that depend on positions alone: causal, window, prefix, global tokens, stride."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.arguments import whole
from clearhead.masks.base import Mask
from clearhead.masks.intervals import Intervals

__all__ = ["Causal", "Global", "Prefix", "Strided", "Window"]


class Causal(Mask):
    """Each query attends to its own position and those before it: ``k_pos <= q_pos``.

    >>> print(Causal())
    Causal()
    ■·······
    ■■······
    ■■■·····
    ■■■■····
    ■■■■■···
    ■■■■■■··
    ■■■■■■■·
    ■■■■■■■■
    """

    head_dependent = False
    position_dependent = True
    relative = True

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return k_pos <= q_pos

    def intervals(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_len: int) -> Intervals:
        return Intervals.single(torch.zeros_like(q_pos), q_pos + 1, k_len)


class Window(Mask):
    """Each query attends to the keys from ``q_pos - before`` to ``q_pos + after``, both included.

    Args:
        before: number of positions before the query's, 0 or more.
        after: number of positions after the query's, 0 or more.

    Raises:
        ShapeError: ``before`` or ``after`` is not a whole number of at least 0.

    >>> Window(1).dense(3, 3).int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """

    fields = ("before", "after")
    head_dependent = False
    position_dependent = True
    relative = True

    def __init__(self, before: int, after: int = 0) -> None:
        self.before = whole("Window", "before", before, low=0)
        self.after = whole("Window", "after", after, low=0)

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (k_pos >= q_pos - self.before) & (k_pos <= q_pos + self.after)

    def intervals(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_len: int) -> Intervals:
        return Intervals.single(q_pos - self.before, q_pos + self.after + 1, k_len)


class Prefix(Mask):
    """Every query attends to the first ``length`` keys; ``Causal() | Prefix(n)`` is the mask of a prefix LM.

    Args:
        length: number of keys, 0 or more.

    Raises:
        ShapeError: ``length`` is not a whole number of at least 0.

    >>> Prefix(2).dense(2, 3).int().tolist()
    [[1, 1, 0], [1, 1, 0]]
    """

    fields = ("length",)
    head_dependent = False

    def __init__(self, length: int) -> None:
        self.length = whole("Prefix", "length", length, low=0)

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return k_pos < self.length

    def intervals(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_len: int) -> Intervals:
        zero = torch.zeros_like(q_pos)
        return Intervals.single(zero, zero + self.length, k_len)


class Global(Mask):
    """The first ``num_tokens`` positions attend to every key, and every query attends to them.

    Args:
        num_tokens: number of global positions, 0 or more.

    Raises:
        ShapeError: ``num_tokens`` is not a whole number of at least 0.

    Paper: Beltagy et al. 2020, "Longformer", section 3.1.

    >>> Global(1).dense(3, 3).int().tolist()
    [[1, 1, 1], [1, 0, 0], [1, 0, 0]]
    """

    fields = ("num_tokens",)
    head_dependent = False
    position_dependent = True

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = whole("Global", "num_tokens", num_tokens, low=0)

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (k_pos < self.num_tokens) | (q_pos < self.num_tokens)

    def intervals(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_len: int) -> Intervals:
        stop = torch.where(q_pos < self.num_tokens, k_len, self.num_tokens)
        return Intervals.single(torch.zeros_like(stop), stop, k_len)


class Strided(Mask):
    """Each query attends to every ``stride``-th key, counted from its own position: ``(q_pos - k_pos) % stride == 0``.

    Args:
        stride: distance between two keys, 1 or more.

    Raises:
        ShapeError: ``stride`` is not a whole number of at least 1.

    Paper: Child et al. 2019, "Generating long sequences with sparse transformers", section 4.2.

    >>> Strided(2).dense(3, 3).int().tolist()
    [[1, 0, 1], [0, 1, 0], [1, 0, 1]]
    """

    fields = ("stride",)
    head_dependent = False
    position_dependent = True
    relative = True

    def __init__(self, stride: int) -> None:
        self.stride = whole("Strided", "stride", stride, low=1)

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (q_pos - k_pos) % self.stride == 0
