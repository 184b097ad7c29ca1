"""Swapped decoder layers that attend to a memory are fused with both caches and call hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra 'hf'")

import transformers
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

import clearhead as ch
from tests.agreement import needs_native
from tests.bridges.hf_checks import attending, distinct, learns_between_calls_without_gradients
from tests.bridges.hf_models import needs_5
from tests.budget import within_budget

pytestmark = [needs_native, pytest.mark.usefixtures("_kernels"), pytest.mark.covering(0)]

LAYERS: Final = 3
SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 50, "d_model": 32, "encoder_layers": 1, "decoder_layers": LAYERS, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 72, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None, "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip
KINDS: Final[Mapping[str, Callable[[], Any]]] = {
    "bart": lambda: transformers.BartForConditionalGeneration(
        transformers.BartConfig(**SIZES, max_position_embeddings=64)
    ),
    "mbart": lambda: transformers.MBartForConditionalGeneration(
        transformers.MBartConfig(**SIZES, max_position_embeddings=64)
    ),
    "marian": lambda: transformers.MarianMTModel(transformers.MarianConfig(**SIZES, max_position_embeddings=64)),
    "whisper": lambda: transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**SIZES, num_mel_bins=8, max_source_positions=9, max_target_positions=64)
    ),
}
DTYPES: Final = (torch.float32, torch.bfloat16)
CALLS: Final = (5, 1, 1, 3, 1, 1)


def _model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return distinct(KINDS[name], dtype)


def _memory(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1)).to(dtype)


def _ids(length: int = sum(CALLS)) -> Tensor:
    return torch.randint(3, 50, (2, length), generator=torch.Generator().manual_seed(2))


def _decoder(model: Any) -> Any:
    return model.model.decoder


def _decoded(model: Any, cache: Any = None, mask: Tensor | None = None) -> Tensor:
    """Hidden states of a prompt, which fills the memory's cache, and of the tokens after it."""
    decoder, dtype = _decoder(model), model.dtype
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache()) if cache is None else cache
    given = {} if mask is None else {"encoder_attention_mask": mask}
    with torch.no_grad():
        return torch.cat(
            [
                decoder(part, encoder_hidden_states=_memory(dtype), past_key_values=cache, **given).last_hidden_state
                for part in _ids().split(list(CALLS), 1)
            ],
            1,
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_prefill_and_decoding_are_fused_within_the_error_budget(
    name: str, dtype: torch.dtype, fused_kinds: list[str]
) -> None:
    model = _model(name, dtype)
    exact, expected = _decoded(copy.deepcopy(model).double()), _decoded(model)
    ch.swap(model)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    states = _decoded(model, cache)
    within_budget("states", states, expected, exact, terms=LAYERS * 72, dtype=dtype)
    assert attending(fused_kinds) == ["layer"] * LAYERS * len(CALLS)
    assert cache.get_seq_length() == sum(CALLS)
    with ch.observe(model, ch.Want(entropy=True)) as observations:
        watched = _decoded(model)
    assert len(observations) == 2 * LAYERS
    assert len(attending(fused_kinds)) == LAYERS * len(CALLS)
    assert torch.equal(watched, states)
    ch.unswap(model)
    assert torch.equal(_decoded(model), expected)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "whisper"])
def test_a_padded_memory_matches_the_original(name: str, fused_kinds: list[str]) -> None:
    model, real = _model(name), torch.ones(2, 9, dtype=torch.long)
    real[0, 4:] = 0
    expected = _decoded(model, mask=real)
    assert not torch.allclose(expected[0], _decoded(model)[0], atol=1e-3)
    ch.swap(model)
    for _ in range(2):
        torch.testing.assert_close(_decoded(model, mask=real), expected, rtol=1e-4, atol=1e-4)
    assert attending(fused_kinds) == ["layer"] * LAYERS * len(CALLS) * 2


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", KINDS)
def test_training_is_fused_within_the_error_budget(name: str, padded: bool, fused_kinds: list[str]) -> None:
    model, ids, real = _model(name), _ids(7), torch.ones(2, 9, dtype=torch.long)
    real[1, 5:] = 0
    given = {"encoder_attention_mask": real} if padded and name != "whisper" else {}
    upstream = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(3))

    def gradients(of: Any) -> dict[str, Tensor]:
        decoder, memory = _decoder(of), _memory(of.dtype).requires_grad_()
        output = decoder(ids, encoder_hidden_states=memory, use_cache=False, **given).last_hidden_state
        tensors = {"memory": memory, **{key: part for key, part in decoder.named_parameters() if part.requires_grad}}
        gradients = torch.autograd.grad(output, list(tensors.values()), upstream.to(output.dtype))
        return dict(zip(tensors, gradients, strict=True))

    exact, textbook = gradients(copy.deepcopy(model).double()), gradients(model)
    ch.swap(model)
    for _ in range(3):
        actual = gradients(model)
        for key, truth in exact.items():
            within_budget(key, actual[key], textbook[key], truth, terms=18 * 72)
    assert attending(fused_kinds) == ["layer"] * LAYERS * 3


@pytest.mark.parametrize("name", KINDS)
def test_dropout_gives_the_same_bits_under_observation(name: str, fused_kinds: list[str]) -> None:
    model = _model(name)
    for layer in _decoder(model).layers:
        layer.dropout, layer.activation_dropout, layer.self_attn.dropout, layer.encoder_attn.dropout = (
            0.2,
            0.1,
            0.3,
            0.3,
        )
    ch.swap(model)
    model.train()

    def run() -> Tensor:
        torch.manual_seed(5)
        states: Tensor = _decoder(model)(_ids(7), encoder_hidden_states=_memory(), use_cache=False).last_hidden_state
        return states

    first = run()
    assert attending(fused_kinds) == ["layer"] * LAYERS
    with ch.observe(model, ch.Want(entropy=True)):
        assert torch.equal(run(), first)
    assert len(attending(fused_kinds)) == LAYERS
    model.eval()
    assert not torch.allclose(run(), first, atol=1e-2)


@pytest.mark.parametrize("name", KINDS)
def test_generate_gives_the_same_tokens(name: str, fused_kinds: list[str]) -> None:
    model = _model(name)
    if name == "whisper":
        features = torch.randn(2, 8, 18, generator=torch.Generator().manual_seed(4))
        given: dict[str, Any] = {"input_features": features, "max_new_tokens": 8}
    else:
        ids = _ids(9)
        real = torch.ones_like(ids)
        real[0, 6:] = 0
        given = {"input_ids": ids, "attention_mask": real, "max_new_tokens": 8}
    expected = [model.generate(**given, num_beams=beams, do_sample=False) for beams in (1, 3)]
    ch.swap(model)
    fused_kinds.clear()
    for beams, right in zip((1, 3), expected, strict=True):
        assert torch.equal(model.generate(**given, num_beams=beams, do_sample=False), right)
    assert fused_kinds.count("layer") >= 2 * LAYERS * 6


PARTS: Final = (
    "self_attn",
    "encoder_attn",
    "encoder_attn.q_proj",
    "encoder_attn.k_proj",
    "encoder_attn.out_proj",
    "encoder_attn_layer_norm",
    "fc2",
    "activation_fn",
)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["bart", "whisper"])
def test_a_hook_on_a_part_fires(name: str, part: str, fused_kinds: list[str]) -> None:
    model, fired = _model(name), list[object]()
    expected = _decoded(model)
    ch.swap(model)
    _decoded(model)
    fused_kinds.clear()
    looked_at = _decoder(model).layers[1].get_submodule(part)
    handle = looked_at.register_forward_hook(lambda *given: fired.append(given[2]))
    torch.testing.assert_close(_decoded(model), expected, rtol=1e-4, atol=1e-4)
    # Keys of a memory are projected once.
    assert len(fired) == (1 if part == "encoder_attn.k_proj" else len(CALLS))
    assert attending(fused_kinds) == ["layer"] * (LAYERS - 1) * len(CALLS)
    handle.remove()
    _decoded(model)
    assert len(attending(fused_kinds)) == (2 * LAYERS - 1) * len(CALLS)


def test_missing_memories_and_other_caches_run_op_by_op(fused_kinds: list[str]) -> None:
    model = _model("bart")
    config = model.config

    def run() -> list[Tensor]:
        static = EncoderDecoderCache(*(StaticCache(config=config, max_cache_len=12) for _ in range(2)))
        with torch.no_grad():
            return [_decoder(model)(_ids(7), use_cache=False).last_hidden_state, _decoded(model, static)]

    expected = run()
    ch.swap(model)
    torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)
    assert attending(fused_kinds) == []


@needs_5
def test_a_memory_shared_by_sequences_runs_op_by_op(fused_kinds: list[str]) -> None:
    model, memory = _model("bart"), _memory()[:1]

    def run() -> Tensor:
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        with torch.no_grad():
            parts = [
                _decoder(model)(part, encoder_hidden_states=memory, past_key_values=cache).last_hidden_state
                for part in _ids(3).split(1, 1)
            ]
        return torch.cat(parts, 1)

    expected = run()
    ch.swap(model)
    torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)
    assert attending(fused_kinds) == []


def test_a_reordered_memory_cache_takes_effect(fused_kinds: list[str]) -> None:
    model, ids = _model("bart"), _ids()

    def run() -> Tensor:
        cache, outputs = EncoderDecoderCache(DynamicCache(), DynamicCache()), []
        with torch.no_grad():
            for place, part in enumerate(ids.split([5, 1, 1, 1, 1, 1, 2], 1)):
                output = _decoder(model)(part, encoder_hidden_states=_memory(), past_key_values=cache)
                outputs.append(output.last_hidden_state)
                if place % 2:
                    cache.reorder_cache(torch.tensor([1, 0]))
        return torch.cat(outputs, 1)

    expected = run()
    ch.swap(model)
    torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)
    assert attending(fused_kinds) == ["layer"] * LAYERS * 7


@pytest.mark.parametrize("name", KINDS)
def test_calls_without_gradients_do_not_change_training(name: str) -> None:
    learns_between_calls_without_gradients(
        _decoder(_model(name)),
        lambda decoder: decoder(_ids(7), encoder_hidden_states=_memory(), use_cache=False).last_hidden_state,
    )
