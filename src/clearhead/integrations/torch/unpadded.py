"""Removes the padding of a batch of another library's model, and restores it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from clearhead.masks import Documents
from clearhead.shapes import Bool, Float, Int

__all__ = ["MANY", "Packed"]

#: Number of tokens from which it is rounded up, and the multiple.
MANY, _ROWS = 1024, 32


@dataclass(frozen=True, eq=False)
class Packed:
    """Places of real tokens in a batch whose first two axes are flattened, sequence by sequence.

    Many tokens are padded to a multiple of ``_ROWS`` by a document whose output is dropped, as torch's GEMM prepares
    anew for every number of rows.

    Attributes:
        size: the two axes.
        places: of the tokens, and of the rows that fill up.
        count: of the tokens.
        documents: confines attention to each sequence.
    """

    size: tuple[int, int]
    places: Int[Tensor, " rows"]
    count: int
    documents: Documents

    @classmethod
    def of(cls, real: Bool[Tensor, "batch len"], *, batch_first: bool = True) -> Self:
        """How to pack a batch whose real tokens these are; ``batch_first`` says whether its first axis is the batch."""
        sequence, position = real.nonzero(as_tuple=True)
        batch, length = real.shape
        places = sequence * length + position if batch_first else position * batch + sequence
        lengths, count = real.sum(dim=1), places.shape[0]
        if count >= MANY:
            fill = -count % _ROWS
            places = torch.cat([places, places[:1].expand(fill)])
            lengths = torch.cat([lengths, lengths.new_tensor([fill])])
        return cls((batch, length) if batch_first else (length, batch), places, count, Documents(lengths=lengths))

    def pack(self, x: Float[Tensor, "_ _ width"]) -> Float[Tensor, "rows width"]:
        """The tokens of a padded batch."""
        return x.flatten(0, 1).index_select(0, self.places)

    def angles(self, given: Float[Tensor, "_tokens head_dim"]) -> Float[Tensor, "rows head_dim"]:
        """RoPE cos and sin of the packed tokens, of those of a sequence or of the whole batch."""
        return given.index_select(0, self.places % self.size[1] if len(given) == self.size[1] else self.places)

    def unpack(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "_ _ width"]:
        """The padded batch of such tokens, 0 at the padding."""
        output = x.new_zeros((self.size[0] * self.size[1], *x.shape[1:]))
        padded: Tensor = output.index_copy(0, self.places[: self.count], x[: self.count]).unflatten(0, self.size)
        return padded
