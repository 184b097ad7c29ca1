"""Queries and keys in as few bits as weights allow, so that a browser computes any weight as ``exp(score - lse)``.

Short calls are rounded to so many levels, and what weights are off by then is carried for each place: most of it is 0.
Long calls, whose places would be too many, are rounded so finely that no weight is off by more than the limit, but for
a few large ones of each row, which are named with what they are off by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead.inspector.arrays import Floats, Rows, pack
from clearhead.inspector.carried import allowed_in, array_of, in_full, scores_in_full
from clearhead.problem import Problem
from clearhead.statistics import Observation

__all__ = ["Carried", "Fitted", "Head", "checked", "fitted"]

#: A weight on the page is at most this far from the library's.
_ERROR: Final = 9e-5
#: A call of at most so many queries and keys is short.
_SHORT: Final = 512
#: How many of a long row's largest weights are checked one by one; the others are bounded.
_CHECKED: Final = 64
#: A weight ``p`` moves by ``p (1 - p)`` times what its score is off by; where that is more than this, it is put right
#: afterwards instead of asking for finer steps.
_LARGE: Final = 0.05
#: Levels of a number where the page has few of them, and where it has many.
_FINE: Final = 27000
_COARSE: Final = 600
_MANY: Final = 2**20
#: Twice what a corrected weight is off by at most: where no values are carried, and what 16 bits hold.
_UNIT: Final = 1.1e-4
_LEAST_UNIT: Final = 1 / 32000
_ROWS: Final = 512
_TRIES: Final = 7
#: The largest fix that 16 bits hold.
_MOST_FIX: Final = 32767
#: Steps become at most so much finer at once.
_FINER: Final = 0.01
#: ``exp`` of more than this is no number. The least weight that float32 holds: one that reads 0 may be as large.
_MOST_OFF: Final = 700.0
_LEAST: Final = 1.4e-45
#: What float32 leaves of a weight's exactness beside the rounding that is measured.
_FLOAT32: Final = 1e-6


def checked(problem: Problem) -> int:
    """How many of each row's largest weights ``fitted`` asks for; 0 where it asks for whole rows."""
    return 0 if _short(problem) else _CHECKED


def _short(problem: Problem) -> bool:
    return max(problem.q_len, problem.k_len) <= _SHORT


@dataclass
class Named:
    """Some weights of each row by the places of their keys, and what they are off by, in units."""

    rows: NDArray[np.int64]
    places: NDArray[np.int64]
    fix: Floats
    q_len: int

    def added(self, weights: Floats, rows: slice, unit: float) -> Floats:
        """The weights of some rows, put right."""
        mine = (self.rows >= rows.start) & (self.rows < rows.start + weights.shape[0])
        weights[self.rows[mine] - rows.start, self.places[mine]] += self.fix[mine] * unit
        return np.maximum(weights, 0.0)

    def packed(self, unit: float) -> dict[str, Any]:
        """Their object of the schema."""
        kind = "u16" if self.places.max(initial=0) < 2**16 else "i32"
        counts = np.bincount(self.rows, minlength=self.q_len)
        return {
            "counts": pack(counts, "u8"),
            "places": pack(self.places, kind),
            "fix": pack(self.fix, "i16", unit=unit),
        }


@dataclass
class Carried:
    """One query head as the page carries it."""

    query: Rows
    lse: Floats
    error: dict[str, float]
    table: Rows | None = None
    fix: Floats | None = None
    unit: float = _UNIT
    near: Named | None = None
    #: A bound for what the weights are off by that were not checked.
    rest: float = 0.0

    def packed(self) -> dict[str, Any]:
        """Its fields of the schema that do not depend on rules."""
        record = {"query": self.query.packed(), "lse": pack(self.lse, "f32"), "error": self.error}
        if self.near is not None:
            record["near"] = self.near.packed(self.unit)
        return record if self.fix is None else record | {"fix": pack(self.fix, "i16", unit=self.unit)}


@dataclass
class Fitted:
    """A key head with its query heads, as the page carries them."""

    key: Rows
    heads: list[Carried]

    @property
    def error(self) -> float:
        return max(head.error["weight"] for head in self.heads)

    @property
    def rest(self) -> float:
        return max(head.rest for head in self.heads)


@dataclass
class Head:
    """The heads of one sequence: what the library says of them, and what a page's numbers give."""

    problem: Problem
    seen: Observation
    batch: int

    def top(self, head: int) -> tuple[Floats, Tensor]:
        """The largest weights of each row, and where they are."""
        weights, places = self.seen.top_weights, self.seen.top_indices
        assert weights is not None
        assert places is not None
        return np.nan_to_num(array_of(weights[self.batch, head])), places[self.batch, head].cpu()

    def lse(self, head: int) -> Floats:
        """The library's log-sum-exp of each row."""
        assert self.seen.lse is not None
        return array_of(self.seen.lse[self.batch, head])

    def exact(self, head: int) -> tuple[Floats, Floats]:
        """Queries and keys as they are."""
        group = self.problem.num_heads // self.problem.num_kv_heads
        return array_of(self.problem.query[self.batch, head]), array_of(self.problem.key[self.batch, head // group])

    def scores(self, head: int, query: Floats, key: Floats, rows: slice, places: Tensor | None = None) -> Floats:
        """Scores after rules of some rows, at all keys or at some places of each."""
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


def fitted(one: Head, key_head: int, heads: Sequence[int], numbers: int, largest: float) -> Fitted:
    """A key head and its query heads, rounded so that no weight is off by more than the limit.

    ``numbers`` is how many queries and keys the whole page holds, ``largest`` the largest number of the values that
    weights are multiplied with there.
    """
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
    exactly = Rows.exactly(key), [Rows.exactly(query) for query in queries]
    if not finite:
        error = {"weight": 0.0, "score": 0.0}
        whole = zip(heads, exactly[1], tables, strict=True)
        return Fitted(exactly[0], [Carried(query, one.lse(head), error, table) for head, query, table in whole])
    return _long(one, heads, queries, key, tables)


def _table(one: Head, head: int, numbers: int) -> Rows | None:
    """Scores in full, where a rule asks for them."""
    if not in_full(one.problem):
        return None
    scores = scores_in_full(one.problem, one.batch, head)
    if not np.isfinite(scores).all() or not _short(one.problem):
        return Rows.exactly(scores)
    return Rows.in_levels(scores, _COARSE if numbers > _MANY else _FINE)


def _corrected(one: Head, head: int, carried: Carried, key: Rows) -> Carried:
    """The head with what its weights are off by, in units, and the log-sum-exp of its own rounded scores."""
    assert one.seen.rows is not None
    truth = array_of(one.seen.rows[one.batch, head])
    rows = slice(0, truth.shape[0])
    scores = one.scores(head, carried.query.values, key.values, rows) if carried.table is None else carried.table.values
    allowed = allowed_in(one.problem, one.batch, head, rows)
    exact = one.scores(head, *one.exact(head), rows)
    off = np.abs(np.where(allowed & np.isfinite(exact), scores - np.nan_to_num(exact, neginf=0.0), 0.0))
    lse = _own_lse(np.where(allowed, scores, -np.inf), truth, carried.lse)
    carried.lse = np.where(np.isneginf(carried.lse), -np.inf, lse).astype(np.float32).astype(np.float64)
    near = one.weights(head, carried, key, rows)
    carried.fix = _fixes(near, truth, allowed, carried.unit)
    error = np.abs(np.maximum(near + carried.fix * carried.unit, 0.0) - truth).max(initial=0.0)
    carried.error = {"weight": float(error) + _FLOAT32, "score": float(off.max(initial=0.0))}
    return carried


def _fixes(near: Floats, truth: Floats, allowed: NDArray[np.bool_], unit: float) -> Floats:
    """In units, what weights are off by; where that changes a row's sum, a few are rounded the other way."""
    fixes: Floats = np.rint((truth - near) / unit) * allowed
    off = truth - np.maximum(near + fixes * unit, 0.0)
    missing = np.rint(off.sum(axis=1) / unit)
    nearest = np.argsort(np.where(allowed, -np.sign(missing)[:, None] * off, np.inf), axis=1, kind="stable")
    moved = np.arange(off.shape[1]) < np.abs(missing)[:, None]
    np.put_along_axis(fixes, nearest, np.take_along_axis(fixes, nearest, 1) + moved * np.sign(missing)[:, None], 1)
    return fixes


def _own_lse(scores: Floats, weights: Floats, lse: Floats) -> Floats:
    """Log-sum-exp of rounded scores, with what a sink has beside them."""
    most = scores.max(axis=1, initial=-np.inf)
    safe = np.where(np.isneginf(most), 0.0, most)
    with np.errstate(divide="ignore", invalid="ignore"):
        own = safe + np.log(np.exp(scores - safe[:, None]).sum(axis=1))
        beside = 1.0 - weights.sum(axis=1)
        rest = np.where((beside > 1e-5) & np.isfinite(lse), np.log(np.maximum(beside, 1e-30)) + lse, -np.inf)
    found: Floats = np.logaddexp(own, rest)
    return found


def _long(one: Head, heads: Sequence[int], queries: Sequence[Floats], key: Floats, tables: list[Rows | None]) -> Fitted:
    """Rows rounded the finer the more weight they give, or are given, at most."""
    given, received = _needs(one, heads, queries, key)
    part, best = _ERROR / max(abs(one.problem.scale), 1e-30), None
    for _ in range(_TRIES):
        near = Rows.of(key, part / received)
        rows = [Rows.of(query, part / most) for query, most in zip(queries, given, strict=True)]
        found = _measured(one, heads, near, rows, tables)
        if found.error > _ERROR and best is not None:
            break
        if found.error <= _ERROR:
            # One that holds tells how much coarser the next may be: bounds grow with the steps.
            last, best = best is not None or found.rest >= _ERROR / 2, found
            if last:
                break
        wanted = (0.9 if best is not None else 0.6) * _ERROR / max(found.rest, 1e-12)
        part *= min(3.0 if found.error <= _ERROR else 0.6, max(wanted, _FINER))
    if best is not None:
        return best
    return _measured(one, heads, Rows.exactly(key), [Rows.exactly(query) for query in queries], tables)


def _measured(one: Head, heads: Sequence[int], key: Rows, queries: list[Rows], tables: list[Rows | None]) -> Fitted:
    near, made = key.values, []
    for head, query, table in zip(heads, queries, tables, strict=True):
        if table is None:
            made.append(_fit(one, head, query, near))
        else:
            made.append(Carried(query, one.lse(head), {"weight": _FLOAT32, "score": 0.0}, table))
    return Fitted(key, made)


def _fit(one: Head, head: int, rounded: Rows, key: Floats) -> Carried:
    """The head with each row's log-sum-exp as the page's own rounded scores have it, what its large weights are off by,
    and how far its weights and scores are from the library's.

    A row's largest weights are computed as the browser does it. Any other is below the last of these, and its score
    is off by at most ``|dq| |k| + |q'| |dk|``, times the scale.
    """
    query = rounded.values
    named: list[tuple[NDArray[np.int64], NDArray[np.int64], Floats]] = []
    top, places = one.top(head)
    exact = one.exact(head)
    lse, largest, score = one.lse(head), 0.0, 0.0
    rest = _rest(one, top, exact, (query, key))
    for start in range(0, top.shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        scores = one.scores(head, query, key, rows, places[rows])
        truth = one.scores(head, *exact, rows, places[rows])
        off = np.where(top[rows] > 0, scores - truth, 0.0)
        score = max(score, float(np.abs(off).max(initial=0.0)))
        lse[rows] = _moved_lse(lse[rows], top[rows], off).astype(np.float32)
        weights = np.exp(np.where(top[rows] > 0, scores - lse[rows, None], -np.inf))
        # What is measured is what 16 bits keep: a page whose fixes do not fit says so, and finer steps are taken.
        fixes = np.clip(np.rint((top[rows] - weights) / _UNIT), -_MOST_FIX, _MOST_FIX)
        largest = max(largest, float(np.abs(np.maximum(weights + fixes * _UNIT, 0.0) - top[rows]).max(initial=0.0)))
        at, rank = np.nonzero(fixes)
        named.append((at + start, places[rows].numpy()[at, rank], fixes[at, rank]))
    of_row, place, fix = (np.concatenate(parts) for parts in zip(*named, strict=True))
    near = Named(of_row, place, fix, top.shape[0])
    error = {"weight": max(largest, rest) + _FLOAT32, "score": score}
    return Carried(rounded, lse, error, near=near, rest=rest)


def _moved_lse(lse: Floats, top: Floats, off: Floats) -> Floats:
    """Log-sum-exp of rows whose largest weights ``top`` had scores that are off by ``off`` now.

    Roundings of the other keys' scores, each of little weight, leave their sum where it is.
    """
    with np.errstate(divide="ignore"):
        logs = np.where(top > 0, np.log(top) + off, -np.inf)
        others = np.log(np.maximum(1.0 - top.sum(axis=1), 0.0))
    moved: Floats = np.logaddexp(np.logaddexp.reduce(logs, axis=1), others)
    return np.where(np.isneginf(lse), lse, lse + moved)


def _rest(one: Head, top: Floats, exact: tuple[Floats, Floats], near: tuple[Floats, Floats]) -> float:
    """A bound for the weights that are not checked one by one."""
    if top.shape[1] >= one.problem.k_len:
        return 0.0
    # Six deviations of a sum of independent roundings: one of head_dim terms is as good as normal.
    deviation = 6 / np.sqrt(exact[0].shape[1])
    off = _norms(near[0] - exact[0]) * _norms(exact[1]).max() + _norms(near[0]) * _norms(near[1] - exact[1]).max()
    grown = np.expm1(np.minimum(abs(one.problem.scale) * deviation * off, _MOST_OFF))
    return float((np.maximum(top[:, -1], _LEAST) * grown).max(initial=0))


def _needs(one: Head, heads: Sequence[int], queries: Sequence[Floats], key: Floats) -> tuple[list[Floats], Floats]:
    """How far a weight moves at most with a rounding of each query, by head, and of each key: an error of a score
    moves a weight by ``p (1 - p)`` times it, and is itself as large as the row on the other side is long."""
    given, received = [], torch.full((key.shape[0],), 1e-6, dtype=torch.float64)
    keys = _norms(key)
    for head, query in zip(heads, queries, strict=True):
        weights, places = one.top(head)
        moved = np.clip(weights * (1 - weights), 1e-4, _LARGE)
        given.append(np.maximum((moved * keys[places.numpy()]).max(axis=1), 1e-6))
        moved = moved * _norms(query)[:, None]
        # Keys beyond a row's largest weights are given at most the last of these.
        received = received.clamp(min=float(moved[:, -1].max()) if moved.shape[1] < key.shape[0] else 0.0)
        received = received.scatter_reduce(0, places.flatten(), torch.from_numpy(moved).flatten(), "amax")
    return given, received.numpy()


def _norms(rows: Floats) -> Floats:
    found: Floats = np.linalg.norm(rows, axis=1)
    return found
