"""A growing KV cache of transformers whose layers hold keys and values in int8."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from clearhead.cache import KVCache, forget_first, select_batch
from clearhead.errors import UnsupportedError
from clearhead.integrations.transformers.deferred_tensor import RowsTensor

__all__ = ["Int8Cache", "Int8Layer", "Int8SlidingLayer"]


class _InInt8:
    """Mixin of transformers' layers: keys and values are the rows of a ``KVCache`` in int8."""

    kv_cache: KVCache
    dtype: torch.dtype
    device: torch.device
    is_initialized: bool
    cumulative_length: int

    @property
    def keys(self) -> RowsTensor | None:
        """What stands for the keys ``[batch, kv_heads, length, head_dim]``."""
        rows = self.kv_cache.key
        return None if rows is None else RowsTensor(rows, self.dtype)

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        self._assign(keys)

    @property
    def values(self) -> RowsTensor | None:
        """What stands for the values ``[batch, kv_heads, length, value_dim]``."""
        rows = self.kv_cache.value
        return None if rows is None else RowsTensor(rows, self.dtype)

    @values.setter
    def values(self, values: Tensor | None) -> None:
        self._assign(values)

    def _assign(self, given: Tensor | None) -> None:
        if given is not None:
            raise UnsupportedError.about(
                "Int8Cache", "keys and values", must="be appended by update", got="an assignment",
                then="Use a DynamicCache to assign tensors.",
            )  # fmt: skip
        vars(self)["kv_cache"] = KVCache(dtype=torch.int8)

    def lazy_initialization(self, key_states: Tensor, *others: Any) -> None:
        """Record dtype and device of the tokens."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[RowsTensor, RowsTensor]:
        """Append tokens ``[batch, kv_heads, new, head_dim]``; what stands for the keys and values that they may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states)
        rows = self.kv_cache.append(key_states, value_states)
        return RowsTensor(rows[0], self.dtype), RowsTensor(rows[1], self.dtype)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row ``i`` continue what row ``beam_idx[i]`` was."""
        select_batch(self.kv_cache, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        if (rows := self.kv_cache.key) is not None:
            select_batch(self.kv_cache, torch.arange(rows.shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        if (rows := self.kv_cache.key) is not None:
            select_batch(self.kv_cache, torch.arange(rows.shape[0])[indices.to("cpu")])

    def reset(self) -> None:
        """Remove all tokens."""
        self._assign(None)
        self.is_initialized = False
        if hasattr(self, "cumulative_length"):
            self.cumulative_length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens; before transformers 5 a positive number is how many remain."""
        length = self.kv_cache.length
        remaining = length + tokens_to_remove if tokens_to_remove < 0 else tokens_to_remove or length
        self.kv_cache.truncate(max(0, min(length, remaining)))


class Int8Layer(_InInt8, DynamicLayer):  # type: ignore[misc]
    """One layer of an ``Int8Cache``."""

    def get_seq_length(self, *args: Any) -> int:
        """Number of cached tokens."""
        return self.kv_cache.length


class Int8SlidingLayer(_InInt8, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """One layer of an ``Int8Cache`` that keeps the tokens of a window."""

    def activate_past_recording(self) -> None:
        """Not supported: tokens beyond the window are dropped at once."""
        raise UnsupportedError.about(
            "Int8Cache", "a sliding layer", must="drop tokens beyond its window", got="a call to keep them",
            then="Generate without an assistant model, or use a DynamicCache.",
        )  # fmt: skip

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[RowsTensor, RowsTensor]:
        rows = super().update(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        forget_first(self.kv_cache, max(0, self.kv_cache.length - self.sliding_window + 1))
        return rows

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens, while none has left the window."""
        if self.cumulative_length >= self.sliding_window:
            raise UnsupportedError.about(
                "Int8Cache", "crop", must="come before a sliding layer drops tokens",
                got=f"{self.cumulative_length} tokens", then="Use a DynamicCache.",
            )  # fmt: skip
        super().crop(tokens_to_remove)
        self.cumulative_length = self.kv_cache.length


class Int8Cache(DynamicCache):  # type: ignore[misc]
    """A cache for models of transformers with keys and values in int8, one float32 scale for each row, head and token.

    Pass it as ``cache``; before transformers 5.24 the argument was ``past_key_values``.

    A row of ``head_dim`` channels takes ``head_dim + 4`` bytes: 0.26 of a float32 cache's for ``head_dim`` 128. After
    ``ch.swap`` attention reads the int8 rows where they are; other attention implementations read a dequantized copy.

    Args:
        config: the model's ``config``.

    Raises:
        UnsupportedError: a layer of the model caches something else than keys and values of all or the last tokens.

    >>> import clearhead as ch, torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    ...                      num_attention_heads=2, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    >>> model = LlamaForCausalLM(config).eval()
    >>> report = ch.swap(model)
    >>> cache = ch.bridges.transformers.Int8Cache(model.config)
    >>> model.generate(torch.tensor([[1, 2, 3]]), cache=cache, max_new_tokens=4, do_sample=False).shape
    torch.Size([1, 7])
    >>> cache.get_seq_length(), cache.layers[0].kv_cache.key.shape
    (6, torch.Size([1, 2, 6, 12]))
    """

    layers: list[Any]

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.layers = [_in_int8(layer) for layer in self.layers]


def _in_int8(layer: Any) -> Any:
    made = _OF.get(type(layer))
    if made is None:
        raise UnsupportedError.about(
            "Int8Cache", "config", must="be of a model whose layers cache keys and values", got=type(layer).__name__,
            then="Use a DynamicCache.",
        )  # fmt: skip
    return made(layer.sliding_window) if made is Int8SlidingLayer else made()


_OF: Final[dict[type, Any]] = {DynamicLayer: Int8Layer, DynamicSlidingWindowLayer: Int8SlidingLayer}
