"""Masks of sequences of different lengths: padding on the right, and documents packed one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead.arguments import repr_of, tensor_of
from clearhead.errors import MaskError, ShapeError
from clearhead.masks.base import Carrying
from clearhead.masks.intervals import Intervals
from clearhead.masks.picture import SIDE
from clearhead.shapes import Bool, Int

__all__ = ["Documents", "Padding"]


class Padding(Carrying):
    """Queries attend to real tokens alone, those before each sequence's length: ``k_pos < lengths[batch]``.

    Args:
        lengths: int ``[batch]``, the number of real tokens of each sequence; padding is on the right.

    Raises:
        ShapeError: ``lengths`` is not one axis of whole numbers, or one of them is negative.

    >>> Padding([1, 2]).dense(1, 2).tolist()
    [[[[True, False]]], [[[True, True]]]]
    """

    fields = ("lengths",)

    def __init__(self, lengths: Sequence[int] | Int[Tensor, " batch"]) -> None:
        self.lengths = _counts("Padding", "lengths", lengths)

    @classmethod
    def from_tokens(cls, real: Bool[Tensor, "batch len"]) -> Padding:
        """The mask of padded sequences, from booleans that mark real tokens.

        Args:
            real: bool ``[batch, len]``, True for a real token; in each row real tokens come before padding.

        Raises:
            MaskError: ``real`` is not bool ``[batch, len]``, or padding comes before a real token.

        >>> Padding.from_tokens(torch.tensor([[True, True], [True, False]]))
        Padding(lengths=[2, 1])
        """
        if not isinstance(real, Tensor) or real.ndim != 2 or real.is_floating_point():
            raise MaskError.about(
                "Padding.from_tokens",
                "real",
                must="be bool [batch, len]",
                got=repr_of(real),
                then="Pass tokens != pad.",
            )
        real = real != 0
        if not bool((real[:, :-1] >= real[:, 1:]).all()):
            raise MaskError.about(
                "Padding.from_tokens",
                "real",
                must="be [batch, len] with padding only to the right",
                got=f"shape {tuple(real.shape)} with padding elsewhere",
                then="Use ch.Dense(real[:, None, None, :]).",
            )
        return cls(real.sum(dim=-1))

    def carries(self) -> tuple[int, int]:
        return self.lengths.shape[0], 1

    def own_size(self) -> tuple[int, int]:
        return SIDE, max([SIDE, *self.lengths.tolist()])

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return k_pos < self.lengths[self._row(batch)]

    def intervals(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_len: int) -> Intervals:
        stop = self.lengths[self._row(batch)]
        return Intervals.single(torch.zeros_like(stop), stop, k_len)

    def _row(self, batch: Tensor) -> Tensor:
        return batch if self.lengths.shape[0] > 1 else batch * 0

    def check(self, function: str, batch: int, heads: int, q_pos: range, k_len: int) -> None:
        super().check(function, batch, heads, q_pos, k_len)
        if self.lengths.numel() and not self.lengths.is_meta and int(self.lengths.amax()) > k_len:
            raise ShapeError.about(
                function,
                "mask",
                must=f"have lengths of at most k_len {k_len}",
                got=f"{int(self.lengths.amax())}",
                then="Pass the number of real tokens of each sequence.",
            )


class Documents(Carrying):
    """Tokens of packed documents attend within their own document: ``ids[q_pos] == ids[k_pos]``.

    Args:
        lengths: int ``[documents]``, the length of each document, in order. Pass either ``lengths`` or ``ids``.
        ids: int ``[len]`` or ``[batch, len]``, the document of each token. A token with a negative id is padding: it
            attends to nothing and nothing attends to it.

    Raises:
        ShapeError: both or neither are given, or one has a wrong shape or dtype.

    >>> Documents(lengths=[2, 1]).dense(3, 3).int().tolist()
    [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """

    fields = ("ids", "contiguous")
    position_dependent = True

    def __init__(
        self,
        lengths: Sequence[int] | Int[Tensor, " documents"] | None = None,
        *,
        ids: Int[Tensor, "*batch len"] | None = None,
    ) -> None:
        if (lengths is None) == (ids is None):
            raise ShapeError.about(
                "Documents",
                "lengths",
                must="be given, or ids, one of both",
                got="both" if ids is not None else "neither",
                then="Pass Documents(lengths=[5, 3]).",
            )
        if lengths is not None:
            counts = _with_elements("lengths", _counts("Documents", "lengths", lengths))
            document_ids = torch.arange(counts.shape[0], device=counts.device)
            self.ids = torch.repeat_interleave(document_ids, counts)[None]
            self.contiguous = True
        else:
            self.ids = _with_elements("ids", _document_ids(ids))
            self.contiguous = _contiguous(self.ids)

    def carries(self) -> tuple[int, int]:
        return self.ids.shape[0], 1

    def own_size(self) -> tuple[int, int]:
        return self.ids.shape[1], self.ids.shape[1]

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        row = batch if self.ids.shape[0] > 1 else batch * 0
        query_id, key_id = self.ids[row, q_pos], self.ids[row, k_pos]
        return (query_id == key_id) & (query_id >= 0)

    def intervals(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_len: int) -> Intervals | None:
        if not self.contiguous:
            return None
        start, stop = self.bounds()
        row = batch if self.ids.shape[0] > 1 else batch * 0
        return Intervals.single(start[row, q_pos], stop[row, q_pos], k_len)

    def bounds(self) -> tuple[Int[Tensor, "batch len"], Int[Tensor, "batch len"]]:
        """Start and stop of each token's document; an empty interval for padding."""
        total = self.ids.shape[1]
        place = torch.arange(total, device=self.ids.device).expand_as(self.ids)
        changes = self.ids[:, 1:] != self.ids[:, :-1]
        boundary = torch.ones_like(self.ids[:, :1], dtype=torch.bool)
        start = torch.where(torch.cat([boundary, changes], dim=1), place, 0).cummax(dim=1).values
        last = torch.where(torch.cat([changes, boundary], dim=1), place + 1, total)
        stop = last.flip(1).cummin(dim=1).values.flip(1)
        return start, torch.where(self.ids >= 0, stop, start)

    def check(self, function: str, batch: int, heads: int, q_pos: range, k_len: int) -> None:
        super().check(function, batch, heads, q_pos, k_len)
        total = self.ids.shape[1]
        if k_len != total or (len(q_pos) and (q_pos.start < 0 or q_pos.stop > total)):
            queries = f"queries {q_pos.start} to {q_pos.stop - 1}"
            raise MaskError.about(
                function,
                "mask",
                must=f"cover the call's tokens ({k_len} keys, {queries})",
                got=f"{total} tokens in {self!r}",
                then="The documents' lengths must add up to k_len.",
            )


def _document_ids(ids: Tensor | None) -> Tensor:
    tensor = tensor_of(ids)
    if tensor is None or tensor.ndim not in (1, 2) or not _are_whole(tensor):
        raise ShapeError.about(
            "Documents",
            "ids",
            must="be whole numbers [len] or [batch, len]",
            got=repr_of(ids),
            then="Give one id per token.",
        )
    # A copy: a later write into the caller's tensor could split a document, and ``contiguous`` would be wrong.
    return (tensor if tensor.ndim == 2 else tensor[None]).to(torch.int64, copy=True)


def _with_elements(argument: str, tensor: Tensor) -> Tensor:
    """Raise ``ShapeError`` for a meta tensor, which has no elements to read documents from."""
    if tensor.is_meta:
        raise ShapeError.about(
            "Documents",
            argument,
            must="have elements",
            got=f"a meta tensor of shape {tuple(tensor.shape)}",
            then="Make the mask elsewhere and move it with .to(device).",
        )
    return tensor


def _contiguous(ids: Tensor) -> bool:
    """Whether every document is one interval of tokens. Padding may be anywhere."""
    for row in ids:
        pieces = torch.unique_consecutive(row)
        pieces = pieces[pieces >= 0]
        if pieces.numel() != torch.unique(pieces).numel():
            return False
    return True


def _counts(function: str, argument: str, value: Sequence[int] | Tensor) -> Tensor:
    tensor = tensor_of(value)
    if tensor is not None and tensor.numel() == 0 and tensor.ndim == 1:
        tensor = tensor.to(torch.int64)
    if tensor is None or tensor.ndim != 1 or not _are_whole(tensor):
        raise ShapeError.about(
            function, argument, must="be one axis of whole numbers", got=repr_of(value), then="Pass e.g. [5, 3]."
        )
    tensor = tensor.to(torch.int64)
    # Reading elements would synchronise with an accelerator, and break a graph while tracing.
    if tensor.device.type == "cpu" and not torch.compiler.is_compiling() and bool((tensor < 0).any()):
        raise ShapeError.about(
            function, argument, must="not be negative", got=str(int(tensor.min())), then="Count real tokens."
        )
    return tensor


def _are_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
