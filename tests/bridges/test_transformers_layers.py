"""Swapped layers of Llama-like models and GPT-2 are fused with their cache, match transformers and call hooks."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

pytest.importorskip("transformers", reason="needs the extra 'hf'")

import transformers
from transformers import DynamicCache, StaticCache
from transformers.models.llama import modeling_llama as theirs

import clearhead as ch
from clearhead.integrations.transformers import layer as fused
from clearhead.testing import fused_calls
from tests.agreement import needs_native
from tests.bridges.hf_checks import (
    attending,
    decoded,
    distinct,
    ids_of,
    learns_between_calls_without_gradients,
    trains_with_the_gradients_of_eager,
)
from tests.bridges.hf_models import TRANSFORMERS_4, in_float64, needs_5
from tests.budget import within_budget

pytestmark = [needs_native, pytest.mark.usefixtures("_kernels")]

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
KINDS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "llama, biased, scaled positions": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SIZES, attention_bias=True, mlp_bias=True, head_dim=16, hidden_act="gelu",
            rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                             "original_max_position_embeddings": 32},
        )
    ),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=None)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=50, n_embd=32, n_layer=3, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=None,
            pad_token_id=0, n_inner=72, scale_attn_by_inverse_layer_idx=True,
        )
    ),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=16)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)),
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES)),
    "mistral, windows": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=6)),
    "gemma": lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**SIZES, head_dim=16)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            **SIZES, head_dim=16, sliding_window=6, layer_types=WINDOWS, query_pre_attn_scalar=9,
            attn_logit_softcapping=2.0, final_logit_softcapping=None,
        )
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=6, layer_types=WINDOWS)
    ),
}  # fmt: skip
#: Models whose layers train op by op, and the parts that stay fused.
OP_BY_OP = {"qwen3": [], "phi3": ["attention"], "gemma2": ["attention"], "gemma3": []}
DTYPES = [torch.float32, torch.bfloat16]


def _model(name: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    model = distinct(KINDS[name], dtype)
    if name == "gemma2" or (TRANSFORMERS_4 and name == "gpt2"):
        # sdpa omits Gemma 2's soft cap before transformers 5.23, and GPT-2's scales in 4.
        model.set_attn_implementation("eager")
    return model


# ---- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_prefill_and_decoding_are_fused_within_the_error_budget(
    name: str, dtype: torch.dtype, fused_kinds: list[str]
) -> None:
    model, ids = _model(name, dtype), ids_of(length=16)
    exact, expected = decoded(copy.deepcopy(model).double(), ids), decoded(model, ids)
    ch.swap(model)
    cache = DynamicCache(config=model.config)
    output = decoded(model, ids, cache=cache)
    within_budget("logits", output, expected, exact, terms=3 * 72, dtype=dtype)
    assert attending(fused_kinds) == ["layer"] * 3 * 6
    assert cache.get_seq_length() == 16
    theirs, exactly = DynamicCache(config=model.config), DynamicCache(config=model.config)
    ch.unswap(model)
    decoded(model, ids, cache=theirs)
    decoded(copy.deepcopy(model).double(), ids, cache=exactly)
    for layer, other, right in zip(cache.layers, theirs.layers, exactly.layers, strict=True):
        within_budget("keys", layer.keys, other.keys, right.keys, terms=3 * 72, dtype=dtype)
        within_budget("values", layer.values, other.values, right.values, terms=3 * 72, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_observation_gives_the_same_bits(name: str, dtype: torch.dtype, fused_kinds: list[str]) -> None:
    model, ids = _model(name, dtype), ids_of(length=16)
    ch.swap(model)
    output = decoded(model, ids)
    assert torch.equal(decoded(model, ids), output)
    count = len(attending(fused_kinds))
    with ch.observe(model, ch.Want(entropy=True)):
        observed = decoded(model, ids)
    assert len(attending(fused_kinds)) == count
    assert torch.equal(observed, output)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, use_cache=False).logits, output, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", KINDS)
def test_training_is_fused_within_the_error_budget(name: str, fused_kinds: list[str]) -> None:
    model, ids = _model(name), ids_of()
    trains_with_the_gradients_of_eager(model, 4)
    # Layers with head norms, output norms or split halves train as OP_BY_OP lists.
    assert attending(fused_kinds) == OP_BY_OP.get(name, ["layer"]) * 12
    fused_kinds.clear()
    # With a cache, training runs op by op.
    model(ids).logits.sum().backward()
    assert attending(fused_kinds) == []


@pytest.mark.parametrize("name", KINDS)
def test_calls_without_gradients_do_not_change_training(name: str) -> None:
    learns_between_calls_without_gradients(_model(name), lambda model: model(ids_of(), use_cache=False).logits)


def test_split_fused_weights_follow_updates(fused_kinds: list[str]) -> None:
    """Phi-3's joint projections are split for the fused layer; updates and replacements take effect."""
    model, ids = _model("phi3"), ids_of()
    ch.swap(model)

    def assert_matches(original: Any) -> None:
        fused_kinds.clear()
        output = decoded(model, ids, (8, 1))
        torch.testing.assert_close(output, decoded(original, ids, (8, 1)), rtol=1e-4, atol=1e-4)
        assert attending(fused_kinds) == ["layer"] * 6

    original = copy.deepcopy(model)
    ch.unswap(original)
    assert_matches(original)
    for each in (model, original):
        each(ids, use_cache=False).logits.square().sum().backward()
        torch.optim.SGD(each.parameters(), 0.003).step()
    assert_matches(original)
    torch.manual_seed(6)
    weight = torch.randn(144, 32)
    for each in (model, original):
        each.model.layers[1].mlp.gate_up_proj.weight = nn.Parameter(weight)
    assert_matches(original)


@needs_5
def test_partial_rotary_runs_op_by_op(fused_kinds: list[str]) -> None:
    torch.manual_seed(0)
    config = transformers.Phi3Config(
        **SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    )
    model = transformers.Phi3ForCausalLM(config).eval()
    expected = decoded(model, ids_of(length=16))
    ch.swap(model)
    torch.testing.assert_close(decoded(model, ids_of(length=16)), expected, rtol=1e-4, atol=1e-4)
    assert attending(fused_kinds) == []


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_gradient_penalty_matches_the_original(name: str) -> None:
    model, ids = _model(name), ids_of()
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()

    def penalty(of: Any) -> list[Tensor]:
        output = of(inputs_embeds=embedded, use_cache=False).logits
        (first,) = torch.autograd.grad(output.square().sum(), embedded, create_graph=True)
        learned = [part for key, part in of.named_parameters() if "mlp" in key]
        return [first.detach(), *torch.autograd.grad(first.square().sum(), learned)]

    with sdpa_kernel(SDPBackend.MATH):
        expected = penalty(model)
        ch.swap(model)
        for one, other in zip(penalty(model), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


def test_a_vectorised_jacobian_matches_the_original() -> None:
    model = _model()
    embedded = model.get_input_embeddings()(ids_of(1, 9)[:, :3]).detach()

    def jacobian(of: Any) -> Tensor:
        return torch.autograd.functional.jacobian(
            lambda x: of(inputs_embeds=x, use_cache=False).logits[:, -1, :4], embedded, vectorize=True
        )

    expected = jacobian(model)
    ch.swap(model)
    torch.testing.assert_close(jacobian(model), expected, rtol=1e-3, atol=1e-3)


def test_attention_dropout_is_fused_in_training_mode(fused_kinds: list[str]) -> None:
    model = _model()
    ch.swap(model)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    ids = ids_of()
    plain = model(ids, use_cache=False).logits
    model.train()
    torch.manual_seed(5)
    one, two = (model(ids, use_cache=False).logits for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(model(ids, use_cache=False).logits, one)
    assert not torch.allclose(one, two)
    assert not torch.allclose(one, plain)
    assert attending(fused_kinds) == ["layer"] * 12


def test_gpt2_dropout_gives_the_same_bits_under_observation(fused_kinds: list[str]) -> None:
    model, ids = _model("gpt2").train(), ids_of()
    ch.swap(model)

    def gradients() -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        output = model(ids, use_cache=False).logits
        return output.detach(), *torch.autograd.grad(output.square().sum(), list(model.parameters()))

    first = gradients()
    assert attending(fused_kinds) == ["layer"] * 3
    with ch.observe(model, ch.Want(entropy=True)):
        observed = gradients()
    assert len(attending(fused_kinds)) == 3
    assert torch.equal(observed[0], first[0])
    for one, other in zip(observed, first, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    plain = gradients()
    assert not torch.allclose(plain[0], first[0])
    model.eval()
    assert torch.equal(gradients()[0], plain[0])


def test_gpt2_with_a_memory_runs_op_by_op(fused_kinds: list[str]) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=2, n_head=4, add_cross_attention=True, bos_token_id=1, eos_token_id=None
    )
    model, memory = transformers.GPT2LMHeadModel(config).eval(), torch.randn(2, 5, 32)
    given = {"encoder_hidden_states": memory, "use_cache": False}
    with torch.no_grad():
        expected, alone = model(ids_of(), **given).logits, model(ids_of(), use_cache=False).logits
        ch.swap(model)
        torch.testing.assert_close(model(ids_of(), **given).logits, expected, rtol=1e-4, atol=1e-4)
        assert attending(fused_kinds) == []
        torch.testing.assert_close(model(ids_of(), use_cache=False).logits, alone, rtol=1e-4, atol=1e-4)
    assert attending(fused_kinds) == ["layer"] * 2


def test_custom_position_ids_are_fused(fused_kinds: list[str]) -> None:
    model, ids = _model(), ids_of()
    given = {"position_ids": torch.arange(9)[None] * 3 + 5, "use_cache": False}
    with torch.no_grad():
        expected = model(ids, **given).logits
        ch.swap(model)
        torch.testing.assert_close(model(ids, **given).logits, expected, rtol=1e-4, atol=1e-4)
    assert attending(fused_kinds) == ["layer"] * 3


def test_rotary_tables_modified_in_place_take_effect() -> None:
    model = _model()
    ch.swap(model)
    angles = [part.clone() for part in model.model.rotary_emb(torch.zeros(1), torch.arange(9)[None])]
    layer, x = model.model.layers[0], torch.randn(2, 9, 32)
    with torch.no_grad():
        first = layer(x, position_embeddings=tuple(angles))
        angles[0].mul_(0.5)
        second = layer(x, position_embeddings=tuple(angles))
        ch.unswap(model)
        expected = layer(x, position_embeddings=tuple(angles))
    assert not torch.allclose(first, second, atol=1e-3)
    # Called directly without a mask, transformers' attention is causal too.
    torch.testing.assert_close(second, expected, rtol=1e-4, atol=1e-4)


# ---- masks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_matches_the_original(side: str, fused_kinds: list[str]) -> None:
    model, ids = _model(), ids_of()
    real = torch.ones_like(ids)
    real[0, slice(None, 3) if side == "left" else slice(-3, None)] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=real, use_cache=False).logits
        ch.swap(model)
        for _ in range(3):
            output = model(ids, attention_mask=real, use_cache=False).logits
            torch.testing.assert_close(output[real.bool()], expected[real.bool()], rtol=1e-4, atol=1e-4)
    assert attending(fused_kinds) == ["layer"] * 9


@pytest.mark.parametrize("name", KINDS)
def test_generation_after_padding_is_fused(name: str, fused_kinds: list[str]) -> None:
    model, ids = _model(name), ids_of()
    real = torch.ones_like(ids)
    real[0, :3] = 0
    options = [{"do_sample": False}, {"num_beams": 3, "do_sample": False}]
    expected = [model.generate(ids, attention_mask=real, max_new_tokens=6, **option) for option in options]
    ch.swap(model)
    for option, right in zip(options, expected, strict=True):
        assert torch.equal(model.generate(ids, attention_mask=real, max_new_tokens=6, **option), right)
    assert attending(fused_kinds) == ["layer"] * 3 * 6 * 2


@pytest.mark.parametrize("padding", [slice(0, 3), slice(-3, None), slice(2, 5)], ids=["left", "right", "within"])
def test_generation_with_padding_anywhere_is_fused(padding: slice) -> None:
    model, ids = _model(), ids_of()
    real = torch.ones_like(ids)
    real[0, padding] = 0
    expected = model.generate(ids, attention_mask=real, max_new_tokens=6, do_sample=False)
    ch.swap(model)
    with fused_calls() as calls, torch.no_grad():
        tokens = model.generate(ids, attention_mask=real, max_new_tokens=6, do_sample=False)
    assert torch.equal(tokens, expected)
    layers, steps = 3, 6
    assert attending(calls) == ["layer"] * layers * steps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_decoding_after_padding_is_fused_within_the_error_budget(
    name: str, dtype: torch.dtype, fused_kinds: list[str]
) -> None:
    """Each sequence has its own positions and keys."""
    model, ids, real = _model(name, dtype), ids_of(length=16), torch.ones(2, 16, dtype=torch.long)
    real[0, :4] = 0

    def run(of: Any) -> Tensor:
        cache, outputs = DynamicCache(config=of.config), []
        places = (real.cumsum(1) - 1).clamp(min=0)
        for begin, end in ((0, 9), (9, 10), (10, 11), (11, 14), (14, 15), (15, 16)):
            with torch.no_grad():
                outputs.append(
                    of(
                        ids[:, begin:end],
                        attention_mask=real[:, :end],
                        position_ids=places[:, begin:end],
                        past_key_values=cache,
                    ).logits
                )
        return torch.cat(outputs, 1)[real.bool()]

    exact, expected = run(in_float64(model)), run(model)
    ch.swap(model)
    actual = run(model)
    within_budget("logits", actual, expected, exact, terms=3 * 72, dtype=dtype)
    assert attending(fused_kinds) == ["layer"] * 3 * 6
    with ch.observe(model, ch.Want(entropy=True)):
        assert torch.equal(run(model), actual)
    assert len(attending(fused_kinds)) == 3 * 6


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", [name for name in KINDS if name not in OP_BY_OP])
def test_padding_is_removed_without_a_cache(
    name: str, side: str, fused_kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if TRANSFORMERS_4 and name == "gpt2":
        pytest.skip("transformers 4 computes NaN at padding")
    monkeypatch.setattr(fused, "LEAST_UNPADDED", 1)
    model, ids, real = _model(name), ids_of(), torch.ones(2, 9, dtype=torch.long)
    real[0, slice(None, 3) if side == "left" else slice(-3, None)] = 0
    places = (real.cumsum(1) - 1).clamp(min=0)
    upstream = torch.randn(2, 9, 50, generator=torch.Generator().manual_seed(3)) * real[..., None]

    def run(of: Any) -> tuple[Tensor, dict[str, Tensor]]:
        output = of(ids, attention_mask=real, position_ids=places, use_cache=False).logits
        gradients = torch.autograd.grad(output, list(of.parameters()), upstream.to(output.dtype))
        return output.detach()[real.bool()], dict(zip(dict(of.named_parameters()), gradients, strict=True))

    (truth, exact), (expected, textbook) = run(copy.deepcopy(model).double()), run(model)
    ch.swap(model)
    rows = list[int]()
    take = fused.fused_layers
    monkeypatch.setattr(
        fused,
        "fused_layers",
        lambda tokens, *given: (rows.append(tokens[0].shape[1]), take(tokens, *given))[1],
    )
    for _ in range(3):
        output, gradients = run(model)
        within_budget("logits", output, expected, truth, terms=3 * 72)
        for key, right in exact.items():
            within_budget(key, gradients[key], textbook[key], right, terms=18 * 72)
    assert rows == [15] * 9
    assert attending(fused_kinds) == ["layer"] * 9


# ---- caches -------------------------------------------------------------------------------------------------

#: A model whose caches grow, and one whose caches keep five tokens.
CACHED = ["llama", "mistral, windows"]


@pytest.mark.covering(0)
@pytest.mark.parametrize("window", [2, 3, 5, 9, 17, 40])
def test_a_sliding_cache_matches_transformers(window: int, fused_kinds: list[str]) -> None:
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=window)).eval()
    ids, calls = ids_of(length=60), (4, 1, 1, 7, 1, 1, 1, 2, *[1] * 40, 2)
    theirs, ours = DynamicCache(config=model.config), DynamicCache(config=model.config)
    expected = decoded(model, ids, calls, theirs)
    ch.swap(model)
    torch.testing.assert_close(decoded(model, ids, calls, ours), expected, rtol=1e-4, atol=1e-4)
    assert attending(fused_kinds) == ["layer"] * 3 * len(calls)
    for layer, right in zip(ours.layers, theirs.layers, strict=True):
        torch.testing.assert_close((layer.keys, layer.values), (right.keys, right.values), rtol=1e-4, atol=1e-4)
        assert layer.get_seq_length() == right.get_seq_length() == 60
        queries = torch.tensor([60]) if TRANSFORMERS_4 else 1
        assert layer.get_mask_sizes(queries) == right.get_mask_sizes(queries)


@needs_5
def test_a_cache_that_records_its_past_runs_op_by_op(fused_kinds: list[str]) -> None:
    model, ids = _model("mistral, windows"), ids_of(length=16)
    expected = decoded(model, ids)
    ch.swap(model)
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        layer.activate_past_recording()
    torch.testing.assert_close(decoded(model, ids, cache=cache), expected, rtol=1e-4, atol=1e-4)
    assert "layer" not in fused_kinds


def test_generate_with_beams_gives_the_same_tokens(fused_kinds: list[str]) -> None:
    model, ids = _model(), ids_of()
    options = [
        {"do_sample": False},
        {"num_beams": 3, "do_sample": False},
        {"do_sample": False, "num_return_sequences": 2, "num_beams": 2},
    ]
    expected = [model.generate(ids, max_new_tokens=8, **option) for option in options]
    ch.swap(model)
    for option, right in zip(options, expected, strict=True):
        assert torch.equal(model.generate(ids, max_new_tokens=8, **option), right)
    assert attending(fused_kinds) == ["layer"] * 3 * 8 * 3


CHANGES: dict[str, Callable[[Any], object]] = {
    "cut short": lambda cache: cache.crop(-4),
    "reordered": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "selected": lambda cache: cache.batch_select_indices(torch.tensor([1, 1])),
    "forgotten": lambda cache: cache.reset(),
    "scaled": lambda cache: [setattr(layer, "keys", layer.keys * 0.5) for layer in cache.layers],
    "written into": lambda cache: [layer.values.mul_(0.5) for layer in cache.layers],
    "joined": lambda cache: [layer.update(torch.ones(2, 2, 1, 8), torch.ones(2, 2, 1, 8)) for layer in cache.layers],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", CACHED)
def test_caches_changed_by_the_user_take_effect(name: str, change: str, fused_kinds: list[str]) -> None:
    if TRANSFORMERS_4 and change == "forgotten" and name != "llama":
        pytest.skip("transformers 4 does not reset what has slid")
    model, ids, more = _model(name), ids_of(), ids_of(length=4, seed=1)
    if change == "cut short" and name != "llama":
        pytest.skip("transformers does not cut short what has slid")

    def run() -> tuple[Tensor, Any]:
        cache = DynamicCache(config=model.config)
        decoded(model, ids, (5, 1, 1, 1, 1), cache)
        with torch.no_grad():
            CHANGES[change](cache)
        return decoded(model, more, (1, 1, 2), cache), cache

    expected, _ = run()
    ch.swap(model)
    output, cache = run()
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    assert attending(fused_kinds) == ["layer"] * 3 * 8
    ch.unswap(model)
    # transformers continues with the cache.
    continued = decoded(model, more, (1, 3), cache)
    assert bool(continued.isfinite().all())


@pytest.mark.parametrize("name", CACHED)
def test_copied_caches_are_independent(name: str) -> None:
    model, ids = _model(name), ids_of()
    ch.swap(model)
    cache = DynamicCache(config=model.config)
    decoded(model, ids, (7, 1, 1), cache)
    other = copy.deepcopy(cache)
    one, two = ids_of(length=3, seed=1), ids_of(length=3, seed=2)
    right = [decoded(model, torch.cat([ids, more], 1), (7, 1, 1, 1, 1, 1))[:, -3:] for more in (one, two)]
    outputs = [decoded(model, more, (1, 1, 1), selected) for more, selected in ((one, cache), (two, other))]
    torch.testing.assert_close(outputs, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CACHED)
def test_returned_keys_stay_unmodified(name: str) -> None:
    model, ids = _model(name), ids_of()
    ch.swap(model)
    cache = DynamicCache(config=model.config)
    decoded(model, ids, (8, 1), cache)
    keys = cache.layers[0].keys
    before = keys.clone()
    decoded(model, ids_of(length=12, seed=1), (1,) * 12, cache)
    assert torch.equal(keys, before)
    if name == "llama":
        assert torch.equal(cache.layers[0].keys[:, :, :9], before)


@pytest.mark.parametrize("name", CACHED)
def test_caches_started_by_transformers_and_empty_caches_are_fused(name: str, fused_kinds: list[str]) -> None:
    model, ids = _model(name), ids_of(length=16)
    expected = decoded(model, ids)
    cache = DynamicCache() if name == "llama" else DynamicCache(config=model.config)
    decoded(model, ids[:, :9], (9,), cache)
    ch.swap(model)
    torch.testing.assert_close(decoded(model, ids[:, 9:], (1,) * 7, cache), expected[:, 9:], rtol=1e-4, atol=1e-4)
    assert attending(fused_kinds) == ["layer"] * 21
    # A cache without layers creates them at the first update.
    torch.testing.assert_close(decoded(model, ids, cache=DynamicCache()), expected, rtol=1e-4, atol=1e-4)


def test_static_caches_run_op_by_op(fused_kinds: list[str]) -> None:
    model, ids = _model(), ids_of(length=16)
    expected = decoded(model, ids)
    ch.swap(model)
    output = decoded(model, ids, cache=StaticCache(config=model.config, max_cache_len=16))
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    assert attending(fused_kinds) == []


def test_calls_with_gradients_and_a_cache_run_op_by_op(fused_kinds: list[str]) -> None:
    model, ids = _model(), ids_of()
    ch.swap(model)
    cache = DynamicCache(config=model.config)
    model(ids[:, :8], past_key_values=cache)
    model(ids[:, 8:], past_key_values=cache).logits.sum().backward()
    assert attending(fused_kinds) == []
    with torch.no_grad():
        assert bool(model(ids[:, :1], past_key_values=cache).logits.isfinite().all())


@pytest.mark.parametrize("name", CACHED)
def test_inference_mode_and_no_grad_alternate(name: str) -> None:
    model, ids = _model(name), ids_of(length=16)
    expected = decoded(model, ids)
    ch.swap(model)
    cache, outputs = DynamicCache(config=model.config), []
    for place, part in enumerate(ids.split([9, 1, 1, 3, 1, 1], 1)):
        with torch.inference_mode() if place % 2 == 0 else torch.no_grad():
            outputs.append(model(part, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-4, atol=1e-4)


def test_norms_made_in_inference_mode_are_swapped() -> None:
    # A class of its own: the trial of transformers' is remembered.
    class Norm(theirs.LlamaRMSNorm):  # type: ignore[misc]
        pass

    model = _model("llama")
    with torch.inference_mode():
        model.model.norm = Norm(1024)
    rows = ch.swap(model).rows
    assert [row.how for row in rows if row.class_name == "Norm"] == ["native"]


# ---- hooks and changes -------------------------------------------------------------------------------------

PARTS = (
    "self_attn",
    "self_attn.q_proj",
    "self_attn.o_proj",
    "mlp",
    "mlp.gate_proj",
    "mlp.act_fn",
    "input_layernorm",
    "post_attention_layernorm",
)


@pytest.mark.parametrize("part", PARTS)
def test_a_hook_on_a_part_fires(part: str, fused_kinds: list[str]) -> None:
    model, fired = _model(), list[object]()
    expected = decoded(model, ids_of())
    ch.swap(model)
    decoded(model, ids_of())
    fused_kinds.clear()
    handle = model.model.layers[1].get_submodule(part).register_forward_hook(lambda *given: fired.append(given[2]))
    torch.testing.assert_close(decoded(model, ids_of(), (9,)), expected, rtol=1e-4, atol=1e-4)
    assert len(fired) == 1
    # An attention without hooks inside stays fused.
    inside = [] if part.startswith("self_attn.") else ["attention"]
    assert attending(fused_kinds) == ["layer", *inside, "layer"]
    handle.remove()
    fused_kinds.clear()
    decoded(model, ids_of(), (9,))
    assert attending(fused_kinds) == ["layer"] * 3


def test_a_hooked_layer_stays_fused(fused_kinds: list[str]) -> None:
    model, fired = _model(), list[object]()
    ch.swap(model)
    model.model.layers[1].register_forward_hook(lambda *given: fired.append(given[2]))
    decoded(model, ids_of(), (9,))
    assert len(fired) == 1
    assert attending(fused_kinds) == ["layer"] * 3


@needs_5
def test_output_hidden_states_matches_and_stays_fused(fused_kinds: list[str]) -> None:
    model, ids = _model(), ids_of()
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True).hidden_states
        ch.swap(model)
        output = model(ids, output_hidden_states=True).hidden_states
        for one, other in zip(output, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        model(ids)
    assert attending(fused_kinds) == ["layer"] * 6


class _Same(nn.Module):
    def forward(self, hidden_states: Tensor, **given: Any) -> tuple[Tensor, None]:
        return hidden_states, None


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "mlp", nn.Identity()),
        lambda layer: setattr(layer.mlp, "up_proj", nn.Linear(32, 72, bias=False)),
        lambda layer: setattr(layer, "input_layernorm", nn.LayerNorm(32)),
        lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 1.0),
        lambda layer: setattr(layer.self_attn, "scaling", 0.1),
        lambda layer: setattr(layer.self_attn.o_proj, "weight", nn.Parameter(torch.randn(32, 32))),
        lambda layer: layer.self_attn.v_proj.weight.data.mul_(2.0),
        lambda layer: setattr(layer.mlp, "act_fn", nn.Tanh()),
        lambda layer: setattr(layer, "self_attn", _Same()),
    ],
)
def test_changed_layers_take_effect(change: Callable[[Any], object]) -> None:
    model = _model()
    ch.swap(model)
    decoded(model, ids_of(), (8, 1))
    torch.manual_seed(4)
    change(model.model.layers[1])
    output = decoded(model, ids_of(), (8, 1))
    ch.unswap(model)
    torch.testing.assert_close(output, decoded(model, ids_of(), (8, 1)), rtol=1e-4, atol=1e-4)


def test_a_replaced_forward_is_called(fused_kinds: list[str]) -> None:
    model = _model()
    ch.swap(model)
    attention = model.model.layers[0].self_attn
    attention.forward = lambda hidden_states, **_: (hidden_states * 0.0, None)
    decoded(model, ids_of(), (9,))
    assert attending(fused_kinds) == ["layer"] * 2


def test_autocast_stays_close_to_float32() -> None:
    model, ids = _model(), ids_of(length=16)
    expected = decoded(model, ids)
    ch.swap(model)
    with torch.autocast("cpu", torch.bfloat16):
        output = decoded(model, ids)
    torch.testing.assert_close(output.float(), expected, rtol=0.1, atol=0.1)


def test_float64_matches_the_original() -> None:
    model, ids = _model().double(), ids_of(length=16)
    expected = decoded(model, ids)
    ch.swap(model)
    torch.testing.assert_close(decoded(model, ids), expected, rtol=1e-6, atol=1e-6)


def test_a_replaced_rotary_function_runs_op_by_op(monkeypatch: pytest.MonkeyPatch, fused_kinds: list[str]) -> None:
    model = _model()
    monkeypatch.setattr(theirs, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
    expected = decoded(model, ids_of())
    ch.swap(model)
    torch.testing.assert_close(decoded(model, ids_of()), expected, rtol=1e-4, atol=1e-4)
    assert attending(fused_kinds) == []


# ---- classes ------------------------------------------------------------------------------------------------


def test_unswap_restores_classes_and_bits() -> None:
    model, ids = _model(), ids_of(length=16)
    expected, kinds = decoded(model, ids), [type(part) for part in model.modules()]
    ch.swap(model)
    assert [type(part) for part in model.modules()] != kinds
    assert all(isinstance(part, kind) for part, kind in zip(model.modules(), kinds, strict=True))
    ch.unswap(model)
    assert [type(part) for part in model.modules()] == kinds
    assert torch.equal(decoded(model, ids), expected)


def test_copies_and_pickles_of_a_swapped_model_stay_fused(fused_kinds: list[str]) -> None:
    model = _model()
    ch.swap(model)
    expected = decoded(model, ids_of())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        fused_kinds.clear()
        assert torch.equal(decoded(copied, ids_of()), expected)
        assert attending(fused_kinds) == ["layer"] * 3
        ch.unswap(copied)
        assert type(copied.model.layers[0]) is theirs.LlamaDecoderLayer


def test_checkpointed_layers_train(fused_kinds: list[str]) -> None:
    model, ids = _model(), ids_of()
    ch.swap(model)
    upstream = torch.randn(2, 9, 50)
    model.train()
    plain = torch.autograd.grad(model(ids, use_cache=False).logits, list(model.parameters()), upstream)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    fused_kinds.clear()
    gradients = torch.autograd.grad(model(ids, use_cache=False).logits, list(model.parameters()), upstream)
    # torch stops the recomputation of a layer once its tensors are saved, before the call is counted.
    assert attending(fused_kinds) == ["layer"] * 3
    for one, other in zip(gradients, plain, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_a_compiled_layer_matches_the_original() -> None:
    model = _model()
    ch.swap(model)
    layer, x = model.model.layers[0], torch.randn(2, 9, 32)
    angles = model.model.rotary_emb(x, torch.arange(9)[None])
    with torch.no_grad():
        expected = layer(x, position_embeddings=angles)
        compiled = torch.compile(layer, backend="eager")
        torch.testing.assert_close(compiled(x, position_embeddings=angles), expected, rtol=1e-4, atol=1e-4)
