"""The masks of linear attention: causal order, absent keys, and documents as a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.arguments import repr_of
from clearhead.backends.documents import Group, groups
from clearhead.errors import MaskError
from clearhead.masks import Causal, Documents, Mask, Padding
from clearhead.masks.base import Carrying, conjuncts, does_as
from clearhead.shapes import Bool, Int

__all__ = ["SequenceLayout"]


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceLayout:
    """A mask as the recurrence reads it.

    Attributes:
        causal: whether a query attends only to keys up to its own position.
        real: the keys that are present, ``[batch | 1, len]``; None for all.
        groups: the documents of a packed call, each group a batch; None if tokens are not packed.
        order: for each document in the order of the groups, its index in the call.
        ids: the document of each token, ``[1, len]``, in place of groups while a packed call is traced.
    """

    causal: bool
    real: Bool[Tensor, "batch len"] | None = None
    groups: tuple[Group, ...] | None = None
    order: Tensor | None = None
    ids: Int[Tensor, "1 len"] | None = None

    @property
    def packed(self) -> bool:
        """Whether the call's tokens are documents."""
        return self.groups is not None or self.ids is not None

    @property
    def documents(self) -> int:
        """The number of documents with tokens."""
        return 0 if self.order is None else int(self.order.numel())

    def present(self, length: int, device: torch.device) -> Bool[Tensor, "batch len"]:
        """The keys that are present, ``[batch | 1, len]``: those that are not padding and are in a document."""
        real = torch.ones(1, length, dtype=torch.bool, device=device) if self.real is None else self.real
        if self.groups is None:
            return real
        packed = torch.zeros(length, dtype=torch.bool, device=device)
        for group in self.groups:
            packed[group.slots[group.valid]] = True
        return real & packed

    def inhabited(self, batch: int, length: int, device: torch.device) -> Bool[Tensor, " entries"]:
        """Whether each sequence of the batch, or each document, has a key, in the order of the states."""
        present = self.present(length, device)
        if self.groups is None or self.order is None:
            return present.any(dim=-1).expand(batch)
        by_group = [(present[0, group.slots] & group.valid).any(dim=-1) for group in self.groups]
        has_key = torch.cat(by_group) if by_group else present.new_empty(0)
        return has_key[self.order.argsort()]

    @classmethod
    def of(
        cls, function: str, mask: Mask | None, batch: int, length: int, device: torch.device, *, causal: bool
    ) -> SequenceLayout:
        """Read a mask for a call of ``batch`` sequences of ``length`` keys.

        Raises:
            MaskError: the mask is not ``Causal``, ``Padding``, ``Documents`` or a combination of these by ``&``, or
                does not fit.
        """
        if mask is None:
            return cls(causal=causal)
        if not isinstance(mask, Mask):
            raise _refused(function, type(mask).__name__)
        _check(mask, function, batch, length)
        mask = mask.to(device)
        real: Tensor | None = None
        documents: Documents | None = None
        for part in conjuncts(mask):
            if does_as(part, Causal):
                causal = True
            elif isinstance(part, Padding) and does_as(part, Padding):
                within = torch.arange(length, device=device) < part.lengths[:, None]
                real = within if real is None else real & within
            elif isinstance(part, Documents) and does_as(part, Documents) and documents is None:
                documents = part
            else:
                raise _refused(function, repr_of(part))
        if documents is None:
            return cls(causal=causal, real=real)
        if batch != 1 or not documents.contiguous:
            got = f"batch {batch}" if batch != 1 else "a document in several pieces"
            raise MaskError.about(
                function,
                "mask",
                must="have each document in one piece, in a batch of 1",
                got=got,
                then="Pack with ch.pack.",
            )
        if torch.compiler.is_compiling():
            return cls(causal=causal, real=real, ids=documents.ids)
        document_groups = tuple(groups(documents))
        return cls(causal=causal, real=real, groups=document_groups, order=_order(document_groups))


def _check(mask: Mask, function: str, batch: int, length: int) -> None:
    parts = conjuncts(mask)
    if not torch.compiler.is_compiling():
        return mask.check(function, batch, 1, range(length), length)
    for part in parts:
        if isinstance(part, Documents):
            part.check(function, batch, 1, range(length), length)
        # Under a trace the number of lengths is known, but not their values.
        if isinstance(part, Padding):
            Carrying.check(part, function, batch, 1, range(length), length)


def _order(document_groups: tuple[Group, ...]) -> Tensor:
    """The index of each document in the call, in the order of their starts."""
    starts = (
        torch.cat([group.slots[:, 0] for group in document_groups])
        if document_groups
        else torch.empty(0, dtype=torch.int64)
    )
    return starts.argsort().argsort()


def _refused(function: str, got: str) -> MaskError:
    return MaskError.about(
        function,
        "mask",
        must="be None, Causal(), Padding, Documents or their &",
        got=got,
        then="A state of fixed size cannot exclude single keys; use ch.attention for other masks.",
    )
