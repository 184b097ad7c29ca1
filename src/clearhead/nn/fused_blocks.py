"""A stack of blocks as one operator, without gradients: decoding a token op by op is mostly Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import torch
from torch import Tensor, nn

from clearhead.cache import KVCache, count_appended
from clearhead.masks import Mask
from clearhead.masks.parts import band_of
from clearhead.nn.blocks import SUBLAYERS, Block, DecoderBlock, EncoderBlock, cache_views
from clearhead.nn.cache_view import CacheView, same_view
from clearhead.nn.fused import fused_layers
from clearhead.nn.reading import cached_reading, no_gradients_if_frozen
from clearhead.nn.spec import Stack
from clearhead.paged_step import PagedLayer
from clearhead.shapes import Float

__all__ = ["MOST_ELEMENTS", "fused_blocks"]

#: Elements of a call's tokens up to which blocks are one operator. In larger calls Python's share is small, and an
#: interrupt would wait for all blocks.
MOST_ELEMENTS: Final = 2**17


def fused_blocks(
    blocks: nn.ModuleList,
    tokens: Sequence[Float[Tensor, "batch _len _width"]],
    masks: Sequence[Mask | None],
    caches: Sequence[Sequence[KVCache | PagedLayer | None]] = (),
) -> Float[Tensor, "batch len width"] | None:
    """The output of a stack of blocks, bitwise equal to that of the blocks one by one.

    Args:
        blocks: an encoder's or decoder's.
        tokens: ``[batch, len, width]``, and the memory where the blocks attend to one.
        masks: of each attention of a block.
        caches: of each block, one for each of its attentions.

    Returns:
        The output; None where a gradient may be wanted, a part is hooked or observed, the call is large, or a mask is
        not a band.
    """
    with no_gradients_if_frozen(blocks, tokens):
        return _fused_blocks(blocks, tokens, masks, caches)


def _fused_blocks(
    blocks: nn.ModuleList,
    tokens: Sequence[Tensor],
    masks: Sequence[Mask | None],
    caches: Sequence[Sequence[KVCache | PagedLayer | None]],
) -> Tensor | None:
    x, *memory = tokens
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or x.numel() > MOST_ELEMENTS or len(blocks) < 2:
        return None
    if any(mask is not None and band_of(mask) is None for mask in masks):
        return None
    names = SUBLAYERS[len(tokens)]

    def read() -> Stack | None:
        plain = [block for block in blocks if isinstance(block, Block) and _is_plain(block, memory)]
        layers = [parts for block in plain if (parts := block.parts(names, x)) is not None]
        return Stack(layers) if len(layers) == len(blocks) else None

    key = x.shape[-1], x.dtype, *(each.shape[-1] for each in memory)
    stack, views = cached_reading(blocks, key, read), list[CacheView | None]()
    if stack is None:
        return None
    for block, block_caches in zip(blocks, caches, strict=False):
        cached = _like(views[: len(masks)], block_caches) if stack.repeats else None
        if cached is None:
            cached = cache_views(cast(Block, block), tokens, block_caches)
        if cached is None:
            return None
        views += cached
    growing = [view for view in views if view is not None and view.grows]
    lengths, memories = {view.length for view in growing}, {view.key.data_ptr() for view in growing}
    if len(lengths) > 1 or len(memories) < len(growing):
        return None
    # A memory that caches hold is not read.
    given = tokens[:1] if views and views[-1] is not None else tokens
    output = fused_layers(given, stack, masks, views)
    if output is not None:
        count_appended([cache for cache, *_ in caches if isinstance(cache, KVCache)], x.shape[1])
    return output


def _like(
    views: Sequence[CacheView | None], caches: Sequence[KVCache | PagedLayer | None]
) -> list[CacheView | None] | None:
    """What a block reads from its caches in the place of the first block's ``views``; None where they differ."""
    given_views = [
        same_view(view, cache) if view is not None and view.grows and type(cache) is KVCache else None
        for view, cache in zip(views, caches, strict=False)
    ]
    return given_views if given_views and None not in given_views else None


def _is_plain(block: Block, memory: Sequence[Tensor]) -> bool:
    """Whether a block is one of the library's, and attends to a memory like the one given."""
    if type(block) not in (EncoderBlock, DecoderBlock):
        return False
    attention = block.cross_attention if isinstance(block, DecoderBlock) else None
    return not memory if attention is None else [attention.key_dim] == [each.shape[-1] for each in memory]
