"""Quantised queries and keys from which a browser computes any weight as ``exp(score - lse)``.

Short calls are quantised to a fixed number of levels, and a correction is stored for each pair of query and key; most
corrections are 0. Long calls are quantised so finely that no weight has an error above the limit, except a few large
weights of each row, whose corrections are stored. A call whose weights cannot be within the limit is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead.errors import UnsupportedError
from clearhead.inspector.arrays import Floats, Rows, pack
from clearhead.inspector.carried import FUNCTION, allowed_in, array_of, in_full, scores_in_full
from clearhead.problem import Problem
from clearhead.statistics import Observation

__all__ = ["Carried", "Fitted", "ShownHeads", "checked", "fitted"]

#: The largest error of a weight on the page, and the error that steps are chosen for.
_LIMIT: Final = 1e-4
_ERROR: Final = 9e-5
#: The largest number of queries and of keys in a short call.
_SHORT: Final = 512
#: How many of a long row's largest weights are checked individually; the errors of the others are bounded.
_CHECKED: Final = 64
#: An error in a score moves its weight ``p`` by ``p (1 - p)`` times the error. A weight with a larger factor is
#: corrected afterwards instead of requiring finer steps.
_LARGE: Final = 0.05
#: Levels of an element in a page with few elements, and in one with many.
_FINE: Final = 27000
_COARSE: Final = 600
_MANY: Final = 2**20
#: Unit of a correction, twice the largest error after it: without values, and the least that 16 bits allow.
_UNIT: Final = 1.1e-4
_LEAST_UNIT: Final = 1 / 32000
_ROWS: Final = 512
_TRIES: Final = 7
#: The largest correction in 16 bits.
_MOST_FIX: Final = 32767
#: The smallest factor of a refinement of steps.
_FINER: Final = 0.01
#: The largest argument of ``exp`` without overflow. The smallest float32: a weight that reads 0 may be this large.
_MOST_OFF: Final = 700.0
_LEAST: Final = 1.4e-45
#: The float32 rounding error of a weight, besides the measured quantisation error.
_FLOAT32: Final = 1e-6
#: Half a unit in the last place of float32, relative.
_ROUNDED: Final = 2.0**-24


def checked(problem: Problem) -> int:
    """How many of each row's largest weights ``fitted`` needs; 0 if it needs whole rows."""
    return 0 if _short(problem) else _CHECKED


def _short(problem: Problem) -> bool:
    return max(problem.q_len, problem.k_len) <= _SHORT


@dataclass
class LargeWeights:
    """Corrections of some weights of each row, in units, with the indices of their keys."""

    rows: NDArray[np.int64]
    places: NDArray[np.int64]
    fix: Floats
    q_len: int

    def added(self, weights: Floats, rows: slice, unit: float) -> Floats:
        """The corrected weights of some rows."""
        mine = (self.rows >= rows.start) & (self.rows < rows.start + weights.shape[0])
        weights[self.rows[mine] - rows.start, self.places[mine]] += self.fix[mine] * unit
        return np.maximum(weights, 0.0)

    def packed(self, unit: float) -> dict[str, Any]:
        """The corrections as an object of the schema."""
        kind = "u16" if self.places.max(initial=0) < 2**16 else "i32"
        counts = np.bincount(self.rows, minlength=self.q_len)
        return {
            "counts": pack(counts, "u8"),
            "places": pack(self.places, kind),
            "fix": pack(self.fix, "i16", unit=unit),
        }


@dataclass
class Carried:
    """One query head as stored in the page."""

    query: Rows
    lse: Floats
    error: dict[str, float]
    table: Rows | None = None
    fix: Floats | None = None
    unit: float = _UNIT
    near: LargeWeights | None = None
    #: A bound for the errors of the weights that were not checked.
    rest: float = 0.0

    def packed(self) -> dict[str, Any]:
        """The head's fields of the schema that do not depend on rules."""
        record = {"query": self.query.packed(), "lse": pack(self.lse, "f32"), "error": self.error}
        if self.near is not None:
            record["near"] = self.near.packed(self.unit)
        return record if self.fix is None else record | {"fix": pack(self.fix, "i16", unit=self.unit)}


@dataclass
class Fitted:
    """A key head with its query heads, as stored in the page."""

    key: Rows
    heads: list[Carried]

    @property
    def error(self) -> float:
        return max(head.error["weight"] for head in self.heads)

    @property
    def rest(self) -> float:
        return max(head.rest for head in self.heads)


@dataclass
class ShownHeads:
    """The heads of one sequence: the library's statistics, and the weights that the page computes."""

    problem: Problem
    observation: Observation
    batch: int

    def top(self, head: int) -> tuple[Floats, Tensor]:
        """The largest weights of each row, and the indices of their keys."""
        weights, places = self.observation.top_weights, self.observation.top_indices
        assert weights is not None
        assert places is not None
        return np.nan_to_num(array_of(weights[self.batch, head])), places[self.batch, head].cpu()

    def lse(self, head: int) -> Floats:
        """The library's log-sum-exp of each row."""
        assert self.observation.lse is not None
        return array_of(self.observation.lse[self.batch, head])

    def exact(self, head: int) -> tuple[Floats, Floats]:
        """Queries and keys before quantisation."""
        group = self.problem.num_heads // self.problem.num_kv_heads
        return array_of(self.problem.query[self.batch, head]), array_of(self.problem.key[self.batch, head // group])

    def scores(self, head: int, query: Floats, key: Floats, rows: slice, places: Tensor | None = None) -> Floats:
        """Scores after rules of some rows, at all keys or at the keys ``places`` of each row."""
        if places is None:
            scores, at = query[rows] @ key.T, torch.arange(key.shape[0])[None]
        else:
            scores, at = np.einsum("qd,qkd->qk", query[rows], key[places.numpy()]), places
        tensor = torch.from_numpy(scores * self.problem.scale)[None, None]
        first = self.problem.query_offset + rows.start
        q_pos = torch.arange(first, first + scores.shape[0])[:, None]
        for rule in self.problem.elementwise:
            place = (torch.tensor(self.batch), torch.tensor(head), q_pos, at)
            tensor = rule.mapped(Tensor.cpu).apply(tensor, *place)
        return array_of(tensor[0, 0])

    def weights(self, head: int, carried: Carried, key: Rows, rows: slice) -> Floats:
        """The page's weights of some rows, as the browser computes them."""
        scores = (
            self.scores(head, carried.query.values, key.values, rows)
            if carried.table is None
            else carried.table.values[rows]
        )
        lse = carried.lse[rows, None]
        allowed = allowed_in(self.problem, self.batch, head, rows) & ~np.isneginf(lse)
        weights = np.exp(np.where(allowed, scores - np.where(np.isneginf(lse), 0.0, lse), -np.inf))
        if carried.near is not None:
            return carried.near.added(weights, rows, carried.unit)
        return weights if carried.fix is None else np.maximum(weights + carried.fix[rows] * carried.unit, 0.0)


def fitted(one: ShownHeads, key_head: int, heads: Sequence[int], numbers: int, largest: float) -> Fitted:
    """A key head and its query heads, quantised so that no weight has an error above the limit.

    Args:
        one: the heads of one sequence.
        key_head: the key head.
        heads: its query heads.
        numbers: the number of elements in all queries and keys of the page.
        largest: the largest absolute value of the values that the page multiplies with weights.

    Raises:
        UnsupportedError: scores are so large that a weight would have an error above the limit.
    """
    made = _fitted(one, key_head, heads, numbers, largest)
    for head, carried in zip(heads, made.heads, strict=True):
        if not (carried.error["weight"] <= _LIMIT and np.isfinite(carried.error["score"])):
            raise UnsupportedError.about(
                FUNCTION,
                "scores",
                must=f"be small enough for weights within {_LIMIT:g} of the library's",
                got=f"an error of {carried.error['weight']:.2g} in head {head}",
                then="Scale queries, keys or biases down.",
            )
    return made


def _fitted(one: ShownHeads, key_head: int, heads: Sequence[int], numbers: int, largest: float) -> Fitted:
    key = array_of(one.problem.key[one.batch, key_head])
    queries = [array_of(one.problem.query[one.batch, head]) for head in heads]
    finite = all(np.isfinite(part).all() for part in (key, *queries))
    tables = [_table(one, head, numbers) for head in heads]
    if finite and _short(one.problem):
        levels = _COARSE if numbers > _MANY else _FINE
        near, unit = Rows.in_levels(key, levels), max(_UNIT / max(1.0, 2 * largest), _LEAST_UNIT)
        made = [
            _corrected(one, head, Carried(Rows.in_levels(query, levels), one.lse(head), {}, table, unit=unit), near)
            for head, query, table in zip(heads, queries, tables, strict=True)
        ]
        return Fitted(near, made)
    if not finite:
        return _measured(one, heads, Rows.exactly(key), [Rows.exactly(query) for query in queries], tables)
    return _long(one, heads, queries, key, tables)


def _table(one: ShownHeads, head: int, numbers: int) -> Rows | None:
    """All scores, if the page does not apply one of the rules."""
    if not in_full(one.problem):
        return None
    scores = scores_in_full(one.problem, one.batch, head)
    if not np.isfinite(scores).all() or not _short(one.problem):
        return Rows.exactly(scores)
    return Rows.in_levels(scores, _COARSE if numbers > _MANY else _FINE)


def _corrected(one: ShownHeads, head: int, carried: Carried, key: Rows) -> Carried:
    """The head with corrections of its weights, in units, and the log-sum-exp of its quantised scores."""
    assert one.observation.rows is not None
    truth = array_of(one.observation.rows[one.batch, head])
    rows = slice(0, truth.shape[0])
    scores = one.scores(head, carried.query.values, key.values, rows) if carried.table is None else carried.table.values
    allowed = allowed_in(one.problem, one.batch, head, rows)
    exact = one.scores(head, *one.exact(head), rows)
    off = np.abs(np.where(allowed & np.isfinite(exact), scores - np.nan_to_num(exact, neginf=0.0), 0.0))
    lse = _rounded_lse(np.where(allowed, scores, -np.inf), truth, carried.lse)
    carried.lse = np.where(np.isneginf(carried.lse), -np.inf, lse).astype(np.float32).astype(np.float64)
    near = one.weights(head, carried, key, rows)
    carried.fix = np.clip(np.nan_to_num(_fixes(near, truth, allowed, carried.unit)), -_MOST_FIX, _MOST_FIX)
    error = np.abs(np.maximum(near + carried.fix * carried.unit, 0.0) - truth)
    carried.error = {"weight": _largest(error) + _FLOAT32, "score": _largest(off)}
    return carried


def _fixes(near: Floats, truth: Floats, allowed: NDArray[np.bool_], unit: float) -> Floats:
    """Corrections of weights, in units; some are rounded the other way so that each row's sum is unchanged."""
    fixes: Floats = np.rint((truth - near) / unit) * allowed
    off = truth - np.maximum(near + fixes * unit, 0.0)
    missing = np.rint(off.sum(axis=1) / unit)
    nearest = np.argsort(np.where(allowed, -np.sign(missing)[:, None] * off, np.inf), axis=1, kind="stable")
    moved = np.arange(off.shape[1]) < np.abs(missing)[:, None]
    np.put_along_axis(fixes, nearest, np.take_along_axis(fixes, nearest, 1) + moved * np.sign(missing)[:, None], 1)
    return fixes


def _rounded_lse(scores: Floats, weights: Floats, lse: Floats) -> Floats:
    """Log-sum-exp of quantised scores and a sink's logit."""
    most = scores.max(axis=1, initial=-np.inf)
    safe = np.where(np.isneginf(most), 0.0, most)
    with np.errstate(divide="ignore", invalid="ignore"):
        key_sums = safe + np.log(np.exp(scores - safe[:, None]).sum(axis=1))
        beside = 1.0 - weights.sum(axis=1)
        rest = np.where((beside > 1e-5) & np.isfinite(lse), np.log(np.maximum(beside, 1e-30)) + lse, -np.inf)
    combined: Floats = np.logaddexp(key_sums, rest)
    return combined


def _long(
    one: ShownHeads, heads: Sequence[int], queries: Sequence[Floats], key: Floats, tables: list[Rows | None]
) -> Fitted:
    """A long call: rows are quantised more finely the larger the weights that they give or receive."""
    given, received = _needs(one, heads, queries, key)
    part, best = _ERROR / max(abs(one.problem.scale), 1e-30), None
    for _ in range(_TRIES):
        near = Rows.of(key, part / received)
        rows = [Rows.of(query, part / most) for query, most in zip(queries, given, strict=True)]
        candidate = _measured(one, heads, near, rows, tables)
        if candidate.error > _ERROR and best is not None:
            break
        if candidate.error <= _ERROR:
            # A candidate within the limit says how much coarser the next may be: bounds grow with the steps.
            last, best = best is not None or candidate.rest >= _ERROR / 2, candidate
            if last:
                break
        wanted = (0.9 if best is not None else 0.6) * _ERROR / max(candidate.rest, 1e-12)
        part *= min(3.0 if candidate.error <= _ERROR else 0.6, max(wanted, _FINER))
    if best is not None:
        return best
    return _measured(one, heads, Rows.exactly(key), [Rows.exactly(query) for query in queries], tables)


def _measured(
    one: ShownHeads, heads: Sequence[int], key: Rows, queries: list[Rows], tables: list[Rows | None]
) -> Fitted:
    near, made = key.values, []
    for head, query, table in zip(heads, queries, tables, strict=True):
        if _short(one.problem):
            made.append(_unquantised(one, head, Carried(query, one.lse(head), {}, table), key))
        else:
            made.append(_fit(one, head, query, near, table))
    return Fitted(key, made)


def _unquantised(one: ShownHeads, head: int, carried: Carried, key: Rows) -> Carried:
    """The head of a short call with NaN or infinity; rows that are NaN in the library have no error."""
    assert one.observation.rows is not None
    truth = array_of(one.observation.rows[one.batch, head])
    error = np.abs(one.weights(head, carried, key, slice(0, truth.shape[0])) - truth)
    carried.error = {"weight": _largest(error[~np.isnan(truth).any(axis=1)]) + _FLOAT32, "score": 0.0}
    return carried


def _largest(errors: Floats) -> float:
    """The largest error; infinity if one is NaN."""
    largest = float(errors.max(initial=0.0))
    return np.inf if np.isnan(largest) else largest


def _fit(one: ShownHeads, head: int, rounded: Rows, key: Floats, table: Rows | None) -> Carried:
    """The head with the log-sum-exp of its quantised scores, corrections of its large weights, and its errors.

    A row's largest weights are computed as in the browser. Every other weight is below the smallest of these, and the
    error of its score is at most ``|dq| |k| + |q'| |dk|``, times the scale, besides float32's rounding. Rows that are
    NaN in the library have no error.
    """
    query = rounded.values
    named: list[tuple[NDArray[np.int64], NDArray[np.int64], Floats]] = []
    top, places = one.top(head)
    exact = one.exact(head)
    lse, largest, score = one.lse(head), 0.0, 0.0
    sound = ~np.isnan(lse)
    rest = _rest(one, top, exact, (query, key), sound)
    for start in range(0, top.shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        counted = (top[rows] > 0) & sound[rows, None]
        if table is None:
            scores = one.scores(head, query, key, rows, places[rows])
            truth = one.scores(head, *exact, rows, places[rows])
        else:
            scores = truth = np.take_along_axis(table.values[rows], places[rows].numpy(), axis=1)
        off = np.where(counted, scores - truth, 0.0)
        score = max(score, _largest(np.abs(off)))
        lse[rows] = _moved_lse(lse[rows], top[rows], off).astype(np.float32)
        weights = np.exp(np.where(counted, scores - lse[rows, None], -np.inf))
        # Corrections are clipped to 16 bits before the error is measured; if they do not fit, steps are refined.
        wanted = np.nan_to_num(np.rint((top[rows] - weights) / _UNIT)) * sound[rows, None]
        fixes = np.clip(wanted, -_MOST_FIX, _MOST_FIX)
        error = np.abs(np.maximum(weights + fixes * _UNIT, 0.0) - top[rows])
        largest = max(largest, _largest(error[sound[rows]]))
        at, rank = np.nonzero(fixes)
        named.append((at + start, places[rows].numpy()[at, rank], fixes[at, rank]))
    of_row, place, fix = (np.concatenate(parts) for parts in zip(*named, strict=True))
    near = LargeWeights(of_row, place, fix, top.shape[0])
    error = {"weight": max(largest, rest) + _FLOAT32, "score": score}
    return Carried(rounded, lse, error, table, near=near, rest=rest)


def _moved_lse(lse: Floats, top: Floats, off: Floats) -> Floats:
    """Log-sum-exp of rows after the scores of their largest weights ``top`` have changed by ``off``.

    The sum over the other keys, each of small weight, is taken as unchanged.
    """
    with np.errstate(divide="ignore"):
        logs = np.where(top > 0, np.log(top) + off, -np.inf)
        others = np.log(np.maximum(1.0 - top.sum(axis=1), 0.0))
    moved: Floats = np.logaddexp(np.logaddexp.reduce(logs, axis=1), others)
    return np.where(np.isneginf(lse), lse, lse + moved)


def _rest(
    one: ShownHeads,
    top: Floats,
    exact: tuple[Floats, Floats],
    near: tuple[Floats, Floats],
    sound: NDArray[np.bool_],
) -> float:
    """A bound for the errors of the weights that are not checked individually, in rows that are not NaN."""
    if top.shape[1] >= one.problem.k_len:
        return 0.0
    # Six standard deviations of a sum of head_dim independent rounding errors, which is close to normal.
    deviation = 6 / np.sqrt(exact[0].shape[1])
    keys = _norms(exact[1])
    key_norm = keys[np.isfinite(keys)].max(initial=0.0)
    off = _norms(near[0] - exact[0]) * key_norm
    off += _norms(near[0]) * np.nan_to_num(_norms(near[1] - exact[1])).max(initial=0.0)
    # The library rounds scores of float32.
    off += _ROUNDED * _norms(exact[0]) * key_norm
    grown = np.expm1(np.minimum(abs(one.problem.scale) * deviation * off, _MOST_OFF))
    return _largest((np.maximum(top[:, -1], _LEAST) * grown)[sound])


def _needs(
    one: ShownHeads, heads: Sequence[int], queries: Sequence[Floats], key: Floats
) -> tuple[list[Floats], Floats]:
    """The largest change of a weight per unit of rounding error in each query, by head, and in each key.

    An error of a score moves a weight by ``p (1 - p)`` times the error, which is proportional to the norm of the other
    factor, key or query.
    """
    given, received = [], torch.full((key.shape[0],), 1e-6, dtype=torch.float64)
    keys = _norms(key)
    for head, query in zip(heads, queries, strict=True):
        weights, places = one.top(head)
        moved = np.clip(weights * (1 - weights), 1e-4, _LARGE)
        given.append(np.maximum((moved * keys[places.numpy()]).max(axis=1), 1e-6))
        moved = moved * _norms(query)[:, None]
        # Keys outside a row's largest weights receive at most the smallest of these.
        received = received.clamp(min=float(moved[:, -1].max()) if moved.shape[1] < key.shape[0] else 0.0)
        received = received.scatter_reduce(0, places.flatten(), torch.from_numpy(moved).flatten(), "amax")
    return given, received.numpy()


def _norms(rows: Floats) -> Floats:
    norms: Floats = np.linalg.norm(rows, axis=1)
    return norms
