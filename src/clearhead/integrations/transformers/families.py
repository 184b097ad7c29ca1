"""What layers of Hugging Face transformers are made of: one row per structure.

A row names submodules and attributes by their paths; several names for one thing are alternatives. ``match`` compares
a module's structure with the rows, and ``probe`` compares what a row computes with what the module computes, so a row
may fit more families than it was written for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

__all__ = [
    "ATTENTIONS",
    "ATTENTION_DROPOUTS",
    "FEEDFORWARDS",
    "HEAD_DIMS",
    "KV_HEADS",
    "LAYERS",
    "NORM_EPSILONS",
    "NUM_HEADS",
    "SCALES",
    "SOFTCAPS",
    "AttentionRow",
    "FeedForwardRow",
    "LayerRow",
]

#: Attributes of an attention module or of its config.
NUM_HEADS: Final = ("num_heads", "num_attention_heads", "n_heads")
KV_HEADS: Final = ("num_key_value_heads",)
HEAD_DIMS: Final = ("head_dim", "attention_head_size", "attn_head_size")
SCALES: Final = ("scaling", "scale")
SOFTCAPS: Final = ("attn_logit_softcapping",)
#: A probability that applies while the attention module is training, or a dropout module of which only ``p`` is read.
ATTENTION_DROPOUTS: Final = ("attention_dropout", "attn_dropout", "dropout", "dropout_prob")
#: Attributes of a norm.
NORM_EPSILONS: Final = ("variance_epsilon", "eps", "epsilon")


@dataclass(frozen=True)
class AttentionRow:
    """An attention module.

    Attributes:
        projections: linear layers of queries, keys and values; or one linear layer that computes all three.
        output: the linear layer that mixes the heads.
        core: the submodule that calls the attention function; the module itself by default.
        head_norms: norms of each head's queries and keys.
        dropout: the dropout of the attention's output.
        terms: submodules of the terms that disentangled attention adds to scores, those that the module has.
    """

    projections: tuple[str, ...]
    output: str
    core: str = ""
    head_norms: tuple[str, ...] = ()
    dropout: str | None = None
    terms: tuple[str, ...] = ()


@dataclass(frozen=True)
class FeedForwardRow:
    """A feedforward.

    Attributes:
        expand: the first linear layer.
        activation: a module or a function.
        contract: the last linear layer; None for half a feedforward.
        gate: the linear layer whose output is activated, in a gated feedforward.
        packed_gate: whether ``expand`` computes the gate's output and, behind it, its own.
        hidden: the dropout between the linear layers, a module or a probability.
        dropout: the dropout of the feedforward's output.
    """

    expand: str
    activation: str
    contract: str | None = None
    gate: str | None = None
    packed_gate: bool = False
    hidden: str | None = None
    dropout: str | None = None


@dataclass(frozen=True)
class LayerRow:
    """A transformer layer: attention to its own tokens, attention to a memory in a decoder, a feedforward.

    Attributes:
        attentions: paths of the attention modules.
        norms: one norm per sublayer.
        norm_first: whether a norm precedes its sublayer.
        feedforward: path of the feedforward module, or a row of paths within the layer.
        output_norms: norms of the sublayers' outputs.
        dropouts: dropouts of the sublayers' outputs, modules or probabilities, besides those of the submodules.
        unused: submodules that a call with the row's arguments does not use.
        clamps_float16: whether the layer clamps its output in float16.
    """

    attentions: tuple[str, ...]
    norms: tuple[str, ...]
    norm_first: bool
    feedforward: str | FeedForwardRow = "mlp"
    output_norms: tuple[str, ...] = ()
    dropouts: tuple[str | None, ...] = ()
    unused: tuple[str, ...] = ()
    clamps_float16: bool = False


_QKV: Final = ("q_proj", "k_proj", "v_proj")

ATTENTIONS: Final = (
    AttentionRow(_QKV, "o_proj"),  # Llama, Mistral, Qwen2, Gemma, Gemma2, ViT
    AttentionRow(_QKV, "o_proj", head_norms=("q_norm", "k_norm")),  # Qwen3, Gemma3
    AttentionRow(_QKV, "out_proj"),  # BART, Marian, Whisper, CLIP, SigLIP
    AttentionRow(("qkv_proj",), "o_proj"),  # Phi-3
    AttentionRow(("Wqkv",), "Wo", dropout="out_drop"),  # ModernBERT
    AttentionRow(("c_attn",), "c_proj", dropout="resid_dropout"),  # GPT-2
    AttentionRow(("q_lin", "k_lin", "v_lin"), "out_lin"),  # DistilBERT
    AttentionRow(  # BERT, RoBERTa, ELECTRA
        ("self.query", "self.key", "self.value"), "output.dense", core="self", dropout="output.dropout"
    ),
    AttentionRow(("attn.q", "attn.k", "attn.v"), "attn.o", core="attn", dropout="dropout"),  # MPNet
    AttentionRow(  # DeBERTa v2 and v3
        ("self.query_proj", "self.key_proj", "self.value_proj"),
        "output.dense",
        core="self",
        dropout="output.dropout",
        terms=("self.pos_key_proj", "self.pos_query_proj", "self.pos_dropout"),
    ),
    AttentionRow(  # ViT before transformers 5
        ("attention.query", "attention.key", "attention.value"),
        "output.dense",
        core="attention",
        dropout="output.dropout",
    ),
)

FEEDFORWARDS: Final = (
    FeedForwardRow("up_proj", "act_fn", "down_proj", gate="gate_proj"),  # Llama
    FeedForwardRow("gate_up_proj", "activation_fn", "down_proj", packed_gate=True),  # Phi-3
    FeedForwardRow("Wi", "act", "Wo", packed_gate=True, hidden="drop"),  # ModernBERT
    FeedForwardRow("fc1", "activation_fn", "fc2"),  # CLIP, SigLIP, ViT
    FeedForwardRow("c_fc", "act", "c_proj", dropout="dropout"),  # GPT-2
    FeedForwardRow("lin1", "activation", "lin2", dropout="dropout"),  # DistilBERT
    FeedForwardRow("wi", "act", "wo", hidden="dropout"),  # T5
    FeedForwardRow("wi_1", "act", "wo", gate="wi_0", hidden="dropout"),  # T5 1.1
    FeedForwardRow("dense", "intermediate_act_fn"),  # BERT's first half
)

_BERT: Final = LayerRow(
    ("attention",),
    ("attention.output.LayerNorm", "output.LayerNorm"),
    norm_first=False,
    feedforward=FeedForwardRow(
        "intermediate.dense", "intermediate.intermediate_act_fn", "output.dense", dropout="output.dropout"
    ),
    unused=("crossattention",),
)
_BART: Final = LayerRow(
    ("self_attn",),
    ("self_attn_layer_norm", "final_layer_norm"),
    norm_first=False,
    feedforward=FeedForwardRow("fc1", "activation_fn", "fc2", hidden="activation_dropout"),
    dropouts=("dropout", "dropout"),
    clamps_float16=True,
)
_BART_DECODER: Final = replace(
    _BART,
    attentions=("self_attn", "encoder_attn"),
    norms=("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
    dropouts=("dropout", "dropout", "dropout"),
    clamps_float16=False,
)
_LLAMA: Final = LayerRow(("self_attn",), ("input_layernorm", "post_attention_layernorm"), norm_first=True)

LAYERS: Final = (
    _LLAMA,
    replace(_LLAMA, dropouts=("resid_attn_dropout", "resid_mlp_dropout")),  # Phi-3
    replace(  # Gemma 2 and 3
        _LLAMA,
        norms=("input_layernorm", "pre_feedforward_layernorm"),
        output_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    LayerRow(("attn",), ("attn_norm", "mlp_norm"), norm_first=True),  # ModernBERT
    LayerRow(("attn",), ("ln_1", "ln_2"), norm_first=True, unused=("crossattention", "ln_cross_attn")),  # GPT-2
    _BERT,  # DeBERTa v2 and v3 too
    replace(_BERT, norms=("attention.LayerNorm", "output.LayerNorm"), unused=()),  # MPNet
    LayerRow(  # DistilBERT
        ("attention",), ("sa_layer_norm", "output_layer_norm"), norm_first=False, feedforward="ffn"
    ),
    LayerRow(  # ViT
        ("attention",), ("layernorm_before", "layernorm_after"), norm_first=True, dropouts=("dropout", "dropout")
    ),
    replace(  # ViT before transformers 5
        _BERT, norms=("layernorm_before", "layernorm_after"), norm_first=True, unused=()
    ),
    LayerRow(("self_attn",), ("layer_norm1", "layer_norm2"), norm_first=True),  # CLIP, SigLIP
    _BART,
    replace(_BART, norm_first=True),  # Whisper
    _BART_DECODER,
    replace(_BART_DECODER, norm_first=True),  # mBART, Whisper
)
