"""Keys and values of tokens already seen: an explicit argument, owned by whoever decodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from clearhead.arguments import whole
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.shapes import Float

__all__ = ["KVCache", "check_cache", "count_appended", "forget_first", "restored_on_error", "room_behind"]

_SMALLEST = 16


class KVCache:
    """The keys and values of one attention, grown token by token.

    Without gradients the room is allocated ahead and doubled when full, so n appended tokens cost O(n) copies.
    While gradients are recorded, tensors are joined instead and stay differentiable.

    Example: decode one token after another.

    >>> import torch
    >>> from clearhead.nn import MultiHeadAttention
    >>> attention, cache = MultiHeadAttention(8, 2), KVCache()
    >>> with torch.no_grad():
    ...     for step in range(3):
    ...         output = attention(torch.randn(1, 1, 8), cache=cache)
    >>> cache
    KVCache(length=3, shape=[1, 2, 3, 4])
    """

    def __init__(self) -> None:
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._length = 0

    @property
    def length(self) -> int:
        """How many tokens are held."""
        return self._length

    @property
    def key(self) -> Float[Tensor, "batch kv_heads length head_dim"] | None:
        """All keys held, or None before the first."""
        return None if self._key is None else self._key[:, :, : self._length]

    @property
    def value(self) -> Float[Tensor, "batch kv_heads length value_dim"] | None:
        """All values held, or None before the first."""
        return None if self._value is None else self._value[:, :, : self._length]

    def append(
        self, key: Float[Tensor, "batch kv_heads new head_dim"], value: Float[Tensor, "batch kv_heads new value_dim"]
    ) -> tuple[Float[Tensor, "batch kv_heads length head_dim"], Float[Tensor, "batch kv_heads length value_dim"]]:
        """Add tokens, and get all keys and all values, the new ones last.

        Raises:
            ShapeError: the tensors fit neither each other nor what is held.
        """
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
        """Forget the tokens from position ``length`` on, such as drafts that were not accepted or a call that failed.

        The next tokens are written where they stood, so ``key`` and ``value`` that were read before may change.

        Args:
            length: how many tokens to keep, from 0 to as many as are held.

        Raises:
            ShapeError: there are not so many.

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
        # Room ahead was made here; what is full may be somebody's own tensor, which is not to be written to.
        if self._key is not None and self._key.shape[2] == self._length > length:
            self._key = self._key[:, :, :length]
        if self._value is not None and self._value.shape[2] == self._length > length:
            self._value = self._value[:, :, :length]
        self._length = length

    def reset(self) -> None:
        """Forget everything; the next append starts at position 0."""
        self._key = self._value = None
        self._length = 0

    def _joined(self, held: Tensor | None, new: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return new if held is None else torch.cat([held[:, :, : self._length], new], dim=2)
        held = self._with_room(held, new.shape, new)
        held[:, :, self._length : self._length + new.shape[2]] = new
        return held

    def _with_room(self, held: Tensor | None, size: Sequence[int], like: Tensor) -> Tensor:
        """What is held, in memory that has room behind it for new tokens ``[batch, kv_heads, new, dim]``."""
        if held is not None and self._has_room(held, size[2]):
            return held
        room = max(_SMALLEST, 2 * self._length, self._length + size[2])
        larger = like.new_empty((*size[:2], room, size[3]))
        if held is not None:
            larger[:, :, : self._length] = held[:, :, : self._length]
        return larger

    def _has_room(self, held: Tensor | None, new: int) -> bool:
        return held is not None and held.shape[2] >= self._length + new and not _closed(held)

    def _check(self, argument: str, new: Tensor, held: Tensor | None) -> None:
        if not isinstance(new, Tensor) or new.ndim != 4:
            got = f"shape {tuple(new.shape)}" if isinstance(new, Tensor) else type(new).__name__
            raise ShapeError.about(
                "KVCache.append",
                argument,
                must="have axes [batch, kv_heads, new, head_dim]",
                got=got,
                then="Split the embedding into heads first.",
            )
        if held is None:
            return
        if not _fits(new.shape, new, held):
            raise ShapeError.about(
                "KVCache.append",
                argument,
                must=f"match what is held, [{held.shape[0]}, {held.shape[1]}, new, {held.shape[3]}] "
                f"{held.dtype} on {held.device}",
                got=f"shape {tuple(new.shape)} {new.dtype} on {new.device}",
                then="Use one cache per layer and per batch, or call reset().",
            )

    def __repr__(self) -> str:
        shape = None if self._key is None else [*self._key.shape[:2], self._length, self._key.shape[3]]
        return f"KVCache(length={self._length}, shape={shape})"


def _fits(size: Sequence[int], like: Tensor, held: Tensor) -> bool:
    """Whether new tokens ``[batch, kv_heads, new, dim]`` can stand behind those held."""
    batch, kv_heads, _, dim = held.shape
    same = batch == size[0] and kv_heads == size[1] and dim == size[3]
    return same and like.dtype is held.dtype and like.device == held.device


def _closed(held: Tensor) -> bool:
    """Whether inference mode has made it and is over: then it is not to be written to. A compiler cannot tell."""
    return not torch.compiler.is_compiling() and held.is_inference() and not torch.is_inference_mode_enabled()


def room_behind(
    cache: KVCache, x: Tensor, kv_heads: int, head_dim: int, *, may_make: Callable[[Tensor], bool]
) -> tuple[Tensor, Tensor] | None:
    """All of a cache's memory, with room for the heads of ``x`` behind those held, for whoever writes them there
    without torch and without gradients; None where they do not fit what is held.

    Args:
        cache: that of one attention.
        x: ``[batch, new, width]``.
        kv_heads: of keys and values.
        head_dim: of both.
        may_make: whether memory may be asked for, of ``x``, where there is no room.

    Returns:
        Keys and values, ``[batch, kv_heads, room, head_dim]``; ``count_appended`` tells the cache what was written.
    """
    batch, new, _ = x.shape
    size, key, value = (batch, kv_heads, new, head_dim), cache._key, cache._value
    # What is held of keys fits each other, and so it does of values.
    if any(part is not None and not _fits(size, x, part) for part in (key, value)):
        return None
    if key is None or value is None or not cache._has_room(key, new) or not cache._has_room(value, new):
        if not may_make(x):
            return None
        key = cache._key = cache._with_room(key, size, x)
        value = cache._value = cache._with_room(value, size, x)
    return key, value


def count_appended(caches: Sequence[KVCache], new: int) -> None:
    """Count so many tokens as held by each cache, which were written into ``room_behind`` them."""
    rooms = [part for cache in caches for part in (cache._key, cache._value)]
    # Autograd may hold what is written over, of tokens that were taken back.
    torch.autograd.graph.increment_version([part for part in rooms if part is not None and not part.is_inference()])
    for cache in caches:
        cache._length += new


def forget_first(cache: KVCache, count: int) -> None:
    """Forget the first ``count`` tokens: those behind them stay where they lie, until there is no room behind these."""
    if count == 0 or cache._key is None or cache._value is None:
        return
    cache._key, cache._value = cache._key[:, :, count:], cache._value[:, :, count:]
    cache._length -= count


@contextmanager
def restored_on_error(*caches: KVCache | None) -> Iterator[None]:
    """A block that, where it fails, leaves the caches as they were before it; what is no cache is left to others."""
    before = [(cache, cache._key, cache._value, cache._length) for cache in caches if isinstance(cache, KVCache)]
    try:
        yield
    except BaseException:
        # Tokens that were written to room behind the old length stay there until the next are written over them.
        for cache, key, value, length in before:
            cache._key, cache._value, cache._length = key, value, length
        raise


def check_cache(function: str, argument: str, cache: object) -> None:
    """Raise unless ``cache`` is that of one attention, or None."""
    if cache is not None and not isinstance(cache, KVCache):
        raise UnsupportedError.about(
            function,
            argument,
            must="be a KVCache",
            got=type(cache).__name__,
            then="A DecoderCache is for the whole decoder; each of its layers is a KVCache.",
        )
