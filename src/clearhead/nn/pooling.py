"""Pooling: one vector for each sequence, from its real tokens."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from clearhead.shapes import Float, Int

__all__ = ["POOLINGS", "pool"]

POOLINGS: Final = ("mean", "max", "mean_max", "first")


def pool(
    x: Float[Tensor, "batch len dim"], lengths: Int[Tensor, " batch"] | None, kind: str
) -> Float[Tensor, "batch pooled"]:
    """One vector per sequence; a sequence without tokens gives zeros.

    Args:
        x: ``[batch, len, dim]``, zeros at the padding.
        lengths: int ``[batch]``, real tokens of each sequence; None where all are full.
        kind: ``"mean"``, ``"max"``, ``"mean_max"`` (both side by side) or ``"first"``.

    >>> pool(torch.tensor([[[1.0], [3.0], [0.0]]]), torch.tensor([2]), "mean")
    tensor([[2.]])
    """
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0], x.shape[2] * (2 if kind == "mean_max" else 1))
    if kind == "first":
        return x[:, 0]
    parts = []
    if kind in ("mean", "mean_max"):
        count = x.shape[1] if lengths is None else lengths.to(x.device).clamp(min=1)[:, None]
        parts.append((x.sum(dim=1, dtype=torch.float32 if x.dtype != torch.float64 else None) / count).to(x.dtype))
    if kind in ("max", "mean_max"):
        parts.append(_largest(x, lengths))
    return torch.cat(parts, dim=-1)


def _largest(x: Tensor, lengths: Tensor | None) -> Tensor:
    if lengths is None:
        return x.amax(dim=1)
    place = torch.arange(x.shape[1], device=x.device)
    counts = lengths.to(x.device)
    padding = place >= counts[:, None]
    largest = x.masked_fill(padding[..., None], -torch.inf).amax(dim=1)
    return largest.masked_fill((counts == 0)[:, None], 0.0)
