"""Attention rollout: attention through all layers at once, without a square."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from clearhead.arguments import number
from clearhead.dispatch import run
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.observe.layers import places
from clearhead.observe.points import Points, check_points
from clearhead.observe.trace import Trace
from clearhead.problem import Problem
from clearhead.shapes import Float
from clearhead.statistics import Want

__all__ = ["rollout"]

#: Tokens that go through the layers together.
_STRIP = 64


def rollout(
    traced: Mapping[str, Points], tokens: int | Sequence[int] | None = None, *, residual: float = 0.5
) -> Float[Tensor, "batch n length"]:
    """How much of each input token reaches an output token, were values all that layers hand on.

    With ``A_l`` the weights of layer ``l``, mean over heads, ``R_l = (residual I + (1 - residual) A_l) R_{l-1}`` and
    ``R_0 = I``; row ``t`` of the last ``R`` is token ``t``'s. It is computed from the top, ``w <- residual w +
    (1 - residual) w A_l`` from ``w`` the unit vector of ``t``, so that no ``R`` is ever held.

    Args:
        traced: a ``Trace`` of the model's self-attention layers, whose last forward pass is taken in the order of its
            calls; with ``keep="all"`` where the model uses a layer several times. Or ``Points`` by name, lowest first.
        tokens: whose rows, by position in the sequence: one, or several (``range(length)`` for all). By default one
            row, the mean over all of a sequence's tokens.
        residual: the share of what goes around attention.

    Returns:
        ``[batch, n, length]``; a sequence that is too short to have a token has a row of zeros. Rows sum to 1, but for
        layers with a ``ch.Sink``.

    Raises:
        UnsupportedError: no layer was traced, or not every call of one.
        ShapeError: layers are not self-attention over one sequence, or there is no such token.

    Cost: for every 64 tokens, or the mean, a pass of ``row_weights`` over each layer; memory grows with the length,
    apart from the result.

    Paper: Abnar and Zuidema 2020, "Quantifying attention flow in transformers", section 3.

    >>> import torch, clearhead as ch
    >>> model = ch.nn.Encoder(8, num_heads=2, num_layers=3).eval()
    >>> with torch.no_grad(), ch.trace(model) as traced:
    ...     output = model(torch.randn(1, 4, 8))
    >>> rollout(traced, tokens=2).shape, rollout(traced).sum().round(decimals=4)
    (torch.Size([1, 1, 4]), tensor(1.))
    """
    layers = _calls(traced)
    if not layers:
        raise UnsupportedError.about(
            "rollout", "traced", must="hold layers", got="none", then="Run the model within `with ch.trace(model)`."
        )
    share = number(
        "rollout",
        "residual",
        residual,
        must="lie from 0 to 1",
        fits=lambda given: 0.0 <= given <= 1.0,
        then="The paper takes 0.5.",
    )
    problems = [_checked(points, layers[0]) for points in layers]
    return torch.cat([_down(problems, start, share) for start in _starts(layers[-1], tokens)], dim=1)


def _calls(traced: Mapping[str, Points]) -> list[Points]:
    """The calls of one forward pass in their order; all of a layer that the model uses several times."""
    if not isinstance(traced, Trace):
        layers = list(traced.values()) if isinstance(traced, Mapping) else [traced]
        for points in layers:
            check_points("rollout", "traced", points)
        return layers
    if missing := traced.incomplete():
        raise UnsupportedError.about(
            "rollout", "traced", must="hold every call of a layer", got=missing[0], then="Trace with keep='all'."
        )
    return [points for _, points in traced.passed()]


def _checked(points: Points, first: Points) -> Problem:
    """A layer's problem, whose values nobody will look at."""
    problem, wanted = points.padded, first.padded
    size = (problem.batch, problem.q_len, problem.k_len, problem.query_offset)
    if size != (wanted.batch, wanted.q_len, wanted.q_len, 0):
        raise ShapeError.about(
            "rollout",
            f"layer {points.layer!r}",
            must="be self-attention over the sequences of the others",
            got=f"batch {problem.batch}, q_len {problem.q_len}, k_len {problem.k_len}",
            then="Trace the layers of one stack: ch.trace(model, layers='encoder.*').",
        )
    return replace(problem, value=problem.value[..., :1], dropout=0.0)


def _starts(points: Points, tokens: int | Sequence[int] | None) -> Iterator[Float[Tensor, "batch one n length"]]:
    """Strips of the rows to begin with."""
    problem, real = points.padded, points.real
    length, dtype = problem.q_len, problem.work_dtype
    if tokens is None:
        share = real.to(dtype) / real.sum(dim=-1, keepdim=True).clamp(min=1)
        yield share[:, None, None]
        return
    chosen = places("rollout", "tokens", tokens, length, "They are positions in the sequence.")
    if not chosen:
        yield torch.zeros(problem.batch, 1, 0, length, dtype=dtype, device=real.device)
    for begin in range(0, len(chosen), _STRIP):
        index = torch.tensor(chosen[begin : begin + _STRIP], device=real.device)
        rows = torch.nn.functional.one_hot(index, length).to(dtype)
        yield (rows * real[:, index, None].to(dtype))[:, None]


def _down(problems: Sequence[Problem], weights: Tensor, residual: float) -> Float[Tensor, "batch n length"]:
    """Rows of weights from the last layer's output to the first one's input."""
    for problem in reversed(problems):
        seen = run("rollout", problem, Want(row_weights=weights)).row_weights
        assert seen is not None
        weights = residual * weights + (1.0 - residual) * seen.mean(dim=1, keepdim=True)
    return weights[:, 0]
