"""Masks as the family reads them: an order among keys, absent keys, and documents as a batch of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.backends.documents import Group, groups
from clearhead.errors import MaskError
from clearhead.masks import Causal, Documents, Mask, Padding
from clearhead.masks.base import conjuncts
from clearhead.shapes import Bool

__all__ = ["Sequences"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """What a mask says, in the words of the recurrence.

    Attributes:
        causal: keys count in their order.
        real: which keys there are, ``[batch | 1, len]``; None for all.
        groups: the documents of a packed call, each group a batch; None where tokens are not packed.
        order: for each document in the order of the groups, which one of the call's it is.
    """

    causal: bool
    real: Bool[Tensor, "batch len"] | None = None
    groups: tuple[Group, ...] | None = None
    order: Tensor | None = None

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return 0 if self.order is None else int(self.order.numel())

    @classmethod
    def of(
        cls, function: str, mask: Mask | None, batch: int, length: int, device: torch.device, *, causal: bool
    ) -> Sequences:  # fmt: skip
        """Read a mask for a call of ``batch`` sequences of ``length`` keys.

        Raises:
            MaskError: it is anything but ``Causal``, ``Padding``, ``Documents`` and their ``&``, or does not fit.
        """
        if mask is None:
            return cls(causal=causal)
        if not isinstance(mask, Mask):
            raise _refused(function, type(mask).__name__)
        mask.check(function, batch, 1, range(length), length)
        mask = mask.to(device)
        real: Tensor | None = None
        documents: Documents | None = None
        for part in conjuncts(mask):
            if isinstance(part, Causal):
                causal = True
            elif isinstance(part, Padding):
                own = torch.arange(length, device=device) < part.lengths[:, None]
                real = own if real is None else real & own
            elif isinstance(part, Documents) and documents is None:
                documents = part
            else:
                raise _refused(function, repr(part)[:80])
        if documents is None:
            return cls(causal=causal, real=real)
        if batch != 1 or not documents.contiguous:
            got = f"batch {batch}" if batch != 1 else "a document in several pieces"
            raise MaskError.about(
                function, "mask", must="lay each document in one piece in a batch of 1", got=got,
                then="Pack with ch.pack.",
            )  # fmt: skip
        found = tuple(groups(documents))
        return cls(causal=causal, real=real, groups=found, order=_order(found))


def _order(found: tuple[Group, ...]) -> Tensor:
    """Documents count by where they start."""
    starts = torch.cat([group.slots[:, 0] for group in found]) if found else torch.empty(0, dtype=torch.int64)
    return starts.argsort().argsort()


def _refused(function: str, got: str) -> MaskError:
    return MaskError.about(
        function, "mask", must="be None, Causal(), Padding, Documents or their &", got=got,
        then="A state of fixed size holds no key apart; other masks need ch.attention.",
    )  # fmt: skip
