"""Attention of a model of transformers to its own tokens: what a call of it reads, and the attention as one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from clearhead.backends.native_norm import Norm
from clearhead.bridges.torch_parts import is_plain
from clearhead.bridges.transformers_angles import angles_of, fits
from clearhead.bridges.transformers_attention import attend_for, is_causal_alone, weights_wanted
from clearhead.bridges.transformers_cache import CacheLayer, cache_layer_of, of_own_tokens
from clearhead.bridges.transformers_masks import MaskTensor
from clearhead.masks import Causal, Mask
from clearhead.nn.attention_step import by_head
from clearhead.nn.fused_attention import Projections, fused_attention, is_step
from clearhead.nn.held import Held
from clearhead.nn.norm import normed
from clearhead.positions import turned_by_token
from clearhead.projection import NATIVE, are_plain, project
from clearhead.scores import SoftCap
from clearhead.shapes import Float
from clearhead.watch import watched

__all__ = ["OwnTokens", "attended", "attended_in_one_step", "may_be_read", "own_tokens"]

#: Options that are known, or ask for what is collected around a layer.
_READ: Final = ("is_causal", "output_hidden_states")


class OwnTokens(NamedTuple):
    """What an attention to its own tokens reads in a call.

    Attributes:
        mask: what they may attend to.
        causal: whether it is causal where it was given no mask.
        held: what it reads from a cache, where there is one.
        cached: that cache.
        angles: of the tokens, where queries and keys are turned.
    """

    mask: Mask | None
    causal: bool
    held: Held | None
    cached: CacheLayer | None
    angles: Tensor | None


def may_be_read(x: Any, past: Any, options: Mapping[str, Any]) -> bool:
    """Whether a call on tokens, which may be anything, with a cache and further options may be part of a step."""
    if not is_plain(x) or not are_plain(x) or x.dim() != 3 or weights_wanted():
        return False
    if any(option is not None and option is not False and name not in _READ for name, option in options.items()):
        return False
    # Gradients do not go through what a cache holds.
    return past is None or not torch.is_grad_enabled()


def own_tokens(
    attention: Any, own: Projections, x: Float[Tensor, "batch len width"], mask: Any, past: Any,
    is_causal: bool | None, positions: Any,
) -> OwnTokens | None:  # fmt: skip
    """What an attention reads of its own tokens; None where that is for transformers' own code to find out.

    Args:
        attention: it.
        own: what it is.
        x: tokens that ``may_be_read``.
        mask: as in ``attend_for``.
        past: transformers' cache, or None.
        is_causal: as in ``attend_for``.
        positions: as in ``angles_of``, where queries and keys are turned.
    """
    angles, head_dim = None, own.last[0].shape[1] // own.num_heads
    if own.rotary is not None:
        angles = angles_of(positions, x.dtype)
        if angles is None or not fits(angles, x, head_dim):
            return None
    cached = None if past is None else cache_layer_of(of_own_tokens(past), getattr(attention, "layer_idx", None))
    if cached is None and past is not None:
        return None
    causal = is_causal_alone(attention) if is_causal is None else bool(is_causal)
    known, meaning = _meaning(mask, causal, x.shape[1], 0 if cached is None else cached.length)
    held = None if cached is None else cached.held(x, own.num_kv_heads, head_dim)
    if not known or (held is None and cached is not None):
        return None
    return OwnTokens(meaning, causal, held, cached, angles)


def _meaning(given: Any, causal: bool, length: int, before: int) -> tuple[bool, Mask | None]:
    """Whether it is known what a call of so many tokens behind others may attend to, and that."""
    if given is None:
        causal = causal and length > 1
        return not causal or before == 0, Causal() if causal else None
    if type(given) is not MaskTensor or given.query_offset != before or given.shape[-1] != before + length:
        return False, None
    return True, given.meaning()


def attended_in_one_step(
    attention: Any, own: Projections, x: Any, mask: Any, past: Any, options: Mapping[str, Any], positions: Any
) -> Float[Tensor, "batch len width"] | None:
    """What an attention gives, and its cache the keys and values behind those that it held; None where it is for
    others to take its parts one by one. Arguments as in ``own_tokens`` and ``may_be_read``."""
    if not may_be_read(x, past, options):
        return None
    read = own_tokens(attention, own, x, mask, past, options.get("is_causal"), positions)
    if read is None:
        return None
    if watched():
        if not is_step((x,), own, mask=read.mask, held=read.held):
            return None
        return attended(
            attention, own, x, angles=read.angles, mask=mask, causal=read.causal, past=of_own_tokens(past)
        )  # fmt: skip
    output = fused_attention((x,), own, mask=read.mask, held=read.held, angles=read.angles)
    if output is not None and read.cached is not None:
        read.cached.appended(x)
    return output


def attended(
    attention: Any, own: Projections, x: Float[Tensor, "batch len width"], *,
    angles: Float[Tensor, "_rows head_dim"] | None, mask: Any, causal: bool, past: Any,
) -> Float[Tensor, "batch len width"]:  # fmt: skip
    """The same part by part, for those who watch it."""
    projected = [project(x, *layer, path=NATIVE).flatten(0, 1) for layer in own.sources]
    for place, (kind, pair) in enumerate(own.head_norms):
        heads = projected[place].unflatten(-1, (own.num_heads if place == 0 else own.num_kv_heads, -1))
        projected[place] = normed(heads, Norm(*kind, *pair)).flatten(-2)
    counts = (own.num_heads, own.num_kv_heads, own.num_kv_heads)
    query, key, value = by_head(projected, len(x), counts)
    if angles is not None:
        query, key = turned_by_token(query, angles), turned_by_token(key, angles)
    if past is not None:
        key, value = past.update(key, value, attention.layer_idx)
    softcap = next((rule.cap for rule in own.rules if isinstance(rule, SoftCap)), None)
    output, _ = attend_for(
        attention, query, key, value, mask, own.dropout, own.scale, is_causal=causal, softcap=softcap
    )  # fmt: skip
    return project(output.flatten(-2), *own.last, path=NATIVE)
