"""One layer's attention as a page carries it: queries and keys in as few bits as its weights allow, and what the
library says of each row, so that a browser computes any weight again as ``exp(score - lse)``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from clearhead.dispatch import run
from clearhead.errors import UnsupportedError
from clearhead.inspector.arrays import Floats, Rows, pack, pack_part
from clearhead.masks.base import Mask
from clearhead.observe.points import Points
from clearhead.observe.taxonomy import head_scores
from clearhead.problem import Problem
from clearhead.scores import Alibi, RelativeBias, ScoreRule, SoftCap
from clearhead.statistics import Observation, Want

__all__ = ["Texts", "layer_of"]

FUNCTION: Final = "view"

#: A weight on the page is at most this far from the library's.
_ERROR: Final = 9e-5
#: How many of a row's largest weights are checked one by one, of short rows all; the others are bounded.
_CHECKED: Final = 16
_SHORT: Final = 512
_OVERVIEW: Final = 512
_THUMB: Final = 32
#: Scores that no rule of the page's gives are carried in full up to so many.
_MOST_SCORES: Final = 2**20
_MOST_PLACES: Final = 2**26
_ROWS: Final = 512
#: Score rules that the page applies itself.
_KNOWN: Final = (SoftCap, Alibi, RelativeBias)
_TRIES: Final = 4
#: What float32 scores of ordinary size leave of a weight's exactness.
_FLOAT32: Final = 1e-6


@dataclass
class Texts:
    """Lists of token texts and masks, each kept once and named by its place."""

    texts: list[list[str]]
    masks: list[dict[str, Any]]

    def place(self, texts: list[str]) -> int:
        if texts not in self.texts:
            self.texts.append(texts)
        return self.texts.index(texts)

    def mask(self, mask: dict[str, Any]) -> int:
        if mask not in self.masks:
            self.masks.append(mask)
        return self.masks.index(mask)


def layer_of(points: Points, batch: int, heads: Sequence[int], shared: Texts) -> dict[str, Any]:
    """The layer's object of the schema, for the chosen heads of one sequence."""
    problem = points.padded
    side = -(-max(problem.q_len, problem.k_len) // _OVERVIEW)
    seen = _observed(problem, side)
    kinds = _kinds(points, batch)
    group = problem.num_heads // problem.num_kv_heads
    key_heads = sorted({head // group for head in heads})
    keys: list[dict[str, Any]] = []
    records: list[dict[str, Any]] = []
    for place, key_head in enumerate(key_heads):
        own = [head for head in heads if head // group == key_head]
        fitted = _fitted(_Head(problem, seen, batch), key_head, own)
        keys.append(fitted.key.packed())
        for head, query, lse, error in zip(own, fitted.queries, fitted.lse, fitted.errors, strict=True):
            record = {"head": head, "key": place, "query": query.packed(), "lse": pack(lse, "f32"), "error": error}
            record |= _rules(problem, batch, head)
            record["mask"] = None if problem.mask is None else shared.mask(_mask(problem, problem.mask, batch, head))
            record["scores"] = _scores(seen, kinds, batch, head)
            records.append(record | _statistics(seen, side, batch, head))
    return {
        "name": points.layer, "first": problem.query_offset, "q_len": problem.q_len, "k_len": problem.k_len,
        "head_dim": problem.head_dim, "scale": problem.scale, "num_heads": problem.num_heads, "keys": keys,
        "says": [*([] if problem.mask is None else [repr(problem.mask)]), *map(repr, problem.scores)],
        "heads": sorted(records, key=lambda record: int(record["head"])),
    }  # fmt: skip


def _observed(problem: Problem, side: int) -> Observation:
    """What the library says of every row, every column and every block of ``side`` by ``side``."""
    want = Want(
        lse=True, entropy=True, distance=True, received=True, sink=1, heatmap=side,
        top_k=problem.k_len if problem.k_len <= _SHORT else _CHECKED,
    )  # fmt: skip
    with torch.no_grad():
        return run(FUNCTION, problem, want)


def _kinds(points: Points, batch: int) -> dict[str, Tensor]:
    """The kind of each head by ``head_scores``; nothing where queries and keys are not the same tokens."""
    problem = points.padded
    if problem.q_len != problem.k_len or problem.query_offset != 0:
        return {}
    with torch.no_grad():
        found = head_scores(points)
    return {name: getattr(found, name)[batch] for name in ("previous", "following", "same")}


def _scores(seen: Observation, kinds: dict[str, Tensor], batch: int, head: int) -> dict[str, float]:
    """One number each that a head is known by, means over its queries."""
    means = {"entropy": seen.entropy, "distance": seen.distance, "first": seen.sink}
    scores = {name: value[batch, head].double().mean() for name, value in means.items() if value is not None}
    scores |= {name: value[head].double() for name, value in kinds.items()}
    return {name: float(torch.nan_to_num(value)) for name, value in scores.items()}


def _statistics(seen: Observation, side: int, batch: int, head: int) -> dict[str, Any]:
    def numbers(tensor: Tensor | None) -> Floats:
        assert tensor is not None
        return _array(tensor[batch, head])

    cells = torch.from_numpy(np.nan_to_num(numbers(seen.heatmap_max)))
    pool = -(-max(cells.shape) // _THUMB)
    thumb = torch.nn.functional.max_pool2d(cells[None, None], pool, ceil_mode=True)[0, 0]
    found = {"thumb": {"side": side * pool, "cells": _roots(thumb)}}
    if side == 1:
        return found
    return found | {
        "entropy": pack_part(numbers(seen.entropy)), "distance": pack_part(numbers(seen.distance)),
        "first": pack_part(numbers(seen.sink)), "received": pack_part(numbers(seen.received)),
        "overview": {"side": side, "cells": _roots(cells)},
    }  # fmt: skip


def _roots(weights: Tensor) -> dict[str, Any]:
    """Weights for the eye: square roots in 255 steps, which keep small ones apart."""
    return pack(np.rint(np.sqrt(weights.clamp(0, 1).numpy()) * 255), "u8")


def _array(tensor: Tensor) -> Floats:
    return tensor.detach().to("cpu", torch.float64).numpy()


@dataclass
class _Head:
    """The heads of one sequence, and how far what a page carries of them is from the library."""

    problem: Problem
    seen: Observation
    batch: int

    def top(self, head: int) -> tuple[Floats, Tensor]:
        """The largest weights of each row, and where they are."""
        weights, places = self.seen.top_weights, self.seen.top_indices
        assert weights is not None
        assert places is not None
        return np.nan_to_num(_array(weights[self.batch, head])), places[self.batch, head].cpu()

    def lse(self, head: int) -> Floats:
        """The library's log-sum-exp of each row."""
        assert self.seen.lse is not None
        return _array(self.seen.lse[self.batch, head])

    def fit(self, head: int, query: Floats, key: Floats) -> tuple[Floats, dict[str, float]]:
        """Each row's log-sum-exp as the page's own rounded scores have it; and how far the page's weights and scores
        are from the library's.

        A row's largest weights are computed as the browser does it. Any other is below the last of these, and its
        score is off by at most ``|dq| |k| + |q'| |dk|``, times the scale.
        """
        if _carried_in_full(self.problem):
            return self.lse(head), {"weight": _FLOAT32, "score": 0.0}
        top, places = self.top(head)
        exact = self._exact(head)
        lse, largest, score = self.lse(head), 0.0, 0.0
        rest = self._rest(top, exact, (query, key))
        for start in range(0, top.shape[0], _ROWS):
            rows = slice(start, start + _ROWS)
            scores = self._scores(head, query[rows], key, rows, places[rows])
            truth = self._scores(head, exact[0][rows], exact[1], rows, places[rows])
            off = np.where(top[rows] > 0, scores - truth, 0.0)
            score = max(score, float(np.abs(off).max(initial=0.0)))
            # Roundings of the other keys' scores, each of little weight, leave the sum where it is.
            grown = np.where(top[rows] > 0, top[rows] * np.expm1(np.clip(off, -1.0, 1.0)), 0.0).sum(axis=1)
            lse[rows] = (lse[rows] + np.log1p(grown)).astype(np.float32)
            weights = np.exp(np.where(top[rows] > 0, scores - lse[rows, None], -np.inf))
            largest = max(largest, float(np.abs(weights - top[rows]).max(initial=0.0)))
        return lse, {"weight": max(largest, rest), "score": score}

    def _exact(self, head: int) -> tuple[Floats, Floats]:
        group = self.problem.num_heads // self.problem.num_kv_heads
        return _array(self.problem.query[self.batch, head]), _array(self.problem.key[self.batch, head // group])

    def _rest(self, top: Floats, exact: tuple[Floats, Floats], near: tuple[Floats, Floats]) -> float:
        """A bound for the weights that are not checked one by one."""
        if top.shape[1] >= self.problem.k_len:
            return 0.0
        # Six deviations of a sum of independent roundings: one of head_dim terms is as good as normal.
        deviation = 6 / np.sqrt(exact[0].shape[1])
        off = _norms(near[0] - exact[0]) * _norms(exact[1]).max() + _norms(near[0]) * _norms(near[1] - exact[1]).max()
        return float((top[:, -1] * np.expm1(np.minimum(abs(self.problem.scale) * deviation * off, 1.0))).max(initial=0))

    def _scores(self, head: int, query: Floats, key: Floats, rows: slice, places: Tensor) -> Floats:
        """Scores after rules at some places of some rows."""
        scores = np.einsum("qd,qkd->qk", query, key[places.numpy()]) * self.problem.scale
        tensor = torch.from_numpy(scores)[None, None]
        first = self.problem.query_offset + rows.start
        q_pos = torch.arange(first, first + scores.shape[0])[:, None]
        for rule in self.problem.elementwise:
            place = (torch.tensor(self.batch), torch.tensor(head), q_pos, places)
            tensor = rule.mapped(Tensor.cpu).apply(tensor, *place)
        return _array(tensor[0, 0])


def _norms(rows: Floats) -> Floats:
    found: Floats = np.linalg.norm(rows, axis=1)
    return found


@dataclass
class _Fitted:
    """A key head with its query heads, as the page carries them."""

    key: Rows
    queries: list[Rows]
    lse: list[Floats]
    errors: list[dict[str, float]]

    @property
    def error(self) -> float:
        return max(error["weight"] for error in self.errors)


def _fitted(one: _Head, key_head: int, heads: Sequence[int]) -> _Fitted:
    """A key head and its query heads, rounded so that no weight is off by more than the limit.

    A row's numbers are rounded the finer the more weight it gives, or is given, at most.
    """
    key = _array(one.problem.key[one.batch, key_head])
    queries = [_array(one.problem.query[one.batch, head]) for head in heads]
    exact = Rows.exactly(key), [Rows.exactly(query) for query in queries]
    if not all(np.isfinite(part).all() for part in (key, *queries)):
        return _Fitted(*exact, [one.lse(head) for head in heads], [{"weight": 0.0, "score": 0.0} for _ in heads])
    given, received = _needs(one, heads, queries, key)
    part = _ERROR / max(abs(one.problem.scale), 1e-30)
    for _ in range(_TRIES):
        near = Rows.of(key, part / received)
        rows = [Rows.of(query, part / most) for query, most in zip(queries, given, strict=True)]
        found = _measured(one, heads, near, rows)
        # The first try tells how far the second may go: errors grow with the steps.
        part *= min(4.0, 0.95 * _ERROR / max(found.error, 1e-12))
        if _ERROR / 2 <= found.error <= _ERROR:
            break
    return found if found.error <= _ERROR else _measured(one, heads, *exact)


def _measured(one: _Head, heads: Sequence[int], key: Rows, queries: list[Rows]) -> _Fitted:
    near = key.values
    found = [one.fit(head, query.values, near) for head, query in zip(heads, queries, strict=True)]
    return _Fitted(key, queries, [lse for lse, _ in found], [error for _, error in found])


def _needs(one: _Head, heads: Sequence[int], queries: Sequence[Floats], key: Floats) -> tuple[list[Floats], Floats]:
    """How far a weight moves at most with a rounding of each query, by head, and of each key: an error of a score
    moves a weight by ``p (1 - p)`` times it, and is itself as large as the row on the other side is long."""
    given, received = [], torch.full((key.shape[0],), 1e-6, dtype=torch.float64)
    keys = _norms(key)
    for head, query in zip(heads, queries, strict=True):
        weights, places = one.top(head)
        moved = np.maximum(weights * (1 - weights), 1e-4)
        given.append(np.maximum((moved * keys[places.numpy()]).max(axis=1), 1e-6))
        moved = moved * _norms(query)[:, None]
        # Keys beyond a row's largest weights are given at most the last of these.
        received = received.clamp(min=float(moved[:, -1].max()) if moved.shape[1] < key.shape[0] else 0.0)
        received = received.scatter_reduce(0, places.flatten(), torch.from_numpy(moved).flatten(), "amax")
    return given, received.numpy()


def _carried_in_full(problem: Problem) -> bool:
    """Whether scores are carried in full, because of a rule that the page does not know."""
    return not all(type(rule) in _KNOWN for rule in problem.elementwise)


def _rules(problem: Problem, batch: int, head: int) -> dict[str, Any]:
    """The score rules as the page applies them; scores in full where it does not know one."""
    if _carried_in_full(problem):
        return {"rules": [], "table": pack(_scores_in_full(problem, batch, head), "f32")}
    rules: list[dict[str, Any]] = []
    for rule in problem.elementwise:
        if isinstance(rule, SoftCap):
            rules.append({"kind": "softcap", "cap": rule.cap})
        else:
            rules.append({"kind": "relative", "bias": pack(_by_distance(rule, problem, head), "f32")})
    return {"rules": rules}


def _by_distance(rule: ScoreRule, problem: Problem, head: int) -> Floats:
    """What a rule adds at each ``q_pos - k_pos``, from the smallest that the call has to the largest."""
    low = problem.query_offset - problem.k_len + 1
    distance = torch.arange(low, problem.query_offset + problem.q_len, device=problem.query.device)
    zeros = torch.zeros(len(distance), dtype=torch.float64, device=distance.device)
    at = torch.zeros_like(distance)
    return _array(rule.apply(zeros, at, at + head, distance, at))


def _scores_in_full(problem: Problem, batch: int, head: int) -> Floats:
    """Scores of one head after all rules."""
    if problem.q_len * problem.k_len > _MOST_SCORES:
        names = ", ".join(type(rule).__name__ for rule in problem.elementwise)
        raise UnsupportedError.about(
            FUNCTION, "scores", must=f"be Alibi, RelativeBias, SoftCap or Sink beyond {_MOST_SCORES:,} scores a head",
            got=f"{names} on {problem.q_len:,} x {problem.k_len:,}", then="View fewer tokens.",
        )  # fmt: skip
    group = problem.num_heads // problem.num_kv_heads
    query = problem.query[batch, head].to(problem.work_dtype)
    key = problem.key[batch, head // group].to(problem.work_dtype)
    scores = (query @ key.T * problem.scale)[None, None]
    index = (
        torch.tensor([[[[batch]]]], device=query.device), torch.tensor([[[[head]]]], device=query.device),
        *problem.indices()[2:],
    )  # fmt: skip
    with torch.no_grad():
        for each in problem.elementwise:
            scores = each.apply(scores, *index)
    return _array(scores[0, 0])


def _mask(problem: Problem, mask: Mask, batch: int, head: int) -> dict[str, Any]:
    """Each query's runs of keys; a table of bits where its keys are no runs."""
    _, _, q_pos, k_pos = problem.indices()
    at = torch.full((1, 1, 1, 1), batch, device=q_pos.device), torch.full((1, 1, 1, 1), head, device=q_pos.device)
    runs = mask.intervals(*at, q_pos, problem.k_len)
    if runs is not None:
        start, stop = (
            _array(part[0, 0].expand(problem.q_len, -1)).astype(np.int32) for part in (runs.start, runs.stop)
        )
        return {"kind": "runs", "start": pack(start, "i32"), "stop": pack(np.maximum(start, stop), "i32")}
    if problem.q_len * problem.k_len > _MOST_PLACES:
        raise UnsupportedError.about(
            FUNCTION, "mask", must=f"have keys in runs beyond {_MOST_PLACES:,} places",
            got=f"{mask!r} on {problem.q_len:,} x {problem.k_len:,}"[:200], then="View fewer tokens.",
        )  # fmt: skip
    allowed = mask.allows(*at, q_pos, k_pos).expand(1, 1, problem.q_len, problem.k_len)[0, 0].cpu().numpy()
    return {"kind": "table", "bits": pack(np.packbits(allowed, axis=1, bitorder="little"), "u8")}
