"""Block masks of ``torch.nn.attention.flex_attention`` as masks: a table of blocks, and a ``mask_mod`` within them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from clearhead.arguments import repr_of
from clearhead.at_places import SCALARS, OfScalars
from clearhead.errors import MaskError
from clearhead.masks.base import Carrying, Mask
from clearhead.masks.function import MaskFunction, UserFunction, call_user_function
from clearhead.masks.intervals import Intervals
from clearhead.masks.tables import Blocks
from clearhead.masks.traced import traced_intervals
from clearhead.shapes import Bool, Int
from clearhead.torch_private import has_dispatch_mode

__all__ = ["MaskMod", "from_block_mask"]

#: Kinds of blocks.
_SKIPPED, _PARTIAL, _FULL = range(3)


def from_block_mask(block_mask: Any) -> Mask:
    """A ``BlockMask`` of ``torch.nn.attention.flex_attention`` as a mask.

    A query may attend to the keys of its full blocks, and in its partial blocks to those that ``mask_mod`` allows.
    Block ``i`` covers positions ``i * BLOCK_SIZE`` to ``(i + 1) * BLOCK_SIZE - 1``.

    Args:
        block_mask: made by ``create_block_mask`` or ``BlockMask.from_kv_blocks``. Its ``mask_mod(b, h, q_idx, kv_idx)``
            takes scalars, as torch calls it; ``q_idx`` is the absolute position of the query.

    Returns:
        A mask for ``ch.attention``; a ``ch.Blocks`` if ``mask_mod`` allows everything and blocks are square.

    Raises:
        MaskError: ``block_mask`` is no ``BlockMask``, or its table points outside its keys; in a call, ``mask_mod``
            raises (as that of a sliced block mask does) or returns something else than a boolean.

    Cost: the table of blocks. In a call on a CPU, ``mask_mod`` is traced: where it compares positions, their distance
    or values looked up by position, and agrees with the table, it costs ``q_len * (1 + k_blocks)``. Any other one is
    evaluated at every place, and stored as one byte per place, up to 2**26 of them.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")
    >>> from_block_mask(causal).dense(256, 256).int()[:3, :3].tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    # Imported here: few programs have block masks.
    from torch.nn.attention.flex_attention import BlockMask, noop_mask

    if not isinstance(block_mask, BlockMask):
        raise MaskError.about(
            "from_block_mask",
            "block_mask",
            must="be a BlockMask of torch.nn.attention.flex_attention",
            got=repr_of(block_mask),
            then="Make one with create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN), or wrap mask_mod in ch.MaskFunction.",
        )
    kinds, size = _kinds_of_blocks(block_mask), tuple(block_mask.BLOCK_SIZE)
    if block_mask.mask_mod is not noop_mask:
        return MaskMod(block_mask.mask_mod, kinds, size)
    side = math.gcd(*size)
    rows, columns = (length // side for length in size)
    table = (kinds != _SKIPPED).repeat_interleave(rows, dim=2).repeat_interleave(columns, dim=3)
    return Blocks(table, side)


def _kinds_of_blocks(block_mask: Any) -> Int[Tensor, "batch heads q_blocks k_blocks"]:
    """The kind of each block, int8: 0 skipped, 1 partial, 2 full."""
    columns = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    partial = _table(("kv_num_blocks", "kv_indices"), block_mask.kv_num_blocks, block_mask.kv_indices, columns)
    kinds = partial.to(torch.int8)
    if block_mask.full_kv_num_blocks is not None:
        full = _table(
            ("full_kv_num_blocks", "full_kv_indices"),
            block_mask.full_kv_num_blocks,
            block_mask.full_kv_indices,
            columns,
        )
        kinds = torch.where(full, _FULL, kinds)
    return kinds


def _table(
    names: tuple[str, str],
    counts: Int[Tensor, "*leading rows"],
    indices: Int[Tensor, "*leading rows most"],
    columns: int,
) -> Bool[Tensor, "batch heads rows columns"]:
    """Blocks as booleans from the number of them in each row, and their columns."""
    counts = counts.reshape((1,) * (3 - counts.ndim) + tuple(counts.shape))
    indices = indices.reshape((1,) * (4 - indices.ndim) + tuple(indices.shape)).to(torch.int64)
    # An exported graph takes the table as it is.
    readable = not torch.compiler.is_exporting()
    wrong = (counts < 0) | (counts > indices.shape[3])
    if indices.shape[:3] != counts.shape or (readable and bool(wrong.any())):
        raise MaskError.about(
            "from_block_mask",
            "block_mask",
            must=f"have {names[0]} from 0 to {indices.shape[3]}, one for each row of {names[1]}",
            got=f"{repr_of(counts)} for {names[1]} of shape {tuple(indices.shape)}",
            then="Make the block mask with create_block_mask.",
        )
    used = torch.arange(indices.shape[3], device=indices.device) < counts[..., None]
    outside = used & ((indices < 0) | (indices >= columns))
    if readable and bool(outside.any()):
        raise MaskError.about(
            "from_block_mask",
            "block_mask",
            must=f"have {names[1]} from 0 to {columns - 1}, its last block of keys",
            got=int(indices[outside][0]),
            then="seq_lengths and BLOCK_SIZE say how many blocks there are.",
        )
    table = torch.zeros(*indices.shape[:3], columns + 1, dtype=torch.bool, device=indices.device)
    # Entries beyond a row's number of blocks may hold anything; they set a column that is cut off.
    table.scatter_(3, torch.where(used, indices, columns), True)
    return table[..., :columns]


class MaskMod(OfScalars, MaskFunction, Carrying):
    """FlexAttention's ``mask_mod(b, h, q_idx, kv_idx)`` of scalars, within the partial blocks of a table.

    Args:
        fn: the function, which returns a boolean scalar.
        kinds: int8 ``[batch | 1, heads | 1, q_blocks, k_blocks]``: 0 skipped, 1 partial, 2 full.
        block_size: queries and keys per block.
    """

    fields = ("fn", "kinds", "block_size")
    subject: ClassVar[UserFunction] = UserFunction(function="flex_attention", argument="mask_mod", **SCALARS)

    def __init__(
        self,
        fn: Callable[..., Tensor],
        kinds: Int[Tensor, "batch heads q_blocks k_blocks"],
        block_size: tuple[int, ...],
    ) -> None:
        super().__init__(fn)
        self.kinds, self.block_size = kinds, block_size

    def carries(self) -> tuple[int, int]:
        return self.kinds.shape[0], self.kinds.shape[1]

    def check(self, function: str, batch: int, heads: int, q_pos: range, k_len: int) -> None:
        super().check(function, batch, heads, q_pos, k_len)
        q_reach, k_reach = (count * size for count, size in zip(self.kinds.shape[2:], self.block_size, strict=True))
        if (len(q_pos) and (q_pos.start < 0 or q_pos.stop > q_reach)) or k_len > k_reach:
            raise MaskError.about(
                function,
                "mask",
                must=f"cover queries {q_pos.start} to {q_pos.stop - 1} and {k_len} keys",
                got=f"a block mask that covers {q_reach} and {k_reach}",
                then="Make the block mask for the lengths of the call.",
            )

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        row, column = q_pos // self.block_size[0], k_pos // self.block_size[1]
        # How many partial blocks there are decides shapes, which a graph must know without the elements.
        if torch.compiler.is_exporting() or not _are_apart(q_pos, k_pos):
            kinds = self._kinds(batch, head, row, column)
            return (kinds == _FULL) | (super().allows(batch, head, q_pos, k_pos) & (kinds == _PARTIAL))
        # The function is evaluated in partial blocks alone.
        rows, counts = row.flatten().unique_consecutive(return_counts=True)
        kinds = self._kinds(batch, head, rows.view(1, 1, -1, 1), column)
        strips = zip(kinds.split(1, dim=2), q_pos.split(counts.tolist(), dim=2), strict=True)
        whole = [self._allows_in_row(of_row, batch, head, queries, k_pos) for of_row, queries in strips]
        leading = [max(sizes) for sizes in zip(*(strip.shape[:2] for strip in whole), strict=True)]
        return torch.cat([strip.expand(*leading, -1, -1) for strip in whole], dim=2)

    def _allows_in_row(self, kinds: Tensor, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """``allows`` for queries of one row of blocks; ``kinds`` are those of their keys, with one row."""
        partial = kinds == _PARTIAL
        columns = partial.flatten(0, 2).any(dim=0).nonzero().flatten()
        full = (kinds == _FULL).expand(-1, -1, q_pos.shape[2], -1)
        if len(columns) == 0:
            return full
        inside = super().allows(batch, head, q_pos, k_pos[..., columns]) & partial[..., columns]
        leading = [max(sizes) for sizes in zip(full.shape[:2], inside.shape[:2], strict=True)]
        allowed = full.expand(*leading, -1, -1).clone()
        allowed[..., columns] |= inside
        return allowed

    def _evaluated(self, *indices: Tensor) -> Tensor:
        return call_user_function(self.subject, self.fn, MaskError, *indices, run=self._at_places)

    def _at_places(self, *indices: Tensor) -> Tensor:
        allowed = self.at_places(*indices)
        # torch.vmap expands what does not depend on an axis.
        for axis in range(min(2, allowed.ndim)):
            allowed = allowed.narrow(axis, 0, 1) if allowed.stride(axis) == 0 else allowed
        return allowed

    def _kinds(self, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """The kind of the block of each place."""
        size, heads = self.carries()
        if _are_apart(row, column):
            # Faster than an index for each place.
            kinds = self.kinds.index_select(2, row.flatten()).index_select(3, column.flatten())
            kinds = kinds if size == 1 else kinds.index_select(0, batch.flatten())
            return kinds if heads == 1 else kinds.index_select(1, head.flatten())
        return self.kinds[batch if size > 1 else batch * 0, head if heads > 1 else head * 0, row, column]

    def intervals(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_len: int) -> Intervals | None:
        plain = type(q_pos) is Tensor and q_pos.is_cpu and not has_dispatch_mode()
        if not plain or torch.compiler.is_compiling():
            return None
        traced = traced_intervals(self.fn, batch, head, q_pos, k_len, evaluate=self._at_places)
        return traced if traced is not None and self._agrees(traced, batch, head, q_pos, k_len) else None

    def _agrees(self, traced: Intervals, batch: Tensor, head: Tensor, q_pos: Tensor, k_len: int) -> bool:
        """Whether the function alone allows what the table allows: all of full blocks, nothing of skipped ones."""
        side = self.block_size[1]
        start = torch.arange(0, k_len, side, device=q_pos.device)
        stop = (start + side).clamp(max=k_len)
        kinds = self._kinds(batch, head, q_pos // self.block_size[0], (start // side).view(1, 1, 1, -1))
        allowed = traced.count_in_tiles(start, stop)
        wrong = ((kinds == _SKIPPED) & (allowed > 0)) | ((kinds == _FULL) & (allowed < stop - start))
        return not bool(wrong.any())


def _are_apart(rows: Tensor, columns: Tensor) -> bool:
    """Whether tensors of queries and keys have an axis each, ``[1, 1, queries, 1]`` and ``[1, 1, 1, keys]``."""
    return 4 == rows.ndim == columns.ndim and rows.numel() == rows.shape[2] > 0 < columns.numel() == columns.shape[3]
