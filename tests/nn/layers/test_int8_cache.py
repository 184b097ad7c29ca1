"""Modules that decode with an int8 cache: the block operator appends and reads its rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.nn import Decoder, EncoderDecoder, LanguageModel, MultiHeadAttention
from clearhead.testing import forbid_fused
from tests.agreement import needs_native

pytestmark = [needs_native, pytest.mark.covering(1)]

#: Tokens of each call.
CALLS = {"a prompt": (20, *[1] * 10), "single tokens": (1,) * 30, "chunks": (7, 1, 9, 3, 10)}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary, grouped heads": {"rotary": True, "num_kv_heads": 2},
    "rules": {"scores": [ch.SoftCap(2.0), ch.Sink(torch.linspace(-1, 1, 4))]},
}


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture
def invariant() -> Iterator[None]:
    ch.set_invariant(True)
    yield
    ch.set_invariant(False)


def run(module: Any, x: Tensor, calls: tuple[int, ...], cache: Any, **options: Any) -> Tensor:
    return torch.cat([module(part, cache=cache, **options) for part in x.split(list(calls), 1)], 1)


def by_definition(module: MultiHeadAttention, x: Tensor, cache: ch.KVCache, mask: ch.Mask) -> Tensor:
    """The formula in float64 over the keys and values that the cache's rows stand for."""
    query, _, _ = module.double().project(x.double())
    keys, values = (part.double() for part in cache.dequantized())
    options: dict[str, Any] = {"mask": mask, "scores": module.scores.rules(), "backend": "reference"}
    heads = ch.attention(query, keys, values, **options)
    return module.output_projection(heads.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "op by op"])
@pytest.mark.parametrize("mask", [ch.Causal(), ch.Causal() & ch.Window(4)], ids=["causal", "window"])
@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_reads_the_rows_that_it_appends(
    options: dict[str, Any], calls: tuple[int, ...], mask: ch.Mask, fused: bool, kinds: list[str]
) -> None:
    module, x, cache = MultiHeadAttention(32, 4, **options).eval(), torch.randn(2, 30, 32), ch.KVCache(dtype=torch.int8)
    if fused:
        output = run(module, x, calls, cache, mask=mask)
        assert kinds == ["attention"] * len(calls)
    else:
        with forbid_fused():
            output = run(module, x, calls, cache, mask=mask)
        assert kinds == []
    assert cache.length == 30
    assert cache.key.dtype is torch.int8
    torch.testing.assert_close(output.double(), by_definition(module, x, cache, mask), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prefill_chunks_and_decoding_have_the_same_bits(dtype: torch.dtype, invariant: None, kinds: list[str]) -> None:
    model = LanguageModel(60, 64, 4, 2, max_len=64, positions="rotary", num_kv_heads=2).to(dtype).eval()
    ids = torch.randint(0, 60, (2, 30))
    outputs, rows = [], []
    for calls in CALLS.values():
        cache = model.new_cache(dtype=torch.int8)
        outputs.append(run(model, ids, calls, cache))
        rows.append(cache.layers[1].key)
    assert set(kinds) == {"stack"}
    for output, keys in zip(outputs[1:], rows[1:], strict=True):
        assert torch.equal(output, outputs[0])
        assert torch.equal(keys, rows[0])


def test_observers_see_the_keys_that_are_read(kinds: list[str]) -> None:
    module, x = MultiHeadAttention(32, 4).eval(), torch.randn(1, 9, 32)
    plain = run(module, x, (8, 1), ch.KVCache(dtype=torch.int8), mask=ch.Causal())
    with ch.observe(module, want=ch.Want(entropy=True)) as record:
        observed = run(module, x, (8, 1), ch.KVCache(dtype=torch.int8), mask=ch.Causal())
    assert kinds == ["attention", "attention"]
    assert torch.equal(plain, observed)
    assert len(record) > 0


def test_a_cached_memory_is_in_int8() -> None:
    module = Decoder(32, 4, 2, cross_attention=True).eval()
    x, memory, cache = torch.randn(2, 6, 32), torch.randn(2, 5, 32), module.new_cache(dtype=torch.int8)
    output = run(module, x, (4, 1, 1), cache, memory=memory, memory_lengths=[5, 3])
    assert cache.memory[0].key.dtype is torch.int8
    assert cache.memory[0].length == 5
    torch.testing.assert_close(output, module(x, memory=memory, memory_lengths=[5, 3]), rtol=0.05, atol=0.05)


def test_generate_decodes_with_rows_of_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = LanguageModel(60, 64, 4, 2, max_len=64).eval(), torch.randint(0, 60, (2, 12))
    made: list[ch.KVCache] = []
    make = ch.KVCache.__init__

    def recorded(cache: ch.KVCache, **options: Any) -> None:
        made.append(cache)
        make(cache, **options)

    monkeypatch.setattr(ch.KVCache, "__init__", recorded)
    whole = model.generate(ids, 10, temperature=0.0, cache_dtype=torch.int8)
    assert whole.shape == (2, 22)
    assert {cache.key.dtype for cache in made if cache.key is not None} == {torch.int8}
    listed = model.generate(list(ids), 10, temperature=0.0, cache_dtype=torch.int8)
    assert torch.equal(whole, torch.stack(listed))


def test_generate_of_an_encoder_and_a_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    model, source = EncoderDecoder(40, 40, 32, 2, 1).eval(), torch.randint(0, 40, (2, 7))
    plain = model.generate(source, 8, start=1)
    cache = model.new_cache(dtype=torch.int8)
    monkeypatch.setattr(model, "new_cache", lambda dtype: cache if dtype is torch.int8 else None)
    quantized = model.generate(source, 8, start=1, cache_dtype=torch.int8)
    assert {layer.key.dtype for layer in (*cache.layers, *cache.memory)} == {torch.int8}
    assert quantized.shape == plain.shape
    assert bool((quantized == plain).float().mean() > 0.5)


def test_generate_refuses_two_caches() -> None:
    model, ids = LanguageModel(60, 64, 4, 1, max_len=64).eval(), torch.randint(0, 60, (1, 5))
    with pytest.raises(ch.ShapeError, match=r"cache_dtype must be None without a new cache; got cached=False"):
        model.generate(ids, 2, cached=False, cache_dtype=torch.int8)
    pair = EncoderDecoder(40, 40, 32, 2, 1)
    with pytest.raises(ch.ShapeError, match=r"cache_dtype must be None without a new cache; got cached=False"):
        pair.generate(ids, 2, start=1, cached=False, cache_dtype=torch.int8)
    cache = model.new_paged_cache(4)
    with pytest.raises(ch.ShapeError, match=r"cache_dtype must be None without a new cache; got a cache"):
        model.generate(list(ids), 2, cache=cache, cache_dtype=torch.int8)
    with pytest.raises(ch.UnsupportedError, match=r"dtype must be torch\.int8 or None; got torch\.float16"):
        model.generate(ids, 2, cache_dtype=torch.float16)


def test_training_with_an_int8_cache_is_refused() -> None:
    module = MultiHeadAttention(16, 2)
    with torch.enable_grad(), pytest.raises(ch.UnsupportedError, match=r"Call it under torch\.no_grad\(\)\.$"):
        module(torch.randn(1, 3, 16), mask=ch.Causal(), cache=ch.KVCache(dtype=torch.int8))
