"""A packed call told apart: the sequences that lie end to end in it as the padded batch that they came from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clearhead.masks import Documents, Mask
from clearhead.masks.base import conjuncts
from clearhead.packing import unpack
from clearhead.scores import ScoreRule
from clearhead.watch import Call, layout_of

__all__ = ["Sequences", "sequences_of"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """How the sequences of a packed call lie.

    Attributes:
        lengths: tokens of each.
        length: how long the padded batch is.
        rest: what the call's mask says besides.
    """

    lengths: tuple[int, ...]
    length: int
    rest: Mask | None

    def apart(self, packed: Tensor) -> Tensor:
        """``[1, heads, total, dim]`` as ``[batch, heads, length, dim]``, zeros at the padding."""
        packed = packed[:, :, : sum(self.lengths)].transpose(1, 2)
        return unpack(packed, self.lengths, self.length).transpose(1, 2)

    def mask(self, device: torch.device) -> Mask:
        """Who may attend to whom in the padded batch; padding to nobody and nobody to it."""
        place = torch.arange(self.length, device=device)
        real = place < torch.tensor(self.lengths, device=device)[:, None]
        own = Documents(ids=torch.where(real, 0, -1))
        return own if self.rest is None else self.rest & own

    def call(self, call: Call) -> Call:
        """The same attention on the padded batch."""
        query, key, value = (self.apart(_batched(packed)) for packed in (call.query, call.key, call.value))
        return replace(call, query=query, key=key, value=value).with_options(
            mask=self.mask(call.query.device), query_offset=None
        )


def sequences_of(call: Call) -> Sequences | None:
    """The sequences of a packed call; None for any other, and where it would mean another thing apart."""
    mask, scores = call.options.get("mask"), call.options.get("scores", ())
    rules = (scores,) if isinstance(scores, ScoreRule) else tuple(scores)
    query, total = call.query, call.query.shape[-2]
    if mask is None or call.key.shape[-2] != total or call.options.get("query_offset") or total == 0:
        return None
    if query.ndim < 3 or (query.ndim == 4 and query.shape[0] != 1):
        return None
    parts = conjuncts(mask)
    documents = [part for part in parts if isinstance(part, Documents)]
    others = [part for part in parts if not isinstance(part, Documents)]
    if len(documents) != 1 or not all(part.relative for part in others) or not all(rule.relative for rule in rules):
        return None
    found = documents[0]
    if not found.contiguous or tuple(found.ids.shape) != (1, total) or bool((found.ids < 0).any()):
        return None
    rest: Mask | None = None
    for part in others:
        rest = part if rest is None else rest & part
    lengths, length = _lengths(found)
    return Sequences(lengths=lengths, length=length, rest=rest)


def _lengths(documents: Documents) -> tuple[tuple[int, ...], int]:
    """Tokens of each sequence, and the length of the padded batch: as told by who packed it, else the longest."""
    layout = layout_of(documents)
    if layout is not None:
        batch, length = layout
        return tuple(torch.bincount(documents.ids[0], minlength=batch)[:batch].tolist()), length
    _, counts = torch.unique_consecutive(documents.ids[0], return_counts=True)
    return tuple(counts.tolist()), int(counts.max())


def _batched(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 4 else tensor[None]
