"""A boolean matrix drawn as text."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from clearhead.shapes import Bool

__all__ = ["LARGEST", "SIDE", "draw"]

#: Number of queries and keys drawn by default.
SIDE: Final = 8
#: Largest number of queries and of keys that are drawn.
LARGEST: Final = 24


def draw(allowed: Bool[Tensor, "q_len k_len"], size: tuple[int, int] | None = None) -> str:
    """One line per query, ``■`` where it may attend, ``·`` where not; at most ``LARGEST`` queries and keys are drawn.

    Args:
        allowed: the matrix, or its first ``LARGEST`` rows and columns.
        size: number of queries and keys of the whole matrix; by default the shape of ``allowed``.

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
