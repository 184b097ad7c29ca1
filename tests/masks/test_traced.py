"""Predicates traced to intervals of keys, which equal the predicate at every place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import clearhead as ch
from clearhead.masks.base import index_tensors
from clearhead.masks.intervals import Intervals
from clearhead.problem import Problem

BATCH, HEADS, LENGTH = 2, 3, 60
DOCUMENTS = torch.tensor([[0] * 20 + [1] * 30 + [2] * 10, [0] * 5 + [1] * 25 + [7] * 30])
SHUFFLED = torch.tensor([2] * 15 + [0] * 20 + [2] * 10 + [1] * 15)
LENGTHS = torch.tensor([60, 41])
WINDOWS = torch.tensor([3, 10, 60])
RELATION = torch.tensor([[True, False], [True, True]])

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

#: What people write, with the most runs that a row has.
RUNS: dict[str, tuple[Predicate, int]] = {
    "causal": (lambda b, h, i, j: i >= j, 1),
    "causal, of another alignment": (lambda b, h, i, j: j - 5 <= i, 1),
    "window": (lambda b, h, i, j: (i - j).abs() <= 4, 1),
    "window of each head": (lambda b, h, i, j: (i - j).abs() <= WINDOWS[h], 1),
    "causal window": (lambda b, h, i, j: (i >= j) & (i - j < 9), 1),
    "chained by logical_and": (lambda b, h, i, j: torch.logical_and(i >= j, i - j < 9), 1),
    "padding": (lambda b, h, i, j: j < LENGTHS[b], 1),
    "causal and padding": (lambda b, h, i, j: (j <= i) & (j < LENGTHS[b]), 1),
    "prefix": (lambda b, h, i, j: (i >= j) | (j < 7), 2),
    "documents": (lambda b, h, i, j: DOCUMENTS[b, i] == DOCUMENTS[b, j], 1),
    "documents, causal": (lambda b, h, i, j: (DOCUMENTS[b, i] == DOCUMENTS[b, j]) & (i >= j), 1),
    "documents in pieces": (lambda b, h, i, j: SHUFFLED[i] == SHUFFLED[j], 2),
    "other documents": (lambda b, h, i, j: DOCUMENTS[b, i] != DOCUMENTS[b, j], 2),
    "earlier documents": (lambda b, h, i, j: DOCUMENTS[b, i] > DOCUMENTS[b, j], 1),
    "blocks": (lambda b, h, i, j: i // 16 == j // 16, 1),
    "causal blocks": (lambda b, h, i, j: j // 16 <= i // 16, 1),
    "falling": (lambda b, h, i, j: 60 - i <= 55 - j, 1),
    "sinks and a window": (lambda b, h, i, j: (j < 4) | ((i >= j) & (i - j <= 8)), 2),
    "not causal": (lambda b, h, i, j: ~(i >= j), 1),
    "rows": (lambda b, h, i, j: (i % 2 == 0) & (i >= j), 1),
    "head alone": (lambda b, h, i, j: (h == 1) | (i >= j), 1),
    "float": (lambda b, h, i, j: i.float() - j.float() > -0.5, 1),
    "everything": (lambda b, h, i, j: j >= 0, 1),
    "nothing": (lambda b, h, i, j: j < 0, 1),
}


def _decides(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j if int(i.max()) > 30 else i > j


#: What is not few runs, or cannot be told.
PLACES: dict[str, Predicate] = {
    "sums": lambda b, h, i, j: (i + j) % 3 == 0,
    "strides": lambda b, h, i, j: (i - j) % 2 == 0,
    "pairs": lambda b, h, i, j: RELATION[i % 2, j % 2],
    "products": lambda b, h, i, j: i * j < 400,
    "decides": _decides,
    "exclusive or": lambda b, h, i, j: (i >= j) ^ (j < 7),
    "whole numbers of fractions": lambda b, h, i, j: ((i / 4).long() - (j / 4).long()) == 0,
    "a copy that knows nothing": lambda b, h, i, j: torch.as_tensor(i * j, dtype=torch.float32) < 400,
}


def _traced(fn: Predicate, q_len: int = LENGTH, k_len: int = LENGTH, offset: int = 0) -> Intervals | None:
    batch, head, q_pos, _ = index_tensors(BATCH, HEADS, q_len, k_len, offset, None)
    return ch.MaskFunction(fn).intervals(batch, head, q_pos, k_len)


def _places(intervals: Intervals, k_len: int) -> Tensor:
    keys = torch.arange(k_len).view(1, 1, 1, -1, 1)
    return ((keys >= intervals.start[..., None, :]) & (keys < intervals.stop[..., None, :])).any(dim=-1)


@pytest.mark.parametrize("offset", [0, 20])
@pytest.mark.parametrize("name", RUNS)
def test_predicate_becomes_intervals(name: str, offset: int) -> None:
    fn, most = RUNS[name]
    intervals = _traced(fn, LENGTH - offset, LENGTH, offset)
    assert intervals is not None
    assert intervals.count <= most
    index = index_tensors(BATCH, HEADS, LENGTH - offset, LENGTH, offset, None)
    right = fn(*index).expand(BATCH, HEADS, LENGTH - offset, LENGTH)
    assert torch.equal(_places(intervals, LENGTH).expand_as(right), right)


@pytest.mark.parametrize("name", PLACES)
def test_other_predicates_are_evaluated_place_by_place(name: str) -> None:
    assert _traced(PLACES[name]) is None


@pytest.mark.parametrize("name", [*RUNS, *PLACES])
def test_traced_and_evaluated_masks_agree(name: str) -> None:
    fn = RUNS[name][0] if name in RUNS else PLACES[name]
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(BATCH, HEADS, LENGTH, 8, generator=generator, requires_grad=True) for _ in range(3)]
    outputs = {}
    for backend in ("auto", "tiled", "reference"):
        output = ch.attention(*inputs, mask=ch.MaskFunction(fn), backend=backend)
        outputs[backend] = [output, *torch.autograd.grad(output.square().sum(), inputs)]
    for backend in ("auto", "tiled"):
        for one, right in zip(outputs[backend], outputs["reference"], strict=True):
            torch.testing.assert_close(one, right, rtol=1e-4, atol=1e-5)


def test_combinations_with_other_masks_have_intervals() -> None:
    mask = ch.MaskFunction(RUNS["documents"][0]) & ch.Causal()
    inputs = [torch.randn(BATCH, HEADS, LENGTH, 8) for _ in range(3)]
    parts = Problem.of("attention", *inputs, mask=mask).mask_parts
    assert parts.rest == ()
    assert parts.keys_after == 0
    assert parts.intervals is not None


def test_lengths_beyond_any_table_are_traced() -> None:
    """A byte for each place would take 4 GiB."""
    inputs = [torch.randn(1, 1, 65_536, 8) for _ in range(3)]
    near = ch.MaskFunction(lambda b, h, i, j: (i >= j) & (i - j < 64))
    right = ch.attention(*inputs, mask=ch.Causal() & ch.Window(63))
    torch.testing.assert_close(ch.attention(*inputs, mask=near), right, rtol=1e-5, atol=1e-6)


def test_predicate_is_traced_at_each_call() -> None:
    width = [3]
    mask = ch.MaskFunction(lambda b, h, i, j: (i - j).abs() <= width[0])
    before = mask.dense(6, 6).sum(), _traced(mask.fn)
    width[0] = 1
    second = mask.dense(6, 6).sum(), _traced(mask.fn)
    assert before[0] > second[0]
    assert before[1] is not None
    assert second[1] is not None
    assert int((second[1].stop - second[1].start).max()) == 3


_Number = Callable[[Tensor, Tensor, Tensor, Tensor], Any]
_LEAVES: list[_Number] = [
    lambda b, h, i, j: i, lambda b, h, i, j: j, lambda b, h, i, j: i - j, lambda b, h, i, j: h, lambda b, h, i, j: 3,
    lambda b, h, i, j: SHUFFLED[i], lambda b, h, i, j: SHUFFLED[j], lambda b, h, i, j: LENGTHS[b],
    lambda b, h, i, j: i // 4, lambda b, h, i, j: j // 4, lambda b, h, i, j: i / 3, lambda b, h, i, j: (j / 3).long(),
    lambda b, h, i, j: -j, lambda b, h, i, j: (i - j).abs(),
]  # fmt: skip
_COMPARED: list[Callable[[Any, Any], Any]] = [
    lambda x, y: x >= y,
    lambda x, y: x > y,
    lambda x, y: x <= y,
    lambda x, y: x < y,
    lambda x, y: x == y,
    lambda x, y: x != y,
]
_JOINED: list[Callable[[Any, Any], Any]] = [lambda x, y: x & y, lambda x, y: x | y, lambda x, y: x & ~y]


def _two(join: Callable[[Any, Any], Any], left: _Number, right: _Number) -> _Number:
    return lambda b, h, i, j: join(left(b, h, i, j), right(b, h, i, j))


_TRUTHS: st.SearchStrategy[_Number] = st.recursive(
    st.builds(_two, st.sampled_from(_COMPARED), st.sampled_from(_LEAVES[:3] + _LEAVES[5:]), st.sampled_from(_LEAVES)),
    lambda inner: st.builds(_two, st.sampled_from(_JOINED), inner, inner),
    max_leaves=4,
)


@settings(deadline=None, max_examples=500)
@given(truth=_TRUTHS, offset=st.integers(0, 9), q_len=st.integers(1, 12), k_len=st.integers(1, 40))
def test_intervals_equal_the_predicate(truth: _Number, offset: int, q_len: int, k_len: int) -> None:
    intervals = _traced(truth, q_len, k_len, offset)
    if intervals is None:
        return
    index = index_tensors(BATCH, HEADS, q_len, k_len, offset, None)
    right = truth(*index).expand(BATCH, HEADS, q_len, k_len)
    assert torch.equal(_places(intervals, k_len).expand_as(right), right)


def test_thirds_are_rounded_where_the_function_rounds_them() -> None:
    for fn in (lambda b, h, i, j: (i / 3 - j / 3).abs() < 1.0, lambda b, h, i, j: i * 0.1 <= j * 0.1 + 0.3):
        mask = ch.MaskFunction(fn)
        x = torch.randn(1, 1, 200, 4, generator=torch.Generator().manual_seed(0))
        one, right = (ch.attention(x, x, x, mask=mask, backend=backend) for backend in ("auto", "reference"))
        torch.testing.assert_close(one, right)


def test_nan_ids_equal_nothing() -> None:
    ids = torch.full((200,), torch.nan)
    ids[95:105] = 1.0
    mask = ch.MaskFunction(lambda b, h, i, j: ids[i] == ids[j])
    x = torch.randn(1, 1, 200, 4, generator=torch.Generator().manual_seed(0))
    one, right = (ch.attention(x, x, x, mask=mask, backend=backend) for backend in ("auto", "reference"))
    torch.testing.assert_close(one, right)


def test_a_predicate_may_say_that_it_has_no_gradient() -> None:
    assert _traced(torch.no_grad()(lambda b, h, i, j: i >= j)) is not None
