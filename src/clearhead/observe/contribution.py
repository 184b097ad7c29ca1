"""Norm-weighted contribution: what a key adds to a query's output, not only how much it is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn

from clearhead.dispatch import run
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.observe.layers import places
from clearhead.observe.points import Points, check_points
from clearhead.problem import Problem
from clearhead.shapes import Float
from clearhead.statistics import Want

__all__ = ["contributions", "received_contributions", "value_norms"]

#: Names that modules give the projection which mixes their heads.
_NAMES: Final = ("output_projection", "out_proj", "o_proj", "c_proj", "dense")

#: The projection that mixes heads: its weight ``[embed_dim, heads * value_dim]``, or a module that has it.
Projection = Tensor | nn.Module


def value_norms(points: Points, projection: Projection) -> Float[Tensor, "batch heads k_len"]:
    """How long each value is once it has been projected to the output, for each query head.

    ``|| Wo_h v_j ||``, with ``v_j`` as the layer computed it, its bias included.

    Args:
        points: of a layer, from ``trace``.
        projection: the attention module, or its last projection, or that one's weight
            ``[embed_dim, heads * value_dim]``.

    Raises:
        UnsupportedError: the module has no projection that is known by name. ShapeError: its width does not fit.

    Cost: ``k_len * heads * value_dim * embed_dim`` operations, one head at a time.
    """
    check_points("value_norms", "points", points)
    return _norms(points.padded, projection)


def _norms(problem: Problem, projection: Projection) -> Float[Tensor, "batch heads k_len"]:
    weight = _weight(projection).detach()
    heads, width = problem.num_heads, problem.value_dim
    if weight.ndim != 2 or weight.shape[1] != heads * width:
        raise ShapeError.about(
            "contributions",
            "projection",
            must=f"have weight [embed_dim, {heads * width}]",
            got=tuple(weight.shape),
            then="It mixes the heads side by side.",
        )
    group, dtype = heads // problem.num_kv_heads, problem.work_dtype
    norms = []
    for head in range(heads):
        part = weight[:, head * width : (head + 1) * width].to(problem.value.device, dtype)
        norms.append(torch.linalg.vector_norm(problem.value[:, head // group].to(dtype) @ part.T, dim=-1))
    return torch.stack(norms, dim=1)


def _weight(projection: Projection) -> Tensor:
    if isinstance(projection, Tensor):
        return projection
    if isinstance(projection, nn.Module):
        held = [getattr(projection, name) for name in _NAMES if isinstance(getattr(projection, name, None), nn.Module)]
        layer = held[0] if held else projection
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 2:
            # GPT-2's layer holds its weight the other way round.
            return weight.T if type(layer).__name__.endswith("Conv1D") else weight
    raise UnsupportedError.about(
        "contributions",
        "projection",
        must="be the projection that mixes heads, or hold it",
        then="Pass its weight.",
        got=type(projection).__name__,
    )


def contributions(
    points: Points, projection: Projection, queries: int | Sequence[int]
) -> Float[Tensor, "batch heads n k_len"]:
    """How much each key adds to the output of some queries: the length of its projected value times its weight.

    ``p_ij || Wo_h v_j ||``, for each head apart.

    Args:
        points: of a layer, from ``trace``.
        projection: as in ``value_norms``.
        queries: rows, counted within the call.

    Returns:
        ``[batch, heads, n, k_len]``.

    Raises:
        ShapeError: no such query; and as in ``value_norms``.

    Cost: the rows' weights and ``value_norms``; memory ``n * k_len`` per head.

    Paper: Kobayashi et al. 2020, "Attention is not only a weight: analyzing transformers with vector norms", section 3.

    >>> import torch, clearhead as ch
    >>> module = ch.nn.MultiHeadAttention(4, num_heads=2)
    >>> with torch.no_grad(), ch.trace(module) as traced:
    ...     output = module(torch.randn(1, 3, 4))
    >>> contributions(traced[0], module, queries=[0, 2]).shape
    torch.Size([1, 2, 2, 3])
    """
    check_points("contributions", "points", points)
    problem = points.padded
    chosen = places("contributions", "queries", queries, problem.q_len, "Rows are counted within the call.")
    norms = _norms(problem, projection)
    if not chosen:
        return norms.new_empty(*norms.shape[:2], 0, norms.shape[2])
    rows = run("contributions", _narrow(problem), Want(rows=chosen)).rows
    assert rows is not None
    return rows * norms[:, :, None]


def received_contributions(points: Points, projection: Projection) -> Float[Tensor, "batch heads k_len"]:
    """How much each key adds to the outputs of all queries together.

    ``(sum_i p_ij) || Wo_h v_j ||``.

    Arguments, errors and paper as in ``contributions``.

    Cost: a pass for ``received`` and ``value_norms``; memory grows with the length.
    """
    check_points("received_contributions", "points", points)
    problem = points.padded
    # Padding asks too, where a batch was not packed; what it asks for is nobody's output.
    real = points.real.to(problem.work_dtype)[:, None, None]
    sums = run("contributions", _narrow(problem), Want(row_weights=real)).row_weights
    assert sums is not None
    return sums[:, :, 0] * _norms(problem, projection)


def _narrow(problem: Problem) -> Problem:
    """The problem for its weights alone."""
    return replace(problem, value=problem.value[..., :1], dropout=0.0)
