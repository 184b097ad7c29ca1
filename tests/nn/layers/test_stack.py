"""Stacks of fused blocks give the bits and the errors of their blocks."""

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
from clearhead.nn.decoder_cache import DecoderCache
from clearhead.nn.linear import Linear
from clearhead.nn.reading import cached_reading
from tests.agreement import needs_native
from tests.budget import within_budget
from tests.nn.layers.definition import DTYPES, LLAMA, decoded, draw, formula

pytestmark = [needs_native, pytest.mark.covering(1)]

LENGTH = 37
#: Shapes of stacks, and what they are built with.
STACKS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "pre-norm": (32, 4, 3, {}),
    "post-norm": (32, 4, 4, {"norm_first": False}),
    "two blocks of grouped heads": (36, 6, 2, {"num_kv_heads": 2, "bias": False}),
    "rotary positions": (48, 4, 3, {"num_kv_heads": 2, "rotary": 100.0}),
    "Llama": (48, 4, 3, {**LLAMA, "feedforward_dim": 70}),
    "five blocks of one head": (20, 1, 5, {"feedforward_dim": 33, "activation": "relu"}),
}


def stack(kind: Any, name: str = "pre-norm", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    width, heads, layers, extra = STACKS[name]
    torch.manual_seed(1)
    module = kind(width, heads, layers, **extra, **options).to(dtype).eval()
    # Initial ones and zeros would hide that one norm's weights are used for another.
    with torch.no_grad():
        for part in module.parameters():
            if part.dim() == 1:
                part.add_(torch.randn(part.shape) / 4)
    return module


def block_by_block(module: Any, x: Tensor, cache: DecoderCache | None = None, **given: Any) -> Tensor:
    """Call the blocks in turn, then the last norm."""
    for place, block in enumerate(module.blocks):
        if cache is not None:
            given["cache"] = cache.layers[place]
            if cache.memory:
                given["memory_cache"] = cache.memory[place]
        x = block(x, **given)
    output: Tensor = module.norm(x)
    return output


def joined(kinds: Sequence[str]) -> int:
    return sum(name == "stack" for name in kinds)


# ---- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [(9, *[1] * 28), (1,) * 37, (3, 1, 5, 1, 1, 20, 2, 4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", STACKS)
def test_a_decoder_gives_the_bits_of_its_blocks(
    name: str, dtype: torch.dtype, calls: tuple[int, ...], kinds: list[str]
) -> None:
    module = stack(Decoder, name, dtype)
    x = draw(3, LENGTH, module.embed_dim, dtype=dtype)
    output = decoded(module, x, calls, cache=(cache := module.new_cache()))
    assert kinds == ["stack"] * len(calls)
    other = module.new_cache()
    right = decoded(lambda part: block_by_block(module, part, other), x, calls)
    assert torch.equal(output, right)
    for one, two in zip(cache.layers, other.layers, strict=True):
        assert one.length == LENGTH
        assert torch.equal(one.key, two.key)  # type: ignore[arg-type]
        assert torch.equal(one.value, two.value)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_decoder_matches_the_formula(dtype: torch.dtype, kinds: list[str]) -> None:
    module, x = stack(Decoder, dtype=dtype), draw(2, LENGTH, 32, dtype=dtype)
    decoder_output = decoded(module, x, (9, *[1] * 28), cache=module.new_cache())

    def textbook(module: Any, x: Tensor) -> Tensor:
        output: Tensor = module.norm(reduce(lambda y, block: formula(block, y), module.blocks, x))
        return output

    with torch.no_grad():
        exact = textbook(copy.deepcopy(module).double(), x.double())
        within_budget("output", decoder_output, textbook(module, x), exact, terms=2 * LENGTH, dtype=dtype)
    assert joined(kinds) == 29


@pytest.mark.parametrize("mask", [None, Causal()], ids=["none", "causal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", STACKS)
def test_an_encoder_gives_the_bits_of_its_blocks(
    name: str, dtype: torch.dtype, mask: ch.Mask | None, kinds: list[str]
) -> None:
    module = stack(Encoder, name, dtype)
    for length in (1, 7, 7, 7, 33):
        x = draw(2, length, module.embed_dim, seed=length, dtype=dtype)
        with torch.no_grad():
            assert torch.equal(module(x, mask=mask), block_by_block(module, x, mask=mask))
    assert joined(kinds) == 5


@pytest.mark.parametrize("cached", ["both", "tokens", "nothing"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", STACKS)
def test_a_decoder_with_a_memory_gives_the_bits_of_its_blocks(
    name: str, dtype: torch.dtype, cached: str, kinds: list[str]
) -> None:
    module = stack(Decoder, name, dtype, memory_dim=7)
    x, memory = draw(2, LENGTH, module.embed_dim, dtype=dtype), draw(2, 11, 7, seed=5, dtype=dtype)
    calls = (LENGTH,) * 3 if cached == "nothing" else (9, *[1] * 28)

    def caches() -> DecoderCache | None:
        cache: DecoderCache = module.new_cache()
        return {"both": cache, "tokens": DecoderCache(cache.layers), "nothing": None}[cached]

    cache, other = caches(), caches()
    x = x.repeat(1, 3, 1) if cached == "nothing" else x
    output = decoded(module, x, calls, memory=memory, cache=cache)
    # The first call fills the memory's caches, block by block.
    assert joined(kinds) == len(calls) - (cached == "both")
    assert torch.equal(output, decoded(lambda part: block_by_block(module, part, other, memory=memory), x, calls))


def test_dropout_without_gradients_matches_the_blocks(kinds: list[str]) -> None:
    module, x = stack(Encoder, dropout=0.3).train(), draw(2, 9, 32)
    with torch.no_grad():
        for seed in (1, 2, 3, 1):
            torch.manual_seed(seed)
            output = module(x)
            torch.manual_seed(seed)
            assert torch.equal(output, block_by_block(module, x))
            assert not torch.equal(output, module(x))
    assert joined(kinds) == 8


def test_a_stack_of_blocks_of_different_sizes_is_fused(kinds: list[str]) -> None:
    module, x = stack(Decoder), draw(2, LENGTH, 32)
    module.blocks.append(DecoderBlock(32, 2, feedforward_dim=40, dropout=0.0).eval())
    module.blocks.insert(1, DecoderBlock(32, 8, num_kv_heads=2, feedforward_dim=64, dropout=0.0).eval())
    other = module.new_cache()
    output = decoded(module, x, [1] * LENGTH, cache=module.new_cache())
    assert joined(kinds) == LENGTH
    assert torch.equal(output, decoded(lambda part: block_by_block(module, part, other), x, [1] * LENGTH))


def test_generation_matches_generation_without_a_cache(kinds: list[str]) -> None:
    torch.manual_seed(1)
    model = LanguageModel(50, 32, 4, 3, max_len=64)
    ids = torch.randint(50, (3, 5))
    generated = model.generate(ids, 40, temperature=0.0)
    assert joined(kinds) == 40
    assert torch.equal(generated, model.generate(ids, 40, temperature=0.0, cached=False))


# ---- changed blocks -------------------------------------------------------------------------------------------


def replaced(module: Any) -> None:
    module.blocks[1].feedforward.expand = Linear(32, 128)


def reweighted(module: Any) -> None:
    module.blocks[2].attention.value_projection.weight = nn.Parameter(torch.randn(32, 32))


def written_into(module: Any) -> None:
    with torch.no_grad():
        module.blocks[2].attention.value_projection.weight.mul_(-1)


def swapped_data(module: Any) -> None:
    module.blocks[0].feedforward.contract.weight.data = torch.randn(32, 128)


def another_norm(module: Any) -> None:
    module.blocks[1].attention_norm.eps = 0.5


def another_scale(module: Any) -> None:
    module.blocks[0].attention.scale = 2.0


def another_block(module: Any) -> None:
    module.blocks[1] = copy.deepcopy(module.blocks[2])


def fewer_blocks(module: Any) -> None:
    del module.blocks[1]


def replaced_forward(module: Any) -> None:
    module.blocks[1].attention.forward = lambda x, **given: -x


def replaced_forward_of_a_block(module: Any) -> None:
    module.blocks[1].forward = lambda x, **given: -x


def a_rule(module: Any) -> None:
    module.blocks[1].attention.scores.append(ch.nn.MultiHeadAttention(32, 4, scores=ch.Alibi(4)).scores[0])


class Other(Linear):
    """A layer with an overridden forward."""

    def forward(self, input: Tensor) -> Tensor:
        return -super().forward(input)


def another_class(module: Any) -> None:
    module.blocks[1].feedforward.contract.__class__ = Other


CHANGES = (
    replaced, reweighted, written_into, swapped_data, another_norm, another_scale, another_block, fewer_blocks,
    replaced_forward, replaced_forward_of_a_block, a_rule, another_class,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_takes_effect_at_the_next_call(change: Callable[[Any], None]) -> None:
    module, x = stack(Encoder), draw(2, 9, 32)
    with torch.no_grad():
        before = module(x)
        change(module)
        for _ in range(2):
            after = module(x)
            assert not torch.equal(after, before)
            torch.testing.assert_close(after, block_by_block(module, x), rtol=0, atol=0)


def test_attributes_of_a_part_replaced_together_take_effect() -> None:
    module, x = stack(Encoder).eval(), draw(2, 9, 32)
    with torch.no_grad():
        before, layer = module(x), module.blocks[0].attention.query_projection
        layer.__dict__ = vars(nn.Linear(32, 32))
        after = module(x)
        assert not torch.equal(after, before)
        torch.testing.assert_close(after, block_by_block(module, x), rtol=0, atol=0)


def test_reading_is_cached_until_a_part_is_replaced() -> None:
    module, readings = stack(Encoder), list[object]()

    def read() -> object:
        readings.append(object())
        return readings[-1]

    module.eval()
    for _ in range(2):
        assert cached_reading(module, None, read) is readings[0]
    with torch.no_grad():
        module.blocks[0].attention.query_projection.weight.zero_()
    assert cached_reading(module, None, read) is readings[0]
    module.train()
    assert cached_reading(module, None, read) is readings[1]
    module.blocks[0].attention.query_projection.weight = nn.Parameter(torch.zeros(32, 32))
    assert cached_reading(module, None, read) is readings[2]
    handle = module.blocks[0].feedforward.register_forward_hook(lambda *_: None)
    assert cached_reading(module, None, read) is None
    handle.remove()
    assert cached_reading(module, None, read) is readings[-1]


def test_deleting_a_stack_frees_its_weights() -> None:
    module, x = stack(Decoder), draw(2, 9, 32)
    decoded(module, x, [1] * 9, cache=module.new_cache())
    gone = [weakref.ref(module), weakref.ref(module.blocks[0]), weakref.ref(module.blocks[0].feedforward.expand.weight)]
    del module
    gc.collect()
    assert [each() for each in gone] == [None] * 3


def test_a_copy_has_its_own_weights() -> None:
    module, x = stack(Encoder), draw(2, 9, 32)
    with torch.no_grad():
        before = module(x)
        other = copy.deepcopy(module)
        other.blocks[1].feedforward.expand.weight.zero_()
        assert torch.equal(module(x), before)
        assert torch.equal(other(x), block_by_block(other, x))
        assert not torch.equal(other(x), before)


# ---- observed, and op by op ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_observation_gives_the_same_bits(dtype: torch.dtype, kinds: list[str]) -> None:
    module, x = stack(Decoder, dtype=dtype), draw(2, 12, 32, dtype=dtype)
    unobserved = decoded(module, x, [1] * 12, cache=module.new_cache())
    assert joined(kinds) == 12
    cache = module.new_cache()
    with ch.observe(module, ch.Want(entropy=True)) as observations:
        observed = decoded(module, x, [1] * 12, cache=cache)
    assert len(list(observations)) == 3
    assert joined(kinds) == 12
    assert torch.equal(unobserved, observed)


@pytest.mark.parametrize("name", ["", ".attention", ".attention.key_projection", ".attention_norm", ".feedforward"])
def test_hooks_fire_once_for_each_call(name: str) -> None:
    module, x, fired = stack(Decoder), draw(2, 12, 32), []
    right = decoded(module, x, [1] * 12, cache=module.new_cache())
    handle = module.get_submodule(f"blocks.1{name}").register_forward_hook(lambda *given: fired.append(1))
    output = decoded(module, x, [1] * 12, cache=module.new_cache())
    handle.remove()
    assert len(fired) == 12
    torch.testing.assert_close(output, right, rtol=1e-5, atol=1e-5)
    assert torch.equal(decoded(module, x, [1] * 12, cache=module.new_cache()), right)
    assert len(fired) == 12


def test_score_functions_that_the_kernels_lack_run_block_by_block(kinds: list[str]) -> None:
    scores = ch.ScoreFunction(lambda score, batch, head, q_pos, k_pos: score.sin() - 0.1 * (q_pos - k_pos).abs())
    module, x = stack(Decoder, scores=scores), draw(2, LENGTH, 32)
    with torch.no_grad():
        whole = module(x)
    torch.testing.assert_close(
        decoded(module, x, [9, *[1] * 28], cache=module.new_cache()), whole, rtol=1e-5, atol=1e-5
    )
    assert joined(kinds) == 0


def test_padded_and_large_batches_run_block_by_block(kinds: list[str]) -> None:
    module, x = stack(Encoder), draw(2, 9, 32)
    with torch.no_grad():
        padded = module(x, lengths=[9, 4])
        torch.testing.assert_close(padded[1, :4], module(x[1:, :4])[0], rtol=1e-5, atol=1e-5)
        assert joined(kinds) == 1
        module(draw(8, 1024, 32))
        assert joined(kinds) == 1


def test_training_runs_block_by_block(kinds: list[str]) -> None:
    module, x = stack(Encoder), draw(2, 9, 32)
    module(x).sum().backward()
    assert kinds == ["layer"] * 3
    assert all(part.grad is not None for part in module.parameters())


def test_caches_of_unequal_lengths_run_block_by_block(kinds: list[str]) -> None:
    module, x = stack(Decoder), draw(2, 9, 32)
    cache, other = module.new_cache(), module.new_cache()
    for each in (cache, other):
        decoded(module, x, [1] * 9, cache=each)
        each.layers[1].truncate(5)
    kinds.clear()
    with torch.no_grad():
        assert torch.equal(module(x[:, :1], cache=cache), block_by_block(module, x[:, :1], other))
    assert joined(kinds) == 0
    assert [each.length for each in cache.layers] == [10, 6, 10]


# ---- errors -----------------------------------------------------------------------------------------------


def test_wrong_arguments_raise_after_good_calls() -> None:
    module, x, cache = stack(Decoder, memory_dim=7), draw(2, LENGTH, 32), None
    cache, memory = module.new_cache(), draw(2, 11, 7, seed=5)
    decoded(module, x[:, :9], [5, 1, 1, 1, 1], cache=cache, memory=memory)
    for given, other, error in (
        (x[:1, 9:10], memory, "batch"),
        (x[:, 9:10].double(), memory, "dtype"),
        (x[:, 9:10, :9], memory, "x must .*32"),
        (x[:, 9:10], memory[..., :5], "memory must .*7"),
        (x[:, 9:10], memory[:, :9], "memory that filled the cache"),
        (x[:, 9:10], None, "memory must be given"),
    ):
        with pytest.raises((ch.ShapeError, ch.UnsupportedError), match=error):
            decoded(module, given, [1], cache=cache, memory=other)
        assert cache.length == 9
    output = decoded(module, x[:, 9:10], [1], cache=cache, memory=memory)
    right = decoded(module, x[:, :10], [10], memory=memory)[:, 9:]
    torch.testing.assert_close(output, right, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_threads_as_before")
def test_any_number_of_threads_gives_the_same_bits() -> None:
    module, x, outputs = stack(Decoder), draw(2, LENGTH, 32), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        outputs.append(decoded(module, x, [9, *[1] * 28], cache=module.new_cache()))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
