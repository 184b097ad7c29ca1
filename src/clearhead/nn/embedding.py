"""TokenEmbedding: token ids and positions to vectors."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from clearhead.arguments import one_of, probability
from clearhead.choices import is_invariant
from clearhead.errors import ShapeError
from clearhead.nn.batch_layout import BatchLayout
from clearhead.nn.checks import positive
from clearhead.nn.dropout import Dropout
from clearhead.nn.linear import looked_at
from clearhead.nn.packed_rows import by_sequence
from clearhead.positions import sinusoidal
from clearhead.sequence_sums import embed
from clearhead.shapes import Float, Int

__all__ = ["POSITIONS", "TokenEmbedding", "check_ids", "check_range", "embedded", "widened"]

#: Kinds of positions. With "rotary" the attention applies them.
POSITIONS: Final = ("learned", "sinusoidal", "rotary", "none")


class TokenEmbedding(nn.Module):
    """Token vectors plus position vectors.

    Args:
        vocab_size: number of token ids.
        embed_dim: width of a vector.
        max_len: number of positions.
        positions: ``"learned"``, ``"sinusoidal"``, or nothing here (``"rotary"``, ``"none"``).
        dropout: probability of dropping a channel, while training only.

    >>> import torch
    >>> TokenEmbedding(100, 8, max_len=16)(torch.tensor([[1, 2]]), torch.tensor([[0, 1]])).shape
    torch.Size([1, 2, 8])
    """

    def __init__(
        self, vocab_size: int, embed_dim: int, *, max_len: int, positions: str = "learned", dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.vocab_size = positive("TokenEmbedding", "vocab_size", vocab_size)
        self.max_len = positive("TokenEmbedding", "max_len", max_len)
        self.positions = one_of("TokenEmbedding", "positions", positions, POSITIONS, "The usual one is 'learned'.")
        self.token = nn.Embedding(self.vocab_size, positive("TokenEmbedding", "embed_dim", embed_dim))
        width = self.token.embedding_dim
        self.position = nn.Embedding(self.max_len, width) if self.positions == "learned" else None
        self.dropout = Dropout(probability("TokenEmbedding", "dropout", dropout))

    def forward(
        self, ids: Int[Tensor, "batch len"], places: Int[Tensor, "#batch len"]
    ) -> Float[Tensor, "batch len embed_dim"]:
        """Vectors of tokens ``ids`` at positions ``places`` of their sequences; both are in range."""
        ids = widened(ids)
        x = _rows_of(self.token, ids)
        if self.position is not None:
            # Invariant: the positions of each sequence, as their gradient is a sum over sequences.
            x = x + _rows_of(self.position, places.expand(ids.shape) if is_invariant() else places)
        elif self.positions == "sinusoidal":
            x = x + sinusoidal(places, x.shape[-1], dtype=x.dtype)
        embedded: Tensor = self.dropout(x)
        return embedded

    def extra_repr(self) -> str:
        return f"positions={self.positions!r}, max_len={self.max_len}"


def _rows_of(embedding: nn.Embedding, ids: Tensor) -> Tensor:
    """``embedding(ids)``; in invariant mode its gradient has the order of the sequences' tree."""
    if is_invariant() and not looked_at(embedding):
        return embed(ids, embedding.weight)
    rows: Tensor = embedding(ids)
    return rows


def check_ids(function: str, argument: str, ids: object, max_len: int) -> tuple[int, int]:
    """Raise unless ``ids`` is whole numbers ``[batch, len]``, not longer than the positions allow; their shape."""
    whole = isinstance(ids, Tensor) and ids.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
    if not isinstance(ids, Tensor) or not whole or ids.ndim != 2:
        got = f"{str(ids.dtype)[6:]} of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ShapeError.about(
            function,
            argument,
            must="be token ids, whole numbers [batch, len]",
            got=got,
            then="Add a batch axis: ids[None].",
        )
    if ids.shape[1] > max_len:
        raise ShapeError.about(
            function,
            argument,
            must=f"be at most {max_len} tokens long (max_len)",
            got=ids.shape[1],
            then="Cut the sequences, or build the model with a larger max_len.",
        )
    return ids.shape[0], ids.shape[1]


def widened(ids: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Ids of 8 or 16 bits as 64: torch.embedding takes those, and any vocabulary fits them."""
    return ids if ids.dtype in (torch.int64, torch.int32) else ids.to(torch.int64)


def check_range(function: str, argument: str, ids: Int[Tensor, "..."], vocab_size: int) -> None:
    """Raise unless every id, padding aside, is of the vocabulary."""
    # A compiler cannot read values: there an id out of range fails in the look-up. A meta tensor has none.
    if torch.compiler.is_compiling() or ids.numel() == 0 or ids.is_meta:
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0 or high >= vocab_size:
        raise ShapeError.about(
            function,
            argument,
            must=f"lie from 0 to {vocab_size - 1} (vocab_size {vocab_size})",
            got=low if low < 0 else high,
            then="Use the tokenizer that the model was made for.",
        )


def embedded(
    function: str, argument: str, ids: Tensor, layout: BatchLayout, embedding: TokenEmbedding, first: int = 0
) -> Tensor:
    """Vectors of the real tokens only, in the batch's layout."""
    if layout.whole_length > embedding.max_len:
        check_ids(function, argument, ids.new_empty(1, layout.whole_length), embedding.max_len)
    inside = layout.pack(ids)
    check_range(function, argument, inside, embedding.vocab_size)
    with by_sequence(layout.mask):
        x: Tensor = embedding(inside, layout.positions(ids.device) + first)
    return x
