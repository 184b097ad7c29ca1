"""The keys and values that an attention reads from a KV cache, for the block operator."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.cache import KVCache, buffers_of, dropped_by, reserve
from clearhead.errors import ShapeError
from clearhead.int8_rows import channels_of
from clearhead.paged_step import PagedLayer, PagedStep
from clearhead.projection import are_plain
from clearhead.shapes import Float

__all__ = ["CacheView", "cache_view", "cached_memory", "same_view"]


class CacheView(NamedTuple):
    """Keys and values that an attention reads from a KV cache.

    Attributes:
        key: ``[batch, kv_heads, capacity, head_dim]``, or pages ``[num_blocks, block_size, kv_heads, head_dim]``.
        value: alike.
        length: cached tokens.
        grows: whether the operator first appends the call's own tokens, for which there is capacity. A cached memory
            is only read.
        step: what says which pages the call's sequences read and extend; None where the cache is not paged.
        dropped: tokens before the first cached one, which the cache has dropped.
    """

    key: Float[Tensor, "batch kv_heads capacity head_dim"]
    value: Float[Tensor, "batch kv_heads capacity value_dim"]
    length: int
    grows: bool
    step: PagedStep | None = None
    dropped: int = 0

    @property
    def traits(self) -> tuple[object, ...]:
        """What a call says of the view, besides its tensors, and their shape."""
        return self.length, self.grows, self.step, self.dropped, self.key.shape


def cache_view(
    cache: KVCache | PagedLayer | None, x: Tensor, memory: Tensor | None, kv_heads: int, head_dim: int
) -> CacheView | None:
    """What a call without gradients reads from a cache, with capacity for its own tokens; None where there is no cache,
    or the cache does not fit: the op-by-op road says what is wrong.

    Args:
        cache: that of the attention.
        x: ``[batch, len, width]``, the tokens that attend.
        memory: ``[batch, memory_len, width]``, the tokens that they attend to where these are others.
        kv_heads: of the attention's keys and values.
        head_dim: of both.
    """
    if type(x) is not Tensor or torch.is_grad_enabled() or x.dim() != 3:
        return None
    if type(cache) is PagedLayer:
        return CacheView(*cache.pages, cache.step.longest, True, cache.step) if memory is None else None
    if type(cache) is not KVCache:
        return None
    if memory is None:
        # Under autocast, say, the cache's memory is made of another dtype.
        buffers = reserve(cache, x, kv_heads, head_dim, may_make=are_plain)
        return None if buffers is None else CacheView(*buffers, cache.length, grows=True, dropped=dropped_by(cache))
    key, value = cache.key, cache.value
    if key is None or value is None or key.shape[:3] != (x.shape[0], kv_heads, memory.shape[-2]):
        return None
    if channels_of(key) != head_dim:
        return None
    fits = value.shape == key.shape and len(memory) == len(x)
    return CacheView(key, value, cache.length, grows=False, dropped=dropped_by(cache)) if fits else None


def same_view(view: CacheView, cache: KVCache) -> CacheView | None:
    """What is read from another layer's cache in the place of ``view``; None where they differ in more than contents.

    Args:
        view: what a growing cache gave, without pages.
        cache: of an attention with the same heads.
    """
    buffers = buffers_of(cache)
    if buffers is None or cache.length != view.length or dropped_by(cache) != view.dropped:
        return None
    for buffer, like in zip(buffers, (view.key, view.value), strict=True):
        if buffer.shape != like.shape or buffer.dtype is not like.dtype or buffer.is_inference() != like.is_inference():
            return None
    return CacheView(*buffers, view.length, view.grows, dropped=view.dropped)


def cached_memory(
    function: str, cache: KVCache, source: Float[Tensor, "*batch len width"]
) -> tuple[Float[Tensor, "*batch kv_heads len head_dim"], Float[Tensor, "*batch kv_heads len head_dim"]]:
    """The projected memory that an earlier call left in the cache; raises if ``source`` has another batch or length."""
    keys, values = cache.key, cache.value
    assert keys is not None
    assert values is not None
    if keys.shape[2] != source.shape[-2] or keys.shape[0] != (source.shape[0] if source.ndim == 3 else 1):
        raise ShapeError.about(
            function, "key", must=f"be the memory that filled the cache, {keys.shape[0]} x {keys.shape[2]} tokens",
            got=f"shape {tuple(source.shape)}", then="Call cache.reset() before attending to another memory.",
        )  # fmt: skip
    return (keys, values) if source.ndim == 3 else (keys[0], values[0])
