"""Covering arrays: few of the combinations of several options, with every pair of options among them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations


def covering(rows: Sequence[Sequence[Hashable]], strength: int = 2) -> list[int]:
    """Indices of rows that together hold every combination of ``strength`` columns' values which any row holds.

    The choice is greedy and deterministic: each time the first row that adds most combinations. Rows need not form a
    full product, so pairs that exclude each other are never asked for.

    Args:
        rows: combinations of options, a column an option; all of one length.
        strength: columns to combine: 2 for pairs. Rows of fewer columns are all chosen unless they repeat.

    >>> rows = [(a, b, c) for a in "xy" for b in "xy" for c in "xy"]
    >>> [rows[index] for index in covering(rows)]
    [('x', 'x', 'x'), ('x', 'y', 'y'), ('y', 'x', 'y'), ('y', 'y', 'x')]
    """
    width = len(rows[0]) if rows else 0
    columns = list(combinations(range(width), min(strength, width)))
    adds = {
        index: {(chosen, *(row[column] for column in chosen)) for chosen in columns} for index, row in enumerate(rows)
    }
    picked, most = [], len(columns)
    while adds:
        # The number that a row adds only falls, so the first row with the most of the last round is still the best.
        best = next((index for index, combined in adds.items() if len(combined) == most), None)
        if best is None:
            most = max(map(len, adds.values()))
            if most == 0:
                break
            continue
        picked.append(best)
        covered = adds.pop(best)
        for combined in adds.values():
            combined -= covered
    return sorted(picked)
