"""Models of transformers with an int8 cache: swapped ones read its rows, others a dequantized copy."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    MistralForCausalLM,
)

import clearhead as ch
from clearhead.bridges.transformers import Int8Cache, PagedCache
from clearhead.integrations.transformers.deferred_tensor import RowsTensor
from clearhead.testing import fused_calls
from tests.agreement import needs_native
from tests.net.families import FAMILIES, TRANSFORMERS_4, Family

pytestmark = needs_native

VOCAB, PARTS = 41, (9, 1, 1, 3, 1, 2)
ENCODER_DECODERS = ("bart", "marian", "whisper", "t5")
DECODERS = [
    family
    for family in FAMILIES.values()
    if family.generates and "decoder_input_ids" not in family.call(4, "none").arguments
]


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where rows are dequantized."""

    def elements(rows: RowsTensor) -> Tensor:
        raise AssertionError("rows were dequantized")

    monkeypatch.setattr(RowsTensor, "elements", elements)


def made(kind: str) -> tuple[Any, Any]:
    """A model as transformers makes it, and swapped."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None, "bos_token_id": None,
        "pad_token_id": 0,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "llama":
            model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
        else:
            model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=8)).eval()
    swapped = copy.deepcopy(model)
    ch.swap(swapped)
    return model, swapped


def decoded(model: Any, ids: Tensor, cache: Any, padding: int = 0) -> Tensor:
    mask, parts, first = torch.ones_like(ids), [], 0
    mask[0, :padding] = 0
    for count in PARTS:
        end = first + count
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, first:end]
        output = model(
            input_ids=ids[:, first:end], attention_mask=mask[:, :end], past_key_values=cache, position_ids=positions,
            use_cache=True,
        )  # fmt: skip
        parts.append(output.logits)
        first = end
    return torch.cat(parts, 1)[mask.bool()]


def prompt(length: int = sum(PARTS)) -> Tensor:
    return torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("padding", [0, 3], ids=["no padding", "left padding"])
@pytest.mark.parametrize("family", DECODERS, ids=lambda family: family.name)
def test_swapped_decoders_read_what_the_original_dequantizes(family: Family, padding: int) -> None:
    ours, theirs = family.swapped(), family.plain()
    one = decoded(ours, prompt(), Int8Cache(ours.config), padding)
    other = decoded(theirs, prompt(), Int8Cache(theirs.config), padding)
    exact = decoded(theirs, prompt(), DynamicCache(config=theirs.config), padding)
    scale = float(exact.abs().max())
    # A key that lies between two integers may be rounded to either.
    torch.testing.assert_close(one / scale, other / scale, rtol=0, atol=2e-3)
    torch.testing.assert_close(one / scale, exact / scale, rtol=0, atol=0.05)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_fused_layers_never_dequantize(kind: str, unread: None) -> None:
    _, swapped = made(kind)
    cache = Int8Cache(swapped.config)
    with fused_calls() as kinds:
        tokens = swapped.generate(prompt(12), past_key_values=cache, max_new_tokens=10, do_sample=False)
    assert tokens.shape == (2, 22)
    assert kinds == ["layer"] * 20
    assert cache.get_seq_length() == 21
    assert cache.layers[0].kv_cache.length == (21 if kind == "llama" else 7)
    assert cache.layers[0].kv_cache.key.dtype is torch.int8


def test_a_frozen_model_is_one_operator_with_the_same_tokens(unread: None) -> None:
    _, model = made("llama")
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    tokens = model.generate(prompt(9), past_key_values=Int8Cache(model.config), **options)
    ch.freeze(model)
    with fused_calls() as kinds:
        frozen = model.generate(prompt(9), past_key_values=Int8Cache(model.config), **options)
    assert kinds == ["stack"] * 6
    assert torch.equal(frozen, tokens)


def test_the_attention_interface_reads_rows(unread: None) -> None:
    """Layers that are not fused, because they are hooked, attend by transformers' interface."""
    _, swapped = made("llama")
    plain = decoded(swapped, prompt(), Int8Cache(swapped.config))
    for layer in swapped.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda module, given, output: output)
    with fused_calls() as kinds:
        hooked = decoded(swapped, prompt(), Int8Cache(swapped.config))
    assert kinds == []
    torch.testing.assert_close(hooked, plain, rtol=2e-3, atol=2e-3)


def test_observed_layers_have_the_bits_of_unobserved_ones(unread: None) -> None:
    _, swapped = made("llama")
    plain = decoded(swapped, prompt(), Int8Cache(swapped.config))
    with ch.observe(swapped, want=ch.Want(entropy=True)):
        observed = decoded(swapped, prompt(), Int8Cache(swapped.config))
    assert torch.equal(plain, observed)


def test_prefill_and_decoding_have_the_same_bits_in_invariant_mode() -> None:
    _, swapped = made("llama")
    ch.set_invariant(True)
    try:
        ids, caches = prompt(), [Int8Cache(swapped.config) for _ in range(2)]
        # The head is torch's, whose sums have an order of their own.
        body = swapped.model
        whole = body(ids, past_key_values=caches[0], use_cache=True).last_hidden_state
        parts = [
            body(ids[:, t : t + 1], past_key_values=caches[1], use_cache=True).last_hidden_state
            for t in range(ids.shape[1])
        ]
    finally:
        ch.set_invariant(False)
    assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(caches[0].layers[1].kv_cache.key, caches[1].layers[1].kv_cache.key)


@pytest.mark.parametrize("swapped", [False, True], ids=["plain", "swapped"])
def test_beams_are_reordered(swapped: bool) -> None:
    model = made("llama")[swapped]
    options: dict[str, Any] = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    exact = made("llama")[0].generate(prompt(6), **options)
    tokens = model.generate(prompt(6), past_key_values=Int8Cache(model.config), **options)
    assert bool((tokens == exact).float().mean() > 0.9)


def test_rows_are_selected_repeated_cropped_and_copied() -> None:
    _, model = made("llama")
    cache, ids = Int8Cache(model.config), prompt(10)
    model(ids, past_key_values=cache, use_cache=True)
    rows = cache.layers[0].kv_cache.key.clone()
    other = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(cache.layers[0].kv_cache.key, rows[[1, 0]])
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.layers[0].kv_cache.key, rows[[1, 1, 0, 0]])
    cache.batch_select_indices(torch.tensor([3]))
    cache.crop(-4)
    assert torch.equal(cache.layers[0].kv_cache.key, rows[:1, :, :6])
    assert cache.get_seq_length() == 6
    assert torch.equal(other.layers[0].kv_cache.key, rows)
    other.reset()
    assert other.get_seq_length() == 0


def test_what_stands_for_keys_reads_as_keys() -> None:
    _, model = made("llama")
    cache = Int8Cache(model.config)
    model(prompt(10), past_key_values=cache, use_cache=True)
    layer = cache.layers[0]
    assert layer.keys.shape == (2, 2, 10, 16)
    assert layer.keys.dtype is torch.float32
    assert torch.equal(layer.keys + 0, layer.kv_cache.dequantized()[0])
    assert torch.equal(layer.values[:, 1], layer.kv_cache.dequantized()[1][:, 1])


def test_pages_of_int8_give_the_tokens_of_the_int8_cache() -> None:
    _, model = made("llama")
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    pages = PagedCache(model.config, 16, dtype=torch.int8)
    paged = model.generate(prompt(9), past_key_values=pages, **options)
    assert pages.pages.dtype is torch.int8
    PagedCache(model.config, pages=pages.pages, dtype=torch.int8)
    with pytest.raises(ch.ShapeError, match=r"dtype must be that of pages, torch\.int8, or None; got torch\.float32"):
        PagedCache(model.config, pages=pages.pages, dtype=torch.float32)
    assert torch.equal(paged, model.generate(prompt(9), past_key_values=Int8Cache(model.config), **options))


def test_a_decoder_with_a_memory() -> None:
    family = FAMILIES["bart"]
    arguments = {name: value for name, value in family.call(8, "none").arguments.items() if "decoder" not in name}
    arguments.pop("use_cache", None)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    swapped = family.swapped()
    cache = EncoderDecoderCache(Int8Cache(swapped.config), Int8Cache(swapped.config))
    tokens = swapped.generate(**arguments, past_key_values=cache, **options)
    assert cache.self_attention_cache.layers[0].kv_cache.key.dtype is torch.int8
    memory = cache.cross_attention_cache.layers[0].kv_cache
    assert memory.key.dtype is torch.int8
    assert memory.length == arguments["input_ids"].shape[1]
    assert bool((tokens == family.plain().generate(**arguments, **options)).float().mean() > 0.7)


def test_what_is_not_supported_says_so() -> None:
    # In transformers 4 a cache does not know which layers attend.
    if not TRANSFORMERS_4:
        with pytest.raises(ch.UnsupportedError, match="Int8Cache: config must be of a model whose layers cache keys"):
            Int8Cache(MambaConfig(num_hidden_layers=1))
    _, model = made("mistral")
    cache = Int8Cache(model.config)
    model(prompt(12), past_key_values=cache, use_cache=True)
    with pytest.raises(ch.UnsupportedError, match="crop must come before a sliding layer drops tokens"):
        cache.crop(-2)
    with pytest.raises(ch.UnsupportedError, match="must drop tokens beyond its window"):
        cache.layers[0].activate_past_recording()
    with pytest.raises(ch.UnsupportedError, match="must be appended by update"):
        cache.layers[0].keys = torch.zeros(1)
    with torch.enable_grad(), pytest.raises(ch.UnsupportedError, match="floating point without a gradient"):
        model(prompt(3), past_key_values=Int8Cache(model.config), use_cache=True)
