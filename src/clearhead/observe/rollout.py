"""Attention rollout: attention through all layers, without a ``length * length`` matrix."""

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

#: Tokens whose rows are propagated through the layers together.
_STRIP = 64


def rollout(
    traced: Mapping[str, Points], tokens: int | Sequence[int] | None = None, *, residual: float = 0.5
) -> Float[Tensor, "batch n length"]:
    """Attention rollout: how much of each input token reaches an output token through the attention of all layers.

    With ``A_l`` the weights of layer ``l`` averaged over heads, ``R_l = (residual I + (1 - residual) A_l) R_{l-1}``
    and ``R_0 = I``; the result is row ``t`` of the last ``R`` for token ``t``. It is computed from the last layer to
    the first, ``w <- residual w + (1 - residual) w A_l`` starting with the unit vector of ``t``, so no ``R`` is stored.

    Args:
        traced: a ``Trace`` of the model's self-attention layers; the calls of the last forward pass are used, in their
            order. If the model uses a layer several times, trace with ``keep="all"``. Or a mapping from names to
            ``Points``, first layer first.
        tokens: position of one token or of ``n`` tokens, ``range(length)`` for all. By default one row, the mean over
            all tokens of a sequence.
        residual: the weight of the residual connection, from 0 to 1, 0.5 by default.

    Returns:
        ``[batch, n, length]``. A row is zero for a token beyond the end of its sequence. Other rows sum to 1, unless a
        layer has a ``ch.Sink``.

    Raises:
        UnsupportedError: no layer was traced, or not every call of a layer.
        ShapeError: a layer is not self-attention over the whole sequence, or there is no such token.

    Cost: one pass of ``row_weights`` over each layer for every 64 tokens; memory besides the result is linear in the
    length.

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
            "rollout", "traced", must="have layers", got="none", then="Run the model within `with ch.trace(model)`."
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
    """The calls of one forward pass in order, including every call of a layer that the model uses several times."""
    if not isinstance(traced, Trace):
        layers = list(traced.values()) if isinstance(traced, Mapping) else [traced]
        for points in layers:
            check_points("rollout", "traced", points)
        return layers
    if missing := traced.incomplete():
        raise UnsupportedError.about(
            "rollout", "traced", must="have every call of a layer", got=missing[0], then="Trace with keep='all'."
        )
    return [points for _, points in traced.passed()]


def _checked(points: Points, first: Points) -> Problem:
    """A layer's problem with values of one channel, as only the weights are needed."""
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
    """The initial rows, in strips of 64 tokens."""
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
    """Propagate rows of weights from the last layer's output to the first layer's input."""
    for problem in reversed(problems):
        attended = run("rollout", problem, Want(row_weights=weights)).row_weights
        assert attended is not None
        weights = residual * weights + (1.0 - residual) * attended.mean(dim=1, keepdim=True)
    return weights[:, 0]
