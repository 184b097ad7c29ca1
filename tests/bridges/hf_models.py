"""Tiny models of Hugging Face transformers, made from configs with random weights; nothing is downloaded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")

from transformers.masking_utils import AttentionMaskInterface, sdpa_mask  # noqa: E402
from transformers.modeling_utils import AttentionInterface  # noqa: E402

TRANSFORMERS_4: Final = transformers.__version__.startswith("4.")
needs_5 = pytest.mark.skipif(TRANSFORMERS_4, reason="transformers 4 behaves differently")

#: A batch's tokens; the first sentence is PAD tokens shorter.
BATCH, TOKENS, PAD, VOCAB = 2, 23, 6, 61


def _settings(*shared: Mapping[str, Any], **extra: Any) -> Mapping[str, Any]:
    return {key: value for each in (*shared, extra) for key, value in each.items()}


_SMALL: Final = _settings(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=96,
)
_GROUPED: Final = _settings(_SMALL, num_key_value_heads=2, head_dim=8)
_TOKENS: Final = _settings(bos_token_id=1, eos_token_id=None, pad_token_id=0)

Kind = Literal["decoder", "encoder", "encoder-decoder", "vision", "audio"]


@dataclass(frozen=True)
class Model:
    """A row of the table: a class of transformers and the config it is made from."""

    kind: Kind
    cls: str
    config: str
    settings: Mapping[str, Any]

    @property
    def generates(self) -> bool:
        return self.kind in ("decoder", "encoder-decoder", "audio")


MODELS: Final[Mapping[str, Model]] = {
    "llama": Model("decoder", "LlamaForCausalLM", "LlamaConfig", _settings(_GROUPED, _TOKENS)),
    "mistral": Model("decoder", "MistralForCausalLM", "MistralConfig", _settings(_GROUPED, _TOKENS, sliding_window=5)),
    "qwen3": Model(
        "decoder", "Qwen3ForCausalLM", "Qwen3Config",
        _settings(_GROUPED, _TOKENS, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    ),
    "gemma2": Model(
        "decoder", "Gemma2ForCausalLM", "Gemma2Config",
        _settings(_GROUPED, _TOKENS, sliding_window=5, attn_logit_softcapping=0.5, query_pre_attn_scalar=4),
    ),
    "gpt-oss": Model(
        "decoder", "GptOssForCausalLM", "GptOssConfig",
        _settings(_GROUPED, _TOKENS, sliding_window=5, num_local_experts=4, num_experts_per_tok=2),
    ),
    "gpt2": Model(
        "decoder", "GPT2LMHeadModel", "GPT2Config",
        _settings(_TOKENS, vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=96,
                  scale_attn_by_inverse_layer_idx=True, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    ),
    "bert": Model("encoder", "BertForMaskedLM", "BertConfig", _SMALL),
    "roberta": Model("encoder", "RobertaForMaskedLM", "RobertaConfig", _settings(_SMALL, pad_token_id=0)),
    "distilbert": Model(
        "encoder", "DistilBertForMaskedLM", "DistilBertConfig",
        _settings(vocab_size=VOCAB, dim=32, hidden_dim=48, n_layers=2, n_heads=4, max_position_embeddings=96),
    ),
    "mpnet": Model("encoder", "MPNetForMaskedLM", "MPNetConfig", _SMALL),
    "deberta-v3": Model(
        "encoder", "DebertaV2ForMaskedLM", "DebertaV2Config",
        _settings(_SMALL, relative_attention=True, position_buckets=4, norm_rel_ebd="layer_norm", share_att_key=True,
                  pos_att_type=["p2c", "c2p"], position_biased_input=False, type_vocab_size=0),
    ),
    "modernbert": Model(
        "encoder", "ModernBertForMaskedLM", "ModernBertConfig",
        _settings(_SMALL, num_hidden_layers=3, global_attn_every_n_layers=3, local_attention=6, pad_token_id=0,
                  bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2),
    ),
    "t5": Model(
        "encoder-decoder", "T5ForConditionalGeneration", "T5Config",
        _settings(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
                  relative_attention_num_buckets=8, relative_attention_max_distance=12, eos_token_id=None,
                  pad_token_id=0, decoder_start_token_id=0),
    ),
    "bart": Model(
        "encoder-decoder", "BartForConditionalGeneration", "BartConfig",
        _settings(vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                  decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=96,
                  bos_token_id=1, eos_token_id=2, pad_token_id=0, decoder_start_token_id=2, forced_eos_token_id=None),
    ),
    "vit": Model(
        "vision", "ViTForImageClassification", "ViTConfig",
        _settings(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16,
                  patch_size=4, num_labels=5),
    ),
    "whisper": Model(
        "audio", "WhisperForConditionalGeneration", "WhisperConfig",
        _settings(vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                  decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8,
                  max_source_positions=20, max_target_positions=48, bos_token_id=1, eos_token_id=2, pad_token_id=0,
                  decoder_start_token_id=1),
    ),
}  # fmt: skip


@cache
def _made(name: str) -> Any:
    row = MODELS[name]
    config = getattr(transformers, row.config)(**row.settings)
    config._experts_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, row.cls)._from_config(config, attn_implementation="eager")
        for parameter_name, parameter in model.named_parameters():
            # As large as trained weights, so that attention is not uniform and tokens differ.
            if parameter.ndim > 1:
                # T5 does not divide scores by the square root of head_dim; its query weights are smaller instead.
                scale = config.d_kv**-0.5 if parameter_name.endswith("Attention.q.weight") else 1.0
                torch.nn.init.normal_(parameter, std=2.0 * scale * parameter.shape[-1] ** -0.5)
            elif bool((parameter == 0).all()):
                torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def eager(name: str) -> Any:
    """A fresh copy of the model with transformers' eager attention, in float32 and eval mode."""
    return copy.deepcopy(_made(name))


def exact(name: str) -> Any:
    """The model in float64, including attention."""
    return in_float64(eager(name))


def in_float64(model: Any) -> Any:
    """A float64 copy of a model, including the softmax, which transformers' eager attention computes in float32."""
    AttentionInterface.register("float64 formula", _formula)
    AttentionMaskInterface.register("float64 formula", _whole_mask)
    wide = copy.deepcopy(model).double()
    wide.set_attn_implementation("float64 formula")
    return wide


def _whole_mask(**arguments: Any) -> Tensor | None:
    arguments.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return sdpa_mask(**arguments)


def _formula(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None,
    position_bias: Tensor | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    if scaling is None:
        # GPT-2 before transformers 5 scales in its eager attention.
        inverse = getattr(module, "scale_attn_by_inverse_layer_idx", False)
        scaling = query.shape[-1] ** -0.5 / (module.layer_idx + 1 if inverse else 1)
    scores = query @ key.transpose(2, 3) * scaling
    if position_bias is not None:
        scores = scores + position_bias
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        # Models that make their own masks before transformers 5 add them.
        forbidden = attention_mask < 0 if attention_mask.is_floating_point() else ~attention_mask
        scores = scores.masked_fill(forbidden, -1e300)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), weights


def inputs(name: str, *, padding: Literal["left", "right", "none"] = "none", seed: int = 1) -> dict[str, Tensor]:
    """A batch for the model."""
    kind = MODELS[name].kind
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (BATCH, TOKENS), generator=generator)
    if kind == "vision":
        return {"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator)}
    if kind == "audio":
        features = torch.randn(BATCH, 8, 40, generator=generator)
        return {"input_features": features, "decoder_input_ids": ids[:, :7]}
    batch = {"input_ids": ids}
    if padding != "none":
        real = torch.ones_like(ids)
        real[0, slice(0, PAD) if padding == "left" else slice(TOKENS - PAD, TOKENS)] = 0
        batch = {"input_ids": ids * real, "attention_mask": real}
    if kind == "encoder-decoder":
        batch["decoder_input_ids"] = ids[:, :11]
    return batch


def as_double(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in batch.items()}


def real_logits(model: Callable[..., Any], batch: Mapping[str, Tensor]) -> Tensor:
    """Logits of real tokens; logits at padding are undefined."""
    logits: Tensor = model(**batch).logits
    real = batch.get("attention_mask")
    return logits[real.bool()] if real is not None and real.shape == logits.shape[:2] else logits
