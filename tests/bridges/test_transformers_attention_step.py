"""Attention as one step where its layer in transformers is none; and ModernBERT, whose first layer is none."""

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
from clearhead.ops import library as native_library
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

pytestmark = [
    pytest.mark.skipif(native_library.library() is None, reason=f"{native_library.reason()}"),
    pytest.mark.usefixtures("_kernels"),
]

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
#: Layers that no table knows: of experts, with sums that are multiplied, and with an activation of their own.
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
def test_prefill_and_tokens_one_by_one(name: str, dtype: torch.dtype, taken: list[str]) -> None:
    model, ids = distinct(KINDS[name], dtype), ids_of(length=16)
    exact, own = decoded(copy.deepcopy(model).double(), ids), decoded(model, ids)
    ch.swap(model)
    cache = DynamicCache(config=model.config)
    within_budget("logits", decoded(model, ids, cache=cache), own, exact, terms=LAYERS * 72, dtype=dtype)
    assert attending(taken) == ["attention"] * LAYERS * 6
    assert cache.get_seq_length() == 16


@pytest.mark.parametrize("name", ["qwen3 moe", "mixtral"])
def test_experts(name: str, taken: list[str]) -> None:
    """In float32: in 16 bits a router may choose others."""
    model, ids = distinct(KINDS[name]), ids_of(length=16)
    own = decoded(model, ids)
    ch.swap(model)
    torch.testing.assert_close(decoded(model, ids), own, rtol=1e-4, atol=1e-4)
    assert attending(taken) == ["attention"] * LAYERS * 6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_the_same_bits_whoever_watches(name: str, dtype: torch.dtype, taken: list[str]) -> None:
    model, ids, seen = distinct(KINDS[name], dtype), ids_of(length=16), list[str]()
    ch.swap(model)
    found = decoded(model, ids)
    count = len(attending(taken))
    with ch.observe(model, ch.Want(entropy=True)) as watched:
        assert torch.equal(decoded(model, ids), found)
        seen += list(watched)
    assert len(attending(taken)) == count
    assert seen


@pytest.mark.parametrize("name", KINDS)
def test_generate_gives_the_same_tokens(name: str, taken: list[str]) -> None:
    model, ids = distinct(KINDS[name]), ids_of()
    real = torch.ones_like(ids)
    real[0, :3] = 0
    options = [{"do_sample": False}, {"num_beams": 3, "do_sample": False}]
    own = [model.generate(ids, attention_mask=real, max_new_tokens=6, **option) for option in options]
    ch.swap(model)
    for option, right in zip(options, own, strict=True):
        assert torch.equal(model.generate(ids, attention_mask=real, max_new_tokens=6, **option), right)
    assert attending(taken) == ["attention"] * LAYERS * 6 * 2


@pytest.mark.parametrize("name", ["granite", "arcee"])
def test_it_trains_in_one_step(name: str, taken: list[str]) -> None:
    model = distinct(KINDS[name])
    trains_with_the_gradients_of_eager(model, 3)
    assert attending(taken) == ["attention"] * LAYERS * 3


def test_it_learns_between_calls_without_gradients() -> None:
    learns_between_calls_without_gradients(
        distinct(KINDS["granite"]), lambda model: model(ids_of(), use_cache=False).logits
    )


@pytest.mark.parametrize("part", ["q_proj", "v_proj", "o_proj"])
def test_whoever_looks_at_a_part_sees_it(part: str, taken: list[str]) -> None:
    model, seen = distinct(KINDS["granite"]), list[object]()
    own = decoded(model, ids_of())
    ch.swap(model)
    decoded(model, ids_of())
    taken.clear()
    attention = model.model.layers[1].self_attn
    handle = attention.get_submodule(part).register_forward_hook(lambda *given: seen.append(given[2]))
    torch.testing.assert_close(decoded(model, ids_of()), own, rtol=1e-4, atol=1e-4)
    assert len(seen) == 1
    assert attending(taken) == ["attention"] * 2
    handle.remove()
    decoded(model, ids_of())
    assert attending(taken) == ["attention"] * 5


def test_parts_that_were_replaced_are_read() -> None:
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


def test_a_layer_whose_parts_fit_now_is_fused_by_another_swap(taken: list[str]) -> None:
    model, ids = distinct(KINDS["arcee"]), ids_of()
    ch.swap(model)
    decoded(model, ids)
    assert attending(taken) == ["attention"] * LAYERS
    known = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))
    for layer, other in zip(model.model.layers, known.model.layers, strict=True):
        layer.mlp = other.mlp
    assert {row.class_name for row in ch.swap(model).replaced} == {"LlamaMLP", "ArceeDecoderLayer"}
    taken.clear()
    decoded(model, ids)
    assert attending(taken) == ["layer"] * LAYERS


@pytest.mark.parametrize("name", ["granite", "qwen3 moe"])
def test_threads_share_a_model(name: str) -> None:
    model, ids = distinct(KINDS[name]), ids_of()
    ch.swap(model)
    right = decoded(model, ids)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: decoded(model, ids), range(200)))
    assert all(torch.equal(own, right) for own in found)


def test_a_model_that_is_gone_leaves_nothing() -> None:
    model = distinct(KINDS["granite"])
    ch.swap(model)
    decoded(model, ids_of())
    held = [weakref.ref(part) for part in (*model.model.layers, *model.parameters())]
    del model
    gc.collect()
    assert not any(part() is not None for part in held)


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
        found: Tensor = model(ids_of(length=16), attention_mask=real).last_hidden_state
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@needs_5
def test_modernbert(bias: bool, dtype: torch.dtype, taken: list[str]) -> None:
    model = distinct(lambda: _modernbert(norm_bias=bias, attention_bias=bias, mlp_bias=bias), dtype)
    exact, own = _states(copy.deepcopy(model).double()), _states(model)
    ch.swap(model)
    for _ in range(3):
        found = _states(model)
        within_budget("states", found, own, exact, terms=LAYERS * 72, dtype=dtype)
    assert attending(taken) == STEPS * 3
    with ch.observe(model, ch.Want(entropy=True)) as watched:
        assert torch.equal(_states(model), found)
        assert len(list(watched)) == LAYERS
    assert len(attending(taken)) == 9


@pytest.mark.parametrize("left_out", [True, False])
@needs_5
def test_padding_of_modernbert(left_out: bool, taken: list[str]) -> None:
    model, real = distinct(_modernbert), torch.ones(2, 16, dtype=torch.long)
    real[1, 5:] = 0
    own = _states(model, real)
    ch.swap(model, leave_padding_out=left_out)
    for _ in range(2):
        found = _states(model, real)
        torch.testing.assert_close(found[real.bool()], own[real.bool()], rtol=1e-4, atol=1e-4)
    assert attending(taken) == STEPS * 2


@needs_5
def test_dropouts_of_modernbert(taken: list[str]) -> None:
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
    # Halves of a layer learn apart from it.
    taken.clear()
    model(ids_of(length=16)).last_hidden_state.sum().backward()
    assert attending(taken) == ["attention"] * LAYERS
