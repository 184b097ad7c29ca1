"""Masks of sequences of different lengths: padding on the right, and sequences packed one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from clearhead.arguments import repr_of, tensor_of
from clearhead.errors import MaskError, ShapeError
from clearhead.masks.base import Carrying, Mask
from clearhead.masks.intervals import Intervals
from clearhead.masks.picture import SIDE
from clearhead.shapes import Bool, Int

__all__ = ["RAGGED_ARGUMENTS", "Documents", "Padding", "Ragged"]


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
    head_dependent = False

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
    head_dependent = False
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


class Ragged(Mask):
    """Queries of packed sequences attend to the keys of their own sequence, whose number may differ.

    With a window, the last query of a sequence is beside its last key. Queries and keys after the last boundary belong
    to no sequence.

    Args:
        cu_seq_q: int64 ``[sequences + 1]``, where each sequence's queries start, and the end of the last.
        cu_seq_k: int64 ``[sequences + 1]``, the same for keys.
        used_k: int64 ``[sequences]``, how many of the first keys of each sequence exist; None for all.
        before: how many keys before its own a query attends to; None for all.
        after: how many keys after its own a query attends to; None for all.
        longest: the longest query and key lengths that a sequence may have; None for any.

    >>> Ragged(torch.tensor([0, 1, 3]), torch.tensor([0, 2, 4]), after=0).dense(3, 4).int().tolist()
    [[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    """

    fields = ("cu_seq_q", "cu_seq_k", "used_k", "before", "after", "longest")
    head_dependent = False

    def __init__(
        self,
        cu_seq_q: Int[Tensor, " boundaries"],
        cu_seq_k: Int[Tensor, " boundaries"],
        used_k: Int[Tensor, " sequences"] | None = None,
        *,
        before: int | None = None,
        after: int | None = None,
        longest: tuple[int, int] | None = None,
    ) -> None:
        self.cu_seq_q, self.cu_seq_k, self.used_k = cu_seq_q, cu_seq_k, used_k
        self.before, self.after, self.longest = before, after, longest

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        start, stop = self._bounds(q_pos)
        return (k_pos >= start) & (k_pos < stop)

    def intervals(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_len: int) -> Intervals:
        return Intervals.single(*self._bounds(q_pos), k_len)

    def shift(self, q_pos: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """The packed position of the key beside each query, less the query's."""
        sequence = self.sequence(q_pos)
        return self._stop(sequence) - self.cu_seq_q[sequence + 1]

    def sequence(self, q_pos: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """The sequence of each query; that of queries after the last boundary is the last."""
        # Of several sequences that end where an empty one starts, the last is the query's.
        index = torch.searchsorted(self.cu_seq_q[1:], q_pos.contiguous(), right=True)
        return index.clamp(max=self.cu_seq_q.shape[0] - 2)

    def _stop(self, sequence: Tensor) -> Tensor:
        if self.used_k is None:
            return self.cu_seq_k[sequence + 1]
        return self.cu_seq_k[sequence] + self.used_k[sequence]

    def _bounds(self, q_pos: Tensor) -> tuple[Tensor, Tensor]:
        """The first key of each query, and the one after its last."""
        sequence = self.sequence(q_pos)
        first, last = self.cu_seq_k[sequence], self._stop(sequence)
        beside = q_pos + last - self.cu_seq_q[sequence + 1]
        start = first if self.before is None else torch.maximum(first, beside - self.before)
        stop = last if self.after is None else torch.minimum(last, beside + self.after + 1)
        return start, torch.where(q_pos < self.cu_seq_q[-1], stop, start)

    def check(self, function: str, batch: int, heads: int, q_pos: range, k_len: int) -> None:
        queries, keys, used, *longest = RAGGED_ARGUMENTS.get(function, RAGGED_ARGUMENTS["varlen_attn"])
        _check_boundaries(function, queries, self.cu_seq_q, len(q_pos))
        _check_boundaries(function, keys, self.cu_seq_k, k_len)
        k_lengths = self.cu_seq_k.diff()
        if self.used_k is not None:
            wrong = (self.used_k < 0) | (self.used_k > k_lengths)
            if bool(wrong.any()):
                place = int(wrong.nonzero()[0, 0])
                raise ShapeError.about(
                    function,
                    used,
                    must=f"lie from 0 to the keys of each sequence, {int(k_lengths[place])} in sequence {place}",
                    got=int(self.used_k[place]),
                    then="Count the keys that exist.",
                )
            k_lengths = self.used_k
        if self.longest is None or not k_lengths.numel():
            return
        for argument, most, lengths in zip(longest, self.longest, (self.cu_seq_q.diff(), k_lengths), strict=True):
            if int(lengths.max()) > most:
                raise ShapeError.about(
                    function,
                    argument,
                    must="be at least the longest sequence",
                    got=f"{most} for a sequence of {int(lengths.max())} tokens",
                    then="Pass the largest of the lengths.",
                )


_OF_FLASH: Final = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k")
#: What public functions call the boundaries of queries and keys, the used keys, and the longest lengths, for errors.
RAGGED_ARGUMENTS: Final = {
    "varlen_attn": ("cu_seq_q", "cu_seq_k", "seqused_k", "max_q", "max_k"),
    "flash_attn_varlen_func": _OF_FLASH,
    "flash_attn_varlen_qkvpacked_func": ("cu_seqlens", "cu_seqlens", "seqused_k", "max_seqlen", "max_seqlen"),
    "flash_attn_varlen_kvpacked_func": _OF_FLASH,
    "flash_attn_with_kvcache": ("q", "k_cache", "cache_seqlens", "q", "k_cache"),
}


def _check_boundaries(function: str, argument: str, boundaries: Int[Tensor, " boundaries"], total: int) -> None:
    """Raise ``ShapeError`` unless boundaries start at 0, never fall, and end within ``total`` tokens."""

    def wrong(must: str, got: str) -> ShapeError:
        then = "Pass the cumulative sum of the lengths after a 0."
        return ShapeError.about(function, argument, must=must, got=got, then=then)

    if boundaries.is_meta:
        raise wrong("have elements", "a meta tensor")
    values = boundaries.tolist()
    if values[0] != 0:
        raise wrong("start at 0", str(values[0]))
    for place, (one, following) in enumerate(pairwise(values)):
        if following < one:
            raise wrong("never fall", f"{one} and then {following} at place {place + 1}")
    if values[-1] > total:
        raise wrong(f"end within the {total} tokens", str(values[-1]))


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
