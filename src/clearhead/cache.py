"""The KV cache of one attention, an explicit argument that the caller owns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from clearhead.arguments import whole
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.int8_rows import channels_of, dequantize, is_quantized, quantize, row_length
from clearhead.ops.kinds import DTYPES
from clearhead.ops.library import in_memory, library
from clearhead.shapes import Float, Int

__all__ = [
    "KVCache",
    "assume_dropped",
    "buffers_of",
    "check_cache",
    "count_appended",
    "dropped_by",
    "forget_first",
    "in_one_thread",
    "reserve",
    "restored_on_error",
    "select_batch",
]

_SMALLEST = 16


class KVCache:
    """The cached keys and values of one attention, to which each call appends those of its tokens.

    Without gradients the cache's capacity doubles when it is full, so that appending n tokens copies O(n) elements.
    With gradients enabled, new tensors are concatenated instead, and gradients flow to every appended token. A cache is
    for one thread: a call during another thread's call raises ``UnsupportedError``.

    A cache of dtype int8 rounds each row of keys and of values to ``integers * scale`` with ``scale = max |x| / 127``,
    one float32 scale for each batch entry, head and token. What it returns are these rows, ``head_dim + 4`` bytes each,
    which ``attention`` takes as key and value and reads in place. A row with NaN or infinity has the scale NaN.

    Args:
        dtype: ``torch.int8``, or None for the dtype of the tokens.

    Raises:
        UnsupportedError: another dtype.

    Example: decode one token at a time.

    >>> import torch
    >>> from clearhead.nn import MultiHeadAttention
    >>> attention, cache = MultiHeadAttention(8, 2), KVCache()
    >>> with torch.no_grad():
    ...     for step in range(3):
    ...         output = attention(torch.randn(1, 1, 8), cache=cache)
    >>> cache
    KVCache(length=3, shape=[1, 2, 3, 4])
    """

    def __init__(self, *, dtype: torch.dtype | None = None) -> None:
        if dtype not in (None, torch.int8):
            raise UnsupportedError.about(
                "KVCache",
                "dtype",
                must="be torch.int8 or None",
                got=dtype,
                then="Without one the cache has the dtype of the tokens.",
            )
        self.dtype = dtype
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._length = 0
        self._dropped = 0  # tokens before the first cached one
        self._thread: list[int] = []  # of the call that uses the cache; others that came meanwhile follow

    @property
    def length(self) -> int:
        """The number of cached tokens."""
        return self._length

    @property
    def key(self) -> Float[Tensor, "batch kv_heads length head_dim"] | None:
        """The cached keys, ``[batch, kv_heads, length, head_dim]``, of an int8 cache its rows; None for an empty
        cache."""
        return None if self._key is None else self._key[:, :, : self._length]

    @property
    def value(self) -> Float[Tensor, "batch kv_heads length value_dim"] | None:
        """The cached values, ``[batch, kv_heads, length, value_dim]``, of an int8 cache its rows; None for an empty
        cache."""
        return None if self._value is None else self._value[:, :, : self._length]

    def dequantized(
        self,
    ) -> tuple[Float[Tensor, "batch kv_heads length head_dim"], Float[Tensor, "batch kv_heads length value_dim"]]:
        """Copies of all keys and values, in float32 where the cache is in int8.

        Returns:
            Keys ``[batch, kv_heads, length, head_dim]`` and values ``[batch, kv_heads, length, value_dim]``.

        Raises:
            ShapeError: the cache is empty.

        >>> import torch
        >>> cache = KVCache(dtype=torch.int8)
        >>> rows, _ = cache.append(torch.tensor([[[[0.5, -1.27]]]]), torch.zeros(1, 1, 1, 2))
        >>> rows.shape, rows[..., :2].tolist()
        (torch.Size([1, 1, 1, 6]), [[[[50, -127]]]])
        >>> cache.dequantized()[0]
        tensor([[[[ 0.5000, -1.2700]]]])
        """
        key, value = self.key, self.value
        if key is None or value is None:
            raise ShapeError.about(
                "KVCache.dequantized", "the cache", must="hold tokens", got="none", then="Append some."
            )
        parts = [dequantize(part) if is_quantized(part) else part.clone() for part in (key, value)]
        return parts[0], parts[1]

    def append(
        self, key: Float[Tensor, "batch kv_heads new head_dim"], value: Float[Tensor, "batch kv_heads new value_dim"]
    ) -> tuple[Float[Tensor, "batch kv_heads length head_dim"], Float[Tensor, "batch kv_heads length value_dim"]]:
        """Append tokens and return all cached keys and values.

        Args:
            key: ``[batch, kv_heads, new, head_dim]``.
            value: ``[batch, kv_heads, new, value_dim]``.

        Returns:
            Keys ``[batch, kv_heads, length, head_dim]`` and values ``[batch, kv_heads, length, value_dim]``, the new
            tokens last; of an int8 cache its rows.

        Raises:
            ShapeError: the tensors do not fit each other or the cached ones.
            UnsupportedError: an int8 cache, and tokens that require a gradient.
        """
        with in_one_thread(self):
            return self._append(key, value)

    def _append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self._check("key", key, self._key)
        self._check("value", value, self._value)
        if key.shape[:3] != value.shape[:3]:
            raise ShapeError.about(
                "KVCache.append",
                "value",
                must=f"have key's batch, heads and length {tuple(key.shape[:3])}",
                got=f"shape {tuple(value.shape)}",
                then="One value per key.",
            )
        self._key = self._joined(self._key, key)
        self._value = self._joined(self._value, value)
        self._length += key.shape[2]
        return self._key[:, :, : self._length], self._value[:, :, : self._length]

    def truncate(self, length: int) -> None:
        """Remove the tokens from position ``length`` on, such as drafts that were not accepted or a failed call's.

        The next tokens overwrite them, so tensors that ``key`` and ``value`` returned before may change.

        Args:
            length: number of tokens that remain, from 0 to the number of cached tokens.

        Raises:
            ShapeError: ``length`` is out of range.

        Example: try a token, and take it back.

        >>> import torch
        >>> cache, token = KVCache(), torch.zeros(1, 2, 1, 4)
        >>> for _ in range(3):
        ...     keys, values = cache.append(token, token)
        >>> cache.truncate(2)
        >>> cache
        KVCache(length=2, shape=[1, 2, 2, 4])
        """
        length = whole("KVCache.truncate", "length", length, low=0, high=self._length)
        # A tensor without spare capacity may be the caller's, which must not be written to: keep a view of its start.
        if self._key is not None and self._key.shape[2] == self._length > length:
            self._key = self._key[:, :, :length]
        if self._value is not None and self._value.shape[2] == self._length > length:
            self._value = self._value[:, :, :length]
        self._length = length

    def reset(self) -> None:
        """Empty the cache; the next appended token is at position 0."""
        self._key = self._value = None
        self._length = self._dropped = 0

    def _joined(self, cached: Tensor | None, new: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.dtype is None:
            return new if cached is None else torch.cat([cached[:, :, : self._length], new], dim=2)
        cached = self._with_capacity(cached, new.shape, new)
        if self.dtype is not None:
            _write_rows(cached, new, self._length)
        else:
            cached[:, :, self._length : self._length + new.shape[2]] = new
        return cached

    def _with_capacity(self, cached: Tensor | None, size: Sequence[int], like: Tensor) -> Tensor:
        """The cached tensor, in a buffer with capacity for new tokens ``[batch, kv_heads, new, dim]``."""
        if cached is not None and self._has_capacity(cached, size[2]):
            return cached
        capacity = max(_SMALLEST, 2 * self._length, self._length + size[2])
        length = row_length(size[3], self.dtype)
        larger = like.new_empty((*size[:2], capacity, length), dtype=self.dtype or like.dtype)
        if cached is not None:
            larger[:, :, : self._length] = cached[:, :, : self._length]
        return larger

    def _has_capacity(self, cached: Tensor | None, new: int) -> bool:
        return cached is not None and cached.shape[2] >= self._length + new and not _closed(cached)

    def _check(self, argument: str, new: Tensor, cached: Tensor | None) -> None:
        if not isinstance(new, Tensor) or new.ndim != 4:
            got = f"shape {tuple(new.shape)}" if isinstance(new, Tensor) else type(new).__name__
            raise ShapeError.about(
                "KVCache.append",
                argument,
                must="have axes [batch, kv_heads, new, head_dim]",
                got=got,
                then="Split the embedding into heads first.",
            )
        if self.dtype is not None:
            _check_quantizable(argument, new)
        if cached is None:
            return
        if not _fits(new.shape, new, cached):
            raise ShapeError.about(
                "KVCache.append",
                argument,
                must=f"match the cached tokens, [{cached.shape[0]}, {cached.shape[1]}, new, {channels_of(cached)}] "
                f"{cached.dtype} on {cached.device}",
                got=f"shape {tuple(new.shape)} {new.dtype} on {new.device}",
                then="Use one cache per layer and per batch, or call reset().",
            )

    def __repr__(self) -> str:
        shape = None if self._key is None else [*self._key.shape[:2], self._length, channels_of(self._key)]
        return f"KVCache(length={self._length}, shape={shape}{'' if self.dtype is None else ', dtype=torch.int8'})"


def _fits(size: Sequence[int], like: Tensor, cached: Tensor) -> bool:
    """Whether new tokens ``[batch, kv_heads, new, dim]`` can be appended to the cached ones."""
    batch, kv_heads, _, dim = cached.shape
    same = batch == size[0] and kv_heads == size[1] and dim == row_length(size[3], cached.dtype)
    dtype = like.is_floating_point() if is_quantized(cached) else like.dtype is cached.dtype
    return same and dtype and like.device == cached.device


def _check_quantizable(argument: str, new: Tensor) -> None:
    if not new.is_floating_point() or (torch.is_grad_enabled() and new.requires_grad):
        got = f"{new.dtype}{' that requires a gradient' if new.requires_grad else ''}"
        raise UnsupportedError.about(
            "KVCache.append",
            argument,
            must="be floating point without a gradient where the cache is in int8",
            got=got,
            then="Call it under torch.no_grad().",
        )


def _write_rows(cached: Tensor, new: Tensor, first: int) -> None:
    """Write tokens ``[batch, kv_heads, new, dim]`` into int8 rows from ``first`` on."""
    if new.is_cpu and new.dtype in DTYPES and library() is not None and in_memory(cached, new):
        torch.ops.clearhead.cache_append.default(cached, new, first)
    else:
        cached[:, :, first : first + new.shape[2]] = quantize(new)


def _closed(cached: Tensor) -> bool:
    """Whether the tensor was made in inference mode, which is over: torch forbids writes. Compilers cannot tell."""
    return not torch.compiler.is_compiling() and cached.is_inference() and not torch.is_inference_mode_enabled()


def reserve(
    cache: KVCache, x: Tensor, kv_heads: int, head_dim: int, *, may_make: Callable[[Tensor], bool]
) -> tuple[Tensor, Tensor] | None:
    """A cache's buffers with capacity for the tokens of ``x``, for kernels that write keys and values themselves.

    Args:
        cache: the cache of one attention.
        x: the new tokens, ``[batch, new, width]``.
        kv_heads: number of heads of keys and values.
        head_dim: channels of a head of keys, and of values.
        may_make: whether larger buffers may be allocated for ``x`` when the capacity does not suffice.

    Returns:
        Keys and values, ``[batch, kv_heads, capacity, head_dim]``; call ``count_appended`` after writing. None if the
        tokens do not fit the cached ones, or there is no capacity and ``may_make`` is false.
    """
    batch, new, _ = x.shape
    size, key, value = (batch, kv_heads, new, head_dim), cache._key, cache._value
    # All cached keys have one shape and dtype, and so have all cached values.
    if any(part is not None and not _fits(size, x, part) for part in (key, value)):
        return None
    if key is None or value is None or not cache._has_capacity(key, new) or not cache._has_capacity(value, new):
        if not may_make(x):
            return None
        key = cache._key = cache._with_capacity(key, size, x)
        value = cache._value = cache._with_capacity(value, size, x)
    return key, value


def buffers_of(cache: KVCache) -> tuple[Tensor, Tensor] | None:
    """A cache's keys and values with their spare capacity; None of an empty cache."""
    return None if cache._key is None or cache._value is None else (cache._key, cache._value)


def count_appended(caches: Sequence[KVCache], new: int) -> None:
    """Add ``new`` tokens, written into the buffers of ``reserve``, to the length of each cache."""
    buffers = [part for cache in caches for part in (cache._key, cache._value)]
    # Autograd may have saved tokens that were truncated since and are overwritten now.
    torch.autograd.graph.increment_version([part for part in buffers if part is not None and not part.is_inference()])
    for cache in caches:
        cache._length += new


def dropped_by(cache: KVCache) -> int:
    """The number of tokens before the first cached one: the kernels' order of sums goes by places in the sequence."""
    return cache._dropped


def assume_dropped(cache: KVCache, count: int) -> None:
    """Count ``count`` tokens before the first cached one."""
    cache._dropped = count


def select_batch(cache: KVCache, indices: Int[Tensor, " batch"]) -> None:
    """Replace the batch entries of a cache by copies of those at ``indices``."""
    if cache._key is None or cache._value is None:
        return
    for name in ("_key", "_value"):
        part = getattr(cache, name)[:, :, : cache._length]
        setattr(cache, name, part.index_select(0, indices.to(part.device)))


def forget_first(cache: KVCache, count: int) -> None:
    """Remove the first ``count`` tokens, without a copy: the buffer's start moves."""
    if count == 0 or cache._key is None or cache._value is None:
        return
    cache._key, cache._value = cache._key[:, :, count:], cache._value[:, :, count:]
    cache._length -= count
    cache._dropped += count


@contextmanager
def restored_on_error(*caches: KVCache | None) -> Iterator[None]:
    """Restore the caches if the block raises; arguments that are no ``KVCache`` are ignored.

    Raises:
        UnsupportedError: another thread is within a call with one of the caches.
    """
    ours = [cache for cache in caches if isinstance(cache, KVCache)]
    with in_one_thread(*ours), _restored(ours):
        yield


@contextmanager
def in_one_thread(*caches: KVCache) -> Iterator[None]:
    """Raise ``UnsupportedError`` if another thread is within this context with one of the caches."""
    if torch.compiler.is_compiling():
        yield
        return
    thread = threading.get_ident()
    entered: list[KVCache] = []
    try:
        for cache in caches:
            if cache._thread[:1] == [thread]:
                continue
            # One thread's append comes first, whenever the interpreter switches.
            cache._thread.append(thread)
            entered.append(cache)
            if cache._thread[0] != thread:
                raise UnsupportedError.about(
                    "KVCache",
                    "a cache",
                    must="be used by one thread at a time",
                    got="a call during another thread's call",
                    then="Make one cache per thread, or decode the sequences as one batch.",
                )
        yield
    finally:
        for cache in entered:
            cache._thread.remove(thread)


@contextmanager
def _restored(caches: Sequence[KVCache]) -> Iterator[None]:
    before = [(cache, cache._key, cache._value, cache._length, cache._dropped) for cache in caches]
    try:
        yield
    except BaseException:
        # Tokens written beyond the old length remain in the buffer until they are overwritten.
        for cache, key, value, length, dropped in before:
            cache._key, cache._value, cache._length, cache._dropped = key, value, length, dropped
        raise


def check_cache(function: str, argument: str, cache: object) -> None:
    """Raise ``UnsupportedError`` unless ``cache`` is a ``KVCache`` or None."""
    if cache is not None and not isinstance(cache, KVCache):
        raise UnsupportedError.about(
            function,
            argument,
            must="be a KVCache",
            got=type(cache).__name__,
            then="A DecoderCache is for a whole decoder; its layers hold one KVCache each.",
        )
