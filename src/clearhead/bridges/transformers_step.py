"""A layer of a model of transformers as one step, its cache and all, for those who know what the layer is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from clearhead.backends.native_norm import Norm
from clearhead.bridges.packed import Packed
from clearhead.bridges.torch_parts import is_plain
from clearhead.bridges.transformers_angles import angles_of, fits
from clearhead.bridges.transformers_attention import attend_for, is_causal_alone, weights_wanted
from clearhead.bridges.transformers_cache import cache_layer_of
from clearhead.bridges.transformers_masks import MaskTensor
from clearhead.masks import Causal, Mask
from clearhead.nn.attention_step import by_head
from clearhead.nn.fused_attention import Projections
from clearhead.nn.fused_layer import LayerParts, Layers, fused_layers, of_parts
from clearhead.nn.norm import normed
from clearhead.nn.unchanged import Unchanged
from clearhead.positions import turned_by_token
from clearhead.projection import NATIVE, project, project_activate_project
from clearhead.shapes import Float
from clearhead.watch import watched

__all__ = ["Kind", "hooked_now", "layer_in_one_step"]

#: Options that are known, or ask for what is collected around a layer.
_READ: Final = ("is_causal", "output_hidden_states")
#: Where transformers' own hooks come from, which collect only where it is asked for.
_COLLECTS: Final = "transformers.utils.output_capturing"


#: From how many tokens, times the width squared, of padding on it is left out.
_LEAST_LEFT_OUT: Final = 2**22


@dataclass(frozen=True)
class Kind:
    """What somebody knows of a kind of layers.

    Attributes:
        attention: a layer's, which watchers know.
        marks: what a layer and its attention are besides their parts: scale, heads, dropout now.
        parts: what a layer is as a step, where all there is to it is that.
    """

    attention: Callable[[Any], Any]
    marks: Callable[[Any], tuple[object, ...]]
    parts: Callable[[Any, Tensor], LayerParts | None]


@dataclass(frozen=True)
class _Apart:
    """A layer taken apart, for tokens of one width and dtype.

    Attributes:
        parts: of the layer and of its attention.
        unchanged: whether these are what they were, all but the attention.
        like: width and dtype of the tokens, and what the attention is besides its parts.
        layers: as a step takes it.
    """

    parts: list[nn.Module | None]
    unchanged: Unchanged
    like: tuple[object, ...]
    layers: Layers


_APART: Final[WeakKeyDictionary[nn.Module, _Apart]] = WeakKeyDictionary()


def layer_in_one_step(
    kind: Kind, layer: Any, x: Float[Tensor, "batch len width"], mask: Any, past: Any, options: Mapping[str, Any],
    positions: Any = None,
) -> Float[Tensor, "batch len width"] | None:  # fmt: skip
    """What a layer gives, and its cache the keys and values behind those that it held; None where it is for
    transformers' own code to find out.

    Args:
        kind: what the layer is.
        layer: it.
        x: tokens, which may be anything.
        mask: as in ``attend_for``.
        past: transformers' cache, or None.
        options: others that the layer was called with.
        positions: as in ``angles_of``, of an attention that turns queries and keys.
    """
    if not is_plain(x) or x.dim() != 3 or weights_wanted():
        return None
    if any(option is not None and option is not False and name not in _READ for name, option in options.items()):
        return None
    # Gradients do not go through what a cache holds.
    if past is not None and torch.is_grad_enabled():
        return None
    try:
        attention, apart = kind.attention(layer), _taken_apart(kind, layer, x)
    except AttributeError:
        # Something stands there that is not what the kind says.
        return None
    if apart is None:
        return None
    own, angles = apart.layers.parts[0].attentions[0], None
    if own.rotary is not None:
        angles = angles_of(positions, x.dtype)
        if angles is None or not fits(angles, x, _head_dim(own)):
            return None
    cached = None if past is None else cache_layer_of(past, getattr(attention, "layer_idx", None))
    if cached is None and past is not None:
        return None
    causal = options.get("is_causal")
    if causal is None:
        causal = is_causal_alone(attention)
    known, meaning = _meaning(mask, bool(causal), x.shape[1], 0 if cached is None else cached.cache.length)
    held = None if cached is None else cached.held(x, own.num_kv_heads, _head_dim(own))
    if not known or (held is None and cached is not None):
        return None
    # A cache keeps its places.
    packed = _packed(layer, x, mask) if past is None else None
    if watched():
        attend = partial(_attended, attention, own, angles=angles, mask=mask, past=past)
        feed = partial(_fed, apart.layers.parts[0])
        output = of_parts((x,), apart.layers.parts[0], [meaning], [attend, feed], [held])
        return output if packed is None or output is None else packed[0].leave(packed[0].enter(output))
    if packed is not None:
        laid, mask = packed
        layers = apart.layers if angles is None else apart.layers.turned_by(laid.angles(angles))
        output = fused_layers((laid.enter(x)[None],), layers, [mask], [None])
        return None if output is None else laid.leave(output[0])
    layers = apart.layers if angles is None else apart.layers.turned_by(angles)
    output = fused_layers((x,), layers, [meaning], [held])
    if output is not None and cached is not None:
        cached.appended(x)
    return output


def _packed(layer: Any, x: Tensor, given: Any) -> tuple[Packed, Mask] | None:
    """How a layer's tokens are laid end to end, and what they attend to then, where that is asked for and pays."""
    if type(given) is not MaskTensor or not layer.leaves_padding_out:
        return None
    found = given.packed()
    if found is None or found[0].size != x.shape[:2]:
        return None
    rows = x.shape[0] * x.shape[1] - len(found[0].places)
    return found if rows * x.shape[2] ** 2 >= _LEAST_LEFT_OUT else None


def _head_dim(own: Projections) -> int:
    return own.last[0].shape[1] // own.num_heads


def _meaning(given: Any, causal: bool, length: int, before: int) -> tuple[bool, Mask | None]:
    """Whether it is known what a call of so many tokens behind others may attend to, and that."""
    if given is None:
        causal = causal and length > 1
        return not causal or before == 0, Causal() if causal else None
    if type(given) is not MaskTensor or given.query_offset != before or given.shape[-1] != before + length:
        return False, None
    return True, given.meaning()


def _taken_apart(kind: Kind, layer: Any, x: Float[Tensor, "batch len width"]) -> _Apart | None:
    """What a layer is as a step, where all there is to it is that."""
    attention = kind.attention(layer)
    like = (
        x.shape[-1], x.dtype, type(attention), attention.config._attn_implementation, hooked_now(attention),
        *kind.marks(layer),
    )  # fmt: skip
    known, parts = _APART.get(layer), [*layer._modules.values(), *attention._modules.values()]
    if known is not None and known.like == like and known.parts == parts and known.unchanged.holds():
        return known
    found = kind.parts(layer, x)
    if found is None:
        return None
    # The attention is asked each time, for it may have hooks that do nothing now.
    others = [part for part in parts if part is not None and part is not attention]
    apart = _Apart(parts, Unchanged(*others, apart_from=attention), like, Layers([found]))
    if not apart.unchanged.holds():
        return None
    _APART[layer] = apart
    return apart


def hooked_now(module: nn.Module) -> bool:
    """Whether somebody looks at a module's calls, or set a ``forward`` of its own on it; transformers, where nothing is
    to be collected, does not."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values(), *module._backward_hooks.values()]
    hooks += module._backward_pre_hooks.values()
    return "forward" in vars(module) or any(getattr(own, "__module__", "") != _COLLECTS for own in hooks)


# ---- the same part by part, for those who watch --------------------------------------------------------------


def _attended(
    attention: Any, own: Projections, x: Float[Tensor, "batch len width"], *,
    angles: Float[Tensor, "_rows head_dim"] | None, mask: Any, past: Any,
) -> Float[Tensor, "batch len width"]:  # fmt: skip
    """What an attention gives, for those who watch it."""
    projected = [project(x, *layer, path=NATIVE).flatten(0, 1) for layer in own.sources]
    for place, (kind, pair) in enumerate(own.head_norms):
        heads = projected[place].unflatten(-1, (-1, _head_dim(own)))
        projected[place] = normed(heads, Norm(*kind, *pair)).flatten(-2)
    counts = (own.num_heads, own.num_kv_heads, own.num_kv_heads)
    query, key, value = by_head(projected, len(x), counts)
    if angles is not None:
        query, key = turned_by_token(query, angles), turned_by_token(key, angles)
    if past is not None:
        key, value = past.update(key, value, attention.layer_idx)
    output, _ = attend_for(attention, query, key, value, mask, own.dropout, own.scale)
    return project(output.flatten(-2), *own.last, path=NATIVE)


def _fed(parts: LayerParts, x: Float[Tensor, "batch len width"]) -> Float[Tensor, "batch len width"]:
    """What a feedforward gives that a step knows."""
    *gate, expand, contract = parts.feedforward
    found = project_activate_project(
        x, *expand, *contract, gate=gate[0] if gate else None, activation=parts.activation, dropout=parts.hidden
    )
    assert found is not None
    return found
