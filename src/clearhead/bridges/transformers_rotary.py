"""Layers that turn queries and keys by their positions, and their attention: Llama's kind, Gemma's and ModernBERT.

A norm before each sublayer, rotary positions, grouped heads, a feedforward with a gate: some seventy classes say what
Llama's layer says, and some fifty what its attention says, or Mistral's, Qwen2's or Qwen3's. Others differ in what
their parts are called, and in norms of what a sublayer gives: tables say so. Classes are known by the source of their
``forward``, as parts are. A layer whose parts are all known is one step, cache and all, where nobody looks on.
Elsewhere its parts are taken one by one.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from clearhead.bridges.torch_parts import is_plain
from clearhead.bridges.transformers_angles import angles_of, fits
from clearhead.bridges.transformers_attention import NAME, attend_for, scale_of
from clearhead.bridges.transformers_parts import drop_in, feedforward_of, norm_of, plain_layer
from clearhead.bridges.transformers_self_attention import attended_in_one_step
from clearhead.bridges.transformers_source import Way, digest_of, known_by_source, made_of, way_of
from clearhead.bridges.transformers_step import Kind, hooked_now, layer_in_one_step
from clearhead.nn.feedforward import drop_of
from clearhead.nn.fused_attention import Projections
from clearhead.nn.fused_layer import LayerParts
from clearhead.nn.unchanged import TakenApart
from clearhead.positions import turned_by_token
from clearhead.projection import are_plain
from clearhead.scores import SoftCap
from clearhead.shapes import Float

__all__ = ["ATTENTIONS", "LAYERS", "TURNING", "AttentionForm", "LayerForm"]


@dataclass(frozen=True)
class AttentionForm:
    """What the parts of an attention are called.

    Attributes:
        projections: the layers of queries, keys and values; or the one that makes all three side by side.
        last: the layer that mixes the heads.
        head_norms: of each head's queries and of its keys, where there are some.
        drop: what drops what the attention gives, where something does.
        scaling: of scores; of head_dim alone where it has no name.
        softcap: within which scores are held, where they may be.
    """

    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    last: str = "o_proj"
    head_norms: tuple[str, ...] = ()
    drop: str | None = None
    scaling: str | None = "scaling"
    softcap: str | None = None

    def counts(self, attention: Any) -> tuple[int, int]:
        """Heads of queries, and of keys and values."""
        if len(self.projections) == 1:
            queries = attention.config.num_attention_heads
            return queries, getattr(attention, "num_key_value_heads", queries)
        queries, keys = (len(getattr(attention, name).weight) // attention.head_dim for name in self.projections[:2])
        return queries, keys

    def heads(self, attention: Any, x: Tensor) -> list[Tensor]:
        """Queries, keys and values ``[batch, len, heads, head_dim]``, normed."""
        shape = (*x.shape[:-1], -1, attention.head_dim)
        found = [getattr(attention, name)(x).view(shape) for name in self.projections]
        if len(found) == 1:
            queries, keys = self.counts(attention)
            found = [*found[0].split((queries, keys, keys), -2)]
        for place, name in enumerate(self.head_norms):
            found[place] = getattr(attention, name)(found[place])
        return found

    def scale(self, attention: Any) -> float:
        """Of scores."""
        found = attention.head_dim**-0.5 if self.scaling is None else getattr(attention, self.scaling)
        return float(found)

    def dropped(self, attention: Any, output: Tensor) -> Tensor:
        """What is left of what it gives."""
        return output if self.drop is None else getattr(attention, self.drop)(output)

    def cap(self, attention: Any) -> float | None:
        """Within which scores are held, if they are."""
        return None if self.softcap is None else getattr(attention, self.softcap)


#: By the source of an attention's ``forward``.
ATTENTIONS: Final[Mapping[str, AttentionForm]] = {
    # LlamaAttention's, and MistralAttention's and Qwen2Attention's, which tell other kernels of a window besides.
    "8f75c00a401a6427": AttentionForm(),
    "09e6200078ce8582": AttentionForm(),
    "458fecce9ca1b771": AttentionForm(),
    # Qwen3Attention's and Gemma3Attention's.
    "bfd9f32a12e9e8fa": AttentionForm(head_norms=("q_norm", "k_norm")),
    "5ec37492fda6f4fa": AttentionForm(head_norms=("q_norm", "k_norm")),
    # Gemma2Attention's.
    "b3ec97eb26967b0b": AttentionForm(softcap="attn_logit_softcapping"),
    # Phi3Attention's.
    "ca19723800b6fdd3": AttentionForm(projections=("qkv_proj",)),
    # ModernBertAttention's.
    "691a1b0871237046": AttentionForm(projections=("Wqkv",), last="Wo", drop="out_drop", scaling=None),
}


@dataclass(frozen=True)
class LayerForm:
    """How a layer is put together.

    Attributes:
        arguments: of its ``forward``, behind the tokens.
        norms: what the norms in front of its sublayers are called.
        behind: those of what each sublayer gives, where there are some.
        drops: what drops what each sublayer gives, where something does.
        attention: what it is called.
    """

    arguments: tuple[str, ...] = (
        "attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings",
    )  # fmt: skip
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    behind: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    attention: str = "self_attn"


#: By the source of a layer's ``forward``.
LAYERS: Final[Mapping[str, LayerForm]] = {
    # LlamaDecoderLayer's and Phi3DecoderLayer's.
    "41790554596bb832": LayerForm(),
    "d5a3a39fcb7f9e8a": LayerForm(drops=("resid_attn_dropout", "resid_mlp_dropout")),
    # Gemma2DecoderLayer's, and Gemma3DecoderLayer's.
    "c639e2c159e63f07": LayerForm(
        ("position_embeddings", "attention_mask", "position_ids", "past_key_values"),
        norms=("input_layernorm", "pre_feedforward_layernorm"),
        behind=("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    # ModernBertEncoderLayer's, of which the first one norms nothing in front of its attention.
    "1715dc89271ef808": LayerForm(
        ("attention_mask", "position_embeddings"), norms=("attn_norm", "mlp_norm"), attention="attn"
    ),
}
#: Of the functions by which attentions turn queries and keys: channels c and c + head_dim / 2 are a pair. The first may
#: stand there to be replaced by the same from elsewhere. Phi-3's, the third, turns as many channels as there are
#: angles; ModernBERT's, the last, does it in float32.
TURNING: Final = {
    "apply_rotary_pos_emb": ("a9a8d75048e6b99e", "55a62abecf4c2250", "cb1e97a9d4d99232", "e87f9ad0dcc341e3"),
    "rotate_half": ("b024671b0dcb8274",),
}


# ---- attention by itself: one step, or by the kernels part by part ------------------------------------------

_APART: Final = TakenApart[tuple[Projections, float]]()
#: Of what an attention or a layer is called with, that which says nothing of what is computed.
_UNREAD: Final = ("position_ids", "use_cache")


def _attended(
    module: Any, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None,
    past_key_values: Any = None, **kwargs: Any,
) -> tuple[Tensor, None] | None:  # fmt: skip
    """An attention whose queries and keys the kernels turn."""
    x, form = hidden_states, _form_of(module)
    if form is None or not is_plain(x) or not _may_turn(module) or not are_plain(x):
        return None
    output = _in_one_step(module, x, attention_mask, past_key_values, kwargs, position_embeddings)
    if output is not None:
        return form.dropped(module, output), None
    angles = angles_of(position_embeddings, x.dtype)
    if angles is None or not fits(angles, x, module.head_dim):
        return None
    query, key, value = (part.transpose(1, 2) for part in form.heads(module, x))
    query, key = turned_by_token(query, angles), turned_by_token(key, angles)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, module.layer_idx)
    output, _ = attend_for(
        module, query, key, value, attention_mask, _dropout(module), form.scale(module), softcap=form.cap(module),
        **kwargs,
    )  # fmt: skip
    return form.dropped(module, getattr(module, form.last)(output.flatten(-2))), None


def _in_one_step(
    attention: Any, x: Float[Tensor, "batch len width"], mask: Any, past: Any, options: Mapping[str, Any],
    positions: Any,
) -> Tensor | None:  # fmt: skip
    """All of it but what is dropped of it, where its parts are what they were."""
    like, parts = (x.shape[-1], x.dtype, *_marks_of(attention)), [*attention._modules.values()]
    found = _APART.of(attention, like, parts, lambda: _projections_of(attention, x))
    if found is None:
        return None
    options = {name: option for name, option in options.items() if name not in _UNREAD}
    return attended_in_one_step(attention, found[0], x, mask, past, options, positions)


def _form_of(attention: Any) -> AttentionForm | None:
    digest = digest_of(type(attention).forward)
    return None if digest is None else ATTENTIONS.get(digest)


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


_TURNS: Final[dict[type[nn.Module] | None, bool]] = {}


# ---- a whole layer ------------------------------------------------------------------------------------------


#: Of what a layer is called with, that which a step reads.
_READ: Final = ("attention_mask", "past_key_values", "position_embeddings")


def _way_of(form: LayerForm) -> Way:
    """A layer's forward in one step."""
    kind = Kind(
        lambda module: [getattr(module, form.attention)],
        lambda module: _marks_of(getattr(module, form.attention)),
        lambda module, x: _parts_of(form, module, x),
    )

    def way(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        if len(args) > len(form.arguments):
            return None
        given = {**dict(zip(form.arguments, args, strict=False)), **kwargs}
        for name in _UNREAD:
            given.pop(name, None)
        mask, past, positions = (given.pop(name, None) for name in _READ)
        return layer_in_one_step(kind, module, hidden_states, mask, past, given, positions)

    return way


def _marks_of(attention: Any) -> tuple[object, ...]:
    form = _form_of(attention)
    if form is None:
        return ()
    counts = form.counts(attention) if len(form.projections) == 1 else ()
    return form.scale(attention), form.cap(attention), attention.head_dim, _dropout(attention), *counts


def _parts_of(form: LayerForm, module: Any, x: Tensor) -> LayerParts | None:
    attention, names = getattr(module, form.attention), (*form.norms, *form.behind)
    own = None if hooked_now(attention) else _projections_of(attention, x)
    norms = [norm for name in names if (norm := norm_of(getattr(module, name), x)) is not None]
    fed = feedforward_of(module.mlp)
    after = [drop_of(getattr(module, name)) for name in form.drops] or [0.0, 0.0]
    if own is None or fed is None or len(norms) < len(names) or None in after:
        return None
    # Halves of a layer would learn apart from it.
    if fed.halved and torch.is_grad_enabled():
        return None
    projections, drop = own
    return LayerParts(
        [projections], fed.layers, norms[:2], norm_first=True, activation=fed.activation,
        after=(after[0] or drop, after[1] or fed.after), hidden=fed.hidden, behind=norms[2:],
    )  # fmt: skip


def _projections_of(attention: Any, x: Tensor) -> tuple[Projections, float] | None:
    """An attention as part of a step, and the probability with which what it gives is dropped."""
    form = _form_of(attention)
    if form is None or way_of(type(attention)) is not _attended or not _may_turn(attention):
        return None
    paths = (*form.projections, form.last)
    layers = [layer for name in paths if (layer := plain_layer(getattr(attention, name))) is not None]
    head = x[..., : attention.head_dim]
    norms = [norm for name in form.head_norms if (norm := norm_of(getattr(attention, name), head)) is not None]
    drop = drop_in(attention, form.drop)
    if len(layers) < len(paths) or len(norms) < len(form.head_norms) or drop is None:
        return None
    *sources, last = layers
    (num_heads, num_kv_heads), cap = form.counts(attention), form.cap(attention)
    if sum(len(weight) for weight, _ in sources) != (num_heads + 2 * num_kv_heads) * attention.head_dim:
        return None
    found = Projections(
        sources, last, num_heads, num_kv_heads, scale=scale_of(form.scale(attention), attention.head_dim),
        dropout=_dropout(attention), rotary="angles", head_norms=tuple(norms),
        rules=() if cap is None else (SoftCap(cap),),
    )  # fmt: skip
    return found, drop


for _digest in ATTENTIONS:
    known_by_source(_digest, _attended)
for _digest, _form in LAYERS.items():
    # It may be told not to.
    known_by_source(_digest, _way_of(_form), leaves_padding_out=True)
