"""Kinds of heads: how much of a head's attention goes to keys in a simple relation to the query."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from clearhead.arguments import seed_of, whole
from clearhead.errors import ShapeError
from clearhead.observe.band import band, column
from clearhead.observe.points import Points, check_points
from clearhead.problem import Problem
from clearhead.shapes import Bool, Float, Int

__all__ = ["HeadScores", "head_scores", "repeated_tokens"]


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadScores:
    """The mean weight of each head on each kind of key, from 0 to 1; every field is ``[batch, heads]``.

    A mean is over the queries that have such a key, allowed or not, and that are not padding; it is 0 if there are
    none.

    Attributes:
        previous: weight on the token before the query.
        following: weight on the token after the query.
        first: weight on the first token of the sequence that is not padding, for queries after that token.
        same: weight on the query's own token, for queries after that first token.
        induction: weight on the tokens that followed earlier occurrences of the query's token; None without a period.
    """

    previous: Float[Tensor, "batch heads"]
    following: Float[Tensor, "batch heads"]
    first: Float[Tensor, "batch heads"]
    same: Float[Tensor, "batch heads"]
    induction: Float[Tensor, "batch heads"] | None = None

    def __repr__(self) -> str:
        shown = {each.name: getattr(self, each.name) for each in fields(self)}
        lists = (f"{name}={_rounded(value)}" for name, value in shown.items() if value is not None)
        return f"HeadScores({', '.join(lists)})"


def _rounded(value: Tensor) -> list[list[float]]:
    rounded: list[list[float]] = (value.double() + 0.0).round(decimals=2).tolist()
    return rounded


def head_scores(points: Points, *, period: int | None = None) -> HeadScores:
    """Scores that identify previous-token, next-token, first-token, same-token and induction heads.

    ``previous = mean_i p[i, i-1]``, ``following = mean_i p[i, i+1]``, ``first = mean_{i>0} p[i, 0]``,
    ``same = mean_{i>0} p[i, i]``, and on a sequence that repeats every ``period`` tokens
    ``induction = mean_{i>=period} sum_{m>=1} p[i, i - m period + 1]``, over keys after the first.

    Args:
        points: the ``Points`` of a self-attention layer, from ``ch.trace``.
        period: after how many tokens the sequence repeats (``repeated_tokens`` makes such sequences); None for no
            induction score.

    Returns:
        ``HeadScores``, each field ``[batch, heads]``.

    Raises:
        ShapeError: the call is not self-attention over a whole sequence, or the period is not below the length.

    Cost: one pass for ``lse``, and a few diagonals; memory is linear in the length.

    Paper: relative positions in Clark et al. 2019, "What does BERT look at?", section 3.1; induction is the "prefix
    matching" of Olsson et al. 2022, "In-context learning and induction heads", appendix on head activation evaluators.

    >>> import torch, clearhead as ch
    >>> model = ch.nn.LanguageModel(20, embed_dim=8, num_heads=2, num_layers=1).eval()
    >>> ids = repeated_tokens(20, period=5, repeats=2, seed=0)
    >>> with torch.no_grad(), ch.trace(model) as traced:
    ...     logits = model(ids)
    >>> head_scores(traced[0], period=5).following
    tensor([[0., 0.]])
    """
    check_points("head_scores", "points", points)
    problem = points.padded
    if problem.q_len != problem.k_len or problem.query_offset != 0:
        raise ShapeError.about(
            "head_scores",
            "points",
            must="be of self-attention over a whole sequence",
            got=f"q_len {problem.q_len}, k_len {problem.k_len}",
            then="Trace one call without a cache.",
        )
    if period is not None:
        period = whole("head_scores", "period", period, low=1, then="Pass the length of what is repeated.")
    length, real = problem.q_len, points.real
    if period is not None and period >= length:
        raise ShapeError.about(
            "head_scores", "period", must=f"be below the length {length}", got=period, then="Repeat it at least once."
        )
    weights, _ = band(problem, [1, -1, 0])
    # Padding may stand before the first token.
    begin = real.to(torch.int8).argmax(dim=1)
    place = torch.arange(length, device=real.device) - begin[:, None]
    # The token before or after the query must be no padding either.
    none = torch.zeros_like(real[:, :1])
    preceded, followed = torch.cat([none, real[:, :-1]], dim=1), torch.cat([real[:, 1:], none], dim=1)
    return HeadScores(
        previous=_mean(weights[..., 0], real & preceded),
        following=_mean(weights[..., 1], real & followed),
        first=_mean(column(problem, begin), real & (place > 0)),
        same=_mean(weights[..., 2], real & (place > 0)),
        induction=None if period is None else _induction(problem, real, place, period),
    )


def _induction(problem: Problem, real: Tensor, place: Tensor, period: int) -> Float[Tensor, "batch heads"]:
    repeats = (problem.q_len - 1) // period
    distances = [period * number - 1 for number in range(1, repeats + 1)]
    weights, _ = band(problem, distances)
    # The first token of the sequence follows no token.
    followed = place[..., None] - torch.tensor(distances, device=real.device) >= 1
    return _mean((weights * followed[:, None]).sum(dim=-1), real & (place >= period))


def _mean(
    weights: Float[Tensor, "batch heads q_len"], counted: Bool[Tensor, "batch q_len"]
) -> Float[Tensor, "batch heads"]:
    total = counted.sum(dim=-1).clamp(min=1)[:, None]
    mean: Tensor = weights.masked_fill(~counted[:, None], 0.0).sum(dim=-1) / total
    return mean


def repeated_tokens(
    vocab_size: int, *, period: int = 25, repeats: int = 4, batch: int = 1, seed: int | None = None
) -> Int[Tensor, "batch length"]:
    """Repeated random tokens, the input that identifies induction heads.

    The tokens of a period are distinct if ``period <= vocab_size``.

    Args:
        vocab_size: ids are drawn from 0 to ``vocab_size - 1``.
        period: number of tokens before the sequence repeats, 25 by default.
        repeats: number of repeats, 4 by default.
        batch: number of sequences, each with different tokens.
        seed: seed of the random generator; by default a random one.

    Returns:
        int64 ``[batch, period * repeats]``.

    Raises:
        ShapeError: a number is below 1, or ``repeats`` is below 2.

    Paper: Olsson et al. 2022, "In-context learning and induction heads": 25 random tokens, 4 times.
    """
    name = "repeated_tokens"
    vocab_size, period = (
        whole(name, each, size, low=1, high=2**31) for each, size in (("vocab_size", vocab_size), ("period", period))
    )
    repeats = whole(name, "repeats", repeats, low=2, high=2**31)
    batch = whole(name, "batch", batch, low=1, high=2**31)
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed_of(name, seed))
    if period <= vocab_size:
        rows = [torch.randperm(vocab_size, generator=generator)[:period] for _ in range(batch)]
        return torch.stack(rows).repeat(1, repeats)
    return torch.randint(vocab_size, (batch, period), generator=generator).repeat(1, repeats)
