"""Fused layers and attentions that read a KV cache match the formula token by token."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.cache import buffers_of
from clearhead.nn import Decoder, DecoderBlock, MultiHeadAttention
from clearhead.testing import forbid_fused
from tests.agreement import needs_native
from tests.budget import within_budget
from tests.nn.layers.definition import DTYPES, attended, block, caches_alternate, decoded, draw, formula
from tests.nn.layers.with_memory import decoder
from tests.nn.layers.with_memory import formula as with_memory

pytestmark = [needs_native, pytest.mark.covering(1)]

NORMS = pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
#: Tokens of each call: a prompt and single tokens, past the first capacity of 16 and the second of 32.
CALLS = {"a prompt": (9, *[1] * 28), "single tokens": (1,) * 37, "several at a time": (3, 1, 5, 1, 1, 20, 2, 4)}
LENGTH = 37


def sequence(dtype: torch.dtype = torch.float32, batch: int = 2, width: int = 32) -> Tensor:
    return draw(batch, LENGTH, width, dtype=dtype)


def assert_matches_formula(module: Any, actual: Tensor, x: Tensor, *memory: Tensor) -> None:
    """Assert that the output has at most twice the error of the formula in the same dtype."""
    call = with_memory if memory else formula
    with torch.no_grad():
        textbook = call(module, x, *memory)
        exact = call(copy.deepcopy(module).double(), x.double(), *[part.double() for part in memory])
    within_budget("output", actual, textbook, exact, terms=x.shape[0] * x.shape[1], dtype=x.dtype)


# ---- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@NORMS
def test_a_block_with_a_cache_matches_the_formula(
    norm_first: bool, dtype: torch.dtype, calls: tuple[int, ...], kinds: list[str]
) -> None:
    module, x, cache = block(DecoderBlock, dtype, norm_first=norm_first), sequence(dtype), ch.KVCache()
    assert_matches_formula(module, decoded(module, x, calls, cache=cache), x)
    assert cache.length == LENGTH
    assert kinds == ["layer"] * len(calls)


@pytest.mark.parametrize(
    ("width", "heads", "options"),
    [
        (20, 2, {}),
        (36, 3, {"num_kv_heads": 1}),
        (64, 4, {"num_kv_heads": 2, "bias": False}),
        (96, 1, {}),
        (32, 8, {"feedforward_dim": 33, "activation": "relu"}),
        (96, 4, {"rotary": True}),
        (60, 3, {"rotary": 50.0, "num_kv_heads": 1}),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [1, 3, 17])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_size_matches_the_formula(
    dtype: torch.dtype, batch: int, width: int, heads: int, options: Any, kinds: list[str]
) -> None:
    module, x = block(DecoderBlock, dtype, width, heads, **options), sequence(dtype, batch, width)
    assert_matches_formula(module, decoded(module, x, (5, *[1] * 32), cache=ch.KVCache()), x)
    assert set(kinds) == {"layer"}


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@NORMS
def test_a_block_with_a_cached_memory_matches_the_formula(
    norm_first: bool, dtype: torch.dtype, calls: tuple[int, ...], kinds: list[str]
) -> None:
    module, x, memory = decoder(dtype, norm_first=norm_first), sequence(dtype), draw(2, 11, 32, seed=5, dtype=dtype)
    options = {"memory": memory, "cache": ch.KVCache(), "memory_cache": ch.KVCache()}
    assert_matches_formula(module, decoded(module, x, calls, **options), x, memory)
    # The first call fills the memory's cache, op by op.
    assert kinds.count("layer") == len(calls) - 1


def test_a_padded_memory_matches_each_sequence_alone(kinds: list[str]) -> None:
    module, x, memory = decoder(), sequence(), draw(2, 11, 32, seed=5)
    memory[1, 4:] = torch.nan
    mask = ch.Padding([11, 4])
    options = {"memory": memory, "memory_mask": mask, "cache": ch.KVCache(), "memory_cache": ch.KVCache()}
    output = decoded(module, x, [1] * LENGTH, **options)
    with torch.no_grad():
        for place, length in enumerate([11, 4]):
            right = with_memory(module, x[place : place + 1], memory[place : place + 1, :length])
            torch.testing.assert_close(output[place : place + 1], right, rtol=1e-5, atol=1e-5)
    assert kinds.count("layer") == LENGTH - 1


def test_token_and_memory_caches_work_independently(kinds: list[str]) -> None:
    module, x, memory = decoder(memory_dim=7), sequence(), draw(2, 11, 7, seed=5)
    both = decoded(module, x, [9, 28], memory=memory, cache=ch.KVCache(), memory_cache=ch.KVCache())
    torch.testing.assert_close(
        decoded(module, x, [9, 28], memory=memory, cache=ch.KVCache()), both, rtol=1e-5, atol=1e-5
    )
    with torch.no_grad():
        memories = ch.KVCache()
        whole = [module(x, memory=memory, memory_cache=memories) for _ in range(3)]
    for output in whole:
        torch.testing.assert_close(output, both, rtol=1e-5, atol=1e-5)
    assert kinds.count("layer") == 1 + 2 + 2


@pytest.mark.parametrize("mask", [None, ch.Causal()], ids=["none", "causal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_attention_with_a_cache_matches_the_formula(
    dtype: torch.dtype, mask: ch.Mask | None, kinds: list[str]
) -> None:
    torch.manual_seed(1)
    module, x = MultiHeadAttention(32, 4, num_kv_heads=2).to(dtype), sequence(dtype)
    for _ in range(3):
        cache = ch.KVCache()
        output = decoded(module, x, [1] * LENGTH, cache=cache, mask=mask)
        with torch.no_grad():
            textbook = attended(module, x, x, ch.Causal())
            exact = attended(copy.deepcopy(module).double(), x.double(), x.double(), ch.Causal())
        within_budget("output", output, textbook, exact, terms=2 * LENGTH, dtype=dtype)
    assert kinds == ["attention"] * 3 * LENGTH


def test_new_tokens_without_a_mask_attend_to_each_other() -> None:
    torch.manual_seed(1)
    module, x = MultiHeadAttention(32, 4), sequence()
    with torch.no_grad():
        for _ in range(3):
            cache = ch.KVCache()
            module(x[:, :30], cache=cache)
            right = attended(module, x, x, None)[:, 30:]
            torch.testing.assert_close(module(x[:, 30:], cache=cache), right, rtol=1e-5, atol=1e-5)


def test_an_attention_to_a_cached_memory_matches_the_formula(kinds: list[str]) -> None:
    torch.manual_seed(1)
    module, x, memory, cache = MultiHeadAttention(32, 4), sequence(), draw(2, 11, 32, seed=5), ch.KVCache()
    output = decoded(module, x, [1] * LENGTH, key=memory, cache=cache)
    torch.testing.assert_close(output, attended(module, x, memory, None), rtol=1e-5, atol=1e-5)
    assert kinds == ["attention"] * (LENGTH - 1)


# ---- caches -------------------------------------------------------------------------------------------------


def test_caches_of_different_lengths_alternate() -> None:
    caches_alternate(block(DecoderBlock), sequence(), (1, 3, 15, 16, 17, 31, 33))


def test_truncated_tokens_leave_no_trace() -> None:
    module, x, cache = block(DecoderBlock), sequence(), ch.KVCache()
    right = decoded(module, x, [1] * LENGTH, cache=ch.KVCache())
    outputs = []
    with torch.no_grad():
        for place in range(LENGTH):
            for draft in (draw(2, 1, 32, seed=9), draw(2, 3, 32, seed=8)):
                module(draft, cache=cache)
                cache.truncate(place)
            outputs.append(module(x[:, place : place + 1], cache=cache))
    assert torch.equal(torch.cat(outputs, 1), right)


def test_unused_cache_capacity_is_not_read() -> None:
    module, x, cache = block(DecoderBlock), sequence(), ch.KVCache()
    right = decoded(module, x, [1] * LENGTH, cache=ch.KVCache())
    with torch.no_grad():
        for place in range(LENGTH):
            for buffer in buffers_of(cache) or ():
                buffer[:, :, place:] = torch.nan
            token = module(x[:, place : place + 1], cache=cache)
            assert torch.equal(token, right[:, place : place + 1])


def test_overwriting_saved_keys_raises_in_backward() -> None:
    module, x, cache = block(DecoderBlock), sequence(), ch.KVCache()
    decoded(module, x[:, :5], [5], cache=cache)
    factor = torch.ones(1, requires_grad=True)
    keys = cache.key
    assert keys is not None
    total = (keys * factor).sum()
    cache.truncate(3)
    decoded(module, x[:, :1], [1], cache=cache)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_gradient_modes_alternate(first: Any, kinds: list[str]) -> None:
    module, x, cache = block(DecoderBlock), sequence(), ch.KVCache()
    with torch.no_grad():
        whole = module(x)
    outputs = []
    for place in range(LENGTH):
        mode = (first, torch.inference_mode, torch.no_grad, torch.enable_grad)[place % 4]
        with mode():
            token = module(x[:, place : place + 1], cache=cache)
            assert token.requires_grad == (mode is torch.enable_grad)
            outputs.append(token.detach().clone())
        if place % 4 == 3:
            # Keys that were appended with gradients require gradients.
            for part in buffers_of(cache) or ():
                part.detach_()
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-5, atol=1e-5)
    assert kinds.count("layer") == 1 + 3 * LENGTH // 4 + 1


def test_wrong_arguments_raise_after_good_calls() -> None:
    module, x, cache = block(DecoderBlock), sequence(), ch.KVCache()
    decoded(module, x[:, :9], [5, 1, 1, 1, 1], cache=cache)
    with torch.no_grad():
        unlike = "KVCache.append: key must match"
        for bad, error in (
            (x[:1, 9:10], unlike),
            (x[:, 9:10].double(), "dtype"),
            (x[0, 9:10], unlike),
            (x[:, 9:10, :9], "x must .*32"),
        ):
            with pytest.raises((ch.ShapeError, ch.UnsupportedError), match=error):
                module(bad, cache=cache)
            assert cache.length == 9
        right = module(x[:, :10])[:, 9:]
        torch.testing.assert_close(module(x[:, 9:10], cache=cache), right, rtol=1e-5, atol=1e-5)
        other = decoder()
        options = {"cache": ch.KVCache(), "memory_cache": ch.KVCache()}
        for memory, good in ((draw(2, 11, 32, seed=5), True), (draw(2, 10, 32, seed=5), False)):
            if good:
                other(x[:, :3], memory=memory, **options)
            else:
                with pytest.raises(ch.ShapeError, match="memory that filled the cache"):
                    other(x[:, 3:4], memory=memory, **options)
                assert options["cache"].length == 3


# ---- observed, and op by op ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@NORMS
def test_observation_gives_the_same_bits(norm_first: bool, dtype: torch.dtype) -> None:
    x, memory = sequence(dtype), draw(2, 11, 32, seed=5, dtype=dtype)
    for module, given in (
        (block(DecoderBlock, dtype, norm_first=norm_first), {}),
        (decoder(dtype, norm_first=norm_first), {"memory": memory}),
    ):
        caches = [{"cache": ch.KVCache()} | ({"memory_cache": ch.KVCache()} if given else {}) for _ in range(2)]
        for place in range(LENGTH):
            token = x[:, place : place + 1]
            unobserved = decoded(module, token, [1], **given, **caches[0])
            with ch.observe(module, ch.Want(entropy=True)) as observations:
                observed = decoded(module, token, [1], **given, **caches[1])
            assert len(list(observations)) == 1 + len(given)
            assert torch.equal(unobserved, observed)


@pytest.mark.parametrize("name", ["attention", "attention.key_projection", "attention_norm", "feedforward"])
def test_hooks_fire_once_for_each_call(name: str) -> None:
    module, x, fired = block(DecoderBlock), sequence(), []
    right = decoded(module, x, [1] * LENGTH, cache=ch.KVCache())
    handle = module.get_submodule(name).register_forward_hook(lambda *given: fired.append(1))
    output = decoded(module, x, [1] * LENGTH, cache=ch.KVCache())
    handle.remove()
    assert len(fired) == LENGTH
    torch.testing.assert_close(output, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "fuses"),
    [
        (lambda score, batch, head, q_pos, k_pos: score - 0.1 * (q_pos - k_pos).abs(), True),
        (lambda score, batch, head, q_pos, k_pos: score.sin() - 0.1 * (q_pos - k_pos).abs(), False),
    ],
    ids=["rules that the kernels read", "another function"],
)
def test_score_functions_that_reduce_to_rules_are_fused(
    function: Callable[..., Tensor], fuses: bool, kinds: list[str]
) -> None:
    module, x = block(DecoderBlock, scores=ch.ScoreFunction(function)), sequence()
    with torch.no_grad(), forbid_fused():
        whole = module(x)
    output = decoded(module, x, [9, *[1] * 28], cache=ch.KVCache())
    torch.testing.assert_close(output, whole, rtol=1e-5, atol=1e-5)
    assert kinds.count("layer") == (29 if fuses else 0)


BANDS = pytest.mark.parametrize(
    "band", [ch.Window(4), ch.Window(0), ch.Causal() & ch.Window(9, after=3), ch.Window(50)], ids=repr
)


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
@BANDS
def test_a_band_is_fused(band: ch.Mask, calls: tuple[int, ...], kinds: list[str]) -> None:
    module, x = block(DecoderBlock), sequence()
    with torch.no_grad():
        right = formula(module, x, band)
    for _ in range(2):
        output = decoded(module, x, calls, cache=ch.KVCache(), mask=copy.deepcopy(band))
        torch.testing.assert_close(output, right, rtol=1e-5, atol=1e-5)
    assert kinds == ["layer"] * 2 * len(calls)


@BANDS
def test_a_stack_under_a_band_matches_the_formula(band: ch.Mask, kinds: list[str]) -> None:
    torch.manual_seed(1)
    module, x = Decoder(32, 4, 3, dropout=0.0).eval(), sequence()
    with torch.no_grad():
        right = x
        for layer in module.blocks:
            right = formula(layer, right, band)
        right = module.norm(right)
        torch.testing.assert_close(module(x, mask=band), right, rtol=1e-5, atol=1e-5)
    output = decoded(module, x, (9, *[1] * 28), cache=module.new_cache(), mask=band)
    torch.testing.assert_close(output, right, rtol=1e-5, atol=1e-5)
    assert set(kinds) == {"stack"}


def test_changing_the_reach_of_a_band_takes_effect() -> None:
    module, x, band = block(DecoderBlock), sequence(), ch.Window(6)
    caches = [ch.KVCache() for _ in range(4)]
    with torch.no_grad():
        rights = [formula(module, x, ch.Window(reach)) for reach in (1, 2, 3, 6)]
        for place in range(20):
            token = x[:, place : place + 1]
            for reach, cache, right in zip((1, 2, 3, 6), caches, rights, strict=True):
                # One mask whose reach changes.
                band.before = reach
                output = module(token, cache=cache, mask=band)
                torch.testing.assert_close(output, right[:, place : place + 1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("calls", [CALLS["a prompt"], (9, 3, 1, 5, 1, 18)], ids=repr)
@pytest.mark.parametrize("rotary", [False, True], ids=["", "rotary"])
@pytest.mark.parametrize("mask", [~ch.Padding([0, 6]), ~ch.Padding([6, 2]) & ch.Window(20)], ids=repr)
def test_padding_is_fused(mask: ch.Mask, rotary: bool, calls: tuple[int, ...], kinds: list[str]) -> None:
    module, x = block(DecoderBlock, rotary=rotary), sequence()
    with torch.no_grad():
        right = formula(module, x, mask)
    # One mask for all lengths, and one for each.
    for given in (mask, None):
        cache, outputs = ch.KVCache(), []
        for part in x.split(list(calls), 1):
            now = copy.deepcopy(mask) if given is None else given
            outputs.append(decoded(module, part, [part.shape[1]], cache=cache, mask=now))
        torch.testing.assert_close(torch.cat(outputs, 1), right, rtol=1e-5, atol=1e-5)
    assert kinds == ["layer"] * 2 * len(calls)


def test_caches_of_different_lengths_share_a_padding_mask(kinds: list[str]) -> None:
    torch.manual_seed(1)
    module, x, mask = MultiHeadAttention(32, 4, num_kv_heads=2), sequence(), ch.Causal() & ~ch.Padding([0, 6])
    caches = [ch.KVCache() for _ in range(2)]
    with torch.no_grad():
        right = attended(module, x, x, mask)
        for prefix, cache in zip((7, 12), caches, strict=True):
            module(x[:, :prefix], cache=cache, mask=mask)
        for place in range(20):
            for prefix, cache in zip((7, 12), caches, strict=True):
                token = slice(place + prefix, place + prefix + 1)
                output = module(x[:, token], cache=cache, mask=mask)
                torch.testing.assert_close(output, right[:, token], rtol=1e-5, atol=1e-5)
    assert kinds == ["attention"] * 42


def test_tokens_under_any_mask_are_fused(kinds: list[str]) -> None:
    module, x, cache, mask = block(DecoderBlock), sequence(), ch.KVCache(), ch.Window(4) | ch.Prefix(2)
    with torch.no_grad():
        whole = module(x, mask=mask)
    kinds.clear()
    output = decoded(module, x, [9, *[1] * 28], cache=cache, mask=mask)
    torch.testing.assert_close(output, whole, rtol=1e-5, atol=1e-5)
    assert set(kinds) == {"layer"}


def test_autocast_and_another_backend_run_op_by_op(kinds: list[str]) -> None:
    module, x = block(DecoderBlock), sequence()
    with torch.autocast("cpu", torch.bfloat16):
        output = decoded(module, x, [9, *[1] * 28], cache=(cache := ch.KVCache()))
    assert cache.key is not None
    assert cache.key.dtype is torch.bfloat16
    torch.testing.assert_close(output, decoded(module, x, [LENGTH], cache=ch.KVCache()), rtol=0.1, atol=0.1)
    kinds.clear()
    module.attention.backend = "tiled"
    output = decoded(module, x, [9, *[1] * 28], cache=ch.KVCache())
    torch.testing.assert_close(output, formula(module, x), rtol=1e-5, atol=1e-5)
    assert "layer" not in kinds


class CountingCache(ch.KVCache):
    """Counts the appended tokens."""

    appended = 0

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.appended += key.shape[2]
        return super().append(key, value)


def test_an_overridden_cache_append_is_called(kinds: list[str]) -> None:
    module, x, cache = block(DecoderBlock), sequence(), CountingCache()
    decoded(module, x, [9, *[1] * 28], cache=cache)
    assert cache.appended == LENGTH
    assert "layer" not in kinds


@pytest.mark.usefixtures("_threads_as_before")
def test_any_number_of_threads_gives_the_same_bits() -> None:
    module, x, outputs = block(DecoderBlock, width=128), sequence(width=128), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        outputs.append(decoded(module, x, [9, *[1] * 28], cache=ch.KVCache()))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
