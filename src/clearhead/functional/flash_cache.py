"""flash-attention's function that appends to a cache and attends to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.arguments import repr_of, whole
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.functional.flash_call import FlashOptions, check_batch, packed
from clearhead.functional.varlen import VarlenLayout
from clearhead.shapes import Float, Int

__all__ = ["flash_attn_with_kvcache"]


def flash_attn_with_kvcache(
    q: Float[Tensor, "batch q_len heads head_dim"],
    k_cache: Float[Tensor, "batch cache_len kv_heads head_dim"],
    v_cache: Float[Tensor, "batch cache_len kv_heads value_dim"],
    k: Float[Tensor, "batch new_len kv_heads head_dim"] | None = None,
    v: Float[Tensor, "batch new_len kv_heads value_dim"] | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Int[Tensor, " batch"] | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Int[Tensor, "batch pages"] | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Float[Tensor, "*batch heads"] | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Write new keys and values into a cache in place and attend to it; ``flash_attn.flash_attn_with_kvcache``.

    ``softmax(softcap(scale * q @ k_cache^T) - slopes * distance where the window allows) @ v_cache`` over the keys that
    exist.

    Args:
        q: ``[batch, q_len, heads, head_dim]``.
        k_cache: ``[batch, cache_len, kv_heads, head_dim]``, or a pool ``[pages, page_size, kv_heads, head_dim]`` with
            ``block_table``. New keys are written into it.
        v_cache: the same for values.
        k: ``[batch, new_len, kv_heads, head_dim]``, keys to write from ``cache_seqlens`` on; none by default.
        v: the same for values, given with ``k``.
        rotary_cos: must be None: rotate queries and keys with ``ch.positions.Rotary`` first.
        rotary_sin: must be None.
        cache_seqlens: int ``[batch]`` or one int, how many keys each cache holds before the call; by default all.
        cache_batch_idx: must be None.
        cache_leftpad: must be None.
        block_table: int ``[batch, pages per sequence]``, which pages of the pool hold a sequence's keys, in order.
        softmax_scale: factor on ``q @ k^T``; by default ``1 / sqrt(head_dim)``.
        causal: whether a query attends to no later key; the last query stands beside the last key that exists.
        window_size: how many keys before and after its position a query attends to; -1 for all.
        softcap: scores are limited to ``(-softcap, softcap)``; 0 for no limit.
        rotary_interleaved: taken for compatibility.
        alibi_slopes: ``[heads]`` or ``[batch, heads]``, slopes of ALiBi's bias.
        num_splits: taken for compatibility; a row's result never depends on how the keys are divided.
        return_softmax_lse: whether the log-sum-exp is returned too.

    Returns:
        ``[batch, q_len, heads, value_dim]``, and ``softmax_lse`` ``[batch, heads, q_len]`` if requested.

    Raises:
        ShapeError: shapes or lengths do not fit, the cache is too short for the new keys, or a page does not exist.
        UnsupportedError: an argument that must be None is given.

    Cost: ``4 * heads * head_dim * q_len`` operations for each key that exists.

    >>> import torch, clearhead as ch
    >>> cache = torch.zeros(2, 1, 16, 2, 8)  # keys and values of 16 tokens
    >>> q, k, v = torch.randn(3, 1, 1, 2, 8)
    >>> ch.functional.flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=0, causal=True).shape
    torch.Size([1, 1, 2, 8])
    """
    name = "flash_attn_with_kvcache"
    refused = {
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
    }
    for argument, value in refused.items():
        if value is not None:
            then = "Rotate first (ch.positions.Rotary), and select and shift the cache's entries yourself."
            raise UnsupportedError.about(name, argument, must="be None", got=repr_of(value), then=then)
    whole(name, "num_splits", num_splits, low=0)
    check_batch(name, q, k_cache, v_cache, pool=block_table is not None)
    batch, q_len = q.shape[:2]
    capacity = k_cache.shape[1] * (1 if block_table is None else _pages(name, block_table, batch))
    lengths = _cache_lengths(name, cache_seqlens, batch, capacity, q)
    if (k is None) != (v is None):
        raise ShapeError.about(name, "v", must="be given with k", got="only one of them", then="Pass both, or neither.")
    if k is not None and v is not None:
        _write(name, (k_cache, v_cache), (k, v), lengths, capacity, block_table)
        lengths = lengths + k.shape[1]
    starts = torch.arange(batch + 1, device=q.device)
    layout = VarlenLayout(
        starts * q_len, None if block_table is not None else starts * capacity, lengths, q_len, capacity, block_table
    )
    keys, values = (part if block_table is not None else part.flatten(0, 1) for part in (k_cache, v_cache))
    options = FlashOptions(softmax_scale, 0.0, causal, window_size, softcap, alibi_slopes, False, return_softmax_lse)
    returned = packed(name, q.flatten(0, 1), keys, values, layout, options)
    if isinstance(returned, Tensor):
        attended: Tensor = returned.unflatten(0, (batch, q_len))
        return attended
    output, lse, _ = returned
    by_entry: Tensor = lse.unflatten(1, (batch, q_len))
    return output.unflatten(0, (batch, q_len)), by_entry.transpose(0, 1)


def _pages(function: str, block_table: object, batch: int) -> int:
    """How many pages each sequence has."""
    if not isinstance(block_table, Tensor) or block_table.ndim != 2 or block_table.shape[0] != batch:
        raise ShapeError.about(
            function,
            "block_table",
            must=f"have axes [{batch}, pages per sequence]",
            got=repr_of(block_table),
            then="Pass the pages of each sequence, in order.",
        )
    return block_table.shape[1]


def _cache_lengths(function: str, given: Any, batch: int, capacity: int, query: Tensor) -> Int[Tensor, " batch"]:
    """How many keys each cache holds, as int64 ``[batch]``."""
    if not isinstance(given, Tensor):
        length = capacity if given is None else whole(function, "cache_seqlens", given, low=0)
        return torch.full((batch,), length, device=query.device)
    if given.shape != (batch,) or given.dtype not in (torch.int32, torch.int64) or given.device != query.device:
        raise ShapeError.about(
            function,
            "cache_seqlens",
            must=f"be int32 or int64 of shape [{batch}] on query's device",
            got=f"{repr_of(given)} on {given.device}",
            then="Count the keys in each cache.",
        )
    return given.to(torch.int64)


def _write(
    function: str,
    caches: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    lengths: Int[Tensor, " batch"],
    capacity: int,
    block_table: Tensor | None,
) -> None:
    """Write new keys and values behind those that the caches hold, in place."""
    batch, count = lengths.shape[0], new[0].shape[1] if new[0].ndim == 4 else -1
    for name, cache, tokens in zip(("k", "v"), caches, new, strict=True):
        if tokens.shape != (batch, count, *cache.shape[2:]) or tokens.dtype != cache.dtype:
            raise ShapeError.about(
                function,
                name,
                must=f"be {str(cache.dtype)[6:]} of shape {(batch, 'new_len', *cache.shape[2:])}".replace("'", ""),
                got=repr_of(tokens),
                then="New keys have the cache's heads.",
            )
    if batch and not 0 <= int(lengths.min()) <= int(lengths.max()) <= capacity - count:
        raise ShapeError.about(
            function,
            "cache_seqlens",
            must=f"lie from 0 to {capacity - count}, so that {count} new keys fit into {capacity}",
            got=int(lengths.max()) if int(lengths.min()) >= 0 else int(lengths.min()),
            then="Allocate a longer cache.",
        )
    entry = torch.arange(batch, device=lengths.device)[:, None]
    place = lengths[:, None] + torch.arange(count, device=lengths.device)
    if block_table is not None:
        size = caches[0].shape[1]
        entry, place = block_table.to(torch.int64)[entry, place // size], place % size
        if entry.numel() and not 0 <= int(entry.min()) <= int(entry.max()) < caches[0].shape[0]:
            raise ShapeError.about(
                function,
                "block_table",
                must=f"name pages from 0 to {caches[0].shape[0] - 1}",
                got=int(entry.min()) if int(entry.min()) < 0 else int(entry.max()),
                then="Pass the pages of each sequence, in order.",
            )
    with torch.no_grad():
        for cache, tokens in zip(caches, new, strict=True):
            cache[entry, place] = tokens
