"""Norm-weighted contributions: how much a key adds to a query's output, its weight times its projected value's norm."""

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
    """The norm of each value after the output projection, for each query head.

    ``|| Wo_h v_j ||``, with ``v_j`` as the layer computed it, its bias included.

    Args:
        points: the ``Points`` of one layer, from ``ch.trace``.
        projection: the attention module, its output projection, or the projection's weight
            ``[embed_dim, heads * value_dim]``.

    Returns:
        ``[batch, heads, k_len]``.

    Raises:
        UnsupportedError: the module has no output projection under a recognised name.
        ShapeError: the projection's width is not ``heads * value_dim``.

    Cost: ``k_len * heads * value_dim * embed_dim`` operations, one head at a time.

    Paper: Kobayashi et al. 2020, "Attention is not only a weight: analyzing transformers with vector norms", section 3.
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
        projections = [
            getattr(projection, name) for name in _NAMES if isinstance(getattr(projection, name, None), nn.Module)
        ]
        layer = projections[0] if projections else projection
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 2:
            # GPT-2's Conv1D stores its weight transposed.
            return weight.T if type(layer).__name__.endswith("Conv1D") else weight
    raise UnsupportedError.about(
        "contributions",
        "projection",
        must="be the projection that mixes heads, or a module that has it",
        then="Pass its weight.",
        got=type(projection).__name__,
    )


def contributions(
    points: Points, projection: Projection, queries: int | Sequence[int]
) -> Float[Tensor, "batch heads n k_len"]:
    """How much each key adds to the output of chosen queries: its weight times the norm of its projected value.

    ``p_ij || Wo_h v_j ||``, for each head separately.

    Args:
        points: the ``Points`` of one layer, from ``ch.trace``.
        projection: the attention module, its output projection, or the projection's weight
            ``[embed_dim, heads * value_dim]``.
        queries: index of one query within the call, or ``n`` of them.

    Returns:
        ``[batch, heads, n, k_len]``.

    Raises:
        UnsupportedError: the module has no output projection under a recognised name.
        ShapeError: there is no such query, or the projection's width is not ``heads * value_dim``.

    Cost: the weights of ``n`` rows and ``value_norms``; memory ``n * k_len`` per head.

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

    ``(sum_i p_ij) || Wo_h v_j ||``, for each head separately; queries at padding do not count.

    Args:
        points: the ``Points`` of one layer, from ``ch.trace``.
        projection: the attention module, its output projection, or the projection's weight
            ``[embed_dim, heads * value_dim]``.

    Returns:
        ``[batch, heads, k_len]``.

    Raises:
        UnsupportedError: the module has no output projection under a recognised name.
        ShapeError: the projection's width is not ``heads * value_dim``.

    Cost: one pass for the column sums, and ``value_norms``; memory is linear in the length.

    Paper: Kobayashi et al. 2020, "Attention is not only a weight: analyzing transformers with vector norms", section 3.
    """
    check_points("received_contributions", "points", points)
    problem = points.padded
    # In a batch that was not packed, padding has queries too; they must not count.
    real = points.real.to(problem.work_dtype)[:, None, None]
    sums = run("contributions", _narrow(problem), Want(row_weights=real)).row_weights
    assert sums is not None
    return sums[:, :, 0] * _norms(problem, projection)


def _narrow(problem: Problem) -> Problem:
    """The problem with values of one channel, enough to compute weights."""
    return replace(problem, value=problem.value[..., :1], dropout=0.0)
