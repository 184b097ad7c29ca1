"""A KV cache in pages, which many sequences of different lengths share."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor

from clearhead.arguments import repr_of, whole
from clearhead.errors import CacheFullError, ShapeError, UnsupportedError
from clearhead.functional.paged import PageTable, attend_to_pages
from clearhead.masks import Causal, Mask
from clearhead.ops.kinds import DTYPES
from clearhead.ops.library import in_memory, library
from clearhead.scores import ScoreRule, as_rules
from clearhead.shapes import Float, Int

__all__ = ["PagedKVCache", "PagedLayer", "PagedSequences", "PagedStep", "write_pages"]

_NAME: Final = "PagedKVCache"
#: Bytes of a huge page.
_HUGE: Final = 2**21


@dataclass(eq=False)
class _Blocks:
    """What one sequence holds: its blocks in order, its length, and its row of the table."""

    row: int
    blocks: list[int]
    length: int = 0


class PagedKVCache:
    """Keys and values of many sequences in blocks of ``block_size`` tokens, for all layers of a model.

    A sequence takes a block when it needs one and returns its blocks when it is removed, so memory is used for cached
    tokens and not for the longest sequence. ``fork`` shares blocks; a shared block is copied when one of its sequences
    writes into it (copy-on-write). When no block is free, ``extend`` raises and the cache is unmodified.

    Args:
        num_layers: layers of the model.
        num_blocks: blocks of each layer, shared by all sequences.
        num_kv_heads: heads of keys and values.
        head_dim: channels of a head of keys.
        block_size: tokens of a block. The CPU kernels read a multiple of 16 in place, and copy tiles of others first. A
            sequence leaves half a block empty on average; blocks of 16 are read up to a fifth slower than those of 64.
        value_dim: channels of a head of values; by default ``head_dim``.
        dtype: of keys and values; by default torch's default dtype.
        device: where they are; by default torch's default device.

    Raises:
        ShapeError: a size is no whole number from 1.

    Cost: memory for ``num_layers * num_blocks * block_size * num_kv_heads * (head_dim + value_dim)`` elements.

    Paper: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention".

    Example: two sequences that share a prefix of 40 tokens.

    >>> import torch
    >>> cache = PagedKVCache(num_layers=1, num_blocks=8, num_kv_heads=2, head_dim=4, block_size=16)
    >>> first = cache.add()
    >>> with torch.no_grad(), cache.extend({first: 40}) as step:
    ...     query, key, value = torch.randn(3, 1, 2, 40, 4)
    ...     output = step.attend(0, query, key, value)
    >>> second = cache.fork(first)
    >>> cache
    PagedKVCache(sequences=2, tokens=80, blocks: 3 used of 8, 3 shared, block_size=16)
    >>> with torch.no_grad(), cache.extend({first: 1, second: 1}) as step:
    ...     query, key, value = torch.randn(3, 1, 2, 2, 4)
    ...     output = step.attend(0, query, key, value)
    >>> cache.length(first), cache.used_blocks, cache.shared_blocks
    (41, 4, 2)
    """

    def __init__(
        self, num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int, *, block_size: int = 64,
        value_dim: int | None = None, dtype: torch.dtype | None = None, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        self.num_layers = whole(_NAME, "num_layers", num_layers, low=1)
        self.num_blocks = whole(_NAME, "num_blocks", num_blocks, low=1, high=2**31 - 1)
        self.num_kv_heads = whole(_NAME, "num_kv_heads", num_kv_heads, low=1)
        self.head_dim = whole(_NAME, "head_dim", head_dim, low=1)
        self.block_size = whole(_NAME, "block_size", block_size, low=1, high=2**31 - 1)
        self.value_dim = self.head_dim if value_dim is None else whole(_NAME, "value_dim", value_dim, low=1)
        heads = (self.num_layers, self.num_blocks, self.num_kv_heads, self.block_size)
        # The rows of one head in a block are one after the other, as the kernels read them.
        self._key = _storage((*heads, self.head_dim), dtype, device)
        self._value = _storage((*heads, self.value_dim), dtype, device)
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._holders = [0] * self.num_blocks
        self._sequences: dict[int, _Blocks] = {}
        self._rows = torch.zeros((8, 8), dtype=torch.int32)
        self._free_rows = list(range(7, -1, -1))
        self._next = 0
        self._open = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return self._key.dtype

    @property
    def device(self) -> torch.device:
        """Where keys and values are."""
        return self._key.device

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences in the order in which they were added."""
        return tuple(self._sequences)

    @property
    def free_blocks(self) -> int:
        """Number of blocks that no sequence holds."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Number of blocks that sequences hold, each counted once."""
        return self.num_blocks - len(self._free)

    @property
    def shared_blocks(self) -> int:
        """Number of blocks that more than one sequence holds."""
        return sum(holders > 1 for holders in self._holders)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks of all layers."""
        return self._key.nbytes + self._value.nbytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that sequences hold."""
        return self.nbytes // self.num_blocks * self.used_blocks

    def key_pages(self, layer: int) -> Float[Tensor, "num_blocks block_size kv_heads head_dim"]:
        """A layer's keys, ``[num_blocks, block_size, kv_heads, head_dim]``, for ``ch.functional.paged_attention``; a
        view."""
        return self._key[layer].transpose(1, 2)

    def value_pages(self, layer: int) -> Float[Tensor, "num_blocks block_size kv_heads value_dim"]:
        """A layer's values, ``[num_blocks, block_size, kv_heads, value_dim]``; a view."""
        return self._value[layer].transpose(1, 2)

    def length(self, sequence: int) -> int:
        """Number of cached tokens of a sequence.

        Raises:
            ShapeError: there is no such sequence.
        """
        return self._of("length", sequence).length

    def block_table(
        self, sequences: Sequence[int]
    ) -> tuple[Int[Tensor, "sequences max_blocks"], Int[Tensor, " sequences"]]:
        """The blocks and lengths of sequences, as ``ch.functional.paged_attention`` takes them.

        Args:
            sequences: in the order of the rows.

        Returns:
            int32 ``[sequences, max_blocks]``, zeros beyond a sequence's last block, and int32 ``[sequences]``.

        Raises:
            ShapeError: there is no such sequence.
        """
        return self._table([self._of("block_table", each) for each in sequences])

    def add(self) -> int:
        """Add an empty sequence and return its number. It holds no block until it is extended."""
        if not self._free_rows:
            count = self._rows.shape[0]
            self._rows = torch.cat([self._rows, torch.zeros_like(self._rows)])
            self._free_rows = list(range(2 * count - 1, count - 1, -1))
        sequence, self._next = self._next, self._next + 1
        self._sequences[sequence] = _Blocks(self._free_rows.pop(), [])
        return sequence

    def fork(self, sequence: int, length: int | None = None) -> int:
        """Add a sequence that begins with the tokens of another one, and shares their blocks.

        Args:
            sequence: the sequence to begin with.
            length: how many of its tokens; by default all.

        Returns:
            The new sequence's number. No block is copied until one of the sequences writes into a shared one.

        Raises:
            ShapeError: there is no such sequence, or ``length`` exceeds it.
        """
        source = self._of("fork", sequence)
        length = (
            source.length if length is None else whole(f"{_NAME}.fork", "length", length, low=0, high=source.length)
        )
        forked = self.add()
        blocks = self._sequences[forked]
        blocks.length = length
        self._hold(blocks, source.blocks[: self._blocks_for(length)])
        return forked

    def truncate(self, sequence: int, length: int) -> None:
        """Remove a sequence's tokens from position ``length`` on, and return the blocks that are then empty.

        Args:
            sequence: the sequence.
            length: number of tokens that remain, from 0 to the number of cached ones.

        Raises:
            ShapeError: there is no such sequence, or ``length`` is out of range.
        """
        self._closed("truncate")
        blocks = self._of("truncate", sequence)
        blocks.length = whole(f"{_NAME}.truncate", "length", length, low=0, high=blocks.length)
        remaining = self._blocks_for(blocks.length)
        self._release(blocks.blocks[remaining:])
        del blocks.blocks[remaining:]

    def remove(self, sequence: int) -> None:
        """Remove a sequence and return the blocks that no other one holds.

        Raises:
            ShapeError: there is no such sequence.
        """
        self._closed("remove")
        blocks = self._of("remove", sequence)
        del self._sequences[sequence]
        self._free_rows.append(blocks.row)
        self._release(blocks.blocks)

    def reset(self) -> None:
        """Remove every sequence."""
        for sequence in self.sequences:
            self.remove(sequence)

    def select(self, sequences: Iterable[int]) -> PagedSequences:
        """Sequences as ``cache=`` of a ``ch.nn.LanguageModel``: row ``i`` of a batch extends the ``i``-th of them.

        Raises:
            ShapeError: there is no such sequence, or one is given twice.
        """
        return PagedSequences(self, sequences)

    def extend(self, counts: Mapping[int, int]) -> PagedStep:
        """Reserve blocks for new tokens of sequences, all or none.

        Args:
            counts: the number of new tokens of each sequence, in the order in which their tokens are given.

        Returns:
            A context within which keys and values are appended, layer by layer. At its end the sequences are longer by
            ``counts``; where an exception leaves it, they and the blocks are as before.

        Raises:
            ShapeError: there is no such sequence, or a count is negative.
            CacheFullError: there are not enough free blocks; nothing was changed.
        """
        name = f"{_NAME}.extend"
        self._closed("extend")
        plans: list[_Plan] = []
        for sequence, count in counts.items():
            blocks = self._of("extend", sequence)
            plans.append(self._plan(blocks, whole(name, "counts", count, low=0, high=2**31 - 1 - blocks.length)))
        needed = sum(plan.new for plan in plans)
        if needed > len(self._free):
            raise CacheFullError.about(
                name, "counts", must=f"fit into the {len(self._free)} free blocks of {self.block_size} tokens",
                got=f"{sum(counts.values())} tokens that need {needed} blocks",
                then="Remove or truncate a sequence, or make the cache with more num_blocks.",
            )  # fmt: skip
        return PagedStep(self, plans)

    # ---- for steps ---------------------------------------------------------------------------------------------------

    def _plan(self, blocks: _Blocks, count: int) -> _Plan:
        new = self._blocks_for(blocks.length + count) - len(blocks.blocks)
        last = blocks.length // self.block_size
        copied = last if count > 0 and last < len(blocks.blocks) and self._holders[blocks.blocks[last]] > 1 else None
        return _Plan(blocks, count, new + (copied is not None), copied)

    def _take(self, plan: _Plan) -> _Reservation:
        """Give a sequence its new blocks; its earlier ones stay held until the step ends."""
        blocks, before = plan.blocks, [*plan.blocks.blocks]
        new = [self._free.pop() for _ in range(plan.new)]
        added = [*new]
        if plan.copied is not None:
            copy, original = added.pop(0), blocks.blocks[plan.copied]
            for pages in (self._key, self._value):
                pages[:, copy] = pages[:, original]
            blocks.blocks[plan.copied] = copy
            self._write_row(blocks, plan.copied)
        for block in new:
            self._holders[block] = 1
        first = len(blocks.blocks)
        blocks.blocks += added
        self._write_row(blocks, first)
        blocks.length += plan.tokens
        return _Reservation(plan, before, new)

    def _keep(self, reservation: _Reservation) -> None:
        """End a step: shared blocks that were copied are held once less."""
        if reservation.plan.copied is not None:
            self._release([reservation.before[reservation.plan.copied]])

    def _give_back(self, reservation: _Reservation) -> None:
        """Undo a step."""
        blocks = reservation.plan.blocks
        blocks.length -= reservation.plan.tokens
        blocks.blocks = reservation.before
        self._write_row(blocks, 0)
        self._release(reservation.blocks)

    def _table(self, sequences: Sequence[_Blocks]) -> tuple[Tensor, Tensor]:
        columns = max((len(each.blocks) for each in sequences), default=0)
        rows = torch.tensor([each.row for each in sequences], dtype=torch.int64)
        lengths = torch.tensor([each.length for each in sequences], dtype=torch.int32)
        table = self._rows.index_select(0, rows)[:, :columns].contiguous()
        return table.to(self.device), lengths.to(self.device)

    def _blocks_for(self, length: int) -> int:
        return -(-length // self.block_size)

    def _hold(self, blocks: _Blocks, shared: Sequence[int]) -> None:
        for block in shared:
            self._holders[block] += 1
        blocks.blocks = [*shared]
        self._write_row(blocks, 0)

    def _release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.append(block)

    def _write_row(self, blocks: _Blocks, first: int) -> None:
        count = len(blocks.blocks)
        if count > self._rows.shape[1]:
            wider = torch.zeros((self._rows.shape[0], max(count, 2 * self._rows.shape[1])), dtype=torch.int32)
            wider[:, : self._rows.shape[1]] = self._rows
            self._rows = wider
        if first < count:
            self._rows[blocks.row, first:count] = torch.tensor(blocks.blocks[first:], dtype=torch.int32)

    def _of(self, method: str, sequence: object) -> _Blocks:
        blocks = self._sequences.get(sequence) if isinstance(sequence, int) else None
        if blocks is None:
            raise ShapeError.about(
                f"{_NAME}.{method}", "sequence", must="be one that add() or fork() gave and that was not removed",
                got=repr_of(sequence), then="See cache.sequences.",
            )  # fmt: skip
        return blocks

    def _closed(self, method: str) -> None:
        if self._open:
            raise UnsupportedError.about(
                f"{_NAME}.{method}", "the cache", must="be outside of `with cache.extend(...)`", got="a call within it",
                then="Leave the context first; a cache is for one thread.",
            )  # fmt: skip

    def __repr__(self) -> str:
        tokens = sum(each.length for each in self._sequences.values())
        return (
            f"{_NAME}(sequences={len(self._sequences)}, tokens={tokens}, blocks: {self.used_blocks} used of "
            f"{self.num_blocks}, {self.shared_blocks} shared, block_size={self.block_size})"
        )


class _Plan(NamedTuple):
    """What a step does to one sequence: tokens that it adds, blocks that it takes, and the index of a shared block that
    it copies first."""

    blocks: _Blocks
    tokens: int
    new: int
    copied: int | None


class _Reservation(NamedTuple):
    """What undoes a plan: the blocks before, and the new ones."""

    plan: _Plan
    before: list[int]
    blocks: list[int]


class PagedStep:
    """New tokens of sequences of a ``PagedKVCache``, from ``PagedKVCache.extend``; a context manager.

    Within ``with cache.extend(counts) as step`` call ``attend`` or ``append`` once for every layer. The tokens of all
    sequences are one packed sequence ``[1, heads, total, head_dim]``.

    Attributes:
        cache: the cache.
        counts: the number of new tokens of each sequence.

    >>> cache = PagedKVCache(1, 4, num_kv_heads=1, head_dim=2)
    >>> with torch.no_grad(), cache.extend({cache.add(): 3, cache.add(): 1}) as step:
    ...     step.attend(0, *torch.randn(3, 1, 1, 4, 2)).shape
    torch.Size([1, 1, 4, 2])
    """

    def __init__(self, cache: PagedKVCache, plans: Sequence[_Plan]) -> None:
        self.cache = cache
        self.counts = [plan.tokens for plan in plans]
        self._plans = plans
        self._reservations: list[_Reservation] = []

    def __enter__(self) -> Self:
        self.cache._closed("extend")
        self.cache._open = True
        self._reservations = [self.cache._take(plan) for plan in self._plans]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cache._open = False
        for reservation in self._reservations:
            if kind is None:
                self.cache._keep(reservation)
            else:
                self.cache._give_back(reservation)

    @cached_property
    def table(self) -> PageTable:
        """Blocks, lengths with the new tokens, and where the tokens of each sequence start."""
        table, lengths = self.cache._table([plan.blocks for plan in self._plans])
        starts = torch.tensor([0, *self.counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return PageTable(table, lengths, starts.to(table.device))

    @cached_property
    def longest(self) -> int:
        """The largest length, with the new tokens."""
        return max((plan.blocks.length for plan in self._plans), default=0)

    @cached_property
    def positions(self) -> Int[Tensor, " total"]:
        """The position of every new token in its sequence, int64 ``[total]``."""
        lengths = [plan.blocks.length for plan in self._plans]
        if all(count == 1 for count in self.counts):
            return torch.tensor(lengths, dtype=torch.int64, device=self.cache.device) - 1
        ranges = [torch.arange(length - count, length) for length, count in zip(lengths, self.counts, strict=True)]
        return torch.cat(ranges).to(self.cache.device) if ranges else torch.empty(0, dtype=torch.int64)

    def append(
        self,
        layer: int,
        key: Float[Tensor, "one kv_heads total head_dim"],
        value: Float[Tensor, "one kv_heads total value_dim"],
    ) -> None:
        """Write a layer's keys and values of the new tokens into their pages.

        Args:
            layer: from 0.
            key: ``[1, kv_heads, total, head_dim]``, the new tokens of all sequences one after the other.
            value: ``[1, kv_heads, total, value_dim]``.

        Raises:
            ShapeError: the tensors do not fit the cache.
            UnsupportedError: a tensor requires a gradient, which a cache does not pass on.
        """
        name, cache = "PagedStep.append", self.cache
        layer = whole(name, "layer", layer, low=0, high=cache.num_layers - 1)
        total = sum(self.counts)
        for argument, rows, dim in (("key", key, cache.head_dim), ("value", value, cache.value_dim)):
            wanted = (1, cache.num_kv_heads, total, dim)
            if not isinstance(rows, Tensor) or rows.shape != wanted or rows.dtype != cache.dtype:
                got = f"shape {tuple(rows.shape)} of {rows.dtype}" if isinstance(rows, Tensor) else type(rows).__name__
                raise ShapeError.about(
                    name, argument, must=f"have shape {wanted} of {cache.dtype}", got=got,
                    then="Pack the new tokens of all sequences in the order of extend's counts.",
                )  # fmt: skip
            if torch.is_grad_enabled() and rows.requires_grad:
                raise UnsupportedError.about(
                    name, argument, must="need no gradient", got="one that does",
                    then="Call it under torch.no_grad(); ch.KVCache passes gradients on.",
                )  # fmt: skip
        write_pages(cache, layer, key, value, self.table)

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "one heads total head_dim"],
        key: Float[Tensor, "one kv_heads total head_dim"],
        value: Float[Tensor, "one kv_heads total value_dim"],
        *,
        mask: Mask | None = None,
        scores: ScoreRule | Iterable[ScoreRule] = (),
        scale: float | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "one heads total value_dim"]:
        """Append a layer's keys and values, and attend causally to each sequence's own tokens.

        Args:
            layer: from 0.
            query: ``[1, heads, total, head_dim]``, the new tokens of all sequences one after the other.
            key: ``[1, kv_heads, total, head_dim]``.
            value: ``[1, kv_heads, total, value_dim]``.
            mask: a ``Window`` that forbids more than the causal order does.
            scores: score rules, as ``ch.functional.paged_attention`` takes them.
            scale: factor on ``query @ key^T``; by default ``1 / sqrt(head_dim)``.
            backend: as ``ch.functional.paged_attention`` takes it.

        Returns:
            ``[1, heads, total, value_dim]``.

        Raises:
            ShapeError, MaskError, UnsupportedError: the arguments do not fit.
        """
        self.append(layer, key, value)
        pages = self.cache.key_pages(layer), self.cache.value_pages(layer)
        return attend_to_pages(
            "PagedStep.attend", (query, *pages), self.table, mask=Causal() if mask is None else Causal() & mask,
            scores=as_rules("PagedStep.attend", scores), scale=scale, backend=backend,
        )[0]  # fmt: skip


def write_pages(cache: PagedKVCache, layer: int, key: Tensor, value: Tensor, table: PageTable) -> None:
    """Write the keys and values of the last tokens of sequences into pages that no other sequence holds.

    Args:
        cache: the cache.
        layer: from 0.
        key: ``[batch, kv_heads, new, head_dim]``, as queries are laid out under ``table``.
        value: ``[batch, kv_heads, new, value_dim]``.
        table: blocks and lengths of the sequences, the new tokens included.
    """
    pages = cache.key_pages(layer), cache.value_pages(layer)
    if (
        library() is not None
        and cache.device.type == "cpu"
        and all(map(in_memory, (*pages, key, value)))
        and (cache.dtype in DTYPES)
    ):
        torch.ops.clearhead.paged_append.default(*pages, key, value, *table)
        return
    starts = None if table.query_start is None else table.query_start.tolist()
    for place, length in enumerate(table.lengths.tolist()):
        rows = slice(None) if starts is None else slice(starts[place], starts[place + 1])
        entry = place if starts is None else 0
        new = key[entry, :, rows].shape[1]
        positions = torch.arange(length - new, length, device=cache.device)
        blocks = table.block_table[place, positions // cache.block_size].to(torch.int64)
        for to, part in zip(pages, (key, value), strict=True):
            to[blocks, positions % cache.block_size] = part[entry, :, rows].transpose(0, 1)


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


class PagedSequences:
    """Sequences of a ``PagedKVCache`` as ``cache=`` of a model, from ``PagedKVCache.select``.

    >>> cache = PagedKVCache(1, 4, num_kv_heads=1, head_dim=2)
    >>> cache.select([cache.add(), cache.add()])
    PagedSequences([0, 1], lengths=[0, 0])
    """

    def __init__(self, cache: PagedKVCache, sequences: Iterable[int]) -> None:
        self.cache = cache
        self.sequences = [*sequences]
        for sequence in self.sequences:
            cache._of("select", sequence)
        if len({*self.sequences}) < len(self.sequences):
            raise ShapeError.about(
                f"{_NAME}.select", "sequences", must="be distinct", got=self.sequences,
                then="fork() gives a sequence that begins like another one.",
            )  # fmt: skip

    @property
    def lengths(self) -> list[int]:
        """Number of cached tokens of each."""
        return [self.cache.length(sequence) for sequence in self.sequences]

    def extend(self, counts: Sequence[int]) -> PagedStep:
        """``PagedKVCache.extend`` by so many tokens each."""
        return self.cache.extend(dict(zip(self.sequences, counts, strict=True)))

    def __len__(self) -> int:
        return len(self.sequences)

    def __repr__(self) -> str:
        return f"PagedSequences({self.sequences}, lengths={self.lengths})"


class PagedLayer(NamedTuple):
    """One layer of a step, as ``cache=`` of an attention."""

    step: PagedStep
    layer: int

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        """The layer's pages of keys and of values."""
        return self.step.cache.key_pages(self.layer), self.step.cache.value_pages(self.layer)
