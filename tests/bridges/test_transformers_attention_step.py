"""Attention is fused in layers that are not fused as a whole; and ModernBERT."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs the extra 'hf'")

import transformers
from transformers import DynamicCache

import clearhead as ch
from tests.agreement import needs_native
from tests.bridges.hf_checks import (
    attending,
    decoded,
    distinct,
    ids_of,
    learns_between_calls_without_gradients,
    trains_with_the_gradients_of_eager,
)
from tests.bridges.hf_models import needs_5
from tests.budget import within_budget

pytestmark = [needs_native, pytest.mark.usefixtures("_kernels"), pytest.mark.covering(0)]

LAYERS: Final = 3
SIZES: Final[dict[str, Any]] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GROUPED: Final = {**SIZES, "num_key_value_heads": 2}
EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
#: Layers that are not recognised: with experts, scaled residuals, or another activation.
KINDS: Final[dict[str, Callable[[], Any]]] = {
    "granite": lambda: transformers.GraniteForCausalLM(
        transformers.GraniteConfig(**GROUPED, residual_multiplier=0.7, attention_multiplier=0.3)
    ),
    "qwen3 moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**GROUPED, **EXPERTS, head_dim=16)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**GROUPED, num_local_experts=4, sliding_window=6)
    ),
    "arcee": lambda: transformers.ArceeForCausalLM(transformers.ArceeConfig(**GROUPED)),
}
DTYPES: Final = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["granite", "arcee"])
def test_prefill_and_decoding_are_fused_within_the_error_budget(
    name: str, dtype: torch.dtype, fused_kinds: list[str]
) -> None:
    model, ids = distinct(KINDS[name], dtype), ids_of(length=16)
    exact, expected = decoded(copy.deepcopy(model).double(), ids), decoded(model, ids)
    ch.swap(model)
    cache = DynamicCache(config=model.config)
    within_budget("logits", decoded(model, ids, cache=cache), expected, exact, terms=LAYERS * 72, dtype=dtype)
    assert attending(fused_kinds) == ["attention"] * LAYERS * 6
    assert cache.get_seq_length() == 16


@pytest.mark.parametrize("name", ["qwen3 moe", "mixtral"])
def test_layers_with_experts_have_fused_attention(name: str, fused_kinds: list[str]) -> None:
    """float32 only: in 16 bits a router may choose other experts."""
    model, ids = distinct(KINDS[name]), ids_of(length=16)
    expected = decoded(model, ids)
    ch.swap(model)
    torch.testing.assert_close(decoded(model, ids), expected, rtol=1e-4, atol=1e-4)
    assert attending(fused_kinds) == ["attention"] * LAYERS * 6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_observation_gives_the_same_bits(name: str, dtype: torch.dtype, fused_kinds: list[str]) -> None:
    model, ids, paths = distinct(KINDS[name], dtype), ids_of(length=16), list[str]()
    ch.swap(model)
    output = decoded(model, ids)
    count = len(attending(fused_kinds))
    with ch.observe(model, ch.Want(entropy=True)) as watched:
        assert torch.equal(decoded(model, ids), output)
        paths += list(watched)
    assert len(attending(fused_kinds)) == count
    assert paths


@pytest.mark.parametrize("name", KINDS)
def test_generate_gives_the_same_tokens(name: str, fused_kinds: list[str]) -> None:
    model, ids = distinct(KINDS[name]), ids_of()
    real = torch.ones_like(ids)
    real[0, :3] = 0
    options = [{"do_sample": False}, {"num_beams": 3, "do_sample": False}]
    expected = [model.generate(ids, attention_mask=real, max_new_tokens=6, **option) for option in options]
    ch.swap(model)
    for option, right in zip(options, expected, strict=True):
        assert torch.equal(model.generate(ids, attention_mask=real, max_new_tokens=6, **option), right)
    assert attending(fused_kinds) == ["attention"] * LAYERS * 6 * 2


@pytest.mark.parametrize("name", ["granite", "arcee"])
def test_training_is_fused_within_the_error_budget(name: str, fused_kinds: list[str]) -> None:
    model = distinct(KINDS[name])
    trains_with_the_gradients_of_eager(model, 3)
    assert attending(fused_kinds) == ["attention"] * LAYERS * 3


def test_calls_without_gradients_do_not_change_training() -> None:
    learns_between_calls_without_gradients(
        distinct(KINDS["granite"]), lambda model: model(ids_of(), use_cache=False).logits
    )


@pytest.mark.parametrize("part", ["q_proj", "v_proj", "o_proj"])
def test_a_hook_on_a_part_fires(part: str, fused_kinds: list[str]) -> None:
    model, fired = distinct(KINDS["granite"]), list[object]()
    expected = decoded(model, ids_of())
    ch.swap(model)
    decoded(model, ids_of())
    fused_kinds.clear()
    attention = model.model.layers[1].self_attn
    handle = attention.get_submodule(part).register_forward_hook(lambda *given: fired.append(given[2]))
    torch.testing.assert_close(decoded(model, ids_of()), expected, rtol=1e-4, atol=1e-4)
    assert len(fired) == 1
    assert attending(fused_kinds) == ["attention"] * 2
    handle.remove()
    decoded(model, ids_of())
    assert attending(fused_kinds) == ["attention"] * 5


def test_replaced_parts_take_effect() -> None:
    model, ids = distinct(KINDS["granite"]), ids_of()
    other = copy.deepcopy(model)
    ch.swap(model)
    decoded(model, ids)
    for each in (model, other):
        torch.manual_seed(5)
        layer = each.model.layers[1].self_attn
        layer.k_proj.weight = nn.Parameter(torch.randn(16, 32))
        layer.scaling = 0.1
        each.model.layers[2].self_attn.o_proj = nn.Linear(32, 32)
    torch.testing.assert_close(decoded(model, ids), decoded(other, ids), rtol=1e-4, atol=1e-4)


def test_a_second_swap_fuses_layers_that_match_now(fused_kinds: list[str]) -> None:
    model, ids = distinct(KINDS["arcee"]), ids_of()
    ch.swap(model)
    decoded(model, ids)
    assert attending(fused_kinds) == ["attention"] * LAYERS
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))
    for layer, other in zip(model.model.layers, llama.model.layers, strict=True):
        layer.mlp = other.mlp
    assert {row.class_name for row in ch.swap(model).replaced} == {"LlamaMLP", "ArceeDecoderLayer"}
    fused_kinds.clear()
    decoded(model, ids)
    assert attending(fused_kinds) == ["layer"] * LAYERS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["granite", "qwen3 moe"])
def test_concurrent_threads_give_the_same_bits(name: str) -> None:
    model, ids = distinct(KINDS[name]), ids_of()
    ch.swap(model)
    right = decoded(model, ids)
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda _: decoded(model, ids), range(200)))
    assert all(torch.equal(output, right) for output in outputs)


def test_deleting_a_model_frees_its_parameters() -> None:
    model = distinct(KINDS["granite"])
    ch.swap(model)
    decoded(model, ids_of())
    references = [weakref.ref(part) for part in (*model.model.layers, *model.parameters())]
    del model
    gc.collect()
    assert not any(part() is not None for part in references)


# ---- ModernBERT ---------------------------------------------------------------------------------------------

STEPS: Final = ["attention", "layer", "layer"]


def _modernbert(**more: Any) -> Any:
    config = transformers.ModernBertConfig(
        **{**SIZES, "eos_token_id": 2},
        cls_token_id=1,
        sep_token_id=2,
        local_attention=6,
        global_attn_every_n_layers=2,
        **more,
    )
    return transformers.ModernBertModel(config)


def _states(model: Any, real: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(ids_of(length=16), attention_mask=real).last_hidden_state
    return output


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@needs_5
def test_modernbert_is_within_the_error_budget(bias: bool, dtype: torch.dtype, fused_kinds: list[str]) -> None:
    model = distinct(lambda: _modernbert(norm_bias=bias, attention_bias=bias, mlp_bias=bias), dtype)
    exact, expected = _states(copy.deepcopy(model).double()), _states(model)
    ch.swap(model)
    for _ in range(3):
        actual = _states(model)
        within_budget("states", actual, expected, exact, terms=LAYERS * 72, dtype=dtype)
    assert attending(fused_kinds) == STEPS * 3
    with ch.observe(model, ch.Want(entropy=True)) as watched:
        assert torch.equal(_states(model), actual)
        assert len(list(watched)) == LAYERS
    assert len(attending(fused_kinds)) == 9


@pytest.mark.parametrize("left_out", [True, False])
@needs_5
def test_modernbert_with_padding_matches_the_original(left_out: bool, fused_kinds: list[str]) -> None:
    model, real = distinct(_modernbert), torch.ones(2, 16, dtype=torch.long)
    real[1, 5:] = 0
    expected = _states(model, real)
    ch.swap(model, leave_padding_out=left_out)
    for _ in range(2):
        actual = _states(model, real)
        torch.testing.assert_close(actual[real.bool()], expected[real.bool()], rtol=1e-4, atol=1e-4)
    assert attending(fused_kinds) == STEPS * 2


@needs_5
def test_modernbert_dropout_gives_the_same_bits_under_observation(fused_kinds: list[str]) -> None:
    model = distinct(lambda: _modernbert(attention_dropout=0.3, mlp_dropout=0.2))
    ch.swap(model)
    plain = _states(model)
    model.train()
    torch.manual_seed(5)
    one, two = _states(model), _states(model)
    torch.manual_seed(5)
    assert torch.equal(_states(model), one)
    assert not torch.allclose(one, two)
    assert not torch.allclose(one, plain)
    # In training, attention and feedforward run separately.
    fused_kinds.clear()
    model(ids_of(length=16)).last_hidden_state.sum().backward()
    assert attending(fused_kinds) == ["attention"] * LAYERS
