"""Attention weights along diagonals, without the ``q_len * k_len`` matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from clearhead.dispatch import run
from clearhead.problem import Problem
from clearhead.shapes import Float, Int
from clearhead.statistics import Want

__all__ = ["band", "column"]


def band(
    problem: Problem, distances: Sequence[int], lse: Float[Tensor, "batch heads q_len"] | None = None
) -> tuple[Float[Tensor, "batch heads q_len n"], Float[Tensor, "q_len n"]]:
    """The weight of the key at each distance before the query; a negative distance is a key after the query.

    ``p[i, i - d] = exp(s[i, i - d] - lse[i])``, with scores after rules and mask. Without ``lse`` it is computed.

    Returns:
        Weights ``[batch, heads, q_len, n]``, 0 where there is no such key; and bool ``[q_len, n]``, where there is one.

    Cost: one pass for ``lse``, and ``q_len * n`` dot products; memory is linear in the length.
    """
    problem = replace(problem, dropout=0.0)
    lse, (_, _, q_pos, _) = _lse(problem) if lse is None else lse, problem.indices()
    group = problem.num_heads // problem.num_kv_heads
    query = problem.query.to(problem.work_dtype)
    key = problem.key.to(problem.work_dtype).repeat_interleave(group, dim=1)
    columns, exists = [], []
    for distance in distances:
        wanted = q_pos - distance
        k_pos = wanted.clamp(0, problem.k_len - 1)
        score = (query * key[:, :, k_pos[0, 0, :, 0]]).sum(dim=-1, keepdim=True)
        allowed = wanted == k_pos
        exists.append(allowed[0, 0])
        columns.append(_weights(problem, score, lse, k_pos, allowed))
    return torch.cat(columns, dim=-1), torch.cat(exists, dim=-1)


def column(problem: Problem, places: Int[Tensor, " batch"]) -> Float[Tensor, "batch heads q_len"]:
    """The weight that every query gives to one key of its sequence, at index ``places[batch]``.

    Cost: one pass for ``lse``, and one dot product per query; memory is linear in the length.
    """
    problem = replace(problem, dropout=0.0)
    lse = _lse(problem)
    group = problem.num_heads // problem.num_kv_heads
    k_pos = places.view(-1, 1, 1, 1)
    key = problem.key.take_along_dim(k_pos, dim=2).to(problem.work_dtype).repeat_interleave(group, dim=1)
    score = (problem.query.to(problem.work_dtype) * key).sum(dim=-1, keepdim=True)
    return _weights(problem, score, lse, k_pos, torch.ones_like(score, dtype=torch.bool))[..., 0]


def _lse(problem: Problem) -> Float[Tensor, "batch heads q_len"]:
    lse = run("band", replace(problem, value=problem.value[..., :1]), Want(lse=True)).lse
    assert lse is not None
    return lse


def _weights(problem: Problem, score: Tensor, lse: Tensor, k_pos: Tensor, allowed: Tensor) -> Tensor:
    """``exp(score - lse)`` after scale, mask and rules, for one key per query."""
    batch, head, q_pos, _ = problem.indices()
    if problem.mask is not None:
        allowed = allowed & problem.mask.allows(batch, head, q_pos, k_pos)
    # Rules never see a masked score, as in the formula.
    score = (score * problem.scale).masked_fill(~allowed, 0.0)
    for rule in problem.elementwise:
        score = rule.apply(score, batch, head, q_pos, k_pos)
    return torch.exp(score - lse[..., None]).masked_fill(~allowed, 0.0)
