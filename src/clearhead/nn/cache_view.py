"""The keys and values that an attention reads from a KV cache, for the block operator."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.cache import KVCache, reserve
from clearhead.projection import are_plain
from clearhead.shapes import Float

__all__ = ["CacheView", "cache_view"]


class CacheView(NamedTuple):
    """Keys and values that an attention reads from a KV cache.

    Attributes:
        key: ``[batch, kv_heads, capacity, head_dim]``.
        value: ``[batch, kv_heads, capacity, head_dim]``.
        length: cached tokens.
        grows: whether the operator first appends the call's own tokens, for which there is capacity. A cached memory
            is only read.
    """

    key: Float[Tensor, "batch kv_heads capacity head_dim"]
    value: Float[Tensor, "batch kv_heads capacity value_dim"]
    length: int
    grows: bool


def cache_view(
    cache: KVCache | None, x: Tensor, memory: Tensor | None, kv_heads: int, head_dim: int
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
    if type(cache) is not KVCache or type(x) is not Tensor or torch.is_grad_enabled() or x.dim() != 3:
        return None
    if memory is None:
        # Under autocast, say, the cache's memory is made of another dtype.
        buffers = reserve(cache, x, kv_heads, head_dim, may_make=are_plain)
        return None if buffers is None else CacheView(*buffers, cache.length, grows=True)
    key, value = cache.key, cache.value
    if key is None or value is None or key.shape != (x.shape[0], kv_heads, memory.shape[-2], head_dim):
        return None
    fits = value.shape == key.shape and len(memory) == len(x)
    return CacheView(key, value, cache.length, grows=False) if fits else None
