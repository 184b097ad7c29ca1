"""KVCache: what goes in comes out, in order, with room that grows by doubling."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.cache import KVCache, restored_on_error


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


def test_room_is_allocated_seldom() -> None:
    cache = KVCache()
    places = set()
    with torch.no_grad():
        for seed in range(500):
            keys, _ = cache.append(*_pair(1, seed))
            places.add(keys.data_ptr())
    assert len(places) <= 7  # 16, 32, ..., 512


def test_earlier_answers_stay_as_they_were() -> None:
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
    """Room is only written into where the cache made it."""
    cache = KVCache()
    key, value = _pair(20)
    kept = key.clone()
    cache.append(key, value)
    with torch.no_grad():
        cache.append(*_pair(1, seed=1))
    assert torch.equal(key, kept)


def test_what_inference_mode_filled_is_used_outside_of_it() -> None:
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
def test_a_block_that_fails_leaves_caches_as_they_were(grad: bool) -> None:
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
@pytest.mark.parametrize("room", [1, 16])
def test_tokens_that_were_taken_back_were_never_there(recorded: bool, room: int) -> None:
    first, second, third = _pair(room + 3), _pair(2, seed=2), _pair(4, seed=3)
    cache = KVCache()
    with torch.set_grad_enabled(recorded):
        cache.append(*first)
        cache.append(*second)
    cache.truncate(room)
    assert cache.length == room
    given = [own.clone() for own in (*first, *second)]
    with torch.no_grad():
        found = cache.append(*third)
    for place in (0, 1):
        assert torch.equal(found[place], torch.cat([first[place][:, :, :room], third[place]], dim=2))
    assert all(torch.equal(own, was) for own, was in zip((*first, *second), given, strict=True))
    cache.truncate(0)
    assert (cache.append(*second)[0].shape, cache.length) == (second[0].shape, 2)


def test_what_a_caller_appended_is_not_written_to_when_it_is_taken_back() -> None:
    cache, pair = KVCache(), _pair(3)
    kept = pair[0].clone()
    cache.append(*pair)
    cache.truncate(1)
    with torch.no_grad():
        cache.append(*_pair(1, seed=2))
    assert torch.equal(pair[0], kept)


@pytest.mark.parametrize(
    ("length", "must"),
    [(3, "be at most 2"), *((given, "be a whole number of at least 0") for given in (-1, 1.0, True, None))],
)
def test_no_more_can_be_kept_than_is_held(length: object, must: str) -> None:
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
def test_what_does_not_fit_is_refused_and_leaves_the_cache_alone(key: Tensor, value: Tensor, text: str) -> None:
    cache = KVCache()
    cache.append(*_pair(2))
    with pytest.raises(ch.ShapeError, match=r"^KVCache\.append: " + text):
        cache.append(key, value)
    assert cache.length == 2
