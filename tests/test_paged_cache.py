"""The paged KV cache: blocks are counted exactly, shared ones copied on write, and nothing is lost when it is full."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.paged_cache import PagedKVCache
from clearhead.testing import forbid_fused, fused_calls

LAYERS = 2


def cache_of(num_blocks: int = 12, block_size: int = 4, **sizes: Any) -> PagedKVCache:
    return PagedKVCache(LAYERS, num_blocks, num_kv_heads=1, head_dim=2, block_size=block_size, **sizes)


def extend(cache: PagedKVCache, counts: dict[int, int]) -> Tensor:
    """New tokens of every layer, ``[layers, 1, 1, total, 2]``."""
    new = torch.randn(LAYERS, 1, 1, sum(counts.values()), 2)
    with cache.extend(counts) as step:
        for layer in range(LAYERS):
            step.append(layer, new[layer], -new[layer])
    return new[:, 0, 0]


def held_by(cache: PagedKVCache, sequence: int) -> Tensor:
    """A sequence's keys in every layer, ``[layers, length, 2]``; its values are the negative."""
    table, lengths = cache.block_table([sequence])
    rows = []
    for layer in range(LAYERS):
        keys, values = (
            pages(layer)[table[0].long()].flatten(0, 1)[: int(lengths[0]), 0]
            for pages in (cache.key_pages, cache.value_pages)
        )
        assert torch.equal(keys, -values)
        rows.append(keys)
    return torch.stack(rows)


def state(cache: PagedKVCache) -> tuple[Any, ...]:
    return (
        cache.sequences,
        cache.free_blocks,
        cache.shared_blocks,
        [cache.length(each) for each in cache.sequences],
        [cache.block_table([each])[0].tolist() for each in cache.sequences],
    )


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_random_changes_keep_every_token_and_every_count(block_size: int) -> None:
    draw = random.Random(block_size)
    cache, expected = cache_of(num_blocks=24, block_size=block_size), dict[int, Tensor]()
    for _ in range(120):
        kind, sequences = draw.choice("aeefftr"), list(expected)
        if kind == "a" and len(sequences) < 9:
            expected[cache.add()] = torch.empty(LAYERS, 0, 2)
        elif not sequences:
            continue
        elif kind == "e":
            chosen = draw.sample(sequences, draw.randint(1, len(sequences)))
            counts = {each: draw.randint(0, 2 * block_size) for each in chosen}
            before = state(cache)
            try:
                new = extend(cache, counts).split(list(counts.values()), dim=1)
            except ch.CacheFullError:
                assert state(cache) == before
                continue
            for each, part in zip(counts, new, strict=True):
                expected[each] = torch.cat([expected[each], part], dim=1)
        elif kind == "f" and len(sequences) < 9:
            source = draw.choice(sequences)
            length = draw.randint(0, expected[source].shape[1])
            expected[cache.fork(source, length)] = expected[source][:, :length]
        elif kind == "t":
            each = draw.choice(sequences)
            length = draw.randint(0, expected[each].shape[1])
            cache.truncate(each, length)
            expected[each] = expected[each][:, :length]
        elif kind == "r":
            cache.remove(each := draw.choice(sequences))
            del expected[each]
        for each, tokens in expected.items():
            assert torch.equal(held_by(cache, each), tokens)
        blocks = [block for each in cache.sequences for block in cache.block_table([each])[0][0].tolist()]
        assert cache.used_blocks == len({*blocks}) == cache.num_blocks - cache.free_blocks
        assert cache.shared_blocks == sum(blocks.count(block) > 1 for block in {*blocks})
    cache.reset()
    assert (cache.used_blocks, cache.used_bytes, cache.sequences) == (0, 0, ())


def test_fork_shares_blocks_until_one_is_written() -> None:
    cache = cache_of()
    first = cache.add()
    tokens = extend(cache, {first: 6})
    second = cache.fork(first)
    assert (cache.used_blocks, cache.shared_blocks) == (2, 2)
    extend(cache, {second: 1})
    assert (cache.used_blocks, cache.shared_blocks) == (3, 1)
    assert torch.equal(held_by(cache, first), tokens)
    assert torch.equal(held_by(cache, second)[:, :6], tokens)


def test_bytes_are_those_of_the_blocks() -> None:
    cache = cache_of(num_blocks=10, block_size=4, dtype=torch.bfloat16)
    extend_by = cache.add()
    with cache.extend({extend_by: 5}):
        pass
    assert cache.nbytes == 2 * LAYERS * 10 * 4 * 2 * 2
    assert cache.used_bytes == cache.nbytes // 10 * 2


def test_a_full_cache_loses_nothing() -> None:
    cache = cache_of(num_blocks=3)
    first, second = cache.add(), cache.add()
    tokens = extend(cache, {first: 7, second: 2})
    before = state(cache)
    with pytest.raises(ch.CacheFullError, match="the 0 free blocks of 4 tokens; got 4 tokens that need 1 block"):
        cache.extend({first: 1, second: 3})
    assert state(cache) == before
    assert torch.equal(held_by(cache, first), tokens[:, :7])


def test_a_failing_step_restores_lengths_and_blocks() -> None:
    cache = cache_of()
    first = cache.add()
    tokens = extend(cache, {first: 6})
    second = cache.fork(first)
    before = state(cache)
    with pytest.raises(ZeroDivisionError), cache.extend({first: 5, second: 1}):  # noqa: PT012 - both at once
        assert cache.used_blocks > 2
        raise ZeroDivisionError
    assert state(cache) == before
    assert torch.equal(held_by(cache, second), tokens)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda cache: cache.length(9), "sequence must be one that add"),
        (lambda cache: cache.remove(True + 8), "sequence must be one that add"),
        (lambda cache: cache.fork(0, 5), "length must"),
        (lambda cache: cache.truncate(0, 5), "length must"),
        (lambda cache: cache.extend({0: -1}), "counts must"),
        (lambda cache: cache.select([0, 0]), "sequences must be distinct"),
        (lambda cache: PagedKVCache(0, 1, 1, 1), "num_layers must"),
    ],
)
def test_wrong_arguments_are_one_line(call: Any, text: str) -> None:
    cache = cache_of()
    extend(cache, {cache.add(): 2})
    with pytest.raises(ch.ShapeError, match=text):
        call(cache)


def test_tensors_that_do_not_fit_are_refused_before_a_write() -> None:
    cache = cache_of()
    first = cache.add()
    tokens = extend(cache, {first: 2})
    for key in (torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 1, 3), torch.zeros(1, 1, 1, 2).double()):
        with (
            pytest.raises(ch.ShapeError, match=r"key must have shape \(1, 1, 1, 2\)"),
            cache.extend({first: 1}) as step,
        ):
            step.append(0, key, key)
    assert torch.equal(held_by(cache, first), tokens)


MODELS: dict[str, dict[str, Any]] = {
    "learned": {},
    "llama": {
        "positions": "rotary", "norm": "rms", "activation": "silu", "gated": True, "bias": False, "num_kv_heads": 2,
    },
    "rules": {"positions": "rotary", "scores": [ch.SoftCap(20.0)]},
}  # fmt: skip


def model_of(name: str) -> ch.nn.LanguageModel:
    torch.manual_seed(0)
    return ch.nn.LanguageModel(97, 64, 4, 2, max_len=200, **MODELS[name]).eval()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fused", [True, False])
def test_a_model_over_pages_equals_one_over_whole_sequences(name: str, fused: bool) -> None:
    model, ids = model_of(name), torch.randint(0, 97, (3, 50))
    cache = model.new_paged_cache(num_blocks=40, block_size=16)
    first, second = cache.add(), cache.add()
    with torch.no_grad(), contextlib.nullcontext() if fused else forbid_fused(), fused_calls() as calls:
        both = cache.select([first, second])
        logits = model(ids[:2], lengths=[50, 7], cache=both)
        torch.testing.assert_close(logits, model(ids[:2], lengths=[50, 7]), rtol=1e-4, atol=1e-4)
        third = cache.fork(first, 21)
        logits = model(ids[:, :4], cache=cache.select([second, first, third]))
        for place, prefix in enumerate((ids[1, :7], ids[0], ids[0, :21])):
            whole = model(torch.cat([prefix, ids[place, :4]])[None])[0, -4:]
            torch.testing.assert_close(logits[place], whole, rtol=1e-4, atol=1e-4)
    # Score rules over pages run op by op.
    assert name == "rules" or ("stack" in calls) is fused


@pytest.mark.parametrize("num_blocks", [None, 8])
def test_generate_of_a_list_equals_generating_one_by_one(num_blocks: int | None) -> None:
    model = model_of("llama")
    prompts = [torch.randint(0, 97, (length,)) for length in (5, 1, 33, 70, 16)]
    expected = [model.generate(prompt[None], 12, temperature=0.0)[0] for prompt in prompts]
    cache = None if num_blocks is None else model.new_paged_cache(num_blocks, block_size=16)
    results = model.generate(prompts, 12, temperature=0.0, cache=cache)
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))
    assert cache is None or (cache.used_blocks, cache.sequences) == (0, ())
    stop = int(expected[0][8])
    results = model.generate(prompts, 12, temperature=0.0, stop=stop)
    assert len(results[0]) <= 9
    assert int(results[0][-1]) == stop


def test_a_model_refuses_pages_of_another_model_and_leaves_them() -> None:
    model, cache = model_of("learned"), cache_of()
    both = cache.select([cache.add()])
    with torch.no_grad(), pytest.raises(ch.ShapeError, match="cache must have 2 layers of 4 heads of 16"):
        model(torch.zeros(1, 3, dtype=torch.int64), cache=both)
    before = state(cache)
    with pytest.raises(ch.CacheFullError, match="must have 13 free blocks for prompt 0"):
        model.generate([torch.zeros(40, dtype=torch.int64)], 12, cache=cache)
    assert state(cache) == before
