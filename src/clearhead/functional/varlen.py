"""Attention over packed sequences of different lengths, with the signature of ``torch.nn.attention.varlen``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from clearhead import torch_op
from clearhead.arguments import FARTHEST, dense, flag, repr_of, whole, whole_number
from clearhead.dispatch import run
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.functional.paged import PageTable, attend_to_pages, reads_pages
from clearhead.masks import Causal, Mask, Window
from clearhead.masks.sequences import RAGGED_ARGUMENTS, Ragged
from clearhead.problem import Problem
from clearhead.shapes import Float, Int
from clearhead.statistics import Observation, Want

__all__ = ["PackedCall", "VarlenLayout", "band", "check_heads", "compute", "varlen_attn", "window_of"]

#: The side without a limit of a window whose other side has one.
_UNLIMITED: Final = FARTHEST
_AXES: Final = ("total", "heads", "head_dim")
_POOL_AXES: Final = ("pages", "page_size", "kv_heads", "head_dim")


@runtime_checkable
class Aux(Protocol):
    """What else is returned, such as ``torch.nn.attention.varlen.AuxRequest(lse=True)``."""

    lse: bool


def varlen_attn(
    query: Float[Tensor, "total_q heads head_dim"],
    key: Float[Tensor, "*total_k kv_heads head_dim"],
    value: Float[Tensor, "*total_k kv_heads value_dim"],
    cu_seq_q: Int[Tensor, " boundaries"],
    cu_seq_k: Int[Tensor, " boundaries"] | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Aux | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Int[Tensor, " sequences"] | None = None,
    block_table: Int[Tensor, "sequences pages"] | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within packed sequences, with the arguments of ``torch.nn.attention.varlen.varlen_attn``.

    ``softmax(scale * query_s @ key_s^T where the window allows) @ value_s`` for every sequence ``s``.

    Args:
        query: ``[total_q, heads, head_dim]``, the sequences one after the other.
        key: ``[total_k, kv_heads, head_dim]``; with ``block_table`` a pool ``[pages, page_size, kv_heads, head_dim]``.
        value: ``[total_k, kv_heads, value_dim]``, or a pool as ``key``.
        cu_seq_q: int32 or int64 ``[sequences + 1]``: 0, and the cumulative sum of the sequences' query lengths.
        cu_seq_k: the same for keys; may be None with ``block_table`` and ``seqused_k``.
        max_q: the longest query length, or more.
        max_k: the longest key length, or more.
        return_aux: if its ``lse`` is true, the log-sum-exp of each row is returned too.
        scale: factor on ``query @ key^T``; by default ``1 / sqrt(head_dim)``.
        window_size: how many keys before and after the query's position it attends to; -1 for all, so ``(-1, 0)`` is
            causal. The last query of a sequence has the position of its last key.
        enable_gqa: whether ``kv_heads`` may be less than ``heads``, which it divides.
        seqused_k: int ``[sequences]``, how many of each sequence's first keys exist; by default all.
        block_table: int ``[sequences, pages per sequence]``, which pages of the pool hold a sequence's keys, in order.
            Each sequence has ``seqused_k`` keys, or as ``cu_seq_k`` says.
        num_splits: taken for compatibility; a row's result never depends on how the keys are divided among threads.

    Returns:
        ``[total_q, heads, value_dim]``; and ``lse`` ``[heads, total_q]`` if requested. A query without a key, and one
        after the last boundary, gives 0, and ``-inf`` in ``lse``. Gradients reach query, key and value, with every
        argument, and through ``lse``.

    Raises:
        ShapeError: shapes or lengths do not fit, boundaries fall or end beyond the tokens, or a page does not exist.
        UnsupportedError: dtypes or devices do not fit, or heads differ without ``enable_gqa``.

    Cost: ``4 * heads * head_dim * sum_s(q_len_s * k_len_s)`` operations; nothing is computed between sequences.
    Memory grows with the tokens. ``block_table`` with
    ``seqused_k`` is read where the pages are, on the CPU without gradients; otherwise they are copied.

    Paper: Dao 2023, "FlashAttention-2", section 3.

    >>> import torch, clearhead as ch
    >>> query, key, value = torch.randn(3, 5, 2, 8)  # sequences of 3 and 2 tokens
    >>> bounds = torch.tensor([0, 3, 5], dtype=torch.int32)
    >>> ch.functional.varlen_attn(query, key, value, bounds, bounds, 3, 3, window_size=(-1, 0)).shape
    torch.Size([5, 2, 8])
    """
    name = "varlen_attn"
    check_heads(name, query, key, value, pool=block_table is not None, grouped=flag(name, "enable_gqa", enable_gqa))
    if num_splits is not None:
        whole(name, "num_splits", num_splits, low=0)
    before, after = window_of(name, window_size)
    layout = VarlenLayout(cu_seq_q, cu_seq_k, seqused_k, max_q, max_k, block_table)
    wanted = return_aux is not None and bool(return_aux.lse)
    table = layout.page_table(query, key, value)
    if table is not None:
        heads = query.transpose(0, 1)[None]
        results = attend_to_pages(name, (heads, key, value), table, mask=band(before, after), scale=scale, lse=wanted)
        output = results[0][0].transpose(0, 1)
        return (output, results[1][0]) if wanted else output
    packed = PackedCall.of(name, query, key, value, layout)
    done = compute(name, *packed.tensors, want_lse=wanted, scale=scale, mask=packed.mask(before, after), query_offset=0)
    output = done.output[0].transpose(0, 1)
    return (output, done.lse[0]) if wanted and done.lse is not None else output


def compute(function: str, query: Tensor, key: Tensor, value: Tensor, *, want_lse: bool, **options: Any) -> Observation:
    """Attention of ``[batch, heads, len, dim]`` on behalf of a public function; one operator while compiling."""
    want = Want(lse=want_lse)
    if torch.compiler.is_compiling():
        if want_lse:
            return torch_op.observe_attention(query, key, value, want=want, **options)
        return Observation(output=torch_op.attention(query, key, value, **options))
    return run(function, Problem.of(function, query, key, value, **options), want)


@dataclass(frozen=True, eq=False)
class VarlenLayout:
    """Where packed sequences lie, as a caller passes it."""

    cu_seq_q: object
    cu_seq_k: object
    used_k: object
    max_q: object
    max_k: object
    block_table: object = None

    def page_table(self, query: Tensor, key: Tensor, value: Tensor) -> PageTable | None:
        """What the CPU kernels read pages by, where they do and everything fits; ``PackedCall`` says what does not."""
        given = (self.cu_seq_q, self.used_k, self.block_table)
        if torch.compiler.is_compiling() or any(type(part) is not Tensor or not part.is_cpu for part in given):
            return None
        start, lengths, blocks = given
        assert isinstance(start, Tensor)
        assert isinstance(lengths, Tensor)
        assert isinstance(blocks, Tensor)
        whole_numbers = all(part.dtype in (torch.int32, torch.int64) for part in (start, lengths, blocks))
        longest = (whole_number(self.max_q), whole_number(self.max_k))
        if not whole_numbers or start.dim() != 1 or start.numel() < 2 or None in longest:
            return None
        table = PageTable(*(part.to(torch.int32).contiguous() for part in (blocks, lengths, start)))
        return table if reads_pages((query.transpose(0, 1)[None], key, value), table, longest) else None


@dataclass(frozen=True, eq=False)
class PackedCall:
    """PackedCall sequences, checked but for the values of the boundaries, which the mask checks.

    Attributes:
        tensors: query, key and value as ``attention`` takes them, ``[1, heads, total, dim]``.
        cu_seq_q: int64 ``[sequences + 1]``.
        cu_seq_k: int64 ``[sequences + 1]``.
        used_k: int64 ``[sequences]``, or None for all keys.
        longest: the longest query and key lengths that are allowed.
    """

    tensors: tuple[Tensor, Tensor, Tensor]
    cu_seq_q: Int[Tensor, " boundaries"]
    cu_seq_k: Int[Tensor, " boundaries"]
    used_k: Int[Tensor, " sequences"] | None
    longest: tuple[int, int]

    @classmethod
    def of(cls, function: str, query: Tensor, key: Tensor, value: Tensor, layout: VarlenLayout) -> PackedCall:
        """Check a public function's call and read the pages that its block table names."""
        names = RAGGED_ARGUMENTS[function]
        cu_q = _integers(function, names[0], layout.cu_seq_q, query, axes=1)
        if cu_q.shape[0] == 0:
            raise ShapeError.about(function, names[0], must="begin with 0", got="no element", then="Pass [0].")
        shape = (cu_q.shape[0] - 1,)
        used = None if layout.used_k is None else _integers(function, names[2], layout.used_k, query, shape=shape)
        if layout.cu_seq_k is layout.cu_seq_q:
            cu_k = cu_q
        elif layout.cu_seq_k is not None or layout.block_table is None:
            cu_k = _integers(function, names[1], layout.cu_seq_k, query, shape=cu_q.shape)
        else:
            cu_k = None
        if layout.block_table is not None:
            pages = _integers(function, "block_table", layout.block_table, query, axes=2, shape=(*shape, None))
            lengths = _paged_lengths(function, names, pages, cu_k, used, key.shape[1])
            key, value = gather_pages(function, key, value, pages, lengths)
            cu_k, used = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), None
        assert cu_k is not None
        longest = (
            whole(function, names[3], layout.max_q, low=0),
            whole(function, names[4], layout.max_k, low=0),
        )
        parts = (part.transpose(0, 1)[None] for part in (query, key, value))
        return cls(tuple(parts), cu_q, cu_k, used, longest)  # type: ignore[arg-type]

    @property
    def is_square(self) -> bool:
        """Whether every sequence has as many keys as queries, at the same places."""
        if self.cu_seq_q is self.cu_seq_k or torch.compiler.is_compiling() or self.cu_seq_q.is_meta:
            return self.cu_seq_q is self.cu_seq_k and self.used_k is None
        return self.used_k is None and torch.equal(self.cu_seq_q, self.cu_seq_k)

    def mask(self, before: int | None, after: int | None) -> Mask:
        """Each query attends to its own sequence, within a window around the key beside it."""
        near = band(before, after)
        # The kernels read a band faster than intervals that differ from row to row.
        by_band = near is not None and self.is_square
        before, after = (None, None) if by_band else (before, after)
        mask = Ragged(self.cu_seq_q, self.cu_seq_k, self.used_k, before=before, after=after, longest=self.longest)
        return mask & near if by_band and near is not None else mask


def gather_pages(
    function: str,
    key: Float[Tensor, "pages page_size kv_heads head_dim"],
    value: Float[Tensor, "pages page_size kv_heads value_dim"],
    block_table: Int[Tensor, "sequences pages_per_sequence"],
    lengths: Int[Tensor, " sequences"],
) -> tuple[Float[Tensor, "total_k kv_heads head_dim"], Float[Tensor, "total_k kv_heads value_dim"]]:
    """The first ``lengths`` keys and values of each sequence, packed, from the pages that the table names.

    Raises:
        ShapeError: a page that a sequence needs is not in the pool.
    """
    page_size = key.shape[1]
    sequence = torch.repeat_interleave(lengths)
    place = torch.arange(sequence.shape[0], device=key.device) - (lengths.cumsum(0) - lengths)[sequence]
    page = block_table[sequence, place // page_size] if page_size else sequence
    outside = (page < 0) | (page >= key.shape[0])
    if bool(outside.any()):
        raise ShapeError.about(
            function,
            "block_table",
            must=f"name pages from 0 to {key.shape[0] - 1} where a sequence has keys",
            got=int(page[outside][0]),
            then="Pass the pages of each sequence, in order.",
        )
    slots = page * page_size + place % max(1, page_size)
    return key.flatten(0, 1).index_select(0, slots), value.flatten(0, 1).index_select(0, slots)


def _paged_lengths(
    function: str, names: Sequence[str], pages: Tensor, cu_k: Tensor | None, used: Tensor | None, page_size: int
) -> Int[Tensor, " sequences"]:
    """How many keys each sequence has in its pages."""
    if cu_k is None and used is None:
        raise ShapeError.about(
            function, names[2], must="be given with block_table", got="None", then="Count each sequence's keys."
        )
    lengths = used if cu_k is None or used is not None else cu_k.diff()
    assert lengths is not None
    capacity = pages.shape[1] * page_size
    if lengths.numel() and not 0 <= int(lengths.min()) <= int(lengths.max()) <= capacity:
        low = int(lengths.min())
        raise ShapeError.about(
            function,
            names[1] if used is None else names[2],
            must=f"lie from 0 to the {capacity} keys of {pages.shape[1]} pages"
            if used is not None
            else f"never fall, nor count more keys than the {capacity} of {pages.shape[1]} pages",
            got=low if low < 0 else int(lengths.max()),
            then="Give each sequence as many pages as its keys need.",
        )
    return lengths


def window_of(function: str, window_size: object) -> tuple[int | None, int | None]:
    """How many keys before and after its own a query attends to; None for all, which is -1 in ``window_size``."""
    sides = tuple(window_size) if isinstance(window_size, (tuple, list)) else ()
    limits = [whole_number(side) for side in sides]
    if len(limits) != 2 or any(limit is None or limit < -1 for limit in limits):
        raise ShapeError.about(
            function,
            "window_size",
            must="be two whole numbers of at least -1",
            got=repr_of(window_size),
            then="(-1, -1) is full attention, (-1, 0) is causal.",
        )
    before, after = (None if limit == -1 else limit for limit in limits)
    return before, after


def band(before: int | None, after: int | None) -> Mask | None:
    """The mask of a window around each query's position, None on a side without a limit.

    >>> band(None, 0), band(3, None), band(None, None)
    (Causal(), Window(before=3, after=281474976710656), None)
    """
    if before is None:
        return None if after is None else Causal() if after == 0 else Window(_UNLIMITED, after)
    return Window(before, _UNLIMITED if after is None else after)


def check_heads(function: str, query: Tensor, key: Tensor, value: Tensor, *, pool: bool, grouped: bool) -> None:
    """Raise unless the three are dense, have the axes of packed sequences, and heads that fit."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        axes = _POOL_AXES if pool and name != "query" else _AXES
        if isinstance(tensor, Tensor):
            dense(function, name, tensor)
        if not isinstance(tensor, Tensor) or tensor.ndim != len(axes):
            got = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            must = f"have axes [{', '.join(axes)}]"
            raise ShapeError.about(function, name, must=must, got=got, then="Sequences lie one after the other.")
    if value.shape[:-1] != key.shape[:-1]:
        raise ShapeError.about(
            function,
            "value",
            must=f"have key's tokens and heads {tuple(key.shape[:-1])}",
            got=f"shape {tuple(value.shape)}",
            then="One value per key.",
        )
    if not grouped and query.shape[-2] != key.shape[-2]:
        raise UnsupportedError.about(
            function,
            "key",
            must=f"have query's {query.shape[-2]} heads",
            got=f"{key.shape[-2]} heads",
            then="Pass enable_gqa=True for heads that are shared by several of query.",
        )


def _integers(
    function: str, argument: str, given: object, query: Tensor, *, axes: int = 1, shape: tuple[int | None, ...] = ()
) -> Int[Tensor, "..."]:
    """A tensor of whole numbers on query's device as int64; ``shape`` has None for any size."""
    axes = len(shape) or axes
    fits = (
        isinstance(given, Tensor)
        and given.dtype in (torch.int32, torch.int64)
        and given.ndim == axes
        and all(size in (None, actual) for size, actual in zip(shape or (None,) * axes, given.shape, strict=True))
    )
    if not isinstance(given, Tensor) or not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in shape) or ", ".join(["any"] * axes)
        raise ShapeError.about(
            function,
            argument,
            must=f"be int32 or int64 of shape [{sizes}]",
            got=repr_of(given),
            then="Lengths of n sequences have n + 1 boundaries, and n rows of pages.",
        )
    if given.device != query.device:
        raise UnsupportedError.about(
            function,
            argument,
            must=f"be on query's device {query.device}",
            got=given.device,
            then="Move it with .to(device).",
        )
    return given.to(torch.int64)
