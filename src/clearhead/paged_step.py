"""A step of a paged KV cache: new tokens of its sequences, appended to their blocks layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from types import TracebackType
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor

from clearhead.arguments import whole
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.functional.paged import PageTable, attend_to_pages
from clearhead.int8_rows import is_quantized, quantize
from clearhead.masks import Causal, Mask
from clearhead.ops.kinds import DTYPES
from clearhead.ops.library import in_memory, library
from clearhead.paged_blocks import BlockPlan, BlockPool, Reservation
from clearhead.scores import ScoreRule, as_rules
from clearhead.shapes import Float, Int

__all__ = ["PagedLayer", "PagedStep", "write_pages"]

_CAUSAL: Final = Causal()


class PagedStep:
    """New tokens of sequences of a ``PagedKVCache``, from ``PagedKVCache.extend``; a context manager.

    Within ``with cache.extend(counts) as step`` call ``attend`` or ``append`` once for every layer. The tokens of all
    sequences are one packed sequence ``[1, heads, total, head_dim]``.

    Attributes:
        pool: the blocks of the cache.
        counts: the number of new tokens of each sequence.

    >>> import clearhead as ch
    >>> cache = ch.PagedKVCache(1, 4, num_kv_heads=1, head_dim=2)
    >>> with torch.no_grad(), cache.extend({cache.add(): 3, cache.add(): 1}) as step:
    ...     step.attend(0, *torch.randn(3, 1, 1, 4, 2)).shape
    torch.Size([1, 1, 4, 2])
    """

    def __init__(self, pool: BlockPool, plans: Sequence[BlockPlan]) -> None:
        self.pool = pool
        self.counts = [plan.tokens for plan in plans]
        self._total = sum(self.counts)
        self._plans = plans
        self._reservations: list[Reservation] = []

    def __enter__(self) -> Self:
        self.pool.check_closed("PagedKVCache.extend")
        self.pool.is_open = True
        self._reservations = [self.pool.take(plan) for plan in self._plans]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pool.is_open = False
        for reservation in self._reservations:
            if kind is None:
                self.pool.keep(reservation)
            else:
                self.pool.give_back(reservation)

    @cached_property
    def table(self) -> PageTable:
        """Blocks, lengths with the new tokens, and where the tokens of each sequence start."""
        table, lengths = self.pool.table([plan.owner for plan in self._plans])
        starts = torch.tensor([0, *self.counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return PageTable(table, lengths, starts.to(table.device))

    @cached_property
    def longest(self) -> int:
        """The largest length, with the new tokens."""
        return max((plan.owner.length for plan in self._plans), default=0)

    @cached_property
    def positions(self) -> Int[Tensor, " total"]:
        """The position of every new token in its sequence, int64 ``[total]``."""
        lengths = [plan.owner.length for plan in self._plans]
        if all(count == 1 for count in self.counts):
            return torch.tensor(lengths, dtype=torch.int64, device=self.pool.device) - 1
        ranges = [torch.arange(length - count, length) for length, count in zip(lengths, self.counts, strict=True)]
        return torch.cat(ranges).to(self.pool.device) if ranges else torch.empty(0, dtype=torch.int64)

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
        name, pool = "PagedStep.append", self.pool
        layer = whole(name, "layer", layer, low=0, high=pool.num_layers - 1)
        for argument, rows, dim in (("key", key, pool.head_dim), ("value", value, pool.value_dim)):
            wanted = (1, pool.num_kv_heads, self._total, dim)
            if not isinstance(rows, Tensor) or rows.shape != wanted or not _takes(pool.dtype, rows):
                got = f"shape {tuple(rows.shape)} of {rows.dtype}" if isinstance(rows, Tensor) else type(rows).__name__
                raise ShapeError.about(
                    name, argument, must=f"have shape {wanted} of {_written(pool.dtype)}", got=got,
                    then="Pack the new tokens of all sequences in the order of extend's counts.",
                )  # fmt: skip
            if torch.is_grad_enabled() and rows.requires_grad:
                raise UnsupportedError.about(
                    name, argument, must="need no gradient", got="one that does",
                    then="Call it under torch.no_grad(); ch.KVCache passes gradients on.",
                )  # fmt: skip
        write_pages(pool.pages[layer], key, value, self.table)

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
        return attend_to_pages(
            "PagedStep.attend", (query, *self.pool.pages[layer]), self.table,
            mask=_CAUSAL if mask is None else _CAUSAL & mask,
            scores=as_rules("PagedStep.attend", scores), scale=scale, backend=backend,
        )[0]  # fmt: skip


def write_pages(pages: tuple[Tensor, Tensor], key: Tensor, value: Tensor, table: PageTable) -> None:
    """Write the keys and values of the last tokens of sequences into pages that no other sequence holds.

    Args:
        pages: a layer's pages of keys and of values, ``[num_blocks, block_size, kv_heads, dim]``.
        key: ``[batch, kv_heads, new, head_dim]``, as queries are laid out under ``table``.
        value: ``[batch, kv_heads, new, value_dim]``.
        table: blocks and lengths of the sequences, the new tokens included.
    """
    if library() is not None and pages[0].is_cpu and key.dtype in DTYPES and in_memory(*pages, key, value):
        torch.ops.clearhead.paged_append.default(*pages, key, value, *table)
        return
    size, device = pages[0].shape[1], pages[0].device
    starts = None if table.query_start is None else table.query_start.tolist()
    for place, length in enumerate(table.lengths.tolist()):
        rows = slice(None) if starts is None else slice(starts[place], starts[place + 1])
        entry = place if starts is None else 0
        new = key[entry, :, rows].shape[1]
        positions = torch.arange(length - new, length, device=device)
        blocks = table.block_table[place, positions // size].to(torch.int64)
        for to, part in zip(pages, (key, value), strict=True):
            new_rows = quantize(part[entry, :, rows]) if is_quantized(to) else part[entry, :, rows]
            to[blocks, positions % size] = new_rows.transpose(0, 1)


def _takes(dtype: torch.dtype, rows: Tensor) -> bool:
    """Whether pages of a dtype take these rows."""
    return rows.is_floating_point() if dtype is torch.int8 else rows.dtype == dtype


def _written(dtype: torch.dtype) -> str:
    return "a floating-point dtype" if dtype is torch.int8 else str(dtype)


class PagedLayer(NamedTuple):
    """One layer of a step, as ``cache=`` of an attention."""

    step: PagedStep
    layer: int

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        """The layer's pages of keys and of values."""
        return self.step.pool.pages[self.layer]
