"""Packed documents as padded batches: groups of documents of similar length.

In a packed sequence each document is a square on the diagonal of the scores. Documents are sorted by length and split
into groups whose shortest is not much shorter than the longest, so that little of each batch is padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from clearhead.masks import Documents
from clearhead.masks.base import conjuncts, does_as
from clearhead.problem import Problem
from clearhead.shapes import Bool, Float, Int

__all__ = ["Group", "documents_in", "groups"]

#: The shortest document of a group has at least this share of the longest: at most half of the scores are padding.
_SHORTEST_SHARE: Final = 0.7
_SLACK: Final = 4


@dataclass(frozen=True)
class Group:
    """Documents of similar length.

    Attributes:
        slots: the index in the packed sequence of the token at each place; padding repeats the document's first token.
        valid: whether the place is a token, not padding.
    """

    slots: Int[Tensor, "documents len"]
    valid: Bool[Tensor, "documents len"]

    def take(self, packed: Float[Tensor, "1 heads total dim"]) -> Float[Tensor, "documents heads len dim"]:
        """The group's tokens of a packed tensor, as a padded batch."""
        return packed[0][:, self.slots].transpose(0, 1)

    def put(self, packed: Float[Tensor, "1 heads total dim"], batch: Float[Tensor, "documents heads len dim"]) -> None:
        """Write the group's tokens, without padding, into a packed tensor in place."""
        packed[0][:, self.slots[self.valid]] = batch.transpose(0, 1)[:, self.valid].to(packed.dtype)


def documents_in(problem: Problem) -> Documents | None:
    """The ``Documents`` in the mask of a packed call; None if there is none, or the call is not packed."""
    packed = problem.batch == 1 and problem.q_len == problem.k_len and problem.query_offset == 0
    if not packed or problem.mask is None:
        return None
    for part in conjuncts(problem.mask):
        if isinstance(part, Documents) and does_as(part, Documents) and part.contiguous:
            return part
    return None


def groups(documents: Documents) -> Iterator[Group]:
    """The groups of a packed sequence, longest documents first."""
    ids = documents.ids[0]
    document_ids, counts = torch.unique_consecutive(ids, return_counts=True)
    starts = counts.cumsum(0) - counts
    real = document_ids >= 0
    starts, counts = starts[real], counts[real]
    counts, order = counts.sort(descending=True, stable=True)
    starts = starts[order]
    lengths = counts.tolist()
    first = 0
    while first < len(lengths):
        last = first
        while last < len(lengths) and lengths[last] >= _SHORTEST_SHARE * lengths[first] - _SLACK:
            last += 1
        place = torch.arange(lengths[first], device=ids.device)
        valid = place < counts[first:last, None]
        yield Group(torch.where(valid, starts[first:last, None] + place, starts[first:last, None]), valid)
        first = last
