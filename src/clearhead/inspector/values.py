"""Values in a page: their norms, their channels if they are few, and corrections of their weighted sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from clearhead.inspector.arrays import Floats, Rows, pack, pack_part
from clearhead.inspector.carried import array_of
from clearhead.inspector.rounding import Fitted, ShownHeads

__all__ = ["AT_MOST", "largest_of", "norms_of", "outputs_of", "values_of"]

#: By default values are stored if they have at most this many elements.
AT_MOST: Final = 2**19
_LEVELS: Final = 27000
#: Unit of the corrections of sums, twice their largest error, unless the corrections are too large for 16 bits.
_UNIT: Final = 1e-4
_ROWS: Final = 512


def _exact(one: ShownHeads, key_head: int) -> Floats:
    return array_of(one.problem.value[one.batch, key_head])


def largest_of(one: ShownHeads, key_head: int) -> float:
    """The largest absolute value of a key head's values, 0 if one is NaN or infinite."""
    values = np.abs(_exact(one, key_head))
    return float(values.max(initial=0.0)) if np.isfinite(values).all() else 0.0


def norms_of(one: ShownHeads, key_head: int) -> dict[str, Any]:
    """The norm of each key's value."""
    # Unlike a root of a sum of squares, this does not overflow.
    norms: Floats = np.hypot.reduce(_exact(one, key_head), axis=1)
    return pack_part(norms)


def values_of(one: ShownHeads, key_head: int) -> Rows:
    """The values of a key head, quantised if they are finite."""
    values = _exact(one, key_head)
    return Rows.in_levels(values, _LEVELS) if np.isfinite(values).all() else Rows.exactly(values)


def outputs_of(one: ShownHeads, fitted: Fitted, heads: Sequence[int], values: Rows) -> list[dict[str, Any]]:
    """For each query head, the library's output minus the sum of the page's weighted values."""
    return [_rest(one, fitted, place, head, values) for place, head in enumerate(heads)]


def _rest(one: ShownHeads, fitted: Fitted, place: int, head: int, values: Rows) -> dict[str, Any]:
    truth = array_of(one.observation.output[one.batch, head])
    sums = np.empty_like(truth)
    for start in range(0, truth.shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        sums[rows] = np.nan_to_num(one.weights(head, fitted.heads[place], fitted.key, rows)) @ np.nan_to_num(
            values.values
        )
    off = np.where(np.isfinite(truth), np.nan_to_num(truth) - sums, 0.0)
    unit = max(_UNIT, float(np.abs(off).max(initial=0.0)) / 32000)
    return pack(np.rint(off / unit), "i16", unit=unit)
