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
        tuple(zip(group, values, strict=True))
        for group in combinations(range(len(names)), strength)
        for values in product(*(range(len(options[names[place]])) for place in group))
    }
    rows: list[tuple[int, ...]] = []
    for chosen in sorted(missing, key=lambda chosen: tuple(zip(*chosen, strict=True))):
        if chosen not in missing:
            continue
        best: tuple[int, tuple[int, ...]] = (-1, ())
        for _ in range(_CANDIDATES):
            row = [generator.randrange(len(options[name])) for name in names]
            for place, value in chosen:
                row[place] = value
            gain = len(missing.intersection(combinations(enumerate(row), strength)))
            best = max(best, (gain, tuple(row)))
        rows.append(best[1])
        missing.difference_update(combinations(enumerate(best[1]), strength))
    return [{name: options[name][value] for name, value in zip(names, row, strict=True)} for row in rows]
