"""Packing: sequences of different lengths as one, without padding, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead.arguments import dense, repr_of, tensor_of, whole
from clearhead.errors import ShapeError
from clearhead.masks import Documents
from clearhead.shapes import Int

__all__ = ["as_lengths", "pack", "real_places", "unpack"]


def as_lengths(
    function: str,
    lengths: Sequence[int] | Int[Tensor, " batch"],
    *,
    batch: int | None = None,
    longest: int | None = None,
) -> Int[Tensor, " batch"]:
    """Sequence lengths as an int64 tensor, one for each of ``batch`` sequences, from 0 to ``longest``.

    Raises:
        ShapeError: they are no whole numbers, too many or too few, or out of range.
    """
    converted = tensor_of(lengths)
    # Values that are no tensor, and meta tensors, fail the check of the shape below.
    tensor = torch.empty(0, 0) if converted is None or converted.is_meta else converted
    empty = tensor.numel() == 0 and tensor.ndim == 1
    integral = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool) or empty
    if tensor.ndim != 1 or not integral or (batch is not None and tensor.shape[0] != batch):
        raise ShapeError.about(
            function,
            "lengths",
            must=f"be whole numbers, one per sequence{'' if batch is None else f' ({batch})'}",
            got=repr_of(lengths) + (" on meta" if converted is not None and converted.is_meta else ""),
            then="Count the real tokens of each sequence.",
        )
    tensor = tensor.to(torch.int64)
    if torch.compiler.is_exporting():
        # The lengths are an input of the exported program: there are no elements to read.
        return tensor
    low, high = (int(tensor.min()), int(tensor.max())) if tensor.numel() else (0, 0)
    if low < 0 or (longest is not None and high > longest):
        raise ShapeError.about(
            function,
            "lengths",
            must=f"lie from 0 to {'the longest sequence' if longest is None else longest}",
            got=low if low < 0 else high,
            then="Count the real tokens of each sequence, padding to the right.",
        )
    return tensor


def real_places(lengths: Int[Tensor, " batch"], length: int) -> Int[Tensor, " total"]:
    """Indices of the real tokens of a padded batch that is flattened to ``[batch * length]``."""
    real = torch.arange(length, device=lengths.device) < lengths[:, None]
    return real.flatten().nonzero()[:, 0]


def pack(x: Tensor, lengths: Sequence[int] | Int[Tensor, " batch"]) -> tuple[Tensor, Documents]:
    """Remove padding: the real tokens of a batch as one packed sequence, and the mask that separates the sequences.

    Args:
        x: ``[batch, len, ...]`` with padding on the right: embeddings, or token ids.
        lengths: int ``[batch]``, number of real tokens of each sequence, from 0 to ``len``.

    Returns:
        The packed sequence ``[1, total, ...]``, where ``total`` is the sum of the lengths, and ``Documents(lengths)``.
        Attention over the packed sequence under this mask equals attention over each sequence alone.

    Raises:
        ShapeError: x or lengths do not fit.
        UnsupportedError: x is nested or sparse.

    Cost: one copy of the real tokens.

    >>> import torch
    >>> packed, documents = pack(torch.tensor([[1, 2, 0], [3, 0, 0]]), [2, 1])
    >>> packed, documents.dense(3, 3).int().tolist()
    (tensor([[1, 2, 3]]), [[1, 1, 0], [1, 1, 0], [0, 0, 1]])
    """
    if isinstance(x, Tensor):
        dense("pack", "x", x)
    if not isinstance(x, Tensor) or x.ndim < 2:
        raise ShapeError.about(
            "pack", "x", must="have axes [batch, len, ...]", got=_shape_or_type(x), then="Add a batch axis: x[None]."
        )
    counts = as_lengths("pack", lengths, batch=x.shape[0], longest=x.shape[1])
    places = real_places(counts, x.shape[1]).to(x.device)
    return x.flatten(0, 1).index_select(0, places)[None], Documents(lengths=counts).to(x.device)


def unpack(packed: Tensor, lengths: Sequence[int] | Int[Tensor, " batch"], max_len: int | None = None) -> Tensor:
    """Undo ``pack``: convert a packed sequence to a padded batch, with zeros at the padding.

    Args:
        packed: ``[1, total, ...]``.
        lengths: int ``[batch]``, the lengths that were given to ``pack``; their sum is ``total``.
        max_len: length of the padded batch; by default the largest of ``lengths``.

    Returns:
        ``[batch, max_len, ...]``.

    Raises:
        ShapeError: the sum of the lengths is not ``total``, or one is above ``max_len``.
        UnsupportedError: packed is nested or sparse.

    Cost: one copy of the tokens.

    >>> import torch
    >>> unpack(torch.tensor([[1, 2, 3]]), [2, 1])
    tensor([[1, 2],
            [3, 0]])
    """
    if max_len is not None:
        max_len = whole("unpack", "max_len", max_len, low=0)
    counts = as_lengths("unpack", lengths, longest=max_len)
    total = int(counts.sum())
    if isinstance(packed, Tensor):
        dense("unpack", "packed", packed)
    if not isinstance(packed, Tensor) or packed.ndim < 2 or packed.shape[:2] != (1, total):
        raise ShapeError.about(
            "unpack",
            "packed",
            must=f"have axes [1, {total}, ...], the sum of the lengths",
            got=_shape_or_type(packed),
            then="Pass the lengths that it was packed with.",
        )
    length = max_len if max_len is not None else int(counts.max()) if counts.numel() else 0
    places = real_places(counts, length).to(packed.device)
    padded = packed.new_zeros((counts.shape[0] * length, *packed.shape[2:])).index_copy(0, places, packed[0])
    batch: Tensor = padded.unflatten(0, (counts.shape[0], length))
    return batch


def _shape_or_type(x: object) -> str:
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
