"""RoPE in a fused layer: queries, keys and their gradients are rotated in place."""

from __future__ import annotations

import copy

import pytest
import torch

import clearhead as ch
from clearhead.nn import Decoder, DecoderBlock, EncoderBlock, MultiHeadAttention
from clearhead.positions import MOST_POSITIONS, Rotary
from clearhead.testing import forbid_fused
from tests.agreement import needs_native
from tests.budget import within_budget
from tests.nn.layers.definition import (
    DTYPES,
    KINDS,
    MASK_IDS,
    MASKS,
    Block,
    attended,
    block,
    budget_of,
    by_modules,
    caches_alternate,
    checked,
    decoded,
    draw,
    formula,
    fused,
    output_and_gradients,
    padding_is_contained,
    rotated,
    same,
    tokens,
)
from tests.nn.layers.with_memory import decoder
from tests.nn.layers.with_memory import formula as with_memory

pytestmark = [needs_native, pytest.mark.covering(1)]

NORMS = pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
LENGTH = 37


@pytest.mark.parametrize("mask", MASKS, ids=MASK_IDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@NORMS
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_every_gradient(
    kind: type[Block], norm_first: bool, dtype: torch.dtype, mask: ch.Mask | None
) -> None:
    checked(block(kind, dtype, norm_first=norm_first, rotary=20.0), tokens(dtype), mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@NORMS
def test_observation_gives_the_same_bits(norm_first: bool, dtype: torch.dtype) -> None:
    """An observed layer uses the same RoPE kernel; its bfloat16 gradients are rounded more often."""
    module, x = block(DecoderBlock, dtype, norm_first=norm_first, rotary=True), tokens(dtype)
    unobserved = [output_and_gradients(module, x)]
    with ch.observe(module, ch.Want(entropy=True)) as observations:
        observed = output_and_gradients(module, x, layer=False)
    assert len(list(observations)) == 1
    for results in unobserved:
        same(results if dtype is torch.float32 else results[:1], observed if dtype is torch.float32 else observed[:1])


@pytest.mark.parametrize("needed", ["x", "attention.query_projection", "attention.key_projection.bias", "feedforward"])
@NORMS
def test_only_needed_gradients_are_computed(norm_first: bool, needed: str) -> None:
    module, x = block(rotary=True, norm_first=norm_first), tokens()
    right = dict(zip(["", "x", *dict(module.named_parameters())], output_and_gradients(module, x), strict=True))
    x.requires_grad_(needed == "x")
    for name, part in module.named_parameters():
        part.requires_grad_(name.startswith(needed))
    wanted = {name: part for name, part in [("x", x), *module.named_parameters()] if part.requires_grad}
    for _ in range(3):
        output = fused(module, x)
        upstream = draw(*output.shape, seed=3)
        gradients = torch.autograd.grad(output, list(wanted.values()), upstream)
        same(gradients, [right[name] for name in wanted])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_nan_or_infinity_reaches_only_its_own_row(dtype: torch.dtype, bad: float) -> None:
    """Masked NaN takes the op-by-op backward pass, which also rotates gradients back."""
    upstream = draw(2, 7, 32, seed=3, dtype=dtype).index_fill(1, torch.tensor([5]), 0.0)
    padding_is_contained(block(EncoderBlock, dtype, rotary=True), tokens(dtype), upstream, bad)


def test_create_graph_gives_the_same_gradients() -> None:
    module, x = block(rotary=True, dropout=0.0), tokens()
    (plain,) = torch.autograd.grad(module(x).square().sum(), x)
    (gradients,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    torch.testing.assert_close(gradients, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("calls", [(9, *[1] * 28), (1,) * LENGTH, (3, 1, 5, 1, 1, 20, 2, 4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@NORMS
def test_decoding_with_a_cache_matches_the_formula(
    norm_first: bool, dtype: torch.dtype, calls: tuple[int, ...], kinds: list[str]
) -> None:
    module, x = block(DecoderBlock, dtype, norm_first=norm_first, rotary=True), draw(2, LENGTH, 32, dtype=dtype)
    output = decoded(module, x, calls, cache=(cache := ch.KVCache()))
    with torch.no_grad():
        within_budget(
            "output",
            output,
            formula(module, x),
            formula(copy.deepcopy(module).double(), x.double()),
            terms=2 * LENGTH,
            dtype=dtype,
        )
        key = module.attention.key_projection(module.attention_norm(x) if norm_first else x).unflatten(-1, (4, 8))
    assert kinds == ["layer"] * len(calls)
    assert cache.key is not None
    torch.testing.assert_close(cache.key, rotated(key.transpose(1, 2), 10000.0), rtol=2e-2, atol=2e-2)


def test_caches_of_different_lengths_alternate() -> None:
    caches_alternate(block(DecoderBlock, rotary=True), draw(1, 530, 32), (1, 3, 15, 16, 17, 511, 513))


@pytest.mark.parametrize(("first", "fuses"), [(MOST_POSITIONS - 2, True), (MOST_POSITIONS - 1, False)], ids=str)
def test_positions_beyond_the_table_run_op_by_op(first: int, fuses: bool, kinds: list[str]) -> None:
    torch.manual_seed(1)
    module, x = MultiHeadAttention(32, 4, rotary=True), draw(2, 2, 32)
    with torch.no_grad():
        output = module(x, query_offset=first)
        with forbid_fused():
            torch.testing.assert_close(module(x, query_offset=first), output, rtol=1e-5, atol=1e-5)
    assert kinds == ["attention"] * fuses


def test_tables_of_different_lengths_alternate() -> None:
    module, x = block(DecoderBlock, rotary=True), tokens(batch=1)
    right = output_and_gradients(module, x)
    for length in (520, 9):
        other = tokens(batch=1, length=length)
        budget_of(module, other, None, output_and_gradients(module, other))
        same(output_and_gradients(module, x), right)


def test_a_replaced_rotary_takes_effect(kinds: list[str]) -> None:
    torch.manual_seed(1)
    module, x = Decoder(32, 4, 2, rotary=True, dropout=0.0).eval(), draw(2, 9, 32)
    with torch.no_grad():
        for base in (10000.0, 10.0, None, 10000.0):
            for layer in module.blocks:
                layer.attention.rotary = None if base is None else Rotary(base)
            right = module.norm(formula(module.blocks[1], formula(module.blocks[0], x)))
            for _ in range(3):
                torch.testing.assert_close(module(x), right, rtol=1e-5, atol=1e-5)
    assert set(kinds) == {"stack"}


def test_blocks_of_a_stack_may_have_different_rotary_bases(kinds: list[str]) -> None:
    """Blocks of one stack with different RoPE bases, and one block without RoPE."""
    torch.manual_seed(1)
    module, x = Decoder(32, 4, 3, rotary=True, dropout=0.0).eval(), draw(2, LENGTH, 32)
    module.blocks[1].attention.rotary, module.blocks[2].attention.rotary = None, Rotary(7.0)
    with torch.no_grad():
        right = x
        for layer in module.blocks:
            right = formula(layer, right)
        right = module.norm(right)
    torch.testing.assert_close(
        decoded(module, x, [9, *[1] * 28], cache=module.new_cache()), right, rtol=1e-5, atol=1e-5
    )
    assert set(kinds) == {"stack"}


def test_truncated_tokens_leave_no_trace() -> None:
    module, x, cache = block(DecoderBlock, rotary=True), draw(2, LENGTH, 32), ch.KVCache()
    right = decoded(module, x, [1] * LENGTH, cache=ch.KVCache())
    outputs = []
    with torch.no_grad():
        for place in range(LENGTH):
            module(draw(2, 3, 32, seed=8), cache=cache)
            cache.truncate(place)
            outputs.append(module(x[:, place : place + 1], cache=cache))
    assert torch.equal(torch.cat(outputs, 1), right)


def test_rotary_with_a_memory_matches_the_formula(kinds: list[str]) -> None:
    module, x, memory = decoder(rotary=True), draw(2, LENGTH, 32), draw(2, 11, 32, seed=5)
    with torch.no_grad():
        right = with_memory(module, x, memory)
    given = {"memory": memory, "cache": ch.KVCache(), "memory_cache": ch.KVCache()}
    torch.testing.assert_close(decoded(module, x, [1] * LENGTH, **given), right, rtol=1e-5, atol=1e-5)
    assert kinds.count("layer") == LENGTH - 1


def test_a_cached_memory_is_rotated_once() -> None:
    """The cache contains rotated keys; the offset gives the positions of the queries."""
    torch.manual_seed(1)
    module, x, memory, cache = (
        MultiHeadAttention(32, 4, rotary=True),
        draw(2, 5, 32),
        draw(2, 11, 32, seed=5),
        ch.KVCache(),
    )
    with torch.no_grad():
        for offset in (0, 4, 4, 4, 9, 4):
            right = module(x, memory, query_offset=offset)
            output = module(x, memory, query_offset=offset, cache=cache)
            torch.testing.assert_close(output, right, rtol=1e-6, atol=1e-6)
        right = attended(module, x, x, None)
        torch.testing.assert_close(module(x), right, rtol=1e-5, atol=1e-5)


def test_a_hooked_layer_gives_the_same_bits() -> None:
    module, x, fired = block(rotary=True), tokens(), []
    right = output_and_gradients(module, x)
    handle = module.attention.register_forward_hook(lambda *given: fired.append(1))
    same(output_and_gradients(module, x, layer=False), right)
    handle.remove()
    torch.testing.assert_close(by_modules(module, x), right[0], rtol=1e-5, atol=1e-5)
    assert fired == [1]
