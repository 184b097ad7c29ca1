"""Masks that are neither bands nor intervals become a table for the CPU kernels: its evaluation, and skipped tiles."""

from __future__ import annotations

import pytest
from torch import Tensor

import clearhead as ch
from clearhead.backends import native
from clearhead.masks import parts
from tests.agreement import compare, needs_native
from tests.problems import tensors

pytestmark = needs_native


@pytest.mark.parametrize("strip", [1, 7 * 71, 2**20])
def test_mask_function_is_evaluated_in_strips(strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "STRIP", strip)
    rows: list[int] = []

    def sparse(batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        rows.append(max(q_pos.shape[2], 1) * k_pos.shape[3])
        return (q_pos * 7 + k_pos * 13 + head) % 5 > 1

    inputs = tensors(q_len=61, k_len=71)
    compare("native", inputs, mask=ch.MaskFunction(sparse), query_offset=3)
    if strip == 1:
        assert 71 in rows  # a row at a time


@pytest.mark.parametrize("by_head", [False, True])
def test_one_place_shows_whether_heads_differ(by_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same table for all heads counts once against the limit."""
    monkeypatch.setattr(native, "MAX_TABLE_ENTRIES", 13 * 13)
    mask = ch.MaskFunction(lambda b, h, i, j: ((i * 7 + j * 13) % 5 > 1) | ((h if by_head else 0) == 1))
    query, key, value = tensors()
    reasons = ch.explain_dispatch(query, key, value, mask=mask)
    assert ("would need a table of" in str(reasons)) == by_head


@pytest.mark.parametrize("before", [0, 5, 8, 31])
@pytest.mark.parametrize("start", [0, 3, 64])
def test_empty_intervals_of_a_table_are_skipped(before: int, start: int) -> None:
    """Eight places at a time, and the last few one by one, from both ends and at any place."""
    inputs = tensors(q_len=130, k_len=203)
    window = ch.Window(before).dense(130, 203, query_offset=start)
    compare("native", inputs, mask=ch.Dense(window), query_offset=start)
    compare("native", inputs, mask=ch.Dense(window.mT.contiguous().mT), query_offset=start)
