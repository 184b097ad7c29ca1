"""A packed call, unpacked: its sequences as the padded batch that they came from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clearhead.masks import Documents, Mask
from clearhead.masks.base import conjuncts
from clearhead.packing import unpack
from clearhead.scores import ScoreRule
from clearhead.watch import Call, layout_of

__all__ = ["PackedSequences", "sequences_of"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedSequences:
    """The layout of the sequences in a packed call.

    Attributes:
        lengths: number of tokens of each sequence.
        length: length of the padded batch.
        rest: the call's mask without its ``Documents``.
    """

    lengths: tuple[int, ...]
    length: int
    rest: Mask | None

    def unpacked(self, packed: Tensor) -> Tensor:
        """Unpack ``[1, heads, total, dim]`` into ``[batch, heads, length, dim]``, with zeros at the padding."""
        packed = packed[:, :, : sum(self.lengths)].transpose(1, 2)
        return unpack(packed, self.lengths, self.length).transpose(1, 2)

    def mask(self, device: torch.device) -> Mask:
        """The mask of the padded batch; padding attends to nothing and nothing attends to it."""
        place = torch.arange(self.length, device=device)
        real = place < torch.tensor(self.lengths, device=device)[:, None]
        real_pairs = Documents(ids=torch.where(real, 0, -1))
        return real_pairs if self.rest is None else self.rest & real_pairs

    def call(self, call: Call) -> Call:
        """The same attention on the padded batch."""
        query, key, value = (self.unpacked(_batched(packed)) for packed in (call.query, call.key, call.value))
        return replace(call, query=query, key=key, value=value).with_options(
            mask=self.mask(call.query.device), query_offset=None
        )


def sequences_of(call: Call) -> PackedSequences | None:
    """The sequences of a packed call; None for other calls, and if its mask or rules would differ when unpacked."""
    mask, scores = call.options.get("mask"), call.options.get("scores")
    rules = (scores,) if isinstance(scores, ScoreRule) else tuple(scores or ())
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
    packed = documents[0]
    if not packed.contiguous or tuple(packed.ids.shape) != (1, total) or bool((packed.ids < 0).any()):
        return None
    rest: Mask | None = None
    for part in others:
        rest = part if rest is None else rest & part
    lengths, length = _lengths(packed)
    return PackedSequences(lengths=lengths, length=length, rest=rest)


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
