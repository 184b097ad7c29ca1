"""Masks and score rules in a page: masks as intervals or bits, rules by name, or all scores for other rules."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from clearhead.errors import UnsupportedError
from clearhead.inspector.arrays import FUNCTION, Floats, Rows, pack
from clearhead.masks.base import Mask
from clearhead.problem import Problem
from clearhead.scores import Alibi, RelativeBias, ScoreRule, SoftCap

__all__ = ["FUNCTION", "allowed_in", "array_of", "in_full", "mask_of", "rules_of", "scores_in_full"]

#: Score rules that the page's script applies.
_APPLIED_BY_PAGE: Final = (SoftCap, Alibi, RelativeBias)
#: The largest number of scores of a head that a page stores, for rules that its script does not apply.
_MOST_SCORES: Final = 2**20
_MOST_PLACES: Final = 2**26


def array_of(tensor: Tensor) -> Floats:
    """A tensor's elements in float64."""
    return tensor.detach().to("cpu", torch.float64).numpy()


def in_full(problem: Problem) -> bool:
    """Whether the page stores all scores, because its script does not apply one of the rules."""
    return not all(type(rule) in _APPLIED_BY_PAGE for rule in problem.elementwise)


def rules_of(problem: Problem, head: int, scores: Rows | None) -> dict[str, Any]:
    """The score rules for the page's script; or ``scores`` instead, if it does not apply one of them."""
    if scores is not None:
        return {"rules": [], "table": scores.packed()}
    rules: list[dict[str, Any]] = []
    for rule in problem.elementwise:
        if isinstance(rule, SoftCap):
            rules.append({"kind": "softcap", "cap": rule.cap})
        else:
            rules.append({"kind": "relative", "bias": pack(_by_distance(rule, problem, head), "f32")})
    return {"rules": rules}


def _by_distance(rule: ScoreRule, problem: Problem, head: int) -> Floats:
    """The value that a rule adds at each ``q_pos - k_pos``, from the smallest difference to the largest."""
    low = problem.query_offset - problem.k_len + 1
    distance = torch.arange(low, problem.query_offset + problem.q_len, device=problem.query.device)
    zeros = torch.zeros(len(distance), dtype=torch.float64, device=distance.device)
    at = torch.zeros_like(distance)
    return array_of(rule.apply(zeros, at, at + head, distance, at))


def scores_in_full(problem: Problem, batch: int, head: int) -> Floats:
    """Scores of one head after all rules.

    Raises:
        UnsupportedError: there are too many scores for a page.
    """
    if problem.q_len * problem.k_len > _MOST_SCORES:
        names = ", ".join(type(rule).__name__ for rule in problem.elementwise)
        raise UnsupportedError.about(
            FUNCTION,
            "scores",
            must=f"be Alibi, RelativeBias, SoftCap or Sink beyond {_MOST_SCORES:,} scores a head",
            got=f"{names} on {problem.q_len:,} x {problem.k_len:,}",
            then="View fewer tokens.",
        )
    group = problem.num_heads // problem.num_kv_heads
    query = problem.query[batch, head].to(problem.work_dtype)
    key = problem.key[batch, head // group].to(problem.work_dtype)
    scores = (query @ key.T * problem.scale)[None, None]
    at = _at(problem, batch, head)
    with torch.no_grad():
        for each in problem.elementwise:
            scores = each.apply(scores, *at, *problem.indices()[2:])
    return array_of(scores[0, 0])


def mask_of(problem: Problem, mask: Mask, batch: int, head: int) -> dict[str, Any]:
    """The mask as intervals of keys for each query; as a table of bits if it has no intervals."""
    q_pos = problem.indices()[2]
    runs = mask.intervals(*_at(problem, batch, head), q_pos, problem.k_len)
    if runs is not None:
        start, stop = (
            array_of(part[0, 0].expand(problem.q_len, -1)).astype(np.int32) for part in (runs.start, runs.stop)
        )
        return {"kind": "runs", "start": pack(start, "i32"), "stop": pack(np.maximum(start, stop), "i32")}
    if problem.q_len * problem.k_len > _MOST_PLACES:
        raise UnsupportedError.about(
            FUNCTION,
            "mask",
            must=f"have keys in runs beyond {_MOST_PLACES:,} places",
            got=f"{mask!r} on {problem.q_len:,} x {problem.k_len:,}"[:200],
            then="View fewer tokens.",
        )
    allowed = allowed_in(problem, batch, head, slice(0, problem.q_len))
    return {"kind": "table", "bits": pack(np.packbits(allowed, axis=1, bitorder="little"), "u8")}


def allowed_in(problem: Problem, batch: int, head: int, rows: slice) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which keys the mask allows in some rows."""
    q_pos, k_pos = problem.indices()[2:]
    q_pos = q_pos[..., rows, :]
    shape = (1, 1, q_pos.shape[-2], problem.k_len)
    if problem.mask is None:
        return np.ones(shape[2:], dtype=bool)
    allowed: np.ndarray[Any, np.dtype[np.bool_]] = (
        problem.mask.allows(*_at(problem, batch, head), q_pos, k_pos).expand(shape)[0, 0].cpu().numpy()
    )
    return allowed


def _at(problem: Problem, batch: int, head: int) -> tuple[Tensor, Tensor]:
    device = problem.query.device
    return torch.full((1, 1, 1, 1), batch, device=device), torch.full((1, 1, 1, 1), head, device=device)
