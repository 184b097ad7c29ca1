"""The KV caches of transformers, with capacity for the kernels to append to."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from clearhead.cache import KVCache, assume_dropped, count_appended, forget_first
from clearhead.integrations.transformers.int8_cache import Int8Cache, Int8Layer, Int8SlidingLayer
from clearhead.nn.cache_view import CacheView, cache_view

__all__ = ["CacheLayer", "cache_layer_of", "count_tokens", "may_cache_memory", "of_memory", "of_own_tokens"]


#: With a window of one token transformers drops nothing, as it slices from 0 on.
_LEAST_WINDOW: Final = 2


class _InKVCache:
    """Mixin of transformers' layers: keys and values are views of a ``KVCache``, made when they are read.

    Assigning keys or values, as reordering and cropping do, makes them attributes again.
    """

    __slots__ = ()
    #: What has the layer's keys and values; None where they are attributes, as in transformers' layers.
    kv_cache: KVCache | None = None

    @property
    def keys(self) -> Tensor | None:
        """``[batch, kv_heads, length, head_dim]``."""
        return vars(self).get("keys") if self.kv_cache is None else self.kv_cache.key

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        self._assign(keys, self.values)

    @property
    def values(self) -> Tensor | None:
        """``[batch, kv_heads, length, value_dim]``."""
        return vars(self).get("values") if self.kv_cache is None else self.kv_cache.value

    @values.setter
    def values(self, values: Tensor | None) -> None:
        self._assign(self.keys, values)

    def _assign(self, keys: Tensor | None, values: Tensor | None) -> None:
        vars(self).update(keys=keys, values=values, kv_cache=None)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has keys and values of its own.
        return {**vars(self), "keys": self.keys, "values": self.values, "kv_cache": None}


# transformers' class comes first, and the mixin has no slots: only then can a layer become one of these.
class _AppendedLayer(DynamicLayer, _InKVCache):  # type: ignore[misc]
    def get_seq_length(self, *args: Any) -> int:
        """Number of cached tokens. A model asks three times a token, and transformers would read it off views."""
        return super().get_seq_length(*args) if self.kv_cache is None else self.kv_cache.length


class _AppendedSlidingLayer(DynamicSlidingWindowLayer, _InKVCache):  # type: ignore[misc]
    pass


#: transformers' layers that the kernels can append to, and what they become then.
_IN_KV_CACHE: Final = {DynamicLayer: _AppendedLayer, DynamicSlidingWindowLayer: _AppendedSlidingLayer}
_INT8: Final = {Int8Layer, Int8SlidingLayer}
_SLIDING: Final = {DynamicSlidingWindowLayer, _AppendedSlidingLayer, Int8SlidingLayer}
_KINDS: Final = {*_IN_KV_CACHE, *_IN_KV_CACHE.values(), *_INT8}


class CacheLayer(NamedTuple):
    """One layer of a model's cache.

    Attributes:
        layer: transformers' layer.
        cache: ours, which holds the same.
        most: how many tokens it keeps for later calls, of a layer that slides; all where that is None.
    """

    layer: DynamicLayer
    cache: KVCache
    most: int | None = None

    @property
    def length(self) -> int:
        """Number of cached tokens."""
        return self.cache.length

    def view(self, x: Tensor, num_kv_heads: int, head_dim: int) -> CacheView | None:
        """What the layer's attention reads, with capacity for the call's tokens; None if the cache does not fit."""
        view = cache_view(self.cache, x, None, num_kv_heads, head_dim)
        if view is None or view.length != self.most:
            return view
        # The table of positions is made for the capacity, which must not shrink from call to call.
        capacity = view.length + x.shape[1]
        return view._replace(key=view.key[:, :, :capacity], value=view.value[:, :, :capacity])

    def appended(self, x: Tensor) -> None:
        """Give transformers' layer the tokens of ``x``, which were counted."""
        layer = self.layer
        if self.most is not None:
            forget_first(self.cache, max(0, self.cache.length - self.most))
            layer.cumulative_length += x.shape[1]
        if getattr(layer, "kv_cache", None) is self.cache:
            if not layer.is_initialized:
                layer.lazy_initialization(x)
            return
        if not layer.is_initialized:
            # Before transformers 5, of keys alone.
            count = len(inspect.signature(layer.lazy_initialization).parameters)
            layer.lazy_initialization(*(self.cache.key, self.cache.value)[:count])
        layer.__class__ = _IN_KV_CACHE.get(type(layer), type(layer))
        vars(layer).update(keys=None, values=None, kv_cache=self.cache)


def count_tokens(layers: Sequence[CacheLayer], x: Tensor) -> None:
    """Count the tokens of ``x``, whose keys and values the kernels appended to each layer's cache."""
    if not layers:
        return
    count_appended([layer.cache for layer in layers], x.shape[1])
    for layer in layers:
        layer.appended(x)


def of_own_tokens(past: Any) -> Any:
    """The part of a model's cache with keys and values of its own tokens."""
    return past.self_attention_cache if type(past) is EncoderDecoderCache else past


def of_memory(past: Any, place: Any) -> CacheView | None:
    """What a cache holds of a memory for an attention, once it was filled; None elsewhere."""
    if type(past) is not EncoderDecoderCache or not past.is_updated.get(place):
        return None
    cache = past.cross_attention_cache
    if not _is_plain(cache) or type(cache.layers[place]) not in (DynamicLayer, _AppendedLayer, Int8Layer):
        return None
    layer = cache.layers[place]
    key, value = (layer.kv_cache.key, layer.kv_cache.value) if type(layer) is Int8Layer else (layer.keys, layer.values)
    if not isinstance(key, Tensor) or not isinstance(value, Tensor) or key.shape != value.shape or key.dim() != 4:
        return None
    return CacheView(key, value, key.shape[2], grows=False)


def may_cache_memory(past: Any, place: Any) -> bool:
    """Whether an attention's keys and values of a memory are to be cached now, in a growing cache."""
    if type(past) is not EncoderDecoderCache or not isinstance(place, int) or past.is_updated.get(place):
        return False
    return _is_plain(past.cross_attention_cache)


def cache_layer_of(past: Any, place: Any) -> CacheLayer | None:
    """The layer of an attention's cache, if it grows or slides and can be appended to in place; None otherwise. For
    calls without gradients.

    Keys and values that were reordered, cut short or joined with others since the last call are copied first.
    """
    if not _is_plain(past) or not isinstance(place, int):
        return None
    # A cache without a config makes its layers when they are filled.
    makes_layers = getattr(past, "layer_class_to_replicate", None) is DynamicLayer
    while makes_layers and len(past.layers) <= place:
        past.layers.append(DynamicLayer())
    if place >= len(past.layers):
        return None
    layer = past.layers[place]
    if type(layer) not in _KINDS:
        return None
    most = None
    if type(layer) in _SLIDING:
        most = _most_kept(layer)
        if most is None:
            return None
    if (cache := getattr(layer, "kv_cache", None)) is not None:
        return CacheLayer(layer, cache, most)
    cache = KVCache()
    if layer.is_initialized and layer.keys is not None and layer.values is not None and layer.keys.numel() > 0:
        cache.append(layer.keys, layer.values)
        if most is not None:
            assume_dropped(cache, max(0, layer.cumulative_length - cache.length))
    # A sliding layer may cache more than its window, or count in another way.
    return (
        CacheLayer(layer, cache, most) if most is None or cache.length == min(layer.cumulative_length, most) else None
    )


def _is_plain(cache: Any) -> bool:
    """Whether the cache is a growing one that is not offloaded."""
    return type(cache) in (DynamicCache, Int8Cache) and not getattr(cache, "offloading", False)


def _most_kept(layer: Any) -> int | None:
    """Number of tokens that a sliding layer keeps, if the others are never read again."""
    window: int = layer.sliding_window
    return None if getattr(layer, "record_past", False) or window < _LEAST_WINDOW else window - 1
