"""A KV cache of transformers whose layers append into the pages of a ``PagedKVCache``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from clearhead.arguments import whole
from clearhead.errors import ShapeError
from clearhead.functional.paged import PageTable, pages_of
from clearhead.int8_rows import channels_of, dequantize, is_quantized
from clearhead.integrations.transformers.deferred_tensor import DeferredTensor
from clearhead.paged_cache import PagedKVCache
from clearhead.paged_step import write_pages
from clearhead.shapes import Float
from clearhead.torch_private import wrapper_tensor

__all__ = ["PagedCache", "PagesTensor"]


class PagesTensor(DeferredTensor):
    """Keys or values ``[batch, kv_heads, length, dim]`` in pages. ``clearhead``'s attention reads them where they are.

    Attributes:
        pages: ``[num_blocks, block_size, kv_heads, dim]``, or int8 rows.
        table: which pages each sequence reads.
    """

    pages: Tensor
    table: PageTable

    @staticmethod
    def __new__(cls, pages: Tensor, table: PageTable, length: int, dtype: torch.dtype) -> PagesTensor:
        shape = (table.lengths.shape[0], pages.shape[2], length, channels_of(pages))
        made = wrapper_tensor(cls, shape, dtype, pages.device)
        made.pages, made.table = pages, table
        return made

    def elements(self) -> Float[Tensor, "batch kv_heads length dim"]:
        """The elements, copied from the pages."""
        rows = torch.cat([pages_of(self.pages, row, self.shape[2]) for row in self.table.block_table])
        return dequantize(rows).to(self.dtype) if is_quantized(rows) else rows

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PagesTensor(shape={tuple(self.shape)}, block_size={self.pages.shape[1]})"


class PagedCache(Cache):  # type: ignore[misc]
    """A cache for models of transformers in the blocks of a ``ch.PagedKVCache``.

    Pass it as ``cache``; before transformers 5.24 the argument was ``past_key_values``.

    Every row of a batch is a sequence of the paged cache. Beams and ``num_return_sequences`` share blocks until they
    differ, cropping returns blocks, and ``fork`` starts another generation from cached tokens, such as a system prompt.
    Under ``attn_implementation="clearhead"``, as after ``ch.swap``, attention reads the pages where they are if its
    mask is causal or a window; under other masks, such as left padding, and implementations, pages are gathered.

    Args:
        config: the model's ``config``.
        num_blocks: blocks of each layer; not with ``pages``.
        block_size: tokens of a block.
        pages: the paged cache of another ``PagedCache`` of the same model, to share its blocks.
        dtype: ``torch.int8`` for keys and values in int8, as ``ch.PagedKVCache`` takes it; by default the tokens'.

    Attributes:
        pages: the ``ch.PagedKVCache``, once the first tokens have come; its ``used_blocks`` and ``free_blocks`` count.
        sequences: the sequence of each row.

    Raises:
        ShapeError: neither or both of ``num_blocks`` and ``pages`` are given, or a dtype that ``pages`` does not have.

    A call for which no block is free raises ``CacheFullError``, and the cache is as before.

    >>> import clearhead as ch, torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    ...                      num_attention_heads=2, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    >>> model = LlamaForCausalLM(config).eval()
    >>> report = ch.swap(model)
    >>> cache = ch.bridges.transformers.PagedCache(model.config, num_blocks=8)
    >>> model.generate(torch.tensor([[1, 2, 3]]), cache=cache, max_new_tokens=4, do_sample=False).shape
    torch.Size([1, 7])
    >>> cache.pages.used_blocks, cache.get_seq_length()
    (1, 6)
    """

    def __init__(
        self, config: Any, num_blocks: int | None = None, *, block_size: int = 64, pages: PagedKVCache | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        if (num_blocks is None) == (pages is None):
            raise ShapeError.about(
                "PagedCache", "num_blocks", must="be given, or pages of another cache", got="neither or both",
                then="num_blocks * block_size is how many tokens all sequences may have.",
            )  # fmt: skip
        if pages is not None and dtype not in (None, pages.dtype):
            raise ShapeError.about(
                "PagedCache", "dtype", must=f"be that of pages, {pages.dtype}, or None", got=dtype,
                then="The pages have their dtype already.",
            )  # fmt: skip
        self._num_blocks = (
            pages.num_blocks if pages is not None else whole("PagedCache", "num_blocks", num_blocks, low=1)
        )
        self._block_size = whole("PagedCache", "block_size", block_size, low=1)
        self._config, self._dtype = config, dtype
        self.pages = pages
        self.sequences: list[int] = []
        #: The table of the current step and the length that it is for; None where sequences have changed since.
        self._table: tuple[int, PageTable] | None = None
        text = config.get_text_config()
        self._parts = [_PagedCacheLayer(self, place) for place in range(text.num_hidden_layers)]
        super().__init__(layers=[*self._parts])

    def fork(self) -> Self:
        """Another cache that begins with the same tokens and shares their blocks."""
        blocks = self._num_blocks if self.pages is None else None
        forked = type(self)(self._config, blocks, block_size=self._block_size, pages=self.pages, dtype=self._dtype)
        if self.pages is not None:
            forked.sequences = [self.pages.fork(sequence) for sequence in self.sequences]
        for mine, theirs in zip(self._parts, forked._parts, strict=True):
            theirs.length, theirs.is_initialized = mine.length, mine.is_initialized
        return forked

    def reset(self) -> None:
        """Remove all tokens, and return the blocks."""
        self._replace([])
        for layer in self._parts:
            layer.length, layer.is_initialized = 0, False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens; from a positive number on, all beyond so many."""
        for layer in self._parts:
            remaining = layer.length + tokens_to_remove if tokens_to_remove < 0 else tokens_to_remove or layer.length
            layer.length = max(0, min(layer.length, remaining))
        longest = max(layer.length for layer in self._parts)
        self._table = None
        if self.pages is not None:
            for sequence in self.sequences:
                self.pages.truncate(sequence, min(longest, self.pages.length(sequence)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row ``i`` continue what row ``beam_idx[i]`` was; their blocks are shared."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row; the repeated ones share blocks."""
        self._select([row for row in range(len(self.sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, and return the blocks of the others."""
        rows = torch.arange(len(self.sequences))[indices.to("cpu")]
        self._select(rows.tolist())

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 before the first tokens."""
        return len(self.sequences) or -1

    def _select(self, rows: Sequence[int]) -> None:
        if self.pages is not None and self.sequences:
            self._replace([self.pages.fork(self.sequences[row]) for row in rows])

    def _replace(self, sequences: list[int]) -> None:
        if self.pages is not None:
            for sequence in self.sequences:
                self.pages.remove(sequence)
        self.sequences, self._table = sequences, None

    def _reserve(self, key: Tensor, value: Tensor, length: int) -> PagedKVCache:
        """The pages, with capacity for ``length`` tokens of each row."""
        if self.pages is None:
            self.pages = PagedKVCache(
                len(self._parts), self._num_blocks, key.shape[1], key.shape[3], block_size=self._block_size,
                value_dim=value.shape[3], dtype=self._dtype or key.dtype, device=key.device,
            )  # fmt: skip
        pages = self.pages
        if not self.sequences:
            self.sequences = [pages.add() for _ in range(key.shape[0])]
        if key.shape[0] != len(self.sequences):
            raise ShapeError.about(
                "PagedCache", "key_states", must=f"have the cache's batch size {len(self.sequences)}", got=key.shape[0],
                then="Use one cache per batch, or call reset().",
            )  # fmt: skip
        if pages.length(self.sequences[0]) < length:
            with pages.extend({each: length - pages.length(each) for each in self.sequences}):
                pass
            self._table = None
        return pages

    def _pages_of(self, key: Tensor, value: Tensor, length: int) -> tuple[PagedKVCache, PageTable]:
        """The pages with capacity for ``length`` tokens of each row, and their table, which the layers share."""
        pages = self._reserve(key, value, length)
        if self._table is None or self._table[0] != length:
            block_table, _ = pages.block_table(self.sequences)
            lengths = torch.full((len(self.sequences),), length, dtype=torch.int32, device=block_table.device)
            self._table = length, PageTable(block_table, lengths)
        return pages, self._table[1]


class _PagedCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a ``PagedCache``. All layers share the blocks' numbers, and each has pages of its own."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: PagedCache, place: int) -> None:
        super().__init__()
        self.length = 0
        self._cache, self._place = cache, place

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Pages are made with the first tokens of the first layer."""
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[PagesTensor, PagesTensor]:
        """Append tokens ``[batch, kv_heads, new, head_dim]``; the keys and values of all tokens, in their pages."""
        length = self.length + key_states.shape[2]
        pages, table = self._cache._pages_of(key_states, value_states, length)
        of_layer = pages.key_pages(self._place), pages.value_pages(self._place)
        write_pages(of_layer, key_states.detach(), value_states.detach(), table)
        self.length, self.is_initialized = length, True
        keys, values = (PagesTensor(part, table, length, key_states.dtype) for part in of_layer)
        return keys, values

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Number of keys after the call, and the position of the first; before transformers 5 of cache positions."""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.length + new, 0

    def get_seq_length(self, *args: Any) -> int:
        """Number of cached tokens."""
        return self.length

    def get_max_length(self) -> int:
        """No maximum of its own: all sequences share the blocks."""
        return -1

    def get_max_cache_shape(self) -> int:
        """As ``get_max_length``, before transformers 5."""
        return -1
