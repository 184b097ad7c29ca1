"""Stacks of fused blocks: the bits that the blocks give one by one, and the same errors."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.masks import Causal
from clearhead.nn import Decoder, DecoderBlock, Encoder, LanguageModel
from clearhead.nn.linear import Linear
from clearhead.nn.reading import cached_reading
from clearhead.nn.stacks import DecoderCache
from tests.agreement import needs_native
from tests.budget import within_budget
from tests.nn.layers.definition import DTYPES, LLAMA, decoded, draw, formula

pytestmark = needs_native

LENGTH = 37
#: Shapes of stacks, and what they are built with.
STACKS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "norms first": (32, 4, 3, {}),
    "norms last": (32, 4, 4, {"norm_first": False}),
    "two blocks of grouped heads": (36, 6, 2, {"num_kv_heads": 2, "bias": False}),
    "rotary positions": (48, 4, 3, {"num_kv_heads": 2, "rotary": 100.0}),
    "as Llama's": (48, 4, 3, {**LLAMA, "feedforward_dim": 70}),
    "five blocks of one head": (20, 1, 5, {"feedforward_dim": 33, "activation": "relu"}),
}


def stack(kind: Any, name: str = "norms first", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    width, heads, layers, own = STACKS[name]
    torch.manual_seed(1)
    found = kind(width, heads, layers, **own, **options).to(dtype).eval()
    # Norms that start as ones and zeros would hide one another's.
    with torch.no_grad():
        for part in found.parameters():
            if part.dim() == 1:
                part.add_(torch.randn(part.shape) / 4)
    return found


def block_by_block(own: Any, x: Tensor, cache: DecoderCache | None = None, **given: Any) -> Tensor:
    """What the blocks give one by one, and the last norm."""
    for place, block in enumerate(own.blocks):
        if cache is not None:
            given["cache"] = cache.layers[place]
            if cache.memory:
                given["memory_cache"] = cache.memory[place]
        x = block(x, **given)
    output: Tensor = own.norm(x)
    return output


def joined(kinds: Sequence[str]) -> int:
    return sum(name == "stack" for name in kinds)


# ---- numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [(9, *[1] * 28), (1,) * 37, (3, 1, 5, 1, 1, 20, 2, 4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", STACKS)
def test_a_decoder_gives_its_blocks_bits(
    name: str, dtype: torch.dtype, calls: tuple[int, ...], kinds: list[str]
) -> None:
    own = stack(Decoder, name, dtype)
    x = draw(3, LENGTH, own.embed_dim, dtype=dtype)
    found = decoded(own, x, calls, cache=(cache := own.new_cache()))
    assert kinds == ["stack"] * len(calls)
    other = own.new_cache()
    right = decoded(lambda part: block_by_block(own, part, other), x, calls)
    assert torch.equal(found, right)
    for one, two in zip(cache.layers, other.layers, strict=True):
        assert one.length == LENGTH
        assert torch.equal(one.key, two.key)  # type: ignore[arg-type]
        assert torch.equal(one.value, two.value)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_decoder_gives_the_definition(dtype: torch.dtype, kinds: list[str]) -> None:
    own, x = stack(Decoder, dtype=dtype), draw(2, LENGTH, 32, dtype=dtype)
    found = decoded(own, x, (9, *[1] * 28), cache=own.new_cache())

    def textbook(own: Any, x: Tensor) -> Tensor:
        output: Tensor = own.norm(reduce(lambda y, block: formula(block, y), own.blocks, x))
        return output

    with torch.no_grad():
        exact = textbook(copy.deepcopy(own).double(), x.double())
        within_budget("output", found, textbook(own, x), exact, terms=2 * LENGTH, dtype=dtype)
    assert joined(kinds) == 29


@pytest.mark.parametrize("mask", [None, Causal()], ids=["none", "causal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", STACKS)
def test_an_encoder_gives_its_blocks_bits(
    name: str, dtype: torch.dtype, mask: ch.Mask | None, kinds: list[str]
) -> None:
    own = stack(Encoder, name, dtype)
    for length in (1, 7, 7, 7, 33):
        x = draw(2, length, own.embed_dim, seed=length, dtype=dtype)
        with torch.no_grad():
            assert torch.equal(own(x, mask=mask), block_by_block(own, x, mask=mask))
    assert joined(kinds) == 5


@pytest.mark.parametrize("cached", ["both", "tokens", "nothing"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", STACKS)
def test_a_decoder_with_a_memory(name: str, dtype: torch.dtype, cached: str, kinds: list[str]) -> None:
    own = stack(Decoder, name, dtype, memory_dim=7)
    x, memory = draw(2, LENGTH, own.embed_dim, dtype=dtype), draw(2, 11, 7, seed=5, dtype=dtype)
    calls = (LENGTH,) * 3 if cached == "nothing" else (9, *[1] * 28)

    def caches() -> DecoderCache | None:
        found: DecoderCache = own.new_cache()
        return {"both": found, "tokens": DecoderCache(found.layers), "nothing": None}[cached]

    once, twice = caches(), caches()
    x = x.repeat(1, 3, 1) if cached == "nothing" else x
    found = decoded(own, x, calls, memory=memory, cache=once)
    # The first call fills the memory's caches, block by block.
    assert joined(kinds) == len(calls) - (cached == "both")
    assert torch.equal(found, decoded(lambda part: block_by_block(own, part, twice, memory=memory), x, calls))


def test_dropout_without_gradients_is_what_the_blocks_draw(kinds: list[str]) -> None:
    own, x = stack(Encoder, dropout=0.3).train(), draw(2, 9, 32)
    with torch.no_grad():
        for seed in (1, 2, 3, 1):
            torch.manual_seed(seed)
            found = own(x)
            torch.manual_seed(seed)
            assert torch.equal(found, block_by_block(own, x))
            assert not torch.equal(found, own(x))
    assert joined(kinds) == 8


def test_blocks_of_several_sizes_in_one_stack(kinds: list[str]) -> None:
    own, x = stack(Decoder), draw(2, LENGTH, 32)
    own.blocks.append(DecoderBlock(32, 2, feedforward_dim=40, dropout=0.0).eval())
    own.blocks.insert(1, DecoderBlock(32, 8, num_kv_heads=2, feedforward_dim=64, dropout=0.0).eval())
    other = own.new_cache()
    found = decoded(own, x, [1] * LENGTH, cache=own.new_cache())
    assert joined(kinds) == LENGTH
    assert torch.equal(found, decoded(lambda part: block_by_block(own, part, other), x, [1] * LENGTH))


def test_a_language_model_generates_what_it_does_without_a_cache(kinds: list[str]) -> None:
    torch.manual_seed(1)
    own = LanguageModel(50, 32, 4, 3, max_len=64)
    ids = torch.randint(50, (3, 5))
    found = own.generate(ids, 40, temperature=0.0)
    assert joined(kinds) == 40
    assert torch.equal(found, own.generate(ids, 40, temperature=0.0, cached=False))


# ---- whose blocks have changed since ------------------------------------------------------------------------


def replaced(own: Any) -> None:
    own.blocks[1].feedforward.expand = Linear(32, 128)


def reweighted(own: Any) -> None:
    own.blocks[2].attention.value_projection.weight = nn.Parameter(torch.randn(32, 32))


def written_into(own: Any) -> None:
    with torch.no_grad():
        own.blocks[2].attention.value_projection.weight.mul_(-1)


def swapped_data(own: Any) -> None:
    own.blocks[0].feedforward.contract.weight.data = torch.randn(32, 128)


def another_norm(own: Any) -> None:
    own.blocks[1].attention_norm.eps = 0.5


def another_scale(own: Any) -> None:
    own.blocks[0].attention.scale = 2.0


def another_block(own: Any) -> None:
    own.blocks[1] = copy.deepcopy(own.blocks[2])


def fewer_blocks(own: Any) -> None:
    del own.blocks[1]


def own_forward(own: Any) -> None:
    own.blocks[1].attention.forward = lambda x, **given: -x


def own_forward_of_a_block(own: Any) -> None:
    own.blocks[1].forward = lambda x, **given: -x


def a_rule(own: Any) -> None:
    own.blocks[1].attention.scores.append(ch.nn.MultiHeadAttention(32, 4, scores=ch.Alibi(4)).scores[0])


class Other(Linear):
    """A layer with a way of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return -super().forward(input)


def another_class(own: Any) -> None:
    own.blocks[1].feedforward.contract.__class__ = Other


CHANGES = (
    replaced, reweighted, written_into, swapped_data, another_norm, another_scale, another_block, fewer_blocks,
    own_forward, own_forward_of_a_block, a_rule, another_class,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_takes_effect_at_the_next_call(change: Callable[[Any], None]) -> None:
    own, x = stack(Encoder), draw(2, 9, 32)
    with torch.no_grad():
        before = own(x)
        change(own)
        for _ in range(2):
            after = own(x)
            assert not torch.equal(after, before)
            torch.testing.assert_close(after, block_by_block(own, x), rtol=0, atol=0)


def test_reading_is_cached_until_a_part_is_replaced() -> None:
    own, readings = stack(Encoder), list[object]()

    def read() -> object:
        readings.append(object())
        return readings[-1]

    own.eval()
    for _ in range(2):
        assert cached_reading(own, None, read) is readings[0]
    with torch.no_grad():
        own.blocks[0].attention.query_projection.weight.zero_()
    assert cached_reading(own, None, read) is readings[0]
    own.train()
    assert cached_reading(own, None, read) is readings[1]
    own.blocks[0].attention.query_projection.weight = nn.Parameter(torch.zeros(32, 32))
    assert cached_reading(own, None, read) is readings[2]
    handle = own.blocks[0].feedforward.register_forward_hook(lambda *_: None)
    assert cached_reading(own, None, read) is None
    handle.remove()
    assert cached_reading(own, None, read) is readings[-1]


def test_a_stack_and_its_weights_end_with_their_owner() -> None:
    own, x = stack(Decoder), draw(2, 9, 32)
    decoded(own, x, [1] * 9, cache=own.new_cache())
    gone = [weakref.ref(own), weakref.ref(own.blocks[0]), weakref.ref(own.blocks[0].feedforward.expand.weight)]
    del own
    gc.collect()
    assert [each() for each in gone] == [None] * 3


def test_a_copy_has_its_own_weights() -> None:
    own, x = stack(Encoder), draw(2, 9, 32)
    with torch.no_grad():
        before = own(x)
        other = copy.deepcopy(own)
        other.blocks[1].feedforward.expand.weight.zero_()
        assert torch.equal(own(x), before)
        assert torch.equal(other(x), block_by_block(other, x))
        assert not torch.equal(other(x), before)


# ---- observed, and op by op ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_observation_gives_the_same_bits(dtype: torch.dtype, kinds: list[str]) -> None:
    own, x = stack(Decoder, dtype=dtype), draw(2, 12, 32, dtype=dtype)
    alone = decoded(own, x, [1] * 12, cache=own.new_cache())
    assert joined(kinds) == 12
    cache = own.new_cache()
    with ch.observe(own, ch.Want(entropy=True)) as seen:
        watched = decoded(own, x, [1] * 12, cache=cache)
    assert len(list(seen)) == 3
    assert joined(kinds) == 12
    assert torch.equal(alone, watched)


@pytest.mark.parametrize("name", ["", ".attention", ".attention.key_projection", ".attention_norm", ".feedforward"])
def test_hooks_fire_once_for_each_call(name: str) -> None:
    own, x, seen = stack(Decoder), draw(2, 12, 32), []
    right = decoded(own, x, [1] * 12, cache=own.new_cache())
    handle = own.get_submodule(f"blocks.1{name}").register_forward_hook(lambda *given: seen.append(1))
    found = decoded(own, x, [1] * 12, cache=own.new_cache())
    handle.remove()
    assert len(seen) == 12
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    assert torch.equal(decoded(own, x, [1] * 12, cache=own.new_cache()), right)
    assert len(seen) == 12


def test_score_functions_that_the_kernels_lack_run_block_by_block(kinds: list[str]) -> None:
    scores = ch.ScoreFunction(lambda score, batch, head, q_pos, k_pos: score.sin() - 0.1 * (q_pos - k_pos).abs())
    own, x = stack(Decoder, scores=scores), draw(2, LENGTH, 32)
    with torch.no_grad():
        whole = own(x)
    torch.testing.assert_close(decoded(own, x, [9, *[1] * 28], cache=own.new_cache()), whole, rtol=1e-5, atol=1e-5)
    assert joined(kinds) == 0


def test_a_padded_batch_and_a_large_one_go_block_by_block(kinds: list[str]) -> None:
    own, x = stack(Encoder), draw(2, 9, 32)
    with torch.no_grad():
        padded = own(x, lengths=[9, 4])
        torch.testing.assert_close(padded[1, :4], own(x[1:, :4])[0], rtol=1e-5, atol=1e-5)
        assert joined(kinds) == 1
        own(draw(8, 1024, 32))
        assert joined(kinds) == 1


def test_with_gradients_blocks_learn_one_by_one(kinds: list[str]) -> None:
    own, x = stack(Encoder), draw(2, 9, 32)
    own(x).sum().backward()
    assert kinds == ["layer"] * 3
    assert all(part.grad is not None for part in own.parameters())


def test_a_step_with_caches_of_several_lengths_is_each_blocks_own(kinds: list[str]) -> None:
    own, x = stack(Decoder), draw(2, 9, 32)
    cache, other = own.new_cache(), own.new_cache()
    for each in (cache, other):
        decoded(own, x, [1] * 9, cache=each)
        each.layers[1].truncate(5)
    kinds.clear()
    with torch.no_grad():
        assert torch.equal(own(x[:, :1], cache=cache), block_by_block(own, x[:, :1], other))
    assert joined(kinds) == 0
    assert [each.length for each in cache.layers] == [10, 6, 10]


# ---- what fails ---------------------------------------------------------------------------------------------


def test_wrong_arguments_raise_after_good_calls() -> None:
    own, x, cache = stack(Decoder, memory_dim=7), draw(2, LENGTH, 32), None
    cache, memory = own.new_cache(), draw(2, 11, 7, seed=5)
    decoded(own, x[:, :9], [5, 1, 1, 1, 1], cache=cache, memory=memory)
    for given, other, error in (
        (x[:1, 9:10], memory, "batch"),
        (x[:, 9:10].double(), memory, "dtype"),
        (x[:, 9:10, :9], memory, "x must .*32"),
        (x[:, 9:10], memory[..., :5], "memory must .*7"),
        (x[:, 9:10], memory[:, :9], "memory that filled the cache"),
        (x[:, 9:10], None, "memory must be given"),
    ):
        with pytest.raises((ch.ShapeError, ch.UnsupportedError), match=error):
            decoded(own, given, [1], cache=cache, memory=other)
        assert cache.length == 9
    found = decoded(own, x[:, 9:10], [1], cache=cache, memory=memory)
    right = decoded(own, x[:, :10], [10], memory=memory)[:, 9:]
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    own, x, found = stack(Decoder), draw(2, LENGTH, 32), []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(decoded(own, x, [9, *[1] * 28], cache=own.new_cache()))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
