"""Attention over an int8 cache is attention over the dequantized keys and values, whatever computes it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.cache import KVCache
from clearhead.int8_rows import dequantize, quantize
from clearhead.verify.budget import rounding
from tests.agreement import draw, needs_native
from tests.budget import within_budget

pytestmark = needs_native

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
UNSUPPORTED = ch.UnsupportedError


def filled(
    batch: int, heads: int, length: int, dim: int, *, dtype: torch.dtype = torch.float32, value_dim: int = 0
) -> KVCache:
    cache = KVCache(dtype=torch.int8)
    key = draw(batch, heads, length, dim, seed=1, dtype=dtype, grad=False)
    cache.append(key, draw(batch, heads, length, value_dim or dim, seed=2, dtype=dtype, grad=False))
    return cache


def exact(query: Tensor, cache: KVCache, **options: Any) -> Tensor:
    """The formula in float64 on the dequantized keys and values."""
    keys, values = (part.double() for part in cache.dequantized())
    return ch.attention(query.double(), keys, values, backend="reference", **options)


def assert_within_budget(query: Tensor, cache: KVCache, **options: Any) -> None:
    """The output of the kernels has at most twice the error of the formula in the query's dtype."""
    keys, values = cache.key, cache.value
    assert keys is not None
    assert values is not None
    assert ch.explain_dispatch(query, keys, values, **options).choice == "native"
    textbook = ch.attention(
        query, *(part.to(query.dtype) for part in cache.dequantized()), backend="reference", **options
    )
    result = ch.attention(query, keys, values, **options)
    assert result.dtype is query.dtype
    within_budget("output", result, textbook, exact(query, cache, **options), terms=keys.shape[2], dtype=query.dtype)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("dim", [1, 8, 33, 64, 128, 256])
@DTYPES
def test_decoding_and_prefill_match_the_formula(dtype: torch.dtype, dim: int, length: int) -> None:
    cache = filled(2, 2, length, dim, dtype=dtype)
    for queries in (1, 2, 5, 20):
        query = draw(2, 4, queries, dim, dtype=dtype, grad=False)
        assert_within_budget(query, cache, mask=ch.Causal(), query_offset=length - 1)
        assert_within_budget(query, cache)


MASKS: dict[str, dict[str, Any]] = {
    "window": {"mask": ch.Causal() & ch.Window(30), "query_offset": 290},
    "padding": {"mask": ch.Padding([300, 77])},
    "left padding": {
        "mask": ch.Causal() & ch.Dense(torch.arange(300) >= torch.tensor([[[[0]]], [[[123]]]])),
        "query_offset": 290,
    },
    "table": {"mask": ch.Dense(torch.rand(2, 4, 3, 300, generator=torch.Generator().manual_seed(0)) > 0.5)},
    "soft cap and sink": {"scores": [ch.SoftCap(2.0), ch.Sink(torch.linspace(-1, 1, 4))]},
    "alibi": {"scores": [ch.Alibi(4)], "mask": ch.Causal(), "query_offset": 297},
    "bias": {"scores": [ch.DenseBias(draw(2, 4, 3, 300, seed=7, grad=False))]},
    "no key": {"mask": ch.Dense(torch.zeros(1, 300, dtype=torch.bool))},
    "scale": {"scale": 0.7},
}


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
def test_masks_rules_and_grouped_heads(options: dict[str, Any], heads: int) -> None:
    assert_within_budget(draw(2, 4, 3, 64, grad=False), filled(2, heads, 300, 64), **options)


def test_documents_of_a_packed_batch_are_read_apart() -> None:
    cache, mask = filled(1, 2, 300, 32), ch.Causal() & ch.Documents([100, 37, 163])
    assert_within_budget(draw(1, 4, 300, 32, grad=False), cache, mask=mask)


def test_value_heads_of_another_width() -> None:
    assert_within_budget(draw(1, 2, 1, 64, grad=False), filled(1, 2, 100, 64, value_dim=24))


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_backends_of_torch_state_the_semantics(backend: str) -> None:
    query, cache = draw(2, 4, 3, 32, grad=False), filled(2, 2, 70, 32)
    output = ch.attention(query, cache.key, cache.value, backend=backend, mask=ch.Causal(), query_offset=67)
    textbook = ch.attention(query, *cache.dequantized(), backend="reference", mask=ch.Causal(), query_offset=67)
    within_budget(backend, output, textbook, exact(query, cache, mask=ch.Causal(), query_offset=67), terms=70)


@pytest.mark.parametrize("queries", [1, 40])
def test_statistics_are_those_of_the_formula(queries: int) -> None:
    query, cache = draw(2, 4, queries, 64, grad=False), filled(2, 2, 300, 64)
    want = ch.Want(lse=True, entropy=True, top_k=3, received=True, sink=2, distance=True, rows=[0])
    one = ch.observe_attention(query, cache.key, cache.value, want=want)
    keys, values = (part.double() for part in cache.dequantized())
    right = ch.observe_attention(query.double(), keys, values, want=want, backend="reference")
    for name in ("lse", "entropy", "top_weights", "received", "sink", "distance", "rows"):
        torch.testing.assert_close(getattr(one, name).double(), getattr(right, name), rtol=2e-5, atol=2e-5)
    # What is observed has the bits of what is not.
    assert torch.equal(one.output, ch.attention(query, cache.key, cache.value))


@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.parametrize("queries", [1, 3, 300])
def test_threads_do_not_change_bits(queries: int) -> None:
    query, cache, outputs = draw(1, 4, queries, 64, grad=False), filled(1, 2, 2000, 64), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        outputs.append(ch.attention(query, cache.key, cache.value))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("dim", [8, 64, 128])
@DTYPES
def test_one_order_of_sums_for_any_number_of_queries(dtype: torch.dtype, dim: int) -> None:
    """In invariant mode a query has the same bits alone and among others."""
    query, cache = draw(1, 4, 40, dim, dtype=dtype, grad=False), filled(1, 2, 600, dim, dtype=dtype)
    before = ch.set_invariant(True)
    try:
        whole = ch.attention(query, cache.key, cache.value, mask=ch.Causal(), query_offset=560)
        for first, count in ((0, 1), (7, 2), (11, 5), (39, 1)):
            part = ch.attention(
                query[:, :, first : first + count], cache.key, cache.value, mask=ch.Causal(), query_offset=560 + first
            )
            assert torch.equal(part, whole[:, :, first : first + count])
    finally:
        ch.set_invariant(before if isinstance(before, bool) else False)


# ---- quantization ----------------------------------------------------------------------------------------------------


@DTYPES
def test_the_kernel_rounds_as_the_formula_does(dtype: torch.dtype) -> None:
    x = draw(2, 3, 50, 33, dtype=dtype, grad=False)
    x[0, 0, 0] = 0.0
    x[0, 1, 1, 5] = 1e4
    cache = KVCache(dtype=torch.int8)
    rows, _ = cache.append(x, x)
    assert torch.equal(rows, quantize(x))
    # The largest number of a row is exact up to the scale's rounding, and every number is within half a step.
    back = dequantize(rows)
    step = x.float().abs().amax(-1, keepdim=True) / 127
    assert bool(((back - x.float()).abs() <= 0.5001 * step).all())
    assert rows[0, 0, 0].tolist() == [0] * 37


def test_halves_round_to_even() -> None:
    rows = quantize(torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5]))
    assert rows[:6].tolist() == [127, 0, 2, 2, 0, -2]


def test_tiny_rows_are_zeros_and_huge_ones_are_exact() -> None:
    x = torch.tensor([[1e-37, -1e-38], [3e38, -1e38], [2.0**-119, 0.0]])[None, None]
    rows, _ = KVCache(dtype=torch.int8).append(x, x)
    assert torch.equal(rows, quantize(x))
    assert rows[0, 0, 0].tolist() == [0] * 6
    torch.testing.assert_close(dequantize(rows)[0, 0, 1:], x[0, 0, 1:], rtol=0.01, atol=0.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("of_value", [False, True], ids=["key", "value"])
@pytest.mark.parametrize("queries", [1, 3, 40])
def test_a_bad_token_spoils_only_the_queries_that_may_attend_to_it(queries: int, of_value: bool, bad: float) -> None:
    key, value = draw(1, 2, 200, 64, seed=1, grad=False), draw(1, 2, 200, 64, seed=2, grad=False)
    (value if of_value else key)[0, 1, 101, 3] = bad
    cache = KVCache(dtype=torch.int8)
    rows = cache.append(key, value)[of_value]
    assert bool(torch.isnan(rows[0, 1, 101, -4:].view(torch.float32)))
    output = ch.attention(
        draw(1, 4, queries, 64, grad=False), cache.key, cache.value, mask=ch.Causal(), query_offset=100
    )
    spoiled = torch.zeros(1, 4, queries, dtype=torch.bool)
    spoiled[:, 2:, 1:] = True
    assert torch.equal(torch.isnan(output).all(-1), spoiled)
    assert torch.equal(torch.isnan(output).any(-1), spoiled)


# ---- the cache -------------------------------------------------------------------------------------------------------


def test_bytes_are_a_quarter_and_a_scale() -> None:
    cache, plain = filled(1, 2, 16, 128), KVCache()
    with torch.no_grad():
        plain.append(*cache.dequantized())
    assert cache.key.dtype is torch.int8
    assert cache.key.untyped_storage().nbytes() * 4 * 128 == plain.key.untyped_storage().nbytes() * (128 + 4)
    assert cache.value.untyped_storage().nbytes() * 4 * 128 == plain.value.untyped_storage().nbytes() * (128 + 4)


def test_tokens_have_the_same_rows_however_they_are_appended() -> None:
    key, value = draw(2, 3, 70, 32, seed=1, grad=False), draw(2, 3, 70, 32, seed=2, grad=False)
    whole, parts = KVCache(dtype=torch.int8), KVCache(dtype=torch.int8)
    whole.append(key, value)
    for part in zip(key.split([40, 1, 1, 28], 2), value.split([40, 1, 1, 28], 2), strict=True):
        parts.append(*part)
    assert parts.length == 70
    assert torch.equal(whole.key, parts.key)
    assert torch.equal(whole.value, parts.value)


def test_truncate_reset_copy_and_repr() -> None:
    cache = filled(1, 2, 30, 8)
    other = copy.deepcopy(cache)
    cache.truncate(10)
    assert torch.equal(cache.key, other.key[:, :, :10])
    assert str(cache) == "KVCache(length=10, shape=[1, 2, 10, 8], dtype=torch.int8)"
    assert other.length == 30
    cache.reset()
    assert cache.key is None
    with pytest.raises(ch.ShapeError, match="must hold tokens"):
        cache.dequantized()


def test_a_call_that_fails_leaves_the_cache_as_it_was() -> None:
    attention, cache = ch.nn.MultiHeadAttention(16, 2).eval(), KVCache(dtype=torch.int8)
    with torch.no_grad():
        attention(torch.randn(1, 5, 16), mask=ch.Causal(), cache=cache)
        rows = cache.key.clone()
        with pytest.raises(ch.ClearheadError):
            attention(torch.randn(2, 1, 16), mask=ch.Causal(), cache=cache)
    assert cache.length == 5
    assert torch.equal(cache.key, rows)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_other_dtypes_and_gradients_are_refused() -> None:
    with pytest.raises(UNSUPPORTED, match=r"^KVCache: dtype must be torch\.int8 or None; got torch\.int4"):
        KVCache(dtype=torch.int4)
    key = torch.randn(1, 1, 2, 4, requires_grad=True)
    with pytest.raises(UNSUPPORTED, match=r"^KVCache\.append: key must be floating point without a gradient"):
        KVCache(dtype=torch.int8).append(key, key)
    with pytest.raises(UNSUPPORTED, match="key must be floating point"):
        KVCache(dtype=torch.int8).append(torch.ones(1, 1, 2, 4).int(), torch.ones(1, 1, 2, 4))
    cache = filled(1, 2, 20, 16)
    with pytest.raises(ch.ShapeError, match=r"match the cached tokens, \[1, 2, new, 16\]"):
        cache.append(torch.ones(1, 2, 1, 12), torch.ones(1, 2, 1, 12))
    with pytest.raises(UNSUPPORTED, match="native: has no gradient of a call with an int8 KV cache"):
        ch.attention(torch.ones(1, 2, 1, 16, requires_grad=True), cache.key, cache.value)


def test_backends_that_cannot_read_rows_say_so() -> None:
    query, cache = torch.ones(1, 2, 1, 16), filled(1, 2, 20, 16)
    with pytest.raises(UNSUPPORTED, match="sdpa: takes no int8 rows of a KV cache"):
        ch.attention(query, cache.key, cache.value, backend="sdpa")
    reasons = ch.explain_dispatch(query, cache.key, cache.value)
    assert reasons.choice == "native"
    # Nothing copies rows to floats unless it is named.
    with pytest.raises(UNSUPPORTED, match="native: has no float64"):
        ch.attention(query.double(), cache.key, cache.value)


@pytest.mark.parametrize("which", ["key", "value"])
def test_rows_and_floats_do_not_mix(which: str) -> None:
    query, cache = torch.ones(1, 2, 1, 16), filled(1, 2, 20, 16)
    given = {"key": cache.key, "value": cache.value, which: torch.ones(1, 2, 20, 16)}
    with pytest.raises(UNSUPPORTED, match=r"must (be floating point|have query's dtype)"):
        ch.attention(query, given["key"], given["value"])
    with pytest.raises(ch.ShapeError, match="key must have query's head_dim 12"):
        ch.attention(torch.ones(1, 2, 1, 12), cache.key, cache.value)


# ---- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [16, 64, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_have_the_bits_of_a_contiguous_cache(dtype: torch.dtype, block_size: int) -> None:
    pages = ch.PagedKVCache(1, 64, num_kv_heads=2, head_dim=32, block_size=block_size, dtype=torch.int8)
    sequences, lengths = [pages.add(), pages.add()], (150, 37)
    caches = [KVCache(dtype=torch.int8) for _ in lengths]
    for counts in (lengths, (1, 1), (3, 1)):
        total = sum(counts)
        query = draw(1, 4, total, 32, seed=total, dtype=dtype, grad=False)
        key, value = (draw(1, 2, total, 32, seed=total + each, dtype=dtype, grad=False) for each in (1, 2))
        with torch.no_grad(), pages.extend(dict(zip(sequences, counts, strict=True))) as step:
            output = step.attend(0, query, key, value)
        start = 0
        for cache, count in zip(caches, counts, strict=True):
            part = slice(start, start + count)
            keys, values = cache.append(key[:, :, part], value[:, :, part])
            alone = ch.attention(query[:, :, part], keys, values, mask=ch.Causal(), query_offset=cache.length - count)
            if block_size % 16 == 0:
                assert torch.equal(output[:, :, part], alone)
            floor = rounding(alone.double(), cache.length, 1.0, dtype=dtype)
            assert float((output[:, :, part].double() - alone.double()).abs().max()) <= 4 * floor
            start += count


def test_pages_that_are_gathered_mean_the_same() -> None:
    cache = filled(1, 2, 40, 8)
    pages = [
        torch.cat([rows[0], torch.zeros(2, 8, 12, dtype=torch.int8)], 1).view(2, 3, 16, 12).permute(1, 2, 0, 3)
        for rows in (cache.key, cache.value)
    ]
    table, lengths, query = torch.tensor([[0, 1, 2]]).int(), torch.tensor([40]).int(), draw(1, 4, 1, 8, grad=False)
    outputs = [
        ch.functional.paged_attention(query, *pages, table, lengths, backend=backend)
        for backend in ("native", "reference")
    ]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outputs[0], ch.attention(query, cache.key, cache.value), rtol=1e-6, atol=1e-6)
