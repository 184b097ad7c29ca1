"""Layers of Llama's kind and GPT-2's after swap: one step with its cache, transformers' numbers, who sees the parts."""

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
from clearhead.ops import library as native_library
from clearhead.testing import fused_calls
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

pytestmark = [
    pytest.mark.skipif(native_library.library() is None, reason=f"{native_library.reason()}"),
    pytest.mark.usefixtures("_kernels"),
]

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
#: Kinds that learn part by part, and what of them is one step all the same.
BY_PARTS = {"qwen3": [], "phi3": ["attention"], "gemma2": ["attention"], "gemma3": []}
DTYPES = [torch.float32, torch.bfloat16]


def _model(name: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    model = distinct(KINDS[name], dtype)
    if name == "gemma2" or (TRANSFORMERS_4 and name == "gpt2"):
        # Before transformers 5.23 sdpa leaves out Gemma 2's soft cap, and in 4 GPT-2's scales.
        model.set_attn_implementation("eager")
    return model


# ---- numbers ------------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_prefill_and_tokens_one_by_one(name: str, dtype: torch.dtype, taken: list[str]) -> None:
    model, ids = _model(name, dtype), ids_of(length=16)
    exact, own = decoded(copy.deepcopy(model).double(), ids), decoded(model, ids)
    ch.swap(model)
    cache = DynamicCache(config=model.config)
    found = decoded(model, ids, cache=cache)
    within_budget("logits", found, own, exact, terms=3 * 72, dtype=dtype)
    assert attending(taken) == ["layer"] * 3 * 6
    assert cache.get_seq_length() == 16
    theirs, exactly = DynamicCache(config=model.config), DynamicCache(config=model.config)
    ch.unswap(model)
    decoded(model, ids, cache=theirs)
    decoded(copy.deepcopy(model).double(), ids, cache=exactly)
    for layer, other, right in zip(cache.layers, theirs.layers, exactly.layers, strict=True):
        within_budget("keys", layer.keys, other.keys, right.keys, terms=3 * 72, dtype=dtype)
        within_budget("values", layer.values, other.values, right.values, terms=3 * 72, dtype=dtype)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_the_same_bits_whoever_watches(name: str, dtype: torch.dtype, taken: list[str]) -> None:
    model, ids = _model(name, dtype), ids_of(length=16)
    ch.swap(model)
    found = decoded(model, ids)
    assert torch.equal(decoded(model, ids), found)
    count = len(attending(taken))
    with ch.observe(model, ch.Want(entropy=True)):
        watched = decoded(model, ids)
    assert len(attending(taken)) == count
    assert torch.equal(watched, found)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, use_cache=False).logits, found, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", KINDS)
def test_it_trains_in_one_step(name: str, taken: list[str]) -> None:
    model, ids = _model(name), ids_of()
    trains_with_the_gradients_of_eager(model, 4)
    # So do norms of heads and of what a sublayer gives, and layers that are halves of one.
    assert attending(taken) == BY_PARTS.get(name, ["layer"]) * 12
    taken.clear()
    # With a cache gradients take the parts.
    model(ids).logits.sum().backward()
    assert attending(taken) == []


@pytest.mark.parametrize("name", KINDS)
def test_it_learns_between_calls_without_gradients(name: str) -> None:
    learns_between_calls_without_gradients(_model(name), lambda model: model(ids_of(), use_cache=False).logits)


def test_halves_of_a_layer_are_read_as_they_are_now(taken: list[str]) -> None:
    """Of Phi-3's: what a step reads without gradients is what was learned in between, and what was put there."""
    model, ids = _model("phi3"), ids_of()
    ch.swap(model)

    def held_against(own: Any) -> None:
        taken.clear()
        found = decoded(model, ids, (8, 1))
        torch.testing.assert_close(found, decoded(own, ids, (8, 1)), rtol=1e-4, atol=1e-4)
        assert attending(taken) == ["layer"] * 6

    own = copy.deepcopy(model)
    ch.unswap(own)
    held_against(own)
    for each in (model, own):
        each(ids, use_cache=False).logits.square().sum().backward()
        torch.optim.SGD(each.parameters(), 0.003).step()
    held_against(own)
    torch.manual_seed(6)
    weight = torch.randn(144, 32)
    for each in (model, own):
        each.model.layers[1].mlp.gate_up_proj.weight = nn.Parameter(weight)
    held_against(own)


@needs_5
def test_channels_that_are_not_turned_go_by_parts(taken: list[str]) -> None:
    torch.manual_seed(0)
    config = transformers.Phi3Config(
        **SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    )
    model = transformers.Phi3ForCausalLM(config).eval()
    own = decoded(model, ids_of(length=16))
    ch.swap(model)
    torch.testing.assert_close(decoded(model, ids_of(length=16)), own, rtol=1e-4, atol=1e-4)
    assert attending(taken) == []


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_gradient_penalty_is_that_of_the_original(name: str) -> None:
    model, ids = _model(name), ids_of()
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()

    def penalty(of: Any) -> list[Tensor]:
        output = of(inputs_embeds=embedded, use_cache=False).logits
        (first,) = torch.autograd.grad(output.square().sum(), embedded, create_graph=True)
        learned = [part for key, part in of.named_parameters() if "mlp" in key]
        return [first.detach(), *torch.autograd.grad(first.square().sum(), learned)]

    with sdpa_kernel(SDPBackend.MATH):
        own = penalty(model)
        ch.swap(model)
        for one, other in zip(penalty(model), own, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


def test_a_vectorised_jacobian_is_that_of_the_original() -> None:
    model = _model()
    embedded = model.get_input_embeddings()(ids_of(1, 9)[:, :3]).detach()

    def jacobian(of: Any) -> Tensor:
        return torch.autograd.functional.jacobian(
            lambda x: of(inputs_embeds=x, use_cache=False).logits[:, -1, :4], embedded, vectorize=True
        )

    own = jacobian(model)
    ch.swap(model)
    torch.testing.assert_close(jacobian(model), own, rtol=1e-3, atol=1e-3)


def test_dropout_of_weights_while_training(taken: list[str]) -> None:
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
    assert attending(taken) == ["layer"] * 12


def test_every_dropout_of_gpt2_and_the_same_bits_where_somebody_watches(taken: list[str]) -> None:
    model, ids = _model("gpt2").train(), ids_of()
    ch.swap(model)

    def gradients() -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        output = model(ids, use_cache=False).logits
        return output.detach(), *torch.autograd.grad(output.square().sum(), list(model.parameters()))

    first = gradients()
    assert attending(taken) == ["layer"] * 3
    with ch.observe(model, ch.Want(entropy=True)):
        watched = gradients()
    assert len(attending(taken)) == 3
    assert torch.equal(watched[0], first[0])
    for one, other in zip(watched, first, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    plain = gradients()
    assert not torch.allclose(plain[0], first[0])
    model.eval()
    assert torch.equal(gradients()[0], plain[0])


def test_gpt2_with_a_memory_goes_by_parts(taken: list[str]) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=2, n_head=4, add_cross_attention=True, bos_token_id=1, eos_token_id=None
    )
    model, memory = transformers.GPT2LMHeadModel(config).eval(), torch.randn(2, 5, 32)
    given = {"encoder_hidden_states": memory, "use_cache": False}
    with torch.no_grad():
        own, alone = model(ids_of(), **given).logits, model(ids_of(), use_cache=False).logits
        ch.swap(model)
        torch.testing.assert_close(model(ids_of(), **given).logits, own, rtol=1e-4, atol=1e-4)
        assert attending(taken) == []
        torch.testing.assert_close(model(ids_of(), use_cache=False).logits, alone, rtol=1e-4, atol=1e-4)
    assert attending(taken) == ["layer"] * 2


def test_positions_of_ones_own(taken: list[str]) -> None:
    model, ids = _model(), ids_of()
    given = {"position_ids": torch.arange(9)[None] * 3 + 5, "use_cache": False}
    with torch.no_grad():
        own = model(ids, **given).logits
        ch.swap(model)
        torch.testing.assert_close(model(ids, **given).logits, own, rtol=1e-4, atol=1e-4)
    assert attending(taken) == ["layer"] * 3


def test_angles_are_looked_at_anew_where_they_are_written_into() -> None:
    model = _model()
    ch.swap(model)
    angles = [part.clone() for part in model.model.rotary_emb(torch.zeros(1), torch.arange(9)[None])]
    layer, x = model.model.layers[0], torch.randn(2, 9, 32)
    with torch.no_grad():
        first = layer(x, position_embeddings=tuple(angles))
        angles[0].mul_(0.5)
        second = layer(x, position_embeddings=tuple(angles))
        ch.unswap(model)
        own = layer(x, position_embeddings=tuple(angles))
    assert not torch.allclose(first, second, atol=1e-3)
    # Called by itself without a mask, transformers' own implementation is causal too.
    torch.testing.assert_close(second, own, rtol=1e-4, atol=1e-4)


# ---- masks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side: str, taken: list[str]) -> None:
    model, ids = _model(), ids_of()
    real = torch.ones_like(ids)
    real[0, slice(None, 3) if side == "left" else slice(-3, None)] = 0
    with torch.no_grad():
        own = model(ids, attention_mask=real, use_cache=False).logits
        ch.swap(model)
        for _ in range(3):
            found = model(ids, attention_mask=real, use_cache=False).logits
            torch.testing.assert_close(found[real.bool()], own[real.bool()], rtol=1e-4, atol=1e-4)
    assert attending(taken) == ["layer"] * 9


@pytest.mark.parametrize("name", KINDS)
def test_generating_behind_padding(name: str, taken: list[str]) -> None:
    model, ids = _model(name), ids_of()
    real = torch.ones_like(ids)
    real[0, :3] = 0
    options = [{"do_sample": False}, {"num_beams": 3, "do_sample": False}]
    own = [model.generate(ids, attention_mask=real, max_new_tokens=6, **option) for option in options]
    ch.swap(model)
    for option, right in zip(options, own, strict=True):
        assert torch.equal(model.generate(ids, attention_mask=real, max_new_tokens=6, **option), right)
    assert attending(taken) == ["layer"] * 3 * 6 * 2


@pytest.mark.parametrize("padding", [slice(0, 3), slice(-3, None), slice(2, 5)], ids=["left", "right", "within"])
def test_decoding_behind_padding_is_fused_and_gives_the_same_tokens(padding: slice) -> None:
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


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_tokens_behind_padding_one_by_one(name: str, dtype: torch.dtype, taken: list[str]) -> None:
    """Sequences stand at positions of their own, and see their own keys."""
    model, ids, real = _model(name, dtype), ids_of(length=16), torch.ones(2, 16, dtype=torch.long)
    real[0, :4] = 0

    def run(of: Any) -> Tensor:
        cache, found = DynamicCache(config=of.config), []
        places = (real.cumsum(1) - 1).clamp(min=0)
        for begin, end in ((0, 9), (9, 10), (10, 11), (11, 14), (14, 15), (15, 16)):
            with torch.no_grad():
                found.append(
                    of(
                        ids[:, begin:end],
                        attention_mask=real[:, :end],
                        position_ids=places[:, begin:end],
                        past_key_values=cache,
                    ).logits
                )
        return torch.cat(found, 1)[real.bool()]

    exact, own = run(in_float64(model)), run(model)
    ch.swap(model)
    found = run(model)
    within_budget("logits", found, own, exact, terms=3 * 72, dtype=dtype)
    assert attending(taken) == ["layer"] * 3 * 6
    with ch.observe(model, ch.Want(entropy=True)):
        assert torch.equal(run(model), found)
    assert len(attending(taken)) == 3 * 6


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", [name for name in KINDS if name not in BY_PARTS])
def test_padding_is_left_out_where_nothing_is_cached(
    name: str, side: str, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if TRANSFORMERS_4 and name == "gpt2":
        pytest.skip("transformers 4 computes NaN at padding")
    monkeypatch.setattr(fused, "_LEAST_UNPADDED", 1)
    model, ids, real = _model(name), ids_of(), torch.ones(2, 9, dtype=torch.long)
    real[0, slice(None, 3) if side == "left" else slice(-3, None)] = 0
    places = (real.cumsum(1) - 1).clamp(min=0)
    upstream = torch.randn(2, 9, 50, generator=torch.Generator().manual_seed(3)) * real[..., None]

    def run(of: Any) -> tuple[Tensor, dict[str, Tensor]]:
        output = of(ids, attention_mask=real, position_ids=places, use_cache=False).logits
        found = torch.autograd.grad(output, list(of.parameters()), upstream.to(output.dtype))
        return output.detach()[real.bool()], dict(zip(dict(of.named_parameters()), found, strict=True))

    (truth, exact), (own, textbook) = run(copy.deepcopy(model).double()), run(model)
    ch.swap(model)
    seen = list[int]()
    take = fused.fused_layers
    monkeypatch.setattr(
        fused,
        "fused_layers",
        lambda tokens, *given: (seen.append(tokens[0].shape[1]), take(tokens, *given))[1],
    )
    for _ in range(3):
        output, found = run(model)
        within_budget("logits", output, own, truth, terms=3 * 72)
        for key, right in exact.items():
            within_budget(key, found[key], textbook[key], right, terms=18 * 72)
    assert seen == [15] * 9
    assert attending(taken) == ["layer"] * 9


# ---- caches -------------------------------------------------------------------------------------------------

#: One whose caches grow, and one whose caches keep five tokens.
CACHED = ["llama", "mistral, windows"]


@pytest.mark.parametrize("window", [2, 3, 5, 9, 17, 40])
def test_a_cache_that_slides_keeps_what_transformers_keeps(window: int, taken: list[str]) -> None:
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=window)).eval()
    ids, calls = ids_of(length=60), (4, 1, 1, 7, 1, 1, 1, 2, *[1] * 40, 2)
    theirs, ours = DynamicCache(config=model.config), DynamicCache(config=model.config)
    own = decoded(model, ids, calls, theirs)
    ch.swap(model)
    torch.testing.assert_close(decoded(model, ids, calls, ours), own, rtol=1e-4, atol=1e-4)
    assert attending(taken) == ["layer"] * 3 * len(calls)
    for found, right in zip(ours.layers, theirs.layers, strict=True):
        torch.testing.assert_close((found.keys, found.values), (right.keys, right.values), rtol=1e-4, atol=1e-4)
        assert found.get_seq_length() == right.get_seq_length() == 60
        queries = torch.tensor([60]) if TRANSFORMERS_4 else 1
        assert found.get_mask_sizes(queries) == right.get_mask_sizes(queries)


@needs_5
def test_a_cache_that_remembers_its_past_goes_by_parts(taken: list[str]) -> None:
    model, ids = _model("mistral, windows"), ids_of(length=16)
    own = decoded(model, ids)
    ch.swap(model)
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        layer.activate_past_recording()
    torch.testing.assert_close(decoded(model, ids, cache=cache), own, rtol=1e-4, atol=1e-4)
    assert "layer" not in taken


def test_generate_gives_the_same_tokens_with_beams_too(taken: list[str]) -> None:
    model, ids = _model(), ids_of()
    options = [
        {"do_sample": False},
        {"num_beams": 3, "do_sample": False},
        {"do_sample": False, "num_return_sequences": 2, "num_beams": 2},
    ]
    own = [model.generate(ids, max_new_tokens=8, **option) for option in options]
    ch.swap(model)
    for option, right in zip(options, own, strict=True):
        assert torch.equal(model.generate(ids, max_new_tokens=8, **option), right)
    assert attending(taken) == ["layer"] * 3 * 8 * 3


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
def test_a_cache_that_somebody_changed(name: str, change: str, taken: list[str]) -> None:
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

    own, _ = run()
    ch.swap(model)
    found, cache = run()
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-4)
    assert attending(taken) == ["layer"] * 3 * 8
    ch.unswap(model)
    # transformers goes on with what was left.
    again = decoded(model, more, (1, 3), cache)
    assert bool(again.isfinite().all())


@pytest.mark.parametrize("name", CACHED)
def test_a_copy_of_a_cache_is_another(name: str) -> None:
    model, ids = _model(name), ids_of()
    ch.swap(model)
    cache = DynamicCache(config=model.config)
    decoded(model, ids, (7, 1, 1), cache)
    other = copy.deepcopy(cache)
    one, two = ids_of(length=3, seed=1), ids_of(length=3, seed=2)
    right = [decoded(model, torch.cat([ids, more], 1), (7, 1, 1, 1, 1, 1))[:, -3:] for more in (one, two)]
    found = [decoded(model, more, (1, 1, 1), own) for more, own in ((one, cache), (two, other))]
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CACHED)
def test_keys_that_were_read_stay_what_they_are(name: str) -> None:
    model, ids = _model(name), ids_of()
    ch.swap(model)
    cache = DynamicCache(config=model.config)
    decoded(model, ids, (8, 1), cache)
    seen = cache.layers[0].keys
    before = seen.clone()
    decoded(model, ids_of(length=12, seed=1), (1,) * 12, cache)
    assert torch.equal(seen, before)
    if name == "llama":
        assert torch.equal(cache.layers[0].keys[:, :, :9], before)


@pytest.mark.parametrize("name", CACHED)
def test_a_cache_that_transformers_began_and_one_that_grows_by_itself(name: str, taken: list[str]) -> None:
    model, ids = _model(name), ids_of(length=16)
    own = decoded(model, ids)
    cache = DynamicCache() if name == "llama" else DynamicCache(config=model.config)
    decoded(model, ids[:, :9], (9,), cache)
    ch.swap(model)
    torch.testing.assert_close(decoded(model, ids[:, 9:], (1,) * 7, cache), own[:, 9:], rtol=1e-4, atol=1e-4)
    assert attending(taken) == ["layer"] * 21
    # A cache that has no layers yet makes them when it is first written to.
    torch.testing.assert_close(decoded(model, ids, cache=DynamicCache()), own, rtol=1e-4, atol=1e-4)


def test_other_caches_go_by_parts(taken: list[str]) -> None:
    model, ids = _model(), ids_of(length=16)
    own = decoded(model, ids)
    ch.swap(model)
    found = decoded(model, ids, cache=StaticCache(config=model.config, max_cache_len=16))
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-4)
    assert attending(taken) == []


def test_a_call_with_gradients_does_not_go_through_the_cache(taken: list[str]) -> None:
    model, ids = _model(), ids_of()
    ch.swap(model)
    cache = DynamicCache(config=model.config)
    model(ids[:, :8], past_key_values=cache)
    model(ids[:, 8:], past_key_values=cache).logits.sum().backward()
    assert attending(taken) == []
    with torch.no_grad():
        assert bool(model(ids[:, :1], past_key_values=cache).logits.isfinite().all())


@pytest.mark.parametrize("name", CACHED)
def test_inference_mode_and_none_by_turns(name: str) -> None:
    model, ids = _model(name), ids_of(length=16)
    own = decoded(model, ids)
    ch.swap(model)
    cache, found = DynamicCache(config=model.config), []
    for place, part in enumerate(ids.split([9, 1, 1, 3, 1, 1], 1)):
        with torch.inference_mode() if place % 2 == 0 else torch.no_grad():
            found.append(model(part, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(found, 1), own, rtol=1e-4, atol=1e-4)


# ---- who sees the parts -------------------------------------------------------------------------------------

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
def test_whoever_looks_at_a_part_sees_it(part: str, taken: list[str]) -> None:
    model, seen = _model(), list[object]()
    own = decoded(model, ids_of())
    ch.swap(model)
    decoded(model, ids_of())
    taken.clear()
    handle = model.model.layers[1].get_submodule(part).register_forward_hook(lambda *given: seen.append(given[2]))
    torch.testing.assert_close(decoded(model, ids_of(), (9,)), own, rtol=1e-4, atol=1e-4)
    assert len(seen) == 1
    # An attention within which nobody looks is a step of its own.
    inside = [] if part.startswith("self_attn.") else ["attention"]
    assert attending(taken) == ["layer", *inside, "layer"]
    handle.remove()
    taken.clear()
    decoded(model, ids_of(), (9,))
    assert attending(taken) == ["layer"] * 3


def test_hooks_on_a_layer_leave_it_one_step(taken: list[str]) -> None:
    model, seen = _model(), list[object]()
    ch.swap(model)
    model.model.layers[1].register_forward_hook(lambda *given: seen.append(given[2]))
    decoded(model, ids_of(), (9,))
    assert len(seen) == 1
    assert attending(taken) == ["layer"] * 3


@needs_5
def test_hidden_states_are_collected_and_steps_taken_after_that(taken: list[str]) -> None:
    model, ids = _model(), ids_of()
    with torch.no_grad():
        own = model(ids, output_hidden_states=True).hidden_states
        ch.swap(model)
        found = model(ids, output_hidden_states=True).hidden_states
        for one, other in zip(found, own, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        model(ids)
    assert attending(taken) == ["layer"] * 6


def test_weights_are_refused_as_elsewhere() -> None:
    model = _model()
    ch.swap(model)
    with torch.no_grad(), pytest.raises(ch.UnsupportedError, match="output_attentions must be False"):
        model(ids_of(), output_attentions=True)


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
def test_a_layer_that_was_changed_is_called_as_it_is_now(change: Callable[[Any], object]) -> None:
    model = _model()
    ch.swap(model)
    decoded(model, ids_of(), (8, 1))
    torch.manual_seed(4)
    change(model.model.layers[1])
    found = decoded(model, ids_of(), (8, 1))
    ch.unswap(model)
    torch.testing.assert_close(found, decoded(model, ids_of(), (8, 1)), rtol=1e-4, atol=1e-4)


def test_a_forward_that_was_replaced_is_called(taken: list[str]) -> None:
    model = _model()
    ch.swap(model)
    attention = model.model.layers[0].self_attn
    attention.forward = lambda hidden_states, **_: (hidden_states * 0.0, None)
    decoded(model, ids_of(), (9,))
    assert attending(taken) == ["layer"] * 2


def test_under_autocast_it_stays_near() -> None:
    model, ids = _model(), ids_of(length=16)
    own = decoded(model, ids)
    ch.swap(model)
    with torch.autocast("cpu", torch.bfloat16):
        found = decoded(model, ids)
    torch.testing.assert_close(found.float(), own, rtol=0.1, atol=0.1)


def test_in_float64_it_is_transformers_own() -> None:
    model, ids = _model().double(), ids_of(length=16)
    own = decoded(model, ids)
    ch.swap(model)
    torch.testing.assert_close(decoded(model, ids), own, rtol=1e-6, atol=1e-6)


def test_another_way_of_turning_is_left_alone(monkeypatch: pytest.MonkeyPatch, taken: list[str]) -> None:
    model = _model()
    monkeypatch.setattr(theirs, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
    own = decoded(model, ids_of())
    ch.swap(model)
    torch.testing.assert_close(decoded(model, ids_of()), own, rtol=1e-4, atol=1e-4)
    assert attending(taken) == []


# ---- classes ------------------------------------------------------------------------------------------------


def test_unswapped_it_is_transformers_own() -> None:
    model, ids = _model(), ids_of(length=16)
    own, kinds = decoded(model, ids), [type(part) for part in model.modules()]
    ch.swap(model)
    assert [type(part) for part in model.modules()] != kinds
    assert all(isinstance(part, kind) for part, kind in zip(model.modules(), kinds, strict=True))
    ch.unswap(model)
    assert [type(part) for part in model.modules()] == kinds
    assert torch.equal(decoded(model, ids), own)


def test_a_swapped_model_is_copied_and_pickled(taken: list[str]) -> None:
    model = _model()
    ch.swap(model)
    own = decoded(model, ids_of())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for again in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        taken.clear()
        assert torch.equal(decoded(again, ids_of()), own)
        assert attending(taken) == ["layer"] * 3
        ch.unswap(again)
        assert type(again.model.layers[0]) is theirs.LlamaDecoderLayer


def test_checkpointed_layers_train(taken: list[str]) -> None:
    model, ids = _model(), ids_of()
    ch.swap(model)
    upstream = torch.randn(2, 9, 50)
    model.train()
    plain = torch.autograd.grad(model(ids, use_cache=False).logits, list(model.parameters()), upstream)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    taken.clear()
    found = torch.autograd.grad(model(ids, use_cache=False).logits, list(model.parameters()), upstream)
    # torch stops the second forward of a layer once it has saved its tensors, before the call is counted.
    assert attending(taken) == ["layer"] * 3
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_compiled_it_is_transformers_own() -> None:
    model = _model()
    ch.swap(model)
    layer, x = model.model.layers[0], torch.randn(2, 9, 32)
    angles = model.model.rotary_emb(x, torch.arange(9)[None])
    with torch.no_grad():
        own = layer(x, position_embeddings=angles)
        compiled = torch.compile(layer, backend="eager")
        torch.testing.assert_close(compiled(x, position_embeddings=angles), own, rtol=1e-4, atol=1e-4)
