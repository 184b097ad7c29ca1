"""Layers of LayerNorm, attention and a feedforward, each of which is one step: BERT's, ViT's, CLIP's, GPT-2's and more.

They differ in what their parts are called, and in whether a norm comes first: a table says so. A layer is known by the
sources of its own ``forward`` and of its parts'. Elsewhere its parts are taken one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor, nn

from clearhead.bridges.transformers_attention import NAME, scale_of
from clearhead.bridges.transformers_parts import activation_of, norm_of, plain_layer
from clearhead.bridges.transformers_source import Way, digest_of, known_by_source
from clearhead.bridges.transformers_step import Kind, Memory, hooked_now, layer_in_one_step
from clearhead.nn.feedforward import drop_of
from clearhead.nn.fused_attention import Projections
from clearhead.nn.fused_layer import LayerParts
from clearhead.projection import Layer

__all__ = ["FORMS", "AttentionForm", "Form"]


@dataclass(frozen=True)
class AttentionForm:
    """How an attention within a layer is put together; all names are paths within the layer.

    Attributes:
        path: what watchers know.
        heads: the number of heads.
        scale: of scores.
        projections: of queries, keys and values; or the one that makes all three side by side.
        last: the layer that mixes the heads.
        drop: what drops weights: a module, or a probability while the attention is training.
    """

    path: str
    heads: str
    scale: str
    projections: tuple[str, ...]
    last: str
    drop: str


def _projected(path: str, heads: str, scale: str, last: str, drop: str) -> AttentionForm:
    """One that keeps all that is its own under itself, as most do."""
    projections = tuple(f"{path}.{name}_proj" for name in "qkv")
    return AttentionForm(
        path, f"{path}.{heads}", f"{path}.{scale}", projections, f"{path}.{last}", f"{path}.{drop}"
    )  # fmt: skip


@dataclass(frozen=True)
class Form:
    """How a layer is put together; all names are paths within it.

    Attributes:
        sources: digests of what the ``forward`` of a part may say, or another method of it.
        attentions: to its own tokens and, where there is one, to a memory.
        norms: one for each sublayer.
        norm_first: whether a sublayer reads what is normed, and not the sum with it.
        feedforward: the layer that expands, the activation, and the layer that contracts.
        after: what drops what each sublayer gives: a module, a probability while the layer is training, or nothing.
        hidden: the same of what is activated.
        arguments: of the layer's ``forward``, in their order.
        unread: options of a call that say nothing of what is computed, where there is no memory.
        zeros: attributes that have to be 0, or nothing.
        takes_float16: whether float16 is taken as other dtypes are.
    """

    sources: Mapping[str, tuple[str, ...]]
    attentions: tuple[AttentionForm, ...]
    norms: tuple[str, ...]
    norm_first: bool
    feedforward: tuple[str, str, str]
    after: tuple[str | None, ...] = (None, None)
    hidden: str | None = None
    arguments: tuple[str, ...] = ("hidden_states", "attention_mask")
    unread: tuple[str, ...] = ("use_cache",)
    zeros: tuple[str, ...] = ()
    takes_float16: bool = True


#: What a layer that may have a memory is called with.
_WITH_MEMORY: Final = ("hidden_states", "attention_mask", "encoder_hidden_states", "encoder_attention_mask",
                       "past_key_values", "use_cache")  # fmt: skip
#: BertSelfOutput's, and BertOutput's, BertIntermediate's, and the method that puts the two one behind the other.
_BERT_PARTS: Final = {
    "attention.output": ("edd0230858f63315",), "intermediate": ("cf65bc74f562bf96",),
    "output": ("edd0230858f63315",), "feed_forward_chunk": ("3785c8b3b228b046",),
}  # fmt: skip
_BERT_ATTENTION: Final = AttentionForm(
    "attention.self", "attention.self.num_attention_heads", "attention.self.scaling",
    ("attention.self.query", "attention.self.key", "attention.self.value"), "attention.output.dense",
    "attention.self.dropout",
)  # fmt: skip
_BERT: Final = Form(
    sources={**_BERT_PARTS, "attention": ("c891610f861f70ba",), "attention.self": ("e2033ab0f966f3ce",)},
    attentions=(_BERT_ATTENTION,), norms=("attention.output.LayerNorm", "output.LayerNorm"), norm_first=False,
    feedforward=("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense"),
    after=("attention.output.dropout", "output.dropout"), zeros=("chunk_size_feed_forward",),
    arguments=_WITH_MEMORY[:-1], unread=("use_cache", "encoder_attention_mask"),
)  # fmt: skip
#: AltRobertaLayer, which knows no memory.
_ALT_ROBERTA: Final = replace(
    _BERT, attentions=(replace(_BERT_ATTENTION, drop="attention.self.attention_dropout"),),
    arguments=("hidden_states", "attention_mask"),
    sources={**_BERT_PARTS, "attention": ("5a342e7641341c47",), "attention.self": ("302d3e886ff52f81",)},
)  # fmt: skip
_DISTILBERT: Final = Form(
    sources={"attention": ("3c7cd9005c263891",), "ffn": ("c6354a340bee4ce5",), "ffn.ff_chunk": ("43bff270037412c5",)},
    attentions=(AttentionForm(
        "attention", "attention.n_heads", "attention.scaling",
        ("attention.q_lin", "attention.k_lin", "attention.v_lin"), "attention.out_lin", "attention.dropout",
    ),),
    norms=("sa_layer_norm", "output_layer_norm"), norm_first=False,
    feedforward=("ffn.lin1", "ffn.activation", "ffn.lin2"), after=(None, "ffn.dropout"),
    zeros=("ffn.chunk_size_feed_forward",),
)  # fmt: skip
#: CLIPMLP's.
_CLIP_MLP: Final = ("10797a3e625952cf",)
_VIT: Final = Form(
    sources={"attention": ("bc3e29c07890bab6",), "mlp": _CLIP_MLP},
    attentions=(_projected("attention", "num_attention_heads", "scaling", "o_proj", "attention_dropout"),),
    norms=("layernorm_before", "layernorm_after"), norm_first=True,
    feedforward=("mlp.fc1", "mlp.activation_fn", "mlp.fc2"), after=("dropout", "dropout"),
)  # fmt: skip
_CLIP: Final = Form(
    # CLIPAttention's and SiglipAttention's.
    sources={"self_attn": ("48ad9406acaabf52", "3c717e353c9284cb"), "mlp": _CLIP_MLP},
    attentions=(_projected("self_attn", "num_heads", "scale", "out_proj", "dropout"),),
    norms=("layer_norm1", "layer_norm2"), norm_first=True, feedforward=("mlp.fc1", "mlp.activation_fn", "mlp.fc2"),
)  # fmt: skip
#: BartAttention's and WhisperAttention's.
_BART_ATTENTIONS: Final = ("33ac2b0594c87558", "14ac602997449963")
_BART: Final = Form(
    sources={"self_attn": _BART_ATTENTIONS},
    attentions=(_projected("self_attn", "num_heads", "scaling", "out_proj", "dropout"),),
    norms=("self_attn_layer_norm", "final_layer_norm"), norm_first=False, feedforward=("fc1", "activation_fn", "fc2"),
    after=("dropout", "dropout"), hidden="activation_dropout",
    # What overflows in them is clamped.
    takes_float16=False,
)  # fmt: skip
_BART_DECODER: Final = replace(
    _BART, sources={"self_attn": _BART_ATTENTIONS, "encoder_attn": _BART_ATTENTIONS},
    attentions=(*_BART.attentions, _projected("encoder_attn", "num_heads", "scaling", "out_proj", "dropout")),
    norms=("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
    after=("dropout", "dropout", "dropout"), arguments=_WITH_MEMORY, takes_float16=True,
)  # fmt: skip
_GPT2: Final = Form(
    sources={"attn": ("5b6241c4acea9a8e",), "mlp": ("5e4ac81e54593719",)},
    attentions=(AttentionForm(
        "attn", "attn.num_heads", "attn.scaling", ("attn.c_attn",), "attn.c_proj", "attn.attn_dropout"
    ),),
    norms=("ln_1", "ln_2"), norm_first=True, feedforward=("mlp.c_fc", "mlp.act", "mlp.c_proj"),
    after=("attn.resid_dropout", "mlp.dropout"),
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
    # BartDecoderLayer's, MBartDecoderLayer's and WhisperDecoderLayer's.
    "70938c1a09c7146b": _BART_DECODER,
    "ddb649506ee974b5": replace(_BART_DECODER, norm_first=True),
    "f32801aeeb295a5e": replace(_BART_DECODER, norm_first=True),
    "90f90b64665d3916": _GPT2,
}


def _way_of(form: Form) -> Way:
    """A layer's forward in one step."""
    names = {name for own in form.attentions for name in (own.heads, own.scale, own.drop)}
    numbers = [attrgetter(name) for name in {*names, *form.after, form.hidden, *form.zeros} if name is not None]
    paths = [attrgetter(own.path) for own in form.attentions]

    def attentions(layer: Any) -> list[Any]:
        return [path(layer) for path in paths]

    def marks(layer: Any) -> tuple[object, ...]:
        return (layer.training, *[path(layer).training for path in paths], *[own(layer) for own in numbers])

    kind = Kind(attentions, marks, lambda layer, x: _parts_of(form, layer, x))

    def way(layer: Any, *args: Any, **kwargs: Any) -> Tensor | None:
        given = {**dict(zip(form.arguments, args, strict=False)), **kwargs}
        x, mask, past = given.pop("hidden_states", None), given.pop("attention_mask", None), given.pop(_PAST, None)
        memory = None
        if len(form.attentions) > 1:
            memory = Memory(given.pop("encoder_hidden_states", None), given.pop("encoder_attention_mask", None))
        for name in form.unread:
            given.pop(name, None)
        if len(args) > len(form.arguments) or not isinstance(x, Tensor):
            return None
        return layer_in_one_step(kind, layer, x, mask, past, given, memory=memory)

    return way


_PAST: Final = "past_key_values"


def _parts_of(form: Form, layer: Any, x: Tensor) -> LayerParts | None:
    """What a layer is as a step, where all there is to it is that."""
    if x.dtype is torch.float16 and not form.takes_float16:
        return None
    if not all(digest_of(_method(layer, path)) in known for path, known in form.sources.items()):
        return None
    if any(attrgetter(path)(layer) for path in form.zeros):
        return None
    attentions = [found for own in form.attentions if (found := _attention_of(own, layer)) is not None]
    linear = _linear(layer, (form.feedforward[0], form.feedforward[2]))
    norms = [norm for path in form.norms if (norm := norm_of(attrgetter(path)(layer), x)) is not None]
    activation = activation_of(attrgetter(form.feedforward[1])(layer))
    drops = [drop for path in (*form.after, form.hidden) if (drop := _drop(layer, path)) is not None]
    if len(attentions) < len(form.attentions) or linear is None or activation is None:
        return None
    if len(norms) < len(form.norms) or len(drops) < len(form.after) + 1:
        return None
    *after, hidden = drops
    return LayerParts(
        attentions, linear, norms, norm_first=form.norm_first, activation=activation, after=tuple(after), hidden=hidden
    )


def _attention_of(form: AttentionForm, layer: Any) -> Projections | None:
    """One of a layer's attentions, where all there is to it is that."""
    attention, linear = attrgetter(form.path)(layer), _linear(layer, (*form.projections, form.last))
    if attention.config._attn_implementation != NAME or hooked_now(attention) or linear is None:
        return None
    *sources, last = linear
    heads, width = attrgetter(form.heads)(layer), last[0].shape[1]
    if width % heads or sum(len(weight) for weight, _ in sources) != 3 * width:
        return None
    # Of a module that is read but never called.
    found = attrgetter(form.drop)(layer)
    drop = float(getattr(found, "p", found)) if attention.training else 0.0
    return Projections(
        sources, last, heads, heads, scale=scale_of(attrgetter(form.scale)(layer), width // heads), dropout=drop
    )  # fmt: skip


def _linear(layer: Any, paths: Sequence[str]) -> list[Layer] | None:
    """Weights and biases of linear layers, where all are ours."""
    found = [own for path in paths if (own := plain_layer(attrgetter(path)(layer))) is not None]
    return found if len(found) == len(paths) else None


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


for _digest, _form in FORMS.items():
    # It may be told not to.
    known_by_source(_digest, _way_of(_form), leaves_padding_out=True)
