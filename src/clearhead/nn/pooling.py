"""Pooling: one vector for each sequence, from its real tokens."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from clearhead.choices import is_invariant
from clearhead.nn.part import SequencePart
from clearhead.shapes import Float, Int

__all__ = ["POOLINGS", "pool"]

POOLINGS: Final = ("mean", "max", "mean_max", "first")


def pool(
    x: Float[Tensor, "batch len dim"],
    lengths: Int[Tensor, " batch"] | None,
    kind: str,
    sequence: SequencePart | None = None,
) -> Float[Tensor, "batch pooled"]:
    """One vector per sequence; a sequence without tokens gives zeros.

    Args:
        x: ``[batch, len, dim]``, zeros at the padding.
        lengths: int ``[batch]``, real tokens of each sequence; None where all are full.
        kind: ``"mean"``, ``"max"``, ``"mean_max"`` (both side by side) or ``"first"``.
        sequence: which tokens ``x`` has, where other processes have the others; ``lengths`` are those of all.

    >>> pool(torch.tensor([[[1.0], [3.0], [0.0]]]), torch.tensor([2]), "mean")
    tensor([[2.]])
    """
    length = x.shape[1] if sequence is None else sequence.whole_length(x.shape[1])
    if length == 0:
        return x.new_zeros(x.shape[0], x.shape[2] * (2 if kind == "mean_max" else 1))
    if kind == "first":
        # The first process has the first token in every layout.
        return x[:, 0] if sequence is None else sequence.gathered(_padded_to_one(x)[:, 0])[0]
    parts = []
    if kind in ("mean", "mean_max"):
        count = length if lengths is None else lengths.to(x.device).clamp(min=1)[:, None]
        total = _sum(x)
        parts.append(((total if sequence is None else sequence.gathered(total).sum(dim=0)) / count).to(x.dtype))
    if kind in ("max", "mean_max"):
        parts.append(_largest(x, lengths, sequence))
    return torch.cat(parts, dim=-1)


def _sum(x: Float[Tensor, "batch len dim"]) -> Float[Tensor, "batch dim"]:
    """The sum over tokens, in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # A cumulative sum adds in the order of tokens; the order of a sum depends on how many there are, with padding.
    return wide.cumsum(dim=1)[:, -1] if is_invariant() and x.shape[1] else wide.sum(dim=1)


def _padded_to_one(x: Tensor) -> Tensor:
    """At least one token, 0 where there is none."""
    return x if x.shape[1] else torch.cat([x, x.new_zeros(x.shape[0], 1, x.shape[2])], dim=1)


def _largest(x: Tensor, lengths: Tensor | None, sequence: SequencePart | None) -> Tensor:
    if lengths is not None:
        place = torch.arange(x.shape[1], device=x.device) if sequence is None else sequence.positions(x.shape[1])
        padding = place.to(x.device) >= lengths.to(x.device)[:, None]
        x = x.masked_fill(padding[..., None], -torch.inf)
    if sequence is None:
        largest = x.amax(dim=1)
    else:
        nothing = x.new_full((x.shape[0], 1, x.shape[2]), -torch.inf)
        largest = sequence.gathered(torch.cat([x, nothing], dim=1).amax(dim=1)).amax(dim=0)
    return largest if lengths is None else largest.masked_fill((lengths.to(x.device) == 0)[:, None], 0.0)
