"""Covering arrays contain every pair, in few rows."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest

from tests.covering import covering


def pairs(rows: list[Any], strength: int) -> set[Any]:
    return {
        (columns, *(row[column] for column in columns))
        for row in rows
        for columns in combinations(range(len(row)), strength)
    }


@pytest.mark.parametrize("strength", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(4,), (3, 2), (6, 5, 2), (3, 3, 3, 3), (2,) * 8])
def test_every_combination_is_covered(sizes: tuple[int, ...], strength: int) -> None:
    rows = list(product(*map(range, sizes)))
    chosen = [rows[index] for index in covering(rows, strength)]
    assert pairs(chosen, min(strength, len(sizes))) == pairs(rows, min(strength, len(sizes)))
    assert len(set(chosen)) == len(chosen)


def test_impossible_combinations_are_skipped() -> None:
    rows = [(a, b, c) for a, b, c in product(range(4), repeat=3) if a != b]
    chosen = [rows[index] for index in covering(rows)]
    assert pairs(chosen, 2) == pairs(rows, 2)


def test_pairs_take_few_rows() -> None:
    assert len(covering(list(product(range(3), repeat=4)))) <= 13
    assert len(covering(list(product(range(2), repeat=10)))) <= 12


def test_two_options_take_every_row() -> None:
    assert covering(list(product("ab", "xyz"))) == list(range(6))


def test_nothing_to_cover() -> None:
    assert covering([]) == []
    assert covering([()]) == [0]
