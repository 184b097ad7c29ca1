"""Tiny models of torch and of transformers with random weights, for ``swap``; nothing is downloaded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import pytest
import torch
import transformers
from torch import Tensor, nn

import clearhead as ch
from tests.bridges.hf_models import in_float64
from tests.net.calls import Call
from tests.net.modules import distinct, tokens

__all__ = ["FAMILIES", "TOKENS", "TRANSFORMERS_4", "Family", "by_structure"]

TRANSFORMERS_4: Final = transformers.__version__.startswith("4.")

BATCH, TOKENS, PAD, VOCAB, WIDTH, HEADS = 2, 13, 4, 41, 64, 4


@dataclass(frozen=True)
class Family:
    """A kind of model.

    Attributes:
        name: its name in the tests.
        make: builds the model in float32, as its library does; ``dropout`` is the probability throughout.
        call: builds a batch of a length, with padding on one side or none.
        generates: whether it continues prompts.
        paddings: sides on which it supports padding.
    """

    name: str
    make: Callable[[float], nn.Module]
    call: Callable[[int, str], Call]
    generates: bool = False
    paddings: tuple[str, ...] = ()

    def plain(self, dropout: float = 0.0) -> Any:
        """A copy of the model in eval mode, not swapped."""
        return copy.deepcopy(_made(self.name, dropout))

    def exact(self) -> Any:
        """A copy of the model in float64, attention too."""
        model = self.plain()
        return in_float64(model) if isinstance(model, transformers.PreTrainedModel) else model.double()

    def swapped(self, dropout: float = 0.0) -> Any:
        """A copy of the model in eval mode that computes with clearhead."""
        model = self.plain(dropout)
        ch.swap(model)
        return model


@cache
def _made(name: str, dropout: float) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return distinct(FAMILIES[name].make(dropout)).eval()


def _real(length: int, padding: str) -> Tensor:
    real = torch.ones(BATCH, length, dtype=torch.bool)
    if padding != "none":
        real[0, slice(0, PAD) if padding == "left" else slice(length - PAD, length)] = False
    return real


def _ids(length: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(seed))


# ----------------------------------------------------------------------------------------------------------- torch


def _layer(kind: type[nn.Module], **options: Any) -> Callable[[float], nn.Module]:
    return lambda dropout: kind(
        WIDTH, HEADS, **{"dim_feedforward": 48, "batch_first": True, "dropout": dropout, **options}
    )


def _attention_call(length: int, padding: str) -> Call:
    real = _real(length, padding)
    x = tokens(BATCH, length, WIDTH)
    arguments: dict[str, Any] = {"query": x, "key": x, "value": x, "need_weights": False}
    if padding != "none":
        arguments["key_padding_mask"] = ~real
    return Call(arguments, real)


def _encoder_call(length: int, padding: str) -> Call:
    real = _real(length, padding)
    return Call(
        {"src": tokens(BATCH, length, WIDTH), "src_key_padding_mask": None if padding == "none" else ~real}, real
    )


def _decoder_call(length: int, padding: str) -> Call:
    memory = tokens(BATCH, 7, WIDTH, seed=2)
    causal = nn.Transformer.generate_square_subsequent_mask(length)
    padded = None if padding == "none" else ~_real(7, padding)
    return Call(
        {
            "tgt": tokens(BATCH, length, WIDTH),
            "memory": memory,
            "tgt_mask": causal,
            "tgt_is_causal": True,
            "memory_key_padding_mask": padded,
        }
    )


def _transformer_call(length: int, padding: str) -> Call:
    padded = None if padding == "none" else ~_real(7, padding)
    return Call(
        {
            "src": tokens(BATCH, 7, WIDTH, seed=2),
            "tgt": tokens(BATCH, length, WIDTH),
            "tgt_is_causal": True,
            "tgt_mask": nn.Transformer.generate_square_subsequent_mask(length),
            "src_key_padding_mask": padded,
            "memory_key_padding_mask": padded,
        }
    )


def _encoder(dropout: float, **options: Any) -> nn.Module:
    layer = _layer(nn.TransformerEncoderLayer, **options)(dropout)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)


def _decoder(dropout: float) -> nn.Module:
    return nn.TransformerDecoder(_layer(nn.TransformerDecoderLayer)(dropout), 2, norm=nn.LayerNorm(WIDTH))


def _transformer(dropout: float) -> nn.Module:
    return nn.Transformer(WIDTH, HEADS, 1, 1, 48, dropout=dropout, batch_first=True)


_SIDES: Final = ("left", "right")
_TORCH: Final = (
    Family("torch attention", lambda dropout: nn.MultiheadAttention(WIDTH, HEADS, dropout=dropout, batch_first=True),
           _attention_call, paddings=_SIDES),
    Family("torch encoder layer", _layer(nn.TransformerEncoderLayer), _encoder_call, paddings=_SIDES),
    Family("torch encoder layer, pre-norm", _layer(nn.TransformerEncoderLayer, norm_first=True, activation="gelu"),
           _encoder_call, paddings=_SIDES),
    Family("torch encoder layer without bias", _layer(nn.TransformerEncoderLayer, bias=False), _encoder_call),
    Family("torch decoder layer", _layer(nn.TransformerDecoderLayer), _decoder_call, paddings=_SIDES),
    Family("torch decoder layer, pre-norm", _layer(nn.TransformerDecoderLayer, norm_first=True), _decoder_call),
    Family("torch encoder", _encoder, _encoder_call, paddings=_SIDES),
    Family("torch encoder, pre-norm", lambda dropout: _encoder(dropout, norm_first=True), _encoder_call,
           paddings=_SIDES),
    Family("torch decoder", _decoder, _decoder_call, paddings=_SIDES),
    Family("torch transformer", _transformer, _transformer_call, paddings=_SIDES),
)  # fmt: skip

# ---------------------------------------------------------------------------------------------------- transformers


def _text_call(length: int, padding: str) -> Call:
    real = _real(length, padding)
    arguments: dict[str, Any] = {"input_ids": _ids(length) * real}
    if padding != "none":
        arguments["attention_mask"] = real.long()
    return Call(arguments, real)


def _decoding_call(length: int, padding: str) -> Call:
    call = _text_call(length, padding)
    return Call({**call.arguments, "use_cache": False}, call.real)


def _pair_call(length: int, padding: str) -> Call:
    source = _text_call(9, padding).arguments
    return Call({**source, "decoder_input_ids": _ids(length, seed=2), "use_cache": False})


def _image_call(length: int, padding: str) -> Call:
    return Call({"pixel_values": tokens(BATCH, 3, 16, 16)})


def _audio_call(length: int, padding: str) -> Call:
    return Call({"input_features": tokens(BATCH, 8, 40), "decoder_input_ids": _ids(length), "use_cache": False})


def _contrast_call(length: int, padding: str) -> Call:
    return Call({"input_ids": _ids(length), "pixel_values": tokens(BATCH, 3, 16, 16)})


def _of(cls: str, config: str, dropouts: tuple[str, ...] = (), **settings: Any) -> Callable[[float], nn.Module]:
    """A function that builds a model of transformers, with ``dropout`` under the names of its config."""

    def make(dropout: float) -> nn.Module:
        made = getattr(transformers, config)(**settings, **dict.fromkeys(dropouts, dropout))
        return getattr(transformers, cls)._from_config(made, attn_implementation="eager")

    return make


_SMALL: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 96,
}
_GROUPED: Final[Mapping[str, Any]] = {
    **_SMALL,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_PAIR: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1,
}  # fmt: skip
_VISION: Final[Mapping[str, Any]] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}
_BERT: Final = ("hidden_dropout_prob", "attention_probs_dropout_prob")


def _decoding(name: str, prefix: str, dropouts: tuple[str, ...] = ("attention_dropout",), **settings: Any) -> Family:
    settings = {**_GROUPED, **settings}
    return Family(
        name, _of(f"{prefix}ForCausalLM", f"{prefix}Config", dropouts, **settings), _decoding_call, True, _SIDES
    )


_CONTRAST: Final = {**_SMALL, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_TRANSFORMERS: Final = (
    _decoding("llama", "Llama"),
    _decoding("mistral", "Mistral", sliding_window=5, head_dim=8),
    _decoding("qwen2", "Qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1),
    _decoding("qwen3", "Qwen3", head_dim=8),
    _decoding("phi3", "Phi3", ("attention_dropout", "resid_pdrop", "embd_pdrop")),
    _decoding("gemma2", "Gemma2", sliding_window=5, head_dim=8, query_pre_attn_scalar=4, attn_logit_softcapping=2.0),
    Family(
        "gemma3",
        _of("Gemma3ForCausalLM", "Gemma3TextConfig", ("attention_dropout",), **_GROUPED, sliding_window=5, head_dim=8,
            query_pre_attn_scalar=4, sliding_window_pattern=2),
        _decoding_call, True, _SIDES,
    ),
    Family(
        "gpt2",
        _of("GPT2LMHeadModel", "GPT2Config", ("resid_pdrop", "embd_pdrop", "attn_pdrop"), vocab_size=VOCAB,
            n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=96, bos_token_id=1, eos_token_id=None, pad_token_id=0),
        _decoding_call, True, _SIDES,
    ),
    Family("bert", _of("BertForMaskedLM", "BertConfig", _BERT, **_SMALL), _text_call, paddings=_SIDES),
    Family("roberta", _of("RobertaForMaskedLM", "RobertaConfig", _BERT, **_SMALL, pad_token_id=0), _text_call,
           paddings=_SIDES),
    Family(
        "distilbert",
        _of("DistilBertForMaskedLM", "DistilBertConfig", ("dropout", "attention_dropout"), vocab_size=VOCAB, dim=WIDTH,
            hidden_dim=48, n_layers=2, n_heads=HEADS, max_position_embeddings=96),
        _text_call, paddings=_SIDES,
    ),
    Family(
        "modernbert",
        _of("ModernBertForMaskedLM", "ModernBertConfig", ("attention_dropout", "mlp_dropout"), **{
            **_SMALL, "num_hidden_layers": 3, "global_attn_every_n_layers": 3, "local_attention": 6, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
        }),
        _text_call, paddings=_SIDES,
    ),
    Family(
        "mpnet",
        _of("MPNetForMaskedLM", "MPNetConfig", _BERT, **_SMALL, relative_attention_num_buckets=32, pad_token_id=1),
        _text_call, paddings=_SIDES,
    ),
    Family(
        "deberta-v3",
        _of("DebertaV2ForMaskedLM", "DebertaV2Config", _BERT, **_SMALL, relative_attention=True, position_buckets=4,
            norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type=["p2c", "c2p"], position_biased_input=False,
            type_vocab_size=0),
        _text_call, paddings=_SIDES,
    ),
    Family(
        "deberta-v2",
        _of("DebertaV2ForMaskedLM", "DebertaV2Config", _BERT, **_SMALL, relative_attention=True,
            max_relative_positions=5, pos_att_type=["c2p", "p2c"], conv_kernel_size=3, conv_act="gelu"),
        _text_call, paddings=_SIDES,
    ),
    Family("vit", _of("ViTForImageClassification", "ViTConfig", _BERT, **_VISION), _image_call),
    Family(
        "clip",
        _of("CLIPModel", "CLIPConfig", text_config=dict(_CONTRAST), vision_config=dict(_VISION)),
        _contrast_call,
    ),
    Family(
        "siglip",
        _of("SiglipModel", "SiglipConfig", text_config={**_CONTRAST, "projection_size": WIDTH},
            vision_config=dict(_VISION)),
        _contrast_call,
    ),
    Family("bart", _of("BartForConditionalGeneration", "BartConfig",
                       ("dropout", "attention_dropout", "activation_dropout"), **_PAIR, max_position_embeddings=96),
           _pair_call, True, _SIDES),
    Family("marian", _of("MarianMTModel", "MarianConfig", ("dropout", "attention_dropout", "activation_dropout"),
                         **_PAIR, max_position_embeddings=96),
           _pair_call, True, _SIDES),
    Family("whisper", _of("WhisperForConditionalGeneration", "WhisperConfig",
                          ("dropout", "attention_dropout", "activation_dropout"), **_PAIR, num_mel_bins=8,
                          max_source_positions=20, max_target_positions=96),
           _audio_call),
    Family(
        "t5",
        _of("T5ForConditionalGeneration", "T5Config", ("dropout_rate",), vocab_size=VOCAB, d_model=WIDTH, d_kv=8,
            d_ff=48, num_layers=2, num_heads=HEADS, relative_attention_num_buckets=8,
            relative_attention_max_distance=12, eos_token_id=None, pad_token_id=0, decoder_start_token_id=0),
        _pair_call, True, _SIDES,
    ),
)  # fmt: skip

FAMILIES: Final[Mapping[str, Family]] = {family.name: family for family in (*_TORCH, *_TRANSFORMERS)}

#: One family of each layer structure.
_STRUCTURES = ("torch encoder", "torch decoder layer", "llama", "gemma2", "gpt2", "bert", "modernbert", "t5")


def by_structure(names: Iterable[str]) -> list[Any]:
    """Parameters of a test: names of families and others; all but one family of each layer structure are slow."""
    quick = {*names} - FAMILIES.keys() | {*_STRUCTURES}
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in names]
