"""Decoder layers of Llama's kind, and their attention: known by the source of their ``forward``, as parts are.

An RMSNorm before each sublayer, rotary positions, grouped heads, a feedforward with a gate: some seventy classes say
what Llama's layer says, and some fifty what its attention says, or Mistral's, Qwen2's or Qwen3's. A layer whose parts
are all known is one step, cache and all, where nobody looks on. Elsewhere its parts are taken one by one.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import Tensor, nn

from clearhead.bridges.torch_parts import is_plain
from clearhead.bridges.transformers_angles import angles_of, fits
from clearhead.bridges.transformers_attention import NAME, attend_for, scale_of
from clearhead.bridges.transformers_parts import feedforward_of, norm_of, plain_layer
from clearhead.bridges.transformers_source import digest_of, known_by_source, made_of, way_of
from clearhead.bridges.transformers_step import Kind, hooked_now, layer_in_one_step
from clearhead.nn.feedforward import drop_of
from clearhead.nn.fused_attention import Projections
from clearhead.nn.fused_layer import LayerParts
from clearhead.nn.norm import NormLike
from clearhead.positions import turned_by_token
from clearhead.projection import are_plain

__all__ = ["ATTENTIONS", "JOINED_ATTENTIONS", "LAYERS", "NORMED_ATTENTIONS", "TURNING"]

#: LlamaAttention's source, and MistralAttention's and Qwen2Attention's, which tell other kernels of a window besides.
ATTENTIONS: Final = ("8f75c00a401a6427", "09e6200078ce8582", "458fecce9ca1b771")
#: Qwen3Attention's, which norms each head's queries and keys first.
NORMED_ATTENTIONS: Final = ("bfd9f32a12e9e8fa",)
#: Phi3Attention's, whose queries, keys and values come from one product.
JOINED_ATTENTIONS: Final = ("ca19723800b6fdd3",)
#: LlamaDecoderLayer's, and Phi3DecoderLayer's, which drops what each sublayer gives.
LAYERS: Final = ("41790554596bb832", "d5a3a39fcb7f9e8a")
#: Of the functions by which Llama's attention turns queries and keys: channels c and c + head_dim / 2 are a pair.
#: The first may stand there to be replaced by the same from elsewhere. Phi-3's, the last, turns as many channels as
#: there are angles.
TURNING: Final = {
    "apply_rotary_pos_emb": ("a9a8d75048e6b99e", "55a62abecf4c2250", "cb1e97a9d4d99232"),
    "rotate_half": ("b024671b0dcb8274",),
}
#: Of an attention, those of its parts that a step knows.
_PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_JOINED_PROJECTIONS: Final = ("qkv_proj", "o_proj")
#: What drops what a layer's sublayers give, where something does.
_DROPS: Final = ("resid_attn_dropout", "resid_mlp_dropout")


# ---- attention, by the kernels part by part -----------------------------------------------------------------


def _attended(
    module: Any, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None,
    past_key_values: Any = None, **kwargs: Any,
) -> tuple[Tensor, None] | None:  # fmt: skip
    """Llama's attention, its queries and keys turned by the kernels, and normed before that where there are norms."""
    x = hidden_states
    if not is_plain(x) or not _may_turn(module) or not are_plain(x):
        return None
    angles = angles_of(position_embeddings, x.dtype)
    if angles is None or not fits(angles, x, module.head_dim):
        return None
    shape = (*x.shape[:-1], -1, module.head_dim)
    if _joins(module):
        counts = _counts(module)
        heads = [*module.qkv_proj(x).view(shape).split((counts[0], counts[1], counts[1]), -2)]
    else:
        heads = [layer(x).view(shape) for layer in (module.q_proj, module.k_proj, module.v_proj)]
    if _norms_heads(module):
        heads[:2] = module.q_norm(heads[0]), module.k_norm(heads[1])
    query, key, value = (part.transpose(1, 2) for part in heads)
    query, key = turned_by_token(query, angles), turned_by_token(key, angles)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, module.layer_idx)
    output, _ = attend_for(module, query, key, value, attention_mask, _dropout(module), module.scaling, **kwargs)
    return module.o_proj(output.flatten(-2)), None


def _norms_heads(attention: Any) -> bool:
    return digest_of(type(attention).forward) in NORMED_ATTENTIONS


def _joins(attention: Any) -> bool:
    return digest_of(type(attention).forward) in JOINED_ATTENTIONS


def _counts(attention: Any) -> tuple[int, int]:
    """Heads of queries, and of keys and values."""
    if _joins(attention):
        return attention.config.num_attention_heads, attention.num_key_value_heads
    queries, keys = (len(getattr(attention, name).weight) // attention.head_dim for name in _PROJECTIONS[:2])
    return queries, keys


def _dropout(attention: Any) -> float:
    return attention.attention_dropout if attention.training else 0.0


def _may_turn(attention: Any) -> bool:
    """Whether a model's attention is ours, and its positions are turned as is known."""
    return attention.config._attn_implementation == NAME and _turns_as_known(made_of(type(attention)))


def _turns_as_known(kind: type[nn.Module] | None) -> bool:
    if kind not in _TURNS:
        turn = None if kind is None else _names_in(kind.forward).get("apply_rotary_pos_emb")
        found = {"apply_rotary_pos_emb": turn, "rotate_half": _names_in(turn).get("rotate_half")}
        _TURNS[kind] = all(digest_of(own) in TURNING[name] for name, own in found.items())
    return _TURNS[kind]


def _names_in(function: object) -> dict[str, object]:
    """What a function's global names are."""
    plain = inspect.unwrap(function) if callable(function) else None
    return getattr(plain, "__globals__", {})


_NOTHING: Final = nn.Identity()
_TURNS: Final[dict[type[nn.Module] | None, bool]] = {}


# ---- a whole layer ------------------------------------------------------------------------------------------


def _layer(
    module: Any, hidden_states: Tensor, attention_mask: Any = None, position_ids: Any = None,
    past_key_values: Any = None, use_cache: Any = False, position_embeddings: Any = None, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """Llama's layer in one step."""
    return layer_in_one_step(_KIND, module, hidden_states, attention_mask, past_key_values, kwargs, position_embeddings)


def _marks_of(module: Any) -> tuple[object, ...]:
    attention = module.self_attn
    counts = _counts(attention) if _joins(attention) else ()
    return attention.scaling, attention.head_dim, _dropout(attention), *counts


def _parts_of(module: Any, x: Tensor) -> LayerParts | None:
    attention, names = module.self_attn, ("input_layernorm", "post_attention_layernorm")
    if way_of(type(attention)) is not _attended or not _may_turn(attention) or hooked_now(attention):
        return None
    norms = [norm for name in names if (norm := norm_of(getattr(module, name), x)) is not None]
    paths = _JOINED_PROJECTIONS if _joins(attention) else _PROJECTIONS
    layers = [layer for name in paths if (layer := plain_layer(getattr(attention, name))) is not None]
    fed, after = feedforward_of(module.mlp), [drop_of(getattr(module, name, _NOTHING)) for name in _DROPS]
    if fed is None or len(norms) < len(names) or len(layers) < len(paths) or None in after:
        return None
    # Halves of a layer would learn apart from it.
    if fed.halved and torch.is_grad_enabled():
        return None
    *sources, last = layers
    head_norms: tuple[NormLike, ...] = ()
    if _norms_heads(attention):
        found = [norm_of(own, x[..., : attention.head_dim]) for own in (attention.q_norm, attention.k_norm)]
        head_norms = tuple(norm for norm in found if norm is not None)
        if len(head_norms) < len(found):
            return None
    num_heads, num_kv_heads = _counts(attention)
    if sum(len(weight) for weight, _ in sources) != (num_heads + 2 * num_kv_heads) * attention.head_dim:
        return None
    scale = scale_of(attention.scaling, attention.head_dim)
    own = Projections(
        sources, last, num_heads, num_kv_heads, scale=scale, dropout=_dropout(attention), rotary="angles",
        head_norms=head_norms,
    )  # fmt: skip
    return LayerParts(
        [own], fed.layers, norms, norm_first=True, activation=fed.activation,
        after=(after[0] or 0.0, after[1] or fed.after), hidden=0.0,
    )  # fmt: skip


_KIND: Final = Kind(lambda module: [module.self_attn], _marks_of, _parts_of)
for _digest in (*ATTENTIONS, *NORMED_ATTENTIONS, *JOINED_ATTENTIONS):
    known_by_source(_digest, _attended)
for _digest in LAYERS:
    # It may be told not to.
    known_by_source(_digest, _layer, leaves_padding_out=True)
