"""Layers of LayerNorm, attention and a feedforward, each of which is one step: BERT's, ViT's, CLIP's, GPT-2's and more.

They differ in what their parts are called, and in whether a norm comes first: a table says so. A layer is known by the
sources of its own ``forward`` and of its parts'. Elsewhere its parts are taken one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor, nn

from clearhead.bridges.transformers_attention import NAME, scale_of
from clearhead.bridges.transformers_parts import activation_of, norm_of, plain_layer
from clearhead.bridges.transformers_source import Way, digest_of, known_by_source
from clearhead.bridges.transformers_step import Kind, hooked_now, layer_in_one_step
from clearhead.nn.feedforward import drop_of
from clearhead.nn.fused_attention import Projections
from clearhead.nn.fused_layer import LayerParts

__all__ = ["FORMS", "Form"]


@dataclass(frozen=True)
class Form:
    """How a layer is put together; all names are paths within it.

    Attributes:
        sources: digests of what the ``forward`` of a part may say, or another method of it.
        attention: what watchers know.
        heads: the number of heads.
        scale: of scores.
        projections: of queries, keys and values; or the one that makes all three side by side.
        last: the layer that mixes the heads.
        weights_drop: what drops weights: a module, or a probability while the attention is training.
        norms: one for each sublayer.
        norm_first: whether a sublayer reads what is normed, and not the sum with it.
        feedforward: the layer that expands, the activation, and the layer that contracts.
        after: what drops what each sublayer gives: a module, a probability while the layer is training, or nothing.
        hidden: the same of what is activated.
        arguments: of the layer's ``forward``, in their order.
        unread: options of a call that say nothing of what is computed, where there is no memory.
        marks: attributes that have to be 0, or nothing.
        halves: whether numbers of 16 bits with five for the exponent are taken as others are.
    """

    sources: Mapping[str, tuple[str, ...]]
    attention: str
    heads: str
    scale: str
    projections: tuple[str, ...]
    last: str
    weights_drop: str
    norms: tuple[str, str]
    norm_first: bool
    feedforward: tuple[str, str, str]
    after: tuple[str | None, str | None] = (None, None)
    hidden: str | None = None
    arguments: tuple[str, ...] = ("hidden_states", "attention_mask")
    unread: tuple[str, ...] = ("use_cache",)
    marks: tuple[str, ...] = ()
    halves: bool = True


#: BertSelfOutput's, and BertOutput's, BertIntermediate's, and the method that puts the two one behind the other.
_BERT_PARTS: Final = {
    "attention.output": ("edd0230858f63315",), "intermediate": ("cf65bc74f562bf96",),
    "output": ("edd0230858f63315",), "feed_forward_chunk": ("3785c8b3b228b046",),
}  # fmt: skip
_BERT: Final = Form(
    sources={**_BERT_PARTS, "attention": ("c891610f861f70ba",), "attention.self": ("e2033ab0f966f3ce",)},
    attention="attention.self", heads="attention.self.num_attention_heads", scale="attention.self.scaling",
    projections=("attention.self.query", "attention.self.key", "attention.self.value"), last="attention.output.dense",
    weights_drop="attention.self.dropout", norms=("attention.output.LayerNorm", "output.LayerNorm"), norm_first=False,
    feedforward=("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense"),
    after=("attention.output.dropout", "output.dropout"), marks=("chunk_size_feed_forward",),
    arguments=("hidden_states", "attention_mask", "encoder_hidden_states", "encoder_attention_mask", "past_key_values"),
    unread=("use_cache", "encoder_attention_mask"),
)  # fmt: skip
#: AltRobertaLayer, which knows no memory.
_ALT_ROBERTA: Final = replace(
    _BERT, weights_drop="attention.self.attention_dropout", arguments=("hidden_states", "attention_mask"),
    sources={**_BERT_PARTS, "attention": ("5a342e7641341c47",), "attention.self": ("302d3e886ff52f81",)},
)  # fmt: skip
_DISTILBERT: Final = Form(
    sources={"attention": ("3c7cd9005c263891",), "ffn": ("c6354a340bee4ce5",), "ffn.ff_chunk": ("43bff270037412c5",)},
    attention="attention", heads="attention.n_heads", scale="attention.scaling",
    projections=("attention.q_lin", "attention.k_lin", "attention.v_lin"), last="attention.out_lin",
    weights_drop="attention.dropout", norms=("sa_layer_norm", "output_layer_norm"), norm_first=False,
    feedforward=("ffn.lin1", "ffn.activation", "ffn.lin2"), after=(None, "ffn.dropout"),
    marks=("ffn.chunk_size_feed_forward",),
)  # fmt: skip
#: CLIPMLP's.
_CLIP_MLP: Final = ("10797a3e625952cf",)
_VIT: Final = Form(
    sources={"attention": ("bc3e29c07890bab6",), "mlp": _CLIP_MLP},
    attention="attention", heads="attention.num_attention_heads", scale="attention.scaling",
    projections=("attention.q_proj", "attention.k_proj", "attention.v_proj"), last="attention.o_proj",
    weights_drop="attention.attention_dropout", norms=("layernorm_before", "layernorm_after"), norm_first=True,
    feedforward=("mlp.fc1", "mlp.activation_fn", "mlp.fc2"), after=("dropout", "dropout"),
)  # fmt: skip
_CLIP: Final = Form(
    # CLIPAttention's and SiglipAttention's.
    sources={"self_attn": ("48ad9406acaabf52", "3c717e353c9284cb"), "mlp": _CLIP_MLP},
    attention="self_attn", heads="self_attn.num_heads", scale="self_attn.scale",
    projections=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), last="self_attn.out_proj",
    weights_drop="self_attn.dropout", norms=("layer_norm1", "layer_norm2"), norm_first=True,
    feedforward=("mlp.fc1", "mlp.activation_fn", "mlp.fc2"),
)  # fmt: skip
_BART: Final = Form(
    # BartAttention's and WhisperAttention's.
    sources={"self_attn": ("33ac2b0594c87558", "14ac602997449963")},
    attention="self_attn", heads="self_attn.num_heads", scale="self_attn.scaling",
    projections=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), last="self_attn.out_proj",
    weights_drop="self_attn.dropout", norms=("self_attn_layer_norm", "final_layer_norm"), norm_first=False,
    feedforward=("fc1", "activation_fn", "fc2"), after=("dropout", "dropout"), hidden="activation_dropout",
    # What overflows in them is clamped.
    halves=False,
)  # fmt: skip
_GPT2: Final = Form(
    sources={"attn": ("5b6241c4acea9a8e",), "mlp": ("5e4ac81e54593719",)},
    attention="attn", heads="attn.num_heads", scale="attn.scaling", projections=("attn.c_attn",), last="attn.c_proj",
    weights_drop="attn.attn_dropout", norms=("ln_1", "ln_2"), norm_first=True,
    feedforward=("mlp.c_fc", "mlp.act", "mlp.c_proj"), after=("attn.resid_dropout", "mlp.dropout"),
    arguments=("hidden_states", "past_key_values", "attention_mask", "encoder_hidden_states", "encoder_attention_mask",
               "use_cache"),
    unread=("use_cache", "encoder_attention_mask", "position_ids"),
)  # fmt: skip

#: By the source of the layer's ``forward``.
FORMS: Final[Mapping[str, Form]] = {
    # BertLayer's: BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA and more share it, most of them its attention too.
    "c2204f8533dce89a": _BERT,
    "8d9133bc42281b10": _ALT_ROBERTA,
    # DistilBERT's TransformerBlock's.
    "20ca09c6270c564c": _DISTILBERT,
    "68333c77145bd7a9": _VIT,
    # CLIPEncoderLayer's, and SiglipEncoderLayer's, which is the same behind a decorator.
    "1c9865e236e7cc5e": _CLIP,
    "70073a7969a85348": _CLIP,
    # BartEncoderLayer's and WhisperEncoderLayer's.
    "10d50b1032a0e915": _BART,
    "8dcbba6866649aa2": replace(_BART, norm_first=True),
    "90f90b64665d3916": _GPT2,
}


def _way_of(form: Form) -> Way:
    """A layer's forward in one step."""
    heads, scale, weights_drop = attrgetter(form.heads), attrgetter(form.scale), attrgetter(form.weights_drop)
    numbers = [attrgetter(name) for name in {*form.after, form.hidden, *form.marks} if name is not None]
    attention = attrgetter(form.attention)

    def marks(layer: Any) -> tuple[object, ...]:
        training = layer.training, attention(layer).training
        return (heads(layer), scale(layer), weights_drop(layer), *training, *[own(layer) for own in numbers])

    kind = Kind(attention, marks, lambda layer, x: _parts_of(form, layer, x))

    def way(layer: Any, *args: Any, **kwargs: Any) -> Tensor | None:
        given = {**dict(zip(form.arguments, args, strict=False)), **kwargs}
        x, mask, past = given.pop("hidden_states", None), given.pop("attention_mask", None), given.pop(_PAST, None)
        for name in form.unread:
            given.pop(name, None)
        if len(args) > len(form.arguments) or not isinstance(x, Tensor):
            return None
        return layer_in_one_step(kind, layer, x, mask, past, given)

    return way


_PAST: Final = "past_key_values"


def _parts_of(form: Form, layer: Any, x: Tensor) -> LayerParts | None:
    """What a layer is as a step, where all there is to it is that."""
    attention = attrgetter(form.attention)(layer)
    if attention.config._attn_implementation != NAME or hooked_now(attention):
        return None
    if x.dtype is torch.float16 and not form.halves:
        return None
    if not all(digest_of(_method(layer, path)) in known for path, known in form.sources.items()):
        return None
    if any(attrgetter(path)(layer) for path in form.marks):
        return None
    names = (*form.projections, form.last, form.feedforward[0], form.feedforward[2])
    linear = [own for path in names if (own := plain_layer(attrgetter(path)(layer))) is not None]
    norms = [norm for path in form.norms if (norm := norm_of(attrgetter(path)(layer), x)) is not None]
    activation = activation_of(attrgetter(form.feedforward[1])(layer))
    drops = [drop for path in (*form.after, form.hidden) if (drop := _drop(layer, path)) is not None]
    if len(linear) < len(names) or len(norms) < len(form.norms) or activation is None or len(drops) < _DROPS:
        return None
    *sources, last, expand, contract = linear
    num_heads, width, scale = attrgetter(form.heads)(layer), last[0].shape[1], attrgetter(form.scale)(layer)
    if width % num_heads or sum(len(weight) for weight, _ in sources) != 3 * width:
        return None
    projections = Projections(
        sources, last, num_heads, num_heads, scale=scale_of(scale, width // num_heads),
        dropout=_weights_drop(form, layer, attention),
    )  # fmt: skip
    return LayerParts(
        [projections], [expand, contract], norms, norm_first=form.norm_first, activation=activation,
        after=(drops[0], drops[1]), hidden=drops[2],
    )  # fmt: skip


#: Behind each sublayer, and within the feedforward.
_DROPS: Final = 3


def _method(layer: Any, path: str) -> object:
    """A part's ``forward``, or the function that a bound method is of."""
    found = attrgetter(path)(layer)
    return type(found).forward if isinstance(found, nn.Module) else getattr(found, "__func__", None)


def _drop(layer: Any, path: str | None) -> float | None:
    """The probability with which numbers are dropped now; None where that is not known."""
    found = 0.0 if path is None else attrgetter(path)(layer)
    if isinstance(found, nn.Module):
        return drop_of(found)
    return float(found) if layer.training else 0.0


def _weights_drop(form: Form, layer: Any, attention: Any) -> float:
    """The same of weights, of which a module is read but never called."""
    found = attrgetter(form.weights_drop)(layer)
    return float(getattr(found, "p", found)) if attention.training else 0.0


for _digest, _form in FORMS.items():
    known_by_source(_digest, _way_of(_form))
