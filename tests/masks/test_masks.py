"""Masks as booleans, intervals, tile maps, texts and pictures."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import clearhead as ch
from clearhead.masks import parts
from clearhead.masks.base import index_tensors
from clearhead.masks.intervals import MAX_INTERVALS
from clearhead.masks.parts import band_of
from clearhead.masks.tile_map import tile_map
from clearhead.record import decode
from tests.problems import BATCH, HEADS, LEN, MASKS, NamedMask

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "named", [m for m in MASKS.values() if m.mask is not None], ids=[n for n in MASKS if n != "none"]
)
def test_dense_is_the_predicate(named: NamedMask) -> None:
    assert named.mask is not None
    dense = named.mask.dense(LEN, LEN, batch=BATCH, num_heads=HEADS).expand(BATCH, HEADS, LEN, LEN)
    for b in range(BATCH):
        for h in range(HEADS):
            plain = [[bool(named.plain(b, h, i, j)) for j in range(LEN)] for i in range(LEN)]
            assert dense[b, h].tolist() == plain


def test_window_counts_both_ends() -> None:
    assert ch.Window(2).dense(4, 4).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]]
    assert ch.Window(0, 1).dense(3, 3).int().tolist() == [[1, 1, 0], [0, 1, 1], [0, 0, 1]]


def test_offset_places_the_first_query() -> None:
    assert ch.Causal().dense(2, 4, query_offset=2).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert ch.Causal().dense(2, 4, query_offset=0).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]
    assert ch.Causal().dense(3, 2, query_offset=-1).int().tolist() == [[0, 0], [1, 0], [1, 1]]
    rows = torch.rand(2, 4) > 0.5
    assert torch.equal(ch.Dense(rows).dense(2, 4, query_offset=2), rows)
    both = (ch.Dense(rows) & ch.Causal()).dense(2, 4, query_offset=2)
    assert torch.equal(both, rows & ch.Causal().dense(2, 4, query_offset=2))


# --- the algebra -------------------------------------------------------------------------------------

N = 12
atoms = st.one_of(
    st.just(ch.Causal()),
    st.builds(ch.Window, st.integers(0, 5), st.integers(0, 5)),
    st.builds(ch.Prefix, st.integers(0, N)),
    st.builds(ch.Global, st.integers(0, 4)),
    st.builds(ch.Strided, st.integers(1, 5)),
    st.lists(st.integers(0, N), min_size=1, max_size=2).map(ch.Padding),
    st.lists(st.integers(0, 3), min_size=N, max_size=N).map(lambda ids: ch.Documents(ids=torch.tensor(sorted(ids)))),
    st.lists(st.integers(-1, 2), min_size=N, max_size=N).map(lambda ids: ch.Documents(ids=torch.tensor(ids))),
    st.integers(0, 2**9 - 1).map(
        lambda bits: ch.Blocks(torch.tensor([bool(bits >> i & 1) for i in range(9)]).view(3, 3), 4)
    ),
)
expressions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
        inner.map(lambda mask: ~mask),
    ),
    max_leaves=5,
)


def _full(mask: ch.Mask, batch: int = 2) -> torch.Tensor:
    indices = index_tensors(batch, 1, N, N, 0, CPU)
    return mask.allows(*indices).expand(batch, 1, N, N)


@settings(max_examples=150, deadline=None)
@given(expressions, expressions)
def test_and_or_not_follow_boolean_algebra(one: ch.Mask, other: ch.Mask) -> None:
    assert torch.equal(_full(one & other), _full(one) & _full(other))
    assert torch.equal(_full(one | other), _full(one) | _full(other))
    assert torch.equal(_full(~one), ~_full(one))
    assert torch.equal(_full(~(one & other)), _full(~one | ~other))


@settings(max_examples=300, deadline=None)
@given(expressions)
def test_intervals_are_the_predicate(mask: ch.Mask) -> None:
    batch, head, q_pos, k_pos = index_tensors(2, 1, N, N, 0, CPU)
    rows = mask.intervals(batch, head, q_pos, N)
    if rows is None:
        return
    assert rows.count <= MAX_INTERVALS
    inside = (k_pos[..., None] >= rows.start[..., None, :]) & (k_pos[..., None] < rows.stop[..., None, :])
    assert torch.equal(inside.any(-1).expand(2, 1, N, N), _full(mask))
    assert int(inside.sum(-1).max()) <= 1  # runs are disjoint


@settings(max_examples=300, deadline=None)
@given(expressions, st.integers(1, 14), st.integers(1, 14))
def test_tile_map_is_exact(mask: ch.Mask, q_tile: int, k_tile: int) -> None:
    kinds = tile_map(mask, index_tensors(2, 1, N, N, 0, CPU), q_tile, k_tile)
    dense = _full(mask)
    kinds = kinds.expand(2, 1, *kinds.shape[2:])
    for b in range(2):
        for row in range(kinds.shape[2]):
            for column in range(kinds.shape[3]):
                tile = dense[b, 0, row * q_tile : (row + 1) * q_tile, column * k_tile : (column + 1) * k_tile]
                expected = 2 if tile.all() else 1 if tile.any() else 0
                assert int(kinds[b, 0, row, column]) == expected


@settings(max_examples=100, deadline=None)
@given(expressions)
def test_written_and_read_back(mask: ch.Mask) -> None:
    tensors: list[torch.Tensor] = []
    decoded = decode(mask.encode(tensors), tensors)
    assert torch.equal(_full(decoded), _full(mask))


@pytest.mark.parametrize(
    ("mask", "runs"),
    [
        (ch.Causal(), 1),
        (ch.Causal() & ch.Window(2), 1),
        (ch.Padding([3, 5]) & ch.Causal(), 1),
        (~ch.Padding([0, 5]) & ch.Causal(), 1),
        (ch.Documents(lengths=[5, 7]) & ch.Causal() & ch.Window(3), 1),
        (ch.Prefix(2) | ch.Window(1), 2),
        (~ch.Window(1, 1), 2),
        (ch.Strided(2), None),
    ],
    ids=repr,
)
def test_intervals_per_row(mask: ch.Mask, runs: int | None) -> None:
    batch, head, q_pos, _ = index_tensors(2, 1, N, N, 0, CPU)
    rows = mask.intervals(batch, head, q_pos, N)
    assert (None if rows is None else rows.count) == runs


def test_tile_map_of_a_long_causal_mask_is_small() -> None:
    """32,768 tokens: the booleans would take a gigabyte."""
    kinds = tile_map(ch.Causal() & ch.Window(1024), index_tensors(1, 1, 32768, 32768, 0, CPU), 256, 256)
    assert kinds.shape == (1, 1, 128, 128)
    assert int((kinds > 0).sum()) == 128 + 127 + 126 + 125 + 124


# --- words and pictures ------------------------------------------------------------------------------


def test_repr_names_the_fields() -> None:
    assert repr(ch.Causal() & ch.Window(2)) == "Causal() & Window(before=2, after=0)"
    assert repr(~(ch.Causal() | ch.Prefix(2)) & ch.Padding([3, 4])) == (
        "(~(Causal() | Prefix(length=2))) & Padding(lengths=[3, 4])"
    )
    assert repr(ch.Documents(lengths=[600])) == "Documents(ids=int64[1, 600], contiguous=True)"


def test_picture() -> None:
    assert str(ch.Causal() & ch.Window(1)).splitlines()[1:4] == ["■·······", "■■······", "·■■·····"]
    assert ch.Documents(lengths=[1, 2]).picture() == "■··\n·■■\n·■■"
    assert ch.Padding([2, 3]).picture().endswith("(the first of 2 batch x 1 heads)")
    assert "the first 24 of 100 queries" in ch.Documents(lengths=[100]).picture()


# --- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: ch.Window(-1), ch.ShapeError, "Window: before must be a whole number of at least 0; got -1"),
        (lambda: ch.Window(1.5), ch.ShapeError, "got 1.5"),
        (lambda: ch.Prefix(True), ch.ShapeError, "got True"),
        (lambda: ch.Strided(0), ch.ShapeError, "at least 1; got 0"),
        (lambda: ch.Padding([3, -1]), ch.ShapeError, "Padding: lengths must not be negative; got -1"),
        (lambda: ch.Padding([[1]]), ch.ShapeError, "one axis of whole numbers"),
        (lambda: ch.Padding([1.5]), ch.ShapeError, "one axis of whole numbers"),
        (lambda: ch.Padding("abc"), ch.ShapeError, "one axis of whole numbers"),
        (lambda: ch.Documents(), ch.ShapeError, "got neither"),
        (lambda: ch.Documents(lengths=[1], ids=torch.zeros(1).long()), ch.ShapeError, "got both"),
        (lambda: ch.Documents(ids=torch.zeros(3)), ch.ShapeError, "whole numbers [len] or [batch, len]"),
        (lambda: ch.Dense(torch.zeros(3, 3)), ch.MaskError, "must be bool with 2 to 4 axes; got float32"),
        (lambda: ch.Blocks(torch.ones(2, 2).bool(), 0), ch.ShapeError, "at least 1"),
        (lambda: ch.MaskFunction(3), ch.MaskError, "must be callable"),
        (lambda: ch.Causal() & torch.ones(2, 2).bool(), ch.MaskError, "Wrap a boolean tensor in ch.Dense"),
        (lambda: bool(ch.Causal()), ch.MaskError, "Write `a & b`"),
        (lambda: ch.Causal().dense(2, 3), ch.MaskError, "Usual choices: 0"),
        (lambda: ch.Causal().dense(-1, 3), ch.ShapeError, "q_len must be a whole number"),
        (lambda: ch.Padding.from_tokens(torch.tensor([[False, True]])), ch.MaskError, "padding only to the right"),
        (lambda: ch.MaskFunction(lambda b, h, i, j: i - j).dense(2, 2), ch.MaskError, "return bool"),
        (lambda: ch.MaskFunction(lambda b, h, i, j: None).dense(2, 2), ch.MaskError, "return a tensor"),
        (lambda: ch.MaskFunction(lambda b, h, i, j: 1 / 0).dense(2, 2), ch.MaskError, "ZeroDivisionError"),
    ],
)
def test_bad_input(make: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        make()  # type: ignore[operator]
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_padding_from_tokens() -> None:
    assert ch.Padding.from_tokens(torch.tensor([[True, False], [True, True]])).lengths.tolist() == [1, 2]


class TestPartsOf:
    """What a mask comes to is remembered between the layers that share it, and never past a change."""

    def test_parts_of_an_equal_call_are_cached(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[object] = []
        original = parts.compute_parts
        monkeypatch.setattr(parts, "compute_parts", lambda *call: asked.append(call) or original(*call))
        mask = ch.Documents(lengths=[3, 4])
        first = parts.parts_of(mask, (1, 2, 7, 7), 0)
        assert parts.parts_of(mask, (1, 2, 7, 7), 0) is first
        assert parts.parts_of(mask, (1, 2, 5, 7), 2) is not first
        assert len(asked) == 2

    def test_parts_of_combined_masks_are_cached(self) -> None:
        mask = ch.Causal() & ch.Documents(lengths=[3, 4])
        assert mask.placed(0) is mask
        assert parts.parts_of(mask, (1, 2, 7, 7), 0) is parts.parts_of(mask.placed(0), (1, 2, 7, 7), 0)
        table = ch.Causal() & ch.Dense(torch.ones(7, 7, dtype=torch.bool))
        assert table.placed(2) is not table

    def test_changed_elements_invalidate_the_cache(self) -> None:
        lengths = torch.tensor([2, 5])
        mask = ch.Padding(lengths)
        before = parts.parts_of(mask, (2, 1, 5, 5), 0)
        lengths[0] = 4
        changed = parts.parts_of(mask, (2, 1, 5, 5), 0)
        assert before.interval_bounds[1].flatten().tolist() != changed.interval_bounds[1].flatten().tolist()
        for tensors in (changed.interval_bounds, parts.compute_parts(mask, (2, 1, 5, 5), 0).interval_bounds):
            assert [bound.flatten().unique().tolist() for bound in tensors] == [[0], [4, 5]]

    def test_parts_of_a_deleted_mask_are_freed(self) -> None:
        mask = ch.Documents(lengths=[3, 4])
        cached = ref(parts.parts_of(mask, (1, 2, 7, 7), 0))
        assert cached() is not None
        del mask
        gc.collect()
        assert cached() is None

    def test_interval_bounds_are_within_the_keys(self) -> None:
        computed = parts.compute_parts(ch.Padding(torch.tensor([9, 2])) & ch.Documents(lengths=[4, 3]), (2, 1, 7, 7), 0)
        start, stop = computed.interval_bounds
        assert start.dtype is stop.dtype is torch.int32
        assert start.is_contiguous()
        assert int(start.min()) >= 0
        assert int(stop.max()) <= 7


@pytest.mark.parametrize(
    ("mask", "band"),
    [
        (ch.Causal(), (None, 0)),
        (ch.Window(3), (3, 0)),
        (ch.Window(3, 2), (3, 2)),
        (ch.Causal() & ch.Window(3, 2), (3, 0)),
        (ch.Window(5, 1) & ch.Window(3, 2) & ch.Window(4, 0), (3, 0)),
        (ch.Causal() | ch.Window(3), None),
        (~ch.Causal(), None),
        (ch.Causal() & ch.Prefix(3), None),
        (ch.Padding([3]), None),
        (ch.Causal() & ch.Documents(lengths=[3, 4]), None),
    ],
    ids=repr,
)
def test_band_of_masks(mask: ch.Mask, band: object) -> None:
    assert band_of(mask) == band


def test_subclass_is_no_band() -> None:
    class Other(ch.Window):
        def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
            return k_pos == q_pos

    assert band_of(Other(3)) is None
    assert band_of(ch.Causal() & Other(3)) is None
