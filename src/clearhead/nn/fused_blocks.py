"""Blocks one after the other in one step, where nothing is learned: a token that is decoded waits for Python alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from clearhead.cache import KVCache, count_appended
from clearhead.masks import Mask
from clearhead.masks.parts import band_of
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.blocks import SUBLAYERS, Block, DecoderBlock, EncoderBlock
from clearhead.nn.fused_layer import Layers, fused_layers
from clearhead.nn.held import Held, held_by
from clearhead.nn.linear import hooked
from clearhead.nn.unchanged import Unchanged
from clearhead.shapes import Float

__all__ = ["fused_blocks"]

#: Numbers of a call's tokens up to which blocks are one step: beyond, their kernels take many times what Python does,
#: and whoever interrupts a call need not wait for all of them.
_MOST: Final = 2**17


class _Apart(NamedTuple):
    """Blocks taken apart, for tokens of one width and dtype.

    Attributes:
        blocks: themselves.
        unchanged: whether they are that still.
        like: width and dtype of the tokens, and widths of what is attended to besides them.
        layers: the blocks as a step takes them.
        heads: of each attention, those of keys and values, and their size.
    """

    blocks: list[nn.Module]
    unchanged: Unchanged
    like: Hashable
    layers: Layers
    heads: list[tuple[int, int]]


#: A value holds the blocks, and not the list that it lives as long as.
_APART: Final = WeakKeyDictionary[nn.ModuleList, _Apart]()


def fused_blocks(
    blocks: nn.ModuleList, tokens: Sequence[Float[Tensor, "*batch _len _width"]], masks: Sequence[Mask | None],
    caches: Sequence[Sequence[KVCache | None]] = (),
) -> Float[Tensor, "*batch _len _width"] | None:  # fmt: skip
    """The output of the last of blocks, each of which reads what the one before it gives: the bits that they give one
    by one. None where something is learned, somebody looks at a part, or nothing is saved: in a large call, and under
    a mask that is no band and may be another's, as that of each padded batch is.

    Args:
        blocks: encoder's or decoder's.
        tokens: ``[batch, len, width]``, and the memory where the blocks attend to one.
        masks: of each attention of a block.
        caches: of each block, one for each of its attentions.
    """
    x = tokens[0]
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or x.numel() > _MOST or len(blocks) < 2:
        return None
    if any(mask is not None and band_of(mask) is None for mask in masks):
        return None
    apart = _taken_apart(blocks, tokens)
    held = None if apart is None else _held(tokens, caches, apart.heads)
    if apart is None or held is None:
        return None
    # A memory that caches hold is not read again.
    read = tokens[:1] if held and held[-1] is not None else tokens
    found = fused_layers(read, apart.layers, [*masks] * len(blocks), held)
    if found is not None:
        count_appended([own for own, *_ in caches if own is not None], x.shape[1])
    return found


def _taken_apart(blocks: nn.ModuleList, tokens: Sequence[Tensor]) -> _Apart | None:
    """What blocks are as parts of one step, where all there is to them is that."""
    x, *memory = tokens
    like = x.shape[-1], x.dtype, *[each.shape[-1] for each in memory]
    known = _APART.get(blocks)
    if known is not None and known.like == like and [*blocks] == known.blocks and known.unchanged.holds():
        return known
    names, parts, heads = SUBLAYERS[len(tokens)], [], []
    unchanged = Unchanged(*blocks)
    for block in blocks:
        if not isinstance(block, Block) or not _is_plain(block, memory):
            return None
        found = block.parts(names, x)
        if found is None:
            return None
        parts.append(found)
        for name, _ in names[:-1]:
            attention = cast(MultiHeadAttention, getattr(block, name))
            heads.append((attention.num_kv_heads, attention.head_dim))
    _APART[blocks] = apart = _Apart([*blocks], unchanged, like, Layers(parts), heads)
    return apart


def _is_plain(block: Block, memory: Sequence[Tensor]) -> bool:
    """Whether a block is one of these two that nobody has compiled or hooked, and attends to a memory like the one
    given, where there is one."""
    if type(block) not in (EncoderBlock, DecoderBlock) or hooked(block) or block._compiled_call_impl is not None:
        return False
    attention = cast(MultiHeadAttention | None, block._modules.get("cross_attention"))
    return not memory if attention is None else [attention.key_dim] == [each.shape[-1] for each in memory]


def _held(
    tokens: Sequence[Tensor], caches: Sequence[Sequence[KVCache | None]], heads: Sequence[tuple[int, int]]
) -> list[Held | None] | None:
    """What the caches of all attentions hold; None where one cannot be part of a step, or is not alike."""
    found: list[Held | None] = []
    for own in caches:
        for cache, memory in zip(own, (None, *tokens[1:]), strict=True):
            held = None if cache is None else held_by(cache, tokens[0], memory, *heads[len(found)])
            if held is None and cache is not None:
                return None
            found.append(held)
    grow = [own for own in found if own is not None and own.grows]
    if len({own.length for own in grow}) > 1 or len({own.key.data_ptr() for own in grow}) < len(grow):
        return None
    return found
