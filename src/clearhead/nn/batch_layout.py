"""How a padded batch is packed at a model's input and unpacked at its output, so that padding affects nothing.

Where sequences have padding, the real tokens are packed and attend under ``Documents``: every linear layer, norm and
attention in the model works on real tokens only. That is right only if everything else depends on the distance between
tokens alone; otherwise the batch stays padded, and the padding is masked and set to 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.batch_part import current
from clearhead.choices import is_invariant
from clearhead.errors import MaskError
from clearhead.masks import Documents, Mask, Padding
from clearhead.masks.base import conjuncts
from clearhead.nn.part import SequencePart
from clearhead.packing import as_lengths, real_places, unpack
from clearhead.watch import laid_out

__all__ = ["BatchLayout", "Lengths"]

#: Real tokens of each sequence; None where all are full.
Lengths = Sequence[int] | Tensor | None


@dataclass(frozen=True, eq=False)
class BatchLayout:
    """How one batch is laid out in a model.

    Attributes:
        size: batch and length of the padded batch.
        lengths: real tokens of each sequence; None where all are full.
        packed: whether the model sees the tokens packed.
        mask: the mask that the model's attention uses.
        places: positions of the tokens of each row, where other processes have others of the sequence; else None.
        whole_length: tokens of each padded sequence; ``size`` counts those of this process.
    """

    size: tuple[int, int]
    lengths: Tensor | None
    packed: bool
    mask: Mask | None
    places: Tensor | None = None
    whole_length: int = 0

    @classmethod
    def of(
        cls,
        function: str,
        size: Sequence[int],
        device: torch.device,
        *,
        lengths: Lengths,
        mask: Mask | None,
        may_pack: bool,
        sequence: SequencePart | None = None,
    ) -> BatchLayout:
        """The layout of a batch of ``size``, whose padding is given by ``lengths`` or by a ``Padding`` in ``mask``.

        ``may_pack`` says whether the model's score rules mean the same in a packed batch. With ``sequence`` the batch
        has this process's tokens; lengths and masks are those of whole sequences.
        """
        if mask is not None and not isinstance(mask, Mask):
            raise MaskError.about(
                function,
                "mask",
                must="be a mask",
                got=type(mask).__name__,
                then="Wrap a boolean tensor (True = may attend) in ch.Dense; convert a float mask with "
                "ch.bridges.from_additive.",
            )
        size = (size[0], size[1])
        padding, rest = _split_padding(mask)
        if padding is not None:
            if lengths is not None:
                raise MaskError.about(
                    function,
                    "mask",
                    must="contain no Padding where lengths are given",
                    got=repr(mask),
                    then="Give the lengths once.",
                )
            lengths = padding.lengths.expand(size[0]) if padding.lengths.shape[0] == 1 else padding.lengths
        length = size[1] if sequence is None else sequence.whole_length(size[1])
        places = None if sequence is None else sequence.positions(size[1]).to(device)
        if lengths is None:
            return cls(size, None, False, rest, places, length)
        counts = as_lengths(function, lengths, batch=size[0], longest=length)
        # An exported program keeps the padding: the number of real tokens is not known to it.
        exported = torch.compiler.is_exporting()
        # A part of a batch has the layout of the whole batch.
        part = current()
        padded = part is not None and part.packed
        if not exported and not padded and bool((counts == length).all()):
            return cls(size, None, False, rest, places, length)
        # Gradients of parameters are sums over sequences, which the layers of a packed batch do not distinguish.
        by_sequence = is_invariant() and torch.is_grad_enabled()
        packed = may_pack and places is None and not exported and not by_sequence and (rest is None or rest.relative)
        confined: Mask = Documents(lengths=counts.to(device)) if packed else Padding(counts.to(device))
        if isinstance(confined, Documents):
            laid_out(confined, *size)
        return cls(size, counts, packed, confined if rest is None else rest & confined, places, length)

    def pack(self, x: Tensor) -> Tensor:
        """A padded ``[batch, len, ...]`` as the model sees it: packed, or with 0 at the padding."""
        if self.lengths is None:
            return x
        if self.packed:
            places = real_places(self.lengths, self.size[1]).to(x.device)
            return x.flatten(0, 1).index_select(0, places)[None]
        return self.without_padding(x)

    def without_padding(self, x: Tensor) -> Tensor:
        """Tokens as the model sees them, with 0 at the padding if they are not packed."""
        return x if self.lengths is None or self.packed else x.masked_fill(self._padding(x), 0)

    def unpack(self, x: Tensor) -> Tensor:
        """The model's output as a padded ``[batch, len, ...]``, 0 at the padding."""
        if self.lengths is None:
            return x
        if self.packed:
            return unpack(x, self.lengths, self.size[1])
        return self.without_padding(x)

    def positions(self, device: torch.device) -> Tensor:
        """Each token's position in its sequence, ``[batch | 1, len]`` in the layout of the model."""
        place = self._places(device)[None]
        return self.pack(place.expand(self.size)) if self.packed else place

    def _places(self, device: torch.device) -> Tensor:
        """Positions of a row's tokens."""
        return torch.arange(self.size[1], device=device) if self.places is None else self.places

    def _padding(self, x: Tensor) -> Tensor:
        assert self.lengths is not None
        padding = self._places(x.device) >= self.lengths.to(x.device)[:, None]
        return padding.reshape(*self.size, *(1 for _ in x.shape[2:]))


def _split_padding(mask: Mask | None) -> tuple[Padding | None, Mask | None]:
    """The padding of a mask, and what it is combined with by ``&``."""
    if mask is None:
        return None, None
    padding: Padding | None = None
    rest: Mask | None = None
    for part in conjuncts(mask):
        if padding is None and isinstance(part, Padding):
            padding = part
        else:
            rest = part if rest is None else rest & part
    return padding, rest
