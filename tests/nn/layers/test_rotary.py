"""RoPE within a fused layer: queries and keys are rotated in place, and so are their gradients."""

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
    checked,
    decoded,
    draw,
    formula,
    fused,
    numbers,
    same,
    tokens,
    turned,
)
from tests.nn.layers.with_memory import decoder
from tests.nn.layers.with_memory import formula as with_memory

pytestmark = needs_native

NORMS = pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
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
def test_bits_are_those_of_the_modules(norm_first: bool, dtype: torch.dtype) -> None:
    """An observed layer rotates by the same kernel; op by op, gradients are rounded more often."""
    own, x = block(DecoderBlock, dtype, norm_first=norm_first, rotary=True), tokens(dtype)
    alone = [numbers(own, x)]
    with ch.observe(own, ch.Want(entropy=True)) as seen:
        watched = numbers(own, x, layer=False)
    assert len(list(seen)) == 1
    for found in alone:
        same(found if dtype is torch.float32 else found[:1], watched if dtype is torch.float32 else watched[:1])


@pytest.mark.parametrize("needed", ["x", "attention.query_projection", "attention.key_projection.bias", "feedforward"])
@NORMS
def test_only_the_gradients_that_are_needed(norm_first: bool, needed: str) -> None:
    own, x = block(rotary=True, norm_first=norm_first), tokens()
    right = dict(zip(["", "x", *dict(own.named_parameters())], numbers(own, x), strict=True))
    x.requires_grad_(needed == "x")
    for name, part in own.named_parameters():
        part.requires_grad_(name.startswith(needed))
    wanted = {name: part for name, part in [("x", x), *own.named_parameters()] if part.requires_grad}
    for _ in range(3):
        output = fused(own, x)
        upstream = draw(*output.shape, seed=3)
        found = torch.autograd.grad(output, list(wanted.values()), upstream)
        same(found, [right[name] for name in wanted])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_hidden_token_that_is_not_finite(dtype: torch.dtype, bad: float) -> None:
    """NaN behind a mask leads to a backward pass op by op, which rotates gradients back too."""
    own, mask = block(EncoderBlock, dtype, rotary=True), ch.Padding(torch.tensor([7, 3]))
    x = tokens(dtype)
    upstream = draw(2, 7, 32, seed=3, dtype=dtype).index_fill(1, torch.tensor([5]), 0.0)
    right = numbers(own, x, mask, upstream=upstream)
    spoiled = x.detach().clone()
    spoiled[1, 5] = bad
    found = numbers(own, spoiled.requires_grad_(), mask, upstream=upstream)
    rows = [place for place in range(7) if place != 5]
    same([found[0][0], found[0][1, rows]], [right[0][0], right[0][1, rows]])
    wide, exact_x = copy.deepcopy(own).double(), x.detach().double().requires_grad_()
    textbook = torch.autograd.grad(formula(own, x, mask), x, upstream)[0]
    exact = torch.autograd.grad(formula(wide, exact_x, mask), exact_x, upstream.double())[0]
    within_budget("dx", found[1][0], textbook[0], exact[0], terms=128, dtype=dtype)


def test_gradients_that_are_recorded() -> None:
    own, x = block(rotary=True, dropout=0.0), tokens()
    (plain,) = torch.autograd.grad(own(x).square().sum(), x)
    (found,) = torch.autograd.grad(own(x).square().sum(), x, create_graph=True)
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("calls", [(9, *[1] * 28), (1,) * LENGTH, (3, 1, 5, 1, 1, 20, 2, 4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@NORMS
def test_with_a_cache(norm_first: bool, dtype: torch.dtype, calls: tuple[int, ...], kinds: list[str]) -> None:
    own, x = block(DecoderBlock, dtype, norm_first=norm_first, rotary=True), draw(2, LENGTH, 32, dtype=dtype)
    found = decoded(own, x, calls, cache=(cache := ch.KVCache()))
    with torch.no_grad():
        within_budget(
            "output",
            found,
            formula(own, x),
            formula(copy.deepcopy(own).double(), x.double()),
            terms=2 * LENGTH,
            dtype=dtype,
        )
        key = own.attention.key_projection(own.attention_norm(x) if norm_first else x).unflatten(-1, (4, 8))
    assert kinds == ["layer"] * len(calls)
    assert cache.key is not None
    torch.testing.assert_close(cache.key, turned(key.transpose(1, 2), 10000.0), rtol=2e-2, atol=2e-2)


def test_caches_of_many_lengths_in_turn() -> None:
    own, x = block(DecoderBlock, rotary=True), draw(1, 530, 32)
    with torch.no_grad():
        whole = own(x)
        caches = {first: ch.KVCache() for first in (1, 3, 15, 16, 17, 511, 513)}
        for first, cache in caches.items():
            own(x[:, :first], cache=cache)
        for _ in range(4):
            for cache in caches.values():
                place = cache.length
                token = own(x[:, place : place + 1], cache=cache)
                torch.testing.assert_close(token, whole[:, place : place + 1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("first", "fuses"), [(MOST_POSITIONS - 2, True), (MOST_POSITIONS - 1, False)], ids=str)
def test_positions_that_no_table_has_run_op_by_op(first: int, fuses: bool, kinds: list[str]) -> None:
    torch.manual_seed(1)
    own, x = MultiHeadAttention(32, 4, rotary=True), draw(2, 2, 32)
    with torch.no_grad():
        found = own(x, query_offset=first)
        with forbid_fused():
            torch.testing.assert_close(own(x, query_offset=first), found, rtol=1e-5, atol=1e-5)
    assert kinds == ["attention"] * fuses


def test_tables_of_several_lengths_in_turn() -> None:
    own, x = block(DecoderBlock, rotary=True), tokens(batch=1)
    right = numbers(own, x)
    for length in (520, 9):
        other = tokens(batch=1, length=length)
        budget_of(own, other, None, numbers(own, other))
        same(numbers(own, x), right)


def test_a_rotary_in_the_place_of_another(kinds: list[str]) -> None:
    torch.manual_seed(1)
    own, x = Decoder(32, 4, 2, rotary=True, dropout=0.0).eval(), draw(2, 9, 32)
    with torch.no_grad():
        for base in (10000.0, 10.0, None, 10000.0):
            for layer in own.blocks:
                layer.attention.rotary = None if base is None else Rotary(base)
            right = own.norm(formula(own.blocks[1], formula(own.blocks[0], x)))
            for _ in range(3):
                torch.testing.assert_close(own(x), right, rtol=1e-5, atol=1e-5)
    assert set(kinds) == {"stack"}


def test_one_layer_of_several_turns(kinds: list[str]) -> None:
    """Blocks of one stack that turn by other angles, and one that does not."""
    torch.manual_seed(1)
    own, x = Decoder(32, 4, 3, rotary=True, dropout=0.0).eval(), draw(2, LENGTH, 32)
    own.blocks[1].attention.rotary, own.blocks[2].attention.rotary = None, Rotary(7.0)
    with torch.no_grad():
        right = x
        for layer in own.blocks:
            right = formula(layer, right)
        right = own.norm(right)
    torch.testing.assert_close(decoded(own, x, [9, *[1] * 28], cache=own.new_cache()), right, rtol=1e-5, atol=1e-5)
    assert set(kinds) == {"stack"}


def test_truncated_tokens_leave_no_trace() -> None:
    own, x, cache = block(DecoderBlock, rotary=True), draw(2, LENGTH, 32), ch.KVCache()
    right = decoded(own, x, [1] * LENGTH, cache=ch.KVCache())
    found = []
    with torch.no_grad():
        for place in range(LENGTH):
            own(draw(2, 3, 32, seed=8), cache=cache)
            cache.truncate(place)
            found.append(own(x[:, place : place + 1], cache=cache))
    assert torch.equal(torch.cat(found, 1), right)


def test_beside_a_memory(kinds: list[str]) -> None:
    own, x, memory = decoder(rotary=True), draw(2, LENGTH, 32), draw(2, 11, 32, seed=5)
    with torch.no_grad():
        right = with_memory(own, x, memory)
    given = {"memory": memory, "cache": ch.KVCache(), "memory_cache": ch.KVCache()}
    torch.testing.assert_close(decoded(own, x, [1] * LENGTH, **given), right, rtol=1e-5, atol=1e-5)
    assert kinds.count("layer") == LENGTH - 1


def test_a_cached_memory_is_rotated_once() -> None:
    """The cache holds rotated keys; queries stand where the caller says."""
    torch.manual_seed(1)
    own, x, memory, cache = (
        MultiHeadAttention(32, 4, rotary=True),
        draw(2, 5, 32),
        draw(2, 11, 32, seed=5),
        ch.KVCache(),
    )
    with torch.no_grad():
        for offset in (0, 4, 4, 4, 9, 4):
            right = own(x, memory, query_offset=offset)
            found = own(x, memory, query_offset=offset, cache=cache)
            torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)
        right = attended(own, x, x, None)
        torch.testing.assert_close(own(x), right, rtol=1e-5, atol=1e-5)


def test_modules_agree_under_a_hook() -> None:
    own, x, seen = block(rotary=True), tokens(), []
    right = numbers(own, x)
    handle = own.attention.register_forward_hook(lambda *given: seen.append(1))
    same(numbers(own, x, layer=False), right)
    handle.remove()
    torch.testing.assert_close(by_modules(own, x), right[0], rtol=1e-5, atol=1e-5)
    assert seen == [1]
