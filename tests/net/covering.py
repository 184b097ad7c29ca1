"""Covering arrays: few combinations of options in which every pair, or triple, of values occurs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

__all__ = ["covering"]

#: Number of random candidates for each row.
_CANDIDATES = 10


def covering(options: Mapping[str, Sequence[Any]], strength: int = 2) -> list[dict[str, Any]]:
    """Combinations in which any ``strength`` options take all combinations of values; greedy and deterministic."""
    names, generator = list(options), random.Random(0)
    missing = {
        (group, values)
        for group in combinations(range(len(names)), strength)
        for values in product(*(range(len(options[names[place]])) for place in group))
    }
    rows: list[tuple[int, ...]] = []
    while missing:
        group, values = min(missing)
        best: tuple[int, tuple[int, ...]] = (-1, ())
        for _ in range(_CANDIDATES):
            row = [generator.randrange(len(options[name])) for name in names]
            for place, value in zip(group, values, strict=True):
                row[place] = value
            gain = sum(each in missing for each in _groups(row, strength))
            best = max(best, (gain, tuple(row)))
        rows.append(best[1])
        missing.difference_update(_groups(best[1], strength))
    return [{name: options[name][value] for name, value in zip(names, row, strict=True)} for row in rows]


def _groups(row: Sequence[int], strength: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(group, tuple(row[place] for place in group)) for group in combinations(range(len(row)), strength)]
