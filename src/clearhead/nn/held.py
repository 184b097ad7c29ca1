"""What a cache holds for an attention that is part of one step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.cache import KVCache, room_behind
from clearhead.projection import are_plain
from clearhead.shapes import Float

__all__ = ["Held", "held_by", "position_of", "tensors_of"]


class Held(NamedTuple):
    """Keys and values that an attention reads from a cache.

    Attributes:
        key: ``[batch, kv_heads, room, head_dim]``, and so is ``value``.
        value: see there.
        length: of how many tokens.
        grows: whether the call's own tokens are put behind these first, for which there is room. A memory stays as
            it is.
    """

    key: Float[Tensor, "batch kv_heads room head_dim"]
    value: Float[Tensor, "batch kv_heads room value_dim"]
    length: int
    grows: bool

    def marks(self) -> Hashable:
        """What tells layouts apart: a call's position is not part of it."""
        return self.key.shape, self.value.shape, self.grows or self.length


def held_by(cache: KVCache | None, x: Tensor, memory: Tensor | None, kv_heads: int, head_dim: int) -> Held | None:
    """What a cache holds for a call without gradients that may be part of a step, with room for its own tokens; None
    where there is no cache, or it is for others to say what is wrong.

    Args:
        cache: that of the attention.
        x: ``[batch, len, width]``, those that attend.
        memory: ``[batch, memory_len, width]``, what they attend to where it is not themselves.
        kv_heads: of the attention's keys and values.
        head_dim: of both.
    """
    if type(cache) is not KVCache or type(x) is not Tensor or torch.is_grad_enabled() or x.dim() != 3:
        return None
    if memory is None:
        # Under autocast, say, memory is made of another dtype. The step asks again, in one question for all.
        rooms = room_behind(cache, x, kv_heads, head_dim, may_make=are_plain)
        return None if rooms is None else Held(*rooms, cache.length, grows=True)
    key, value = cache.key, cache.value
    if key is None or value is None or key.shape != (x.shape[0], kv_heads, memory.shape[-2], head_dim):
        return None
    return Held(key, value, cache.length, grows=False) if value.shape == key.shape and len(memory) == len(x) else None


def tensors_of(held: Sequence[Held | None]) -> list[Tensor]:
    """The memory that is read and written."""
    return [part for own in held if own is not None for part in (own.key, own.value)]


def position_of(held: Sequence[Held | None]) -> int:
    """Where a call's first token stands."""
    return next((own.length for own in held if own is not None and own.grows), 0)
