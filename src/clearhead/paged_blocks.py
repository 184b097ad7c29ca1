"""Blocks of a paged KV cache: their memory, the sequences that hold each, and what a step takes and gives back."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from clearhead.errors import UnsupportedError
from clearhead.int8_rows import row_length
from clearhead.shapes import Float, Int

__all__ = ["BlockPlan", "BlockPool", "Reservation", "SequenceBlocks"]

#: Bytes of a huge page.
_HUGE: Final = 2**21


@dataclass(eq=False)
class SequenceBlocks:
    """What one sequence holds: its blocks in order, its length, and its row of the table."""

    row: int
    blocks: list[int]
    length: int = 0


class BlockPlan(NamedTuple):
    """What a step does to one sequence: tokens that it adds, blocks that it takes, and the index of a shared block that
    it copies first."""

    owner: SequenceBlocks
    tokens: int
    new: int
    copied: int | None


class Reservation(NamedTuple):
    """What undoes a plan: the blocks before, and the new ones."""

    plan: BlockPlan
    before: list[int]
    blocks: list[int]


class BlockPool:
    """The blocks of all layers, and a table with a row of them for each sequence.

    Attributes:
        num_layers, num_blocks, num_kv_heads, block_size, head_dim, value_dim: sizes, as ``PagedKVCache`` takes them.
        key, value: ``[num_layers, num_blocks, kv_heads, block_size, dim]``, or int8 rows.
        pages: of each layer, keys and values as views ``[num_blocks, block_size, kv_heads, dim]``.
        free: blocks that no sequence holds; the last one is taken next.
        holders: how many sequences hold each block.
        is_open: whether a step is in progress.
    """

    def __init__(
        self, num_layers: int, num_blocks: int, num_kv_heads: int, block_size: int, dims: tuple[int, int],
        dtype: torch.dtype | None, device: torch.device | str | None,
    ) -> None:  # fmt: skip
        self.num_layers, self.num_blocks, self.num_kv_heads = num_layers, num_blocks, num_kv_heads
        self.block_size, (self.head_dim, self.value_dim) = block_size, dims
        # The rows of one head in a block are one after the other, as the kernels read them.
        heads = (num_layers, num_blocks, num_kv_heads, block_size)
        self.key, self.value = (_storage((*heads, row_length(dim, dtype)), dtype, device) for dim in dims)
        self.pages: list[tuple[Float[Tensor, "pages size kv_heads dim"], Float[Tensor, "pages size kv_heads dim"]]]
        with torch.inference_mode(False):
            self.pages = [
                (self.key[layer].transpose(1, 2), self.value[layer].transpose(1, 2)) for layer in range(num_layers)
            ]
        self.free = list(range(num_blocks - 1, -1, -1))
        self.holders = [0] * num_blocks
        self.is_open = False
        self._rows = torch.zeros((8, 8), dtype=torch.int32)
        self._free_rows = list(range(7, -1, -1))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return self.key.dtype

    @property
    def device(self) -> torch.device:
        """Where keys and values are."""
        return self.key.device

    def add(self) -> SequenceBlocks:
        """A row of the table for a new sequence, without a block."""
        if not self._free_rows:
            count = self._rows.shape[0]
            self._rows = torch.cat([self._rows, torch.zeros_like(self._rows)])
            self._free_rows = list(range(2 * count - 1, count - 1, -1))
        return SequenceBlocks(self._free_rows.pop(), [])

    def remove(self, owner: SequenceBlocks) -> None:
        """Return a sequence's row and blocks."""
        self._free_rows.append(owner.row)
        self.release(owner.blocks)

    def blocks_for(self, length: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-length // self.block_size)

    def share(self, owner: SequenceBlocks, blocks: Sequence[int]) -> None:
        """Give a sequence without blocks those of another one."""
        for block in blocks:
            self.holders[block] += 1
        owner.blocks = [*blocks]
        self._write_row(owner, 0)

    def truncate(self, owner: SequenceBlocks, length: int) -> None:
        """Shorten a sequence and return the blocks that are then empty."""
        owner.length = length
        remaining = self.blocks_for(length)
        self.release(owner.blocks[remaining:])
        del owner.blocks[remaining:]

    def release(self, blocks: Iterable[int]) -> None:
        """Hold blocks once less."""
        for block in blocks:
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.free.append(block)

    def plan(self, owner: SequenceBlocks, count: int) -> BlockPlan:
        """What a step of so many new tokens does to a sequence."""
        new = self.blocks_for(owner.length + count) - len(owner.blocks)
        last = owner.length // self.block_size
        copied = last if count > 0 and last < len(owner.blocks) and self.holders[owner.blocks[last]] > 1 else None
        return BlockPlan(owner, count, new + (copied is not None), copied)

    def take(self, plan: BlockPlan) -> Reservation:
        """Give a sequence its new blocks; its earlier ones are released when the step ends."""
        owner, before = plan.owner, [*plan.owner.blocks]
        new = [self.free.pop() for _ in range(plan.new)]
        added = [*new]
        if plan.copied is not None:
            copy, original = added.pop(0), owner.blocks[plan.copied]
            for pages in (self.key, self.value):
                pages[:, copy] = pages[:, original]
            owner.blocks[plan.copied] = copy
            self._write_row(owner, plan.copied)
        for block in new:
            self.holders[block] = 1
        first = len(owner.blocks)
        owner.blocks += added
        self._write_row(owner, first)
        owner.length += plan.tokens
        return Reservation(plan, before, new)

    def keep(self, reservation: Reservation) -> None:
        """End a step: shared blocks that were copied lose a holder."""
        if reservation.plan.copied is not None:
            self.release([reservation.before[reservation.plan.copied]])

    def give_back(self, reservation: Reservation) -> None:
        """Undo a step."""
        owner = reservation.plan.owner
        owner.length -= reservation.plan.tokens
        owner.blocks = reservation.before
        self._write_row(owner, 0)
        self.release(reservation.blocks)

    def table(
        self, sequences: Sequence[SequenceBlocks]
    ) -> tuple[Int[Tensor, "sequences max_blocks"], Int[Tensor, " sequences"]]:
        """The blocks and lengths of sequences, on the device of the blocks."""
        columns = max((len(each.blocks) for each in sequences), default=0)
        rows = torch.tensor([each.row for each in sequences], dtype=torch.int64)
        lengths = torch.tensor([each.length for each in sequences], dtype=torch.int32)
        table = self._rows.index_select(0, rows)[:, :columns].contiguous()
        return table.to(self.device), lengths.to(self.device)

    def check_closed(self, function: str) -> None:
        """Raise within a step, on behalf of a public function."""
        if self.is_open:
            raise UnsupportedError.about(
                function, "the cache", must="be outside of `with cache.extend(...)`", got="a call within it",
                then="Leave the context first; a cache is for one thread.",
            )  # fmt: skip

    def _write_row(self, owner: SequenceBlocks, first: int) -> None:
        count = len(owner.blocks)
        if count > self._rows.shape[1]:
            wider = torch.zeros((self._rows.shape[0], max(count, 2 * self._rows.shape[1])), dtype=torch.int32)
            wider[:, : self._rows.shape[1]] = self._rows
            self._rows = wider
        if first < count:
            self._rows[owner.row, first:count] = torch.tensor(owner.blocks[first:], dtype=torch.int32)


def _storage(sizes: tuple[int, ...], dtype: torch.dtype | None, device: torch.device | str | None) -> Tensor:
    """An uninitialised tensor; on the CPU in huge pages of memory where the system has them.

    Blocks lie in any order: with pages of 4 KiB the look-up of addresses took half of the time of reading them
    (measured: 131 MB, blocks of 16 tokens of 256 bytes).
    """
    with torch.inference_mode(False):
        like = torch.empty(0, dtype=dtype, device=device)
        count = math.prod(sizes)
        if like.device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE") or count * like.itemsize < _HUGE:
            return like.new_empty(sizes)
        memory = mmap.mmap(-1, count * like.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=like.dtype).view(sizes)
