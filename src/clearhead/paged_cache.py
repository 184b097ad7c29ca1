"""A KV cache in pages, which many sequences of different lengths share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from clearhead.arguments import repr_of, whole
from clearhead.errors import CacheFullError, ShapeError
from clearhead.paged_blocks import BlockPlan, BlockPool, SequenceBlocks
from clearhead.paged_step import PagedStep
from clearhead.shapes import Float, Int

__all__ = ["PagedKVCache", "PagedSequences"]

_NAME: Final = "PagedKVCache"


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
        dtype: of keys and values; by default torch's default dtype. With ``torch.int8`` a row of keys or values is
            rounded to int8 integers with one float32 scale, as ``KVCache`` does, and takes ``head_dim + 4`` bytes.
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
        self._pool = BlockPool(
            self.num_layers, self.num_blocks, self.num_kv_heads, self.block_size, (self.head_dim, self.value_dim),
            dtype, device,
        )  # fmt: skip
        self._sequences: dict[int, SequenceBlocks] = {}
        self._next = 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return self._pool.dtype

    @property
    def device(self) -> torch.device:
        """Where keys and values are."""
        return self._pool.device

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences in the order in which they were added."""
        return tuple(self._sequences)

    @property
    def free_blocks(self) -> int:
        """Number of blocks that no sequence holds."""
        return len(self._pool.free)

    @property
    def used_blocks(self) -> int:
        """Number of blocks that sequences hold, each counted once."""
        return self.num_blocks - len(self._pool.free)

    @property
    def shared_blocks(self) -> int:
        """Number of blocks that more than one sequence holds."""
        return sum(holders > 1 for holders in self._pool.holders)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks of all layers."""
        return self._pool.key.nbytes + self._pool.value.nbytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that sequences hold."""
        return self.nbytes // self.num_blocks * self.used_blocks

    def key_pages(self, layer: int) -> Float[Tensor, "num_blocks block_size kv_heads head_dim"]:
        """A layer's keys, ``[num_blocks, block_size, kv_heads, head_dim]``, for ``ch.functional.paged_attention``; a
        view."""
        return self._pool.pages[layer][0]

    def value_pages(self, layer: int) -> Float[Tensor, "num_blocks block_size kv_heads value_dim"]:
        """A layer's values, ``[num_blocks, block_size, kv_heads, value_dim]``; a view."""
        return self._pool.pages[layer][1]

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
        return self._pool.table([self._of("block_table", each) for each in sequences])

    def add(self) -> int:
        """Add an empty sequence and return its number. It holds no block until it is extended."""
        sequence, self._next = self._next, self._next + 1
        self._sequences[sequence] = self._pool.add()
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
        owner = self._sequences[forked]
        owner.length = length
        self._pool.share(owner, source.blocks[: self._pool.blocks_for(length)])
        return forked

    def truncate(self, sequence: int, length: int) -> None:
        """Remove a sequence's tokens from position ``length`` on, and return the blocks that are then empty.

        Args:
            sequence: the sequence.
            length: number of tokens that remain, from 0 to the number of cached ones.

        Raises:
            ShapeError: there is no such sequence, or ``length`` is out of range.
        """
        self._pool.check_closed(f"{_NAME}.truncate")
        owner = self._of("truncate", sequence)
        self._pool.truncate(owner, whole(f"{_NAME}.truncate", "length", length, low=0, high=owner.length))

    def remove(self, sequence: int) -> None:
        """Remove a sequence and return the blocks that no other one holds.

        Raises:
            ShapeError: there is no such sequence.
        """
        self._pool.check_closed(f"{_NAME}.remove")
        owner = self._of("remove", sequence)
        del self._sequences[sequence]
        self._pool.remove(owner)

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
        pool = self._pool
        pool.check_closed(name)
        plans: list[BlockPlan] = []
        for sequence, count in counts.items():
            owner = self._of("extend", sequence)
            plans.append(pool.plan(owner, whole(name, "counts", count, low=0, high=2**31 - 1 - owner.length)))
        needed = sum(plan.new for plan in plans)
        if needed > len(pool.free):
            raise CacheFullError.about(
                name,
                "counts",
                must=f"fit into the {len(pool.free)} free blocks of {self.block_size} tokens",
                got=f"{sum(counts.values())} tokens that need {needed} blocks",
                then="Remove or truncate a sequence, or make the cache with more num_blocks.",
            )
        return PagedStep(pool, plans)

    def _of(self, method: str, sequence: object) -> SequenceBlocks:
        owner = self._sequences.get(sequence) if isinstance(sequence, int) else None
        if owner is None:
            raise ShapeError.about(
                f"{_NAME}.{method}", "sequence", must="be one that add() or fork() gave and that was not removed",
                got=repr_of(sequence), then="See cache.sequences.",
            )  # fmt: skip
        return owner

    def __repr__(self) -> str:
        tokens = sum(each.length for each in self._sequences.values())
        return (
            f"{_NAME}(sequences={len(self._sequences)}, tokens={tokens}, blocks: {self.used_blocks} used of "
            f"{self.num_blocks}, {self.shared_blocks} shared, block_size={self.block_size})"
        )


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
