"""Decoder layers of Llama's kind, and their attention: known by the source of their ``forward``, as parts are.

What Llama's layer does, some sixty classes do, Mistral's and Qwen2's among them: an RMSNorm before each sublayer,
rotary positions, grouped heads, a feedforward with a gate. Such a layer is one step, cache and all, where all its parts
are what they are known to be and nobody looks on. Elsewhere its parts are taken one by one, by the same kernels.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from clearhead.bridges.torch_parts import is_plain
from clearhead.bridges.transformers_angles import angles_of
from clearhead.bridges.transformers_attention import attend_for, scale_of, weights_wanted
from clearhead.bridges.transformers_cache import layer_of
from clearhead.bridges.transformers_masks import MaskTensor
from clearhead.bridges.transformers_parts import faster, feedforward_of, norm_of, original, plain_layer
from clearhead.bridges.transformers_source import digest_of, known_by_source, made_of, way_of
from clearhead.masks import Causal, Mask
from clearhead.nn.fused_attention import Projections
from clearhead.nn.fused_layer import LayerParts, Layers, fused_layers, of_parts
from clearhead.nn.unchanged import Unchanged
from clearhead.positions import turned
from clearhead.projection import NATIVE, Path, are_plain, project
from clearhead.shapes import Float
from clearhead.watch import watched

__all__ = ["faster", "original"]

#: The implementation that a model handed over attends by.
_NAME: Final = "clearhead"


#: LlamaAttention's source, and MistralAttention's and Qwen2Attention's, which tell other kernels of a window besides.
_ATTENTIONS: Final = ("8f75c00a401a6427", "09e6200078ce8582", "458fecce9ca1b771")
#: LlamaDecoderLayer's.
_LAYERS: Final = ("41790554596bb832",)
#: Of the functions by which Llama's attention turns queries and keys: channels c and c + head_dim / 2 are a pair.
_TURNING: Final = {"apply_rotary_pos_emb": "55a62abecf4c2250", "rotate_half": "b024671b0dcb8274"}


# ---- attention, by the kernels part by part -----------------------------------------------------------------


def _attended(
    module: Any, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None,
    past_key_values: Any = None, **kwargs: Any,
) -> tuple[Tensor, None] | None:  # fmt: skip
    """Llama's attention, its queries and keys turned by the kernels."""
    if not is_plain(hidden_states) or not _may_turn(module) or not are_plain(hidden_states):
        return None
    angles = angles_of(position_embeddings, hidden_states.dtype)
    if angles is None or angles.shape != (hidden_states.shape[-2], module.head_dim):
        return None
    return _attended_by(module, hidden_states, angles, attention_mask, past_key_values, **kwargs), None


def _attended_by(
    module: Any, x: Float[Tensor, "batch len width"], angles: Float[Tensor, "len head_dim"], mask: Any, past: Any,
    path: Path | None = None, **options: Any,
) -> Float[Tensor, "batch len width"]:  # fmt: skip
    """The attention of tokens with these angles, its products by ``path`` where one is given."""

    def product(layer: Any, y: Tensor) -> Tensor:
        found: Tensor = layer(y) if path is None else project(y, layer.weight, layer.bias, path=path)
        return found

    shape = (*x.shape[:-1], -1, module.head_dim)
    query, key, value = (
        product(layer, x).view(shape).transpose(1, 2) for layer in (module.q_proj, module.k_proj, module.v_proj)
    )
    query, key = turned(query, angles), turned(key, angles)
    if past is not None:
        key, value = past.update(key, value, module.layer_idx)
    dropout = module.attention_dropout if module.training else 0.0
    output, _ = attend_for(module, query, key, value, mask, dropout, module.scaling, **options)
    return product(module.o_proj, output.flatten(-2))


def _may_turn(attention: Any) -> bool:
    """Whether a model's attention is ours, and its positions are turned as is known."""
    return attention.config._attn_implementation == _NAME and _turns_as_known(made_of(type(attention)))


def _turns_as_known(kind: type[nn.Module] | None) -> bool:
    if kind not in _TURNS:
        turn = None if kind is None else _names_in(kind.forward).get("apply_rotary_pos_emb")
        found = {"apply_rotary_pos_emb": turn, "rotate_half": _names_in(turn).get("rotate_half")}
        _TURNS[kind] = {name: digest_of(own) for name, own in found.items()} == _TURNING
    return _TURNS[kind]


def _names_in(function: object) -> dict[str, object]:
    """What a function's global names are."""
    plain = inspect.unwrap(function) if callable(function) else None
    return getattr(plain, "__globals__", {})


_TURNS: Final[dict[type[nn.Module] | None, bool]] = {}


# ---- a whole layer ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Apart:
    """A layer taken apart, for tokens of one width and dtype.

    Attributes:
        parts: of the layer and of its attention.
        unchanged: whether these are what they were, all but the attention.
        like: width and dtype of the tokens, and what the attention is besides its layers.
        layers: as a step takes it.
    """

    parts: list[nn.Module | None]
    unchanged: Unchanged
    like: tuple[object, ...]
    layers: Layers


_APART: Final[WeakKeyDictionary[nn.Module, _Apart]] = WeakKeyDictionary()
#: Options that ask for what is collected around a layer.
_COLLECTED: Final = ("output_hidden_states",)
#: Of an attention, those of its parts that a step knows.
_PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj")


def _layer(
    module: Any, hidden_states: Tensor, attention_mask: Any = None, position_ids: Any = None,
    past_key_values: Any = None, use_cache: Any = False, position_embeddings: Any = None, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """Llama's layer in one step."""
    x = hidden_states
    if not is_plain(x) or x.dim() != 3 or weights_wanted():
        return None
    if any(option is not None and option is not False and name not in _COLLECTED for name, option in kwargs.items()):
        return None
    # Gradients do not go through what a cache holds.
    if past_key_values is not None and torch.is_grad_enabled():
        return None
    attention, apart = module.self_attn, _taken_apart(module, x)
    angles = None if apart is None else angles_of(position_embeddings, x.dtype)
    if apart is None or angles is None or angles.shape != (x.shape[1], attention.head_dim):
        return None
    cached = None if past_key_values is None else layer_of(past_key_values, attention.layer_idx)
    if cached is None and past_key_values is not None:
        return None
    known, mask = _mask_of(attention, attention_mask, x.shape[1], 0 if cached is None else cached.cache.length)
    own = apart.layers.parts[0].attentions[0]
    held = None if cached is None else cached.held(x, own.num_kv_heads, attention.head_dim)
    if not known or (held is None and cached is not None):
        return None
    if watched():
        attend = partial(_attended_by, attention, angles=angles, mask=attention_mask, past=past_key_values, path=NATIVE)
        return of_parts((x,), apart.layers.parts[0], [mask], [attend, module.mlp], [held])
    output = fused_layers((x,), apart.layers.turned_by(angles), [mask], [held])
    if output is not None and cached is not None:
        cached.appended(x)
    return output


def _mask_of(attention: Any, given: Any, length: int, before: int) -> tuple[bool, Mask | None]:
    """Whether it is known what a call of so many tokens behind others may attend to, and that."""
    if given is None:
        causal = getattr(attention, "is_causal", True) and length > 1
        return not causal or before == 0, Causal() if causal else None
    if type(given) is not MaskTensor or given.query_offset != before or given.shape[-1] != before + length:
        return False, None
    return True, given.meaning()


def _taken_apart(layer: Any, x: Float[Tensor, "batch len width"]) -> _Apart | None:
    """What a layer is as a step, where all there is to it is that."""
    attention = layer.self_attn
    dropout = attention.attention_dropout if attention.training else 0.0
    like = (
        x.shape[-1], x.dtype, attention.scaling, attention.head_dim, dropout, type(attention), _hooks_of(attention),
    )  # fmt: skip
    known, parts = _APART.get(layer), [*layer._modules.values(), *attention._modules.values()]
    if known is not None and known.like == like and known.parts == parts and known.unchanged.holds():
        return known
    found = _parts_of(layer, x, dropout)
    if found is None:
        return None
    # Asked of the attention each time, which may have hooks that do nothing now.
    others = [part for part in parts if part is not None and part is not attention]
    apart = _Apart(parts, Unchanged(*others), like, Layers([found]))
    if not apart.unchanged.holds():
        return None
    _APART[layer] = apart
    return apart


def _parts_of(layer: Any, x: Tensor, dropout: float) -> LayerParts | None:
    attention = layer.self_attn
    norms = [norm_of(layer.input_layernorm), norm_of(layer.post_attention_layernorm)]
    fed, layers = feedforward_of(layer.mlp), [plain_layer(getattr(attention, name)) for name in _PROJECTIONS]
    if way_of(type(attention)) is not _attended or not _may_turn(attention) or _hooks_of(attention):
        return None
    *sources, last = [own for own in layers if own is not None]
    found = [norm for norm in norms if norm is not None]
    if fed is None or len(sources) < 3 or len(found) < 2 or type(attention.head_dim) is not int:
        return None
    num_heads, num_kv_heads = (len(weight) // attention.head_dim for weight, _ in sources[:2])
    scale = scale_of(attention.scaling, attention.head_dim)
    own = Projections(sources, last, num_heads, num_kv_heads, scale=scale, dropout=dropout, rotary="angles")
    return LayerParts(
        [own], fed.layers, [((norm.kind, float(norm.epsilon)), (norm.weight, norm.bias)) for norm in found],
        norm_first=True, activation=fed.activation, after=(0.0, 0.0), hidden=0.0,
    )  # fmt: skip


def _hooks_of(module: nn.Module) -> bool:
    """Whether somebody looks at a module's calls now: transformers' own hooks collect only where it is asked for."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values(), *module._backward_hooks.values()]
    hooks += module._backward_pre_hooks.values()
    return "forward" in vars(module) or any(getattr(own, "__module__", "") != _COLLECTS for own in hooks)


_COLLECTS: Final = "transformers.utils.output_capturing"

for _digest in _ATTENTIONS:
    known_by_source(_digest, _attended)
for _digest in _LAYERS:
    known_by_source(_digest, _layer)
