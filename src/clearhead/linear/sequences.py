"""Masks as the family reads them: an order among keys, absent keys, and documents as a batch of their own."""

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
    """What a mask says, in the words of the recurrence.

    Attributes:
        causal: keys count in their order.
        real: which keys there are, ``[batch | 1, len]``; None for all.
        groups: the documents of a packed call, each group a batch; None where tokens are not packed.
        order: for each document in the order of the groups, which one of the call's it is.
        ids: which document each token is of, ``[1, len]``, in place of groups while a packed call is traced.
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
        """How many documents there are; one without tokens left no trace in the mask."""
        return 0 if self.order is None else int(self.order.numel())

    def present(self, length: int, device: torch.device) -> Bool[Tensor, "batch len"]:
        """Which of ``length`` keys there are, ``[batch | 1, len]``: neither behind a padded end nor in no document."""
        real = torch.ones(1, length, dtype=torch.bool, device=device) if self.real is None else self.real
        if self.groups is None:
            return real
        packed = torch.zeros(length, dtype=torch.bool, device=device)
        for group in self.groups:
            packed[group.slots[group.valid]] = True
        return real & packed

    def inhabited(self, batch: int, length: int, device: torch.device) -> Bool[Tensor, " entries"]:
        """Which sequences have a key, in the order in which states come back: those of the batch, or the documents."""
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
            MaskError: it is anything but ``Causal``, ``Padding``, ``Documents`` and their ``&``, or does not fit.
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
                must="lay each document in one piece in a batch of 1",
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
        # What lengths a tensor holds is not known while the call is traced; how many there are is.
        if isinstance(part, Padding):
            Carrying.check(part, function, batch, 1, range(length), length)


def _order(document_groups: tuple[Group, ...]) -> Tensor:
    """Documents count by where they start."""
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
        then="A state of fixed size holds no key apart; other masks need ch.attention.",
    )
