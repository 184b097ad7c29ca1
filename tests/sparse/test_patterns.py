"""Patterns against their papers' definitions in plain loops, and that kernels skip their empty blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.backends import native
from clearhead.masks.base import index_tensors
from clearhead.masks.tile_map import EMPTY, tile_map
from clearhead.record import decode
from clearhead.sparse import big_bird, covered, dilated, longformer, strided
from tests.problems import LEN, MASKS

LENGTH = 37


def table(allowed: object) -> Tensor:
    return torch.tensor([[allowed(i, j) for j in range(LENGTH)] for i in range(LENGTH)])  # type: ignore[operator]


@pytest.mark.parametrize(("window", "num_global"), [(6, 0), (7, 3), (0, 1)])
def test_longformer_is_a_window_and_global_tokens_both_ways(window: int, num_global: int) -> None:
    expected = table(lambda i, j: abs(i - j) <= window // 2 or i < num_global or j < num_global)
    assert torch.equal(longformer(LENGTH, window, num_global).dense(LENGTH, LENGTH), expected)


@pytest.mark.parametrize(
    ("stride", "keys_before", "keys_after"), list(itertools.product((1, 2, 5), (None, 0, 3), (None, 0, 2))), ids=str
)
def test_dilated_is_every_strideth_key_within_reach(
    stride: int, keys_before: int | None, keys_after: int | None
) -> None:
    def allowed(i: int, j: int) -> bool:
        steps = (i - j) / stride
        return (
            (i - j) % stride == 0
            and (keys_before is None or steps <= keys_before)
            and (keys_after is None or -steps <= keys_after)
        )

    assert torch.equal(dilated(stride, keys_before, keys_after).dense(LENGTH, LENGTH), table(allowed))


def test_strided_is_the_last_ones_and_every_strideth_before() -> None:
    expected = table(lambda i, j: j <= i and (i - j < 5 or (i - j) % 5 == 0))
    assert torch.equal(strided(5).dense(LENGTH, LENGTH), expected)


class TestBigBird:
    def test_every_row_of_blocks_has_its_window_the_globals_and_random_ones(self) -> None:
        chosen = big_bird(640, size=32, window=3, num_global=2, num_random=3, num_heads=4).table[0]
        place = torch.arange(20)
        near = (place[:, None] - place).abs() <= 1
        fixed = near | (place < 2) | (place[:, None] < 2)
        assert bool(chosen[:, fixed].all())
        random = (chosen & ~fixed).sum(dim=-1)
        assert torch.equal(random, torch.where(place < 2, 0, 3).expand(4, 20))

    def test_heads_draw_their_own_and_equal_seeds_the_same(self) -> None:
        one, same, other = (big_bird(640, size=32, num_heads=2, seed=seed).table for seed in (1, 1, 2))
        assert torch.equal(one, same)
        assert not torch.equal(one, other)
        assert not torch.equal(one[:, 0], one[:, 1])

    def test_the_draw_is_even(self) -> None:
        drawn = torch.stack([big_bird(320, size=32, num_random=1, seed=seed).table[0, 0] for seed in range(400)])
        # Row 5 draws one of 10 - 3 near - 2 global = 5 blocks: 80 of 400 each, with a deviation of 8.
        counts = drawn[:, 5, [2, 3, 7, 8, 9]].sum(dim=0)
        assert int(counts.sum()) == 400
        assert bool(((counts - 80).abs() < 5 * 8).all())

    def test_more_random_blocks_than_there_are_take_all(self) -> None:
        assert bool(big_bird(100, size=32, num_random=50).table.all())

    @pytest.mark.parametrize("window", [0, 2, -1])
    def test_the_window_has_a_middle(self, window: int) -> None:
        with pytest.raises(ch.ShapeError, match="big_bird: window must be an odd number of blocks"):
            big_bird(64, window=window)


class TestCovered:
    @pytest.mark.parametrize("name", [name for name, one in MASKS.items() if one.mask is not None])
    @pytest.mark.parametrize("size", [1, 4, 64])
    def test_covered_mask_allows_the_same_places(self, name: str, size: int) -> None:
        mask = MASKS[name].mask
        assert mask is not None
        heads = 2 if name == "function" else None
        table = covered(mask, LEN, size=size, num_heads=heads)
        both = (part.dense(LEN, LEN, num_heads=heads) for part in (mask, table))
        first, second = torch.broadcast_tensors(*both)
        assert torch.equal(first, second)

    def test_covered_mask_with_query_offset(self) -> None:
        mask = ch.Window(5) | ch.Global(2)
        table = covered(mask, 10, 26, query_offset=16, size=4)
        assert torch.equal(table.dense(10, 26, query_offset=16), mask.dense(10, 26, query_offset=16))

    def test_head_dependent_function_needs_num_heads(self) -> None:
        wider = ch.MaskFunction(lambda b, h, i, j: (i - j).abs() <= 4 * (h + 1)) & ch.Causal()
        with pytest.raises(ch.ShapeError, match="covered: num_heads must be given for a mask that reads it"):
            covered(wider, 64, size=4)
        table = covered(wider, 64, size=4, num_heads=3)
        assert torch.equal(table.dense(64, 64), wider.dense(64, 64, num_heads=3))
        assert torch.equal(covered(wider, 64, num_heads=1).dense(64, 64), wider.dense(64, 64))

    def test_batch_dependent_function_needs_batch(self) -> None:
        lengths = torch.tensor([10, 40])
        padded = ch.MaskFunction(lambda b, h, i, j: j < lengths[b])
        with pytest.raises(ch.ShapeError, match="covered: batch must be given for a mask that reads it"):
            covered(padded, 64, size=4)
        table = covered(padded, 64, size=4, batch=2)
        assert torch.equal(table.dense(64, 64), padded.dense(64, 64, batch=2))

    def test_an_offset_between_blocks_is_refused(self) -> None:
        with pytest.raises(ch.ShapeError, match="covered: query_offset must be a multiple of size 4; got 3"):
            covered(ch.Window(5), 10, 26, query_offset=3, size=4)

    def test_table_marks_the_blocks_of_the_mask(self) -> None:
        mask = covered(ch.Window(64) | ch.Global(1), 1024)
        place = torch.arange(16)
        expected = (place <= place[:, None]) & (place[:, None] - place <= 1) | (place == 0) | (place[:, None] == 0)
        blocks = mask.right  # type: ignore[attr-defined]
        assert torch.equal(blocks.table[0, 0], expected)


@pytest.mark.parametrize(
    "mask",
    [longformer(256, 32, 4), big_bird(256, size=16, num_heads=2), covered(dilated(4, 6), 256), ch.Window(20)],
    ids=["longformer", "big bird", "dilated", "window"],
)
def test_every_backend_agrees_and_differentiates(mask: ch.Mask) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 256, 16, generator=generator).requires_grad_() for _ in range(3))
    report = ch.explain_dispatch(query, key, value, mask=mask)
    results = {}
    for backend in ("reference", *(name for name, reasons in report.reasons.items() if not reasons)):
        output = ch.attention(query, key, value, mask=mask, backend=backend)
        results[backend] = [output, *torch.autograd.grad(output.square().sum(), [query, key, value])]
    assert {"tiled", "reference"} < set(results)
    for result in results.values():
        for got, wanted in zip(result, results["reference"], strict=True):
            torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    "pattern",
    [
        lambda length: ch.Causal() & ch.Window(255),
        lambda length: ch.Causal() & longformer(length, 512, 16),
        lambda length: ch.Causal() & big_bird(length),
    ],
    ids=["window", "longformer", "big bird"],
)
def test_the_kernels_take_it_at_32k_tokens_and_few_blocks_are_left(pattern: Callable[[int], ch.Mask]) -> None:
    row = torch.zeros(1, 1, 1, 64).expand(1, 2, 32768, 64)
    report = ch.explain_dispatch(row, row, row, mask=pattern(32768))
    assert report.choice == "native" or native.BACKEND.capability.requires() is not None, report
    # Keys that are computed per query, in whole blocks: independent of the sequence's length.
    computed = []
    for length in (2048, 4096):
        kinds = tile_map(pattern(length), index_tensors(1, 1, length, length, 0, None), 64, 64)
        computed.append(float((kinds != EMPTY).float().mean()) * length)
    assert computed[1] < 1.1 * computed[0] < 1024


def test_errors_name_the_pattern() -> None:
    with pytest.raises(ch.ShapeError, match="longformer: length must be a whole number of at least 1; got 0"):
        longformer(0, 4)
    with pytest.raises(ch.ShapeError, match="longformer: num_global must be a whole number of at least 0; got -1"):
        longformer(8, 4, -1)
    with pytest.raises(ch.ShapeError, match="big_bird: num_global must be a whole number of at least 0; got -1"):
        big_bird(8, num_global=-1)


def test_a_covered_mask_refuses_lengths_that_it_was_not_made_for() -> None:
    """The last block of its table includes keys beyond the length, which did not influence the table."""
    mask = covered(ch.MaskFunction(lambda b, h, i, j: (j < 60) | (j > 65)), 65)
    x = torch.randn(1, 1, 100, 4)
    with pytest.raises(ch.MaskError, match="cover queries 0 to 99 and 100 keys; got one that was made for queries 0 t"):
        ch.attention(x, x, x, mask=mask)
    part, fewer = x[:, :, :65], x[:, :, :40]
    torch.testing.assert_close(
        ch.attention(part, part, part, mask=mask), ch.attention(part, part, part, mask=mask, backend="reference")
    )
    # Fewer tokens, as in decoding, attend to the same keys as in the whole sequence.
    row = ch.attention(fewer[:, :, -1:], fewer, fewer, mask=mask, query_offset=39)
    torch.testing.assert_close(row, ch.attention(fewer, fewer, fewer, mask=mask, backend="reference")[:, :, -1:])


def test_a_covered_mask_travels_as_text() -> None:
    tensors: list[Tensor] = []
    mask = covered(ch.Window(5), 70)
    decoded = decode(mask.encode(tensors), tensors)
    assert torch.equal(decoded.dense(70, 70), mask.dense(70, 70))
    with pytest.raises(ch.MaskError, match="made for queries 0 to 69 and 70 keys"):
        decoded.dense(71, 71)
