"""Booleans as a small picture in text."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from clearhead.shapes import Bool

__all__ = ["LARGEST", "SIDE", "draw"]

#: Positions drawn of a mask that has no size of its own.
SIDE: Final = 8
#: Queries, and keys, that are drawn at most.
LARGEST: Final = 24


def draw(allowed: Bool[Tensor, "q_len k_len"], size: tuple[int, int] | None = None) -> str:
    """One line per query, ``■`` where it may attend, ``·`` where not; of a large picture the first corner, which is all
    that has to be given where ``size`` says how many queries and keys there are.

    >>> import torch
    >>> print(draw(torch.tensor([[True, False], [True, True]])))
    ■·
    ■■
    """
    q_len, k_len = allowed.shape if size is None else size
    corner = allowed[:LARGEST, :LARGEST]
    lines = ["".join("■" if place else "·" for place in row) for row in corner.tolist()]
    if q_len > LARGEST or k_len > LARGEST:
        lines.append(f"(the first {corner.shape[0]} of {q_len} queries, {corner.shape[1]} of {k_len} keys)")
    return "\n".join(lines)
