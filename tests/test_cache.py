"""KVCache: appended tokens come back in order, in buffers whose capacity doubles."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.cache import KVCache, dropped_by, forget_first, in_one_thread, restored_on_error
from clearhead.errors import UnsupportedError
from clearhead.nn import LanguageModel, MultiHeadAttention
from tests.threads import on_threads


def _pair(new: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, new, 4, generator=generator), torch.randn(2, 3, new, 5, generator=generator)


@pytest.mark.parametrize("grad", [False, True])
def test_appended_tokens_come_back_in_order(grad: bool) -> None:
    cache = KVCache()
    parts = [_pair(new, seed) for seed, new in enumerate((3, 1, 1, 40, 0, 7))]
    with torch.set_grad_enabled(grad):
        for place in range(len(parts)):
            keys, values = cache.append(*parts[place])
            assert torch.equal(keys, torch.cat([key for key, _ in parts[: place + 1]], dim=2))
            assert torch.equal(values, torch.cat([value for _, value in parts[: place + 1]], dim=2))
            assert cache.length == keys.shape[2]
    assert torch.equal(cache.key, keys)
    assert torch.equal(cache.value, values)


def test_capacity_grows_by_doubling() -> None:
    cache = KVCache()
    places = set()
    with torch.no_grad():
        for seed in range(500):
            keys, _ = cache.append(*_pair(1, seed))
            places.add(keys.data_ptr())
    assert len(places) <= 7  # 16, 32, ..., 512


def test_earlier_results_are_unmodified() -> None:
    cache = KVCache()
    with torch.no_grad():
        keys, _ = cache.append(*_pair(2))
        before = keys.clone()
        cache.append(*_pair(3, seed=1))
    assert torch.equal(keys, before)


def test_gradients_pass_and_modes_may_change() -> None:
    cache = KVCache()
    with torch.no_grad():
        cache.append(*_pair(2))
    key, value = (part.requires_grad_() for part in _pair(3, seed=1))
    keys, values = cache.append(key, value)
    (keys.sum() + values.square().sum()).backward()
    assert torch.equal(key.grad, torch.ones_like(key))
    assert torch.equal(value.grad, 2 * value.detach())
    with torch.no_grad():
        later, _ = cache.append(*_pair(1, seed=2))
    assert not later.requires_grad
    assert torch.equal(later[:, :, :5], keys)


def test_a_first_token_with_a_gradient_is_not_written_over() -> None:
    """The cache writes only into buffers that it allocated."""
    cache = KVCache()
    key, value = _pair(20)
    copy = key.clone()
    cache.append(key, value)
    with torch.no_grad():
        cache.append(*_pair(1, seed=1))
    assert torch.equal(key, copy)


def test_cache_filled_in_inference_mode_is_usable_outside() -> None:
    cache = KVCache()
    first, second, third = _pair(2), _pair(1, seed=1), _pair(1, seed=2)
    with torch.inference_mode():
        cache.append(*first)
    with torch.no_grad():
        cache.append(*second)
    with torch.inference_mode():
        keys, _ = cache.append(*third)
    assert torch.equal(keys, torch.cat([first[0], second[0], third[0]], dim=2))


@pytest.mark.parametrize("grad", [True, False])
def test_failed_block_restores_caches(grad: bool) -> None:
    filled, empty = KVCache(), KVCache()
    with torch.set_grad_enabled(grad):
        filled.append(*_pair(2))
        before = filled.key.clone()

        def work() -> None:
            filled.append(*_pair(30, seed=1))
            empty.append(*_pair(1, seed=1))
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), restored_on_error(filled, None, empty):
            work()
        assert (filled.length, empty.length, empty.key) == (2, 0, None)
        assert torch.equal(filled.key, before)
        keys, _ = filled.append(*_pair(1, seed=2))
        assert torch.equal(keys, torch.cat([before, _pair(1, seed=2)[0]], dim=2))


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("length", [1, 16])
def test_truncated_tokens_have_no_effect(recorded: bool, length: int) -> None:
    first, second, third = _pair(length + 3), _pair(2, seed=2), _pair(4, seed=3)
    cache = KVCache()
    with torch.set_grad_enabled(recorded):
        cache.append(*first)
        cache.append(*second)
    cache.truncate(length)
    assert cache.length == length
    given = [tensor.clone() for tensor in (*first, *second)]
    with torch.no_grad():
        cached = cache.append(*third)
    for place in (0, 1):
        assert torch.equal(cached[place], torch.cat([first[place][:, :, :length], third[place]], dim=2))
    assert all(torch.equal(tensor, was) for tensor, was in zip((*first, *second), given, strict=True))
    cache.truncate(0)
    assert (cache.append(*second)[0].shape, cache.length) == (second[0].shape, 2)


def test_truncation_does_not_write_to_a_callers_tensor() -> None:
    cache, pair = KVCache(), _pair(3)
    copy = pair[0].clone()
    cache.append(*pair)
    cache.truncate(1)
    with torch.no_grad():
        cache.append(*_pair(1, seed=2))
    assert torch.equal(pair[0], copy)


@pytest.mark.parametrize(
    ("length", "must"),
    [(3, "be at most 2"), *((given, "be a whole number of at least 0") for given in (-1, 1.0, True, None))],
)
def test_truncate_rejects_lengths_beyond_the_cache(length: object, must: str) -> None:
    cache = KVCache()
    cache.append(*_pair(2))
    with pytest.raises(ch.ShapeError, match=rf"^KVCache\.truncate: length must {must}; got "):
        cache.truncate(length)  # type: ignore[arg-type]
    assert cache.length == 2


def test_reset_and_repr() -> None:
    cache = KVCache()
    assert repr(cache) == "KVCache(length=0, shape=None)"
    assert cache.key is None
    cache.append(*_pair(2))
    assert repr(cache) == "KVCache(length=2, shape=[2, 3, 2, 4])"
    cache.reset()
    assert cache.length == 0
    cache.append(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        (torch.zeros(2, 3, 4), torch.zeros(2, 3, 1, 5), r"key must have axes \[batch, kv_heads, new, head_dim\]"),
        (
            torch.zeros(2, 3, 1, 4),
            torch.zeros(2, 3, 2, 5),
            r"value must have key's batch, heads and length \(2, 3, 1\)",
        ),
        ([1.0], torch.zeros(2, 3, 1, 5), r"key must have axes .*; got list\."),
        (torch.zeros(2, 3, 1, 4), None, r"value must have axes .*; got NoneType\."),
        (torch.zeros(1, 3, 1, 4), torch.zeros(1, 3, 1, 5), r"key must match the cached tokens, \[2, 3, new, 4\]"),
        (torch.zeros(2, 3, 1, 4), torch.zeros(2, 3, 1, 6), r"value must match the cached tokens, \[2, 3, new, 5\]"),
        (torch.zeros(2, 3, 1, 4).double(), torch.zeros(2, 3, 1, 5), r"key must match the cached tokens.*float64"),
    ],
)
def test_misfit_is_refused_and_does_not_change_the_cache(key: Tensor, value: Tensor, text: str) -> None:
    cache = KVCache()
    cache.append(*_pair(2))
    with pytest.raises(ch.ShapeError, match=r"^KVCache\.append: " + text):
        cache.append(key, value)
    assert cache.length == 2


def test_a_cache_in_two_threads_says_so_and_stays_whole() -> None:
    module, cache, x = MultiHeadAttention(8, 2).eval(), KVCache(), torch.randn(1, 1, 8)
    entered, leave, errors = threading.Event(), threading.Event(), []

    def hold() -> None:
        with in_one_thread(cache):
            entered.set()
            leave.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    entered.wait(10)
    calls = (lambda: module(x, cache=cache), lambda: cache.append(x[:, None], x[:, None]))
    for call in calls:
        with torch.no_grad(), pytest.raises(UnsupportedError, match="must be used by one thread at a time") as raised:
            call()
        errors.append(str(raised.value))
    leave.set()
    holder.join()
    assert all("\n" not in error for error in errors)
    with torch.no_grad():
        module(x, cache=cache)
    assert cache.length == 1


def test_a_language_model_reads_its_position_in_the_thread_that_appends() -> None:
    model = LanguageModel(20, 8, 2, 2, max_len=500).eval()
    cache, refused = model.new_cache(), []

    def decode(_: int) -> None:
        try:
            with torch.no_grad():
                for _ in range(60):
                    model(torch.zeros(1, 1, dtype=torch.int64), cache=cache)
        except UnsupportedError as error:
            refused.append(str(error))

    on_threads(3, decode)
    assert len({layer.length for layer in cache.layers}) == 1
    assert cache.length >= 60
    assert all("one thread at a time" in error for error in refused)


def test_a_cache_counts_what_it_dropped_until_it_is_reset() -> None:
    cache = KVCache()
    with torch.no_grad():
        cache.append(torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4))
    forget_first(cache, 3)
    forget_first(cache, 2)
    assert (cache.length, dropped_by(cache)) == (4, 5)
    cache.reset()
    assert dropped_by(cache) == 0
