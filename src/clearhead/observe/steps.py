"""The steps of one token's attention: the values that clearhead computed beside the recomputed ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.backends import reference
from clearhead.dispatch import choose
from clearhead.nn.attention import MultiHeadAttention
from clearhead.observe import exact
from clearhead.observe.exact import Array, ScoreRow
from clearhead.observe.explanation import Step
from clearhead.problem import Problem
from clearhead.scores import Alibi, DenseBias, RelativeBias, ScoreRule, SoftCap
from clearhead.shapes import Float
from clearhead.statistics import Want

__all__ = ["AttentionRun", "steps_of"]


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionRun:
    """An attention that ran: its problem and output, and for a module its weights and inputs.

    ``heads`` is the output by head, before the module's output projection.
    """

    problem: Problem
    heads: Float[Tensor, "batch heads q_len value_dim"]
    backend: str
    module: MultiHeadAttention | None = None
    sources: tuple[Tensor, ...] = ()
    output: Float[Tensor, "batch q_len embed_dim"] | None = None

    def place(self, batch: int, head: int, token: int) -> ScoreRow:
        """The row of scores of a token in a head."""
        problem = self.problem
        return ScoreRow(batch, head, problem.query_offset + token, problem.k_len)


@dataclass(frozen=True, kw_only=True)
class _Exact:
    """The attention of one token in one head, in float64 throughout."""

    straight: tuple[Array, Array]
    query: Array
    keys: Array
    values: Array
    scores: Array
    ruled: tuple[Array, ...]
    allowed: np.ndarray
    masked: Array
    weights: Array
    output: Array


def steps_of(subject: AttentionRun, batch: int, head: int, token: int) -> Iterator[Step]:
    """Every step of the attention of ``token`` in ``head``."""
    view = _exact_head(subject, subject.place(batch, head, token), token)
    if subject.module is not None:
        yield from _projection_steps(subject, subject.module, view, batch, head, token)
    yield from _score_steps(subject, view, batch, head, token)
    output = Step.of(
        "weighted sum", "o = Σ p[j] v[j]", subject.backend, subject.heads[batch, head, token], _tensor(view.output)
    )
    yield output
    if subject.module is not None and subject.module.output_projection is not None:
        yield from _output_steps(subject, subject.module, batch, head, token)


def _exact_head(subject: AttentionRun, place: ScoreRow, token: int) -> _Exact:
    problem, module = subject.problem, subject.module
    group = problem.num_heads // problem.num_kv_heads
    kv_head = place.head // group
    if module is None:
        query = exact.as_array(problem.query[place.batch, place.head, token])
        keys, values = (exact.as_array(part[place.batch, kv_head]) for part in (problem.key, problem.value))
        straight = (query, keys)
    else:
        x, y, z = (exact.as_array(source[place.batch]) for source in subject.sources)
        straight = (
            _projected(module.query_projection, x[token], place.head, module.head_dim),
            _projected(module.key_projection, y, kv_head, module.head_dim),
        )
        values = _projected(module.value_projection, z, kv_head, module.head_dim)
        query, keys = straight
        if module.rotary is not None:
            query = exact.rotated(query[None], np.array([place.query]), module.rotary.base)[0]
            keys = exact.rotated(keys, place.keys, module.rotary.base)
    scores: Array = np.einsum("jd,d->j", keys, query)
    ruled = [scores * problem.scale]
    for rule in problem.elementwise:
        ruled.append(exact.ruled(ruled[-1], rule, place))
    allowed = exact.allowed(problem.mask, place)
    masked = np.where(allowed, ruled[-1], -np.inf)
    weights = exact.softmax(masked, exact.sink_logit(problem.scores, place.head))
    return _Exact(
        straight=straight, query=query, keys=keys, values=values, scores=scores, ruled=tuple(ruled), allowed=allowed,
        masked=masked, weights=weights, output=exact.weighted_sum(weights, values, allowed),
    )  # fmt: skip


def _projected(layer: torch.nn.Linear, x: Array, head: int, head_dim: int) -> Array:
    """``x`` projected by one head's rows of a projection."""
    rows = slice(head * head_dim, (head + 1) * head_dim)
    bias = None if layer.bias is None else exact.as_array(layer.bias[rows])
    return exact.project(x, exact.as_array(layer.weight[rows]), bias)


def _projection_steps(
    subject: AttentionRun, module: MultiHeadAttention, view: _Exact, batch: int, head: int, token: int
) -> Iterator[Step]:
    width, kv_head = module.head_dim, head // (module.num_heads // module.num_kv_heads)
    rows = slice(head * width, (head + 1) * width)
    kv_rows = slice(kv_head * width, (kv_head + 1) * width)
    bias = module.query_projection.bias is not None
    with torch.no_grad():
        query, key, value = (
            layer(source[batch])
            for layer, source in zip(
                (module.query_projection, module.key_projection, module.value_projection), subject.sources, strict=True
            )
        )
    of = "projection"
    plus = " + b" if bias else ""
    straight_query, straight_keys = (_tensor(part) for part in view.straight)
    yield Step.of("query", f"q = Wq x[{token}]{plus}", of, query[token, rows], straight_query)
    yield Step.of("keys", f"k[j] = Wk x[j]{plus}", of, key[:, kv_rows], straight_keys)
    yield Step.of("values", f"v[j] = Wv x[j]{plus}", of, value[:, kv_rows], _tensor(view.values))
    if module.rotary is not None:
        problem, turn = subject.problem, repr(module.rotary)
        yield Step.of(
            "turned query", f"q = R(i) q, {turn}", "rotary", problem.query[batch, head, token], _tensor(view.query)
        )
        yield Step.of("turned keys", "k[j] = R(j) k[j]", "rotary", problem.key[batch, kv_head], _tensor(view.keys))


def _score_steps(subject: AttentionRun, view: _Exact, batch: int, head: int, token: int) -> Iterator[Step]:
    problem = subject.problem
    row = replace(
        problem, query=problem.query[:, :, token : token + 1], query_offset=problem.query_offset + token, dropout=0.0
    )
    with torch.no_grad():
        done = reference.steps(row)
    scaled = done.scaled
    yield Step.of("scores", "s[j] = q · k[j]", "reference", done.raw[batch, head, 0], _tensor(view.scores))
    yield Step.of(
        "scaling", f"s[j] = {problem.scale:.4g} s[j]", "reference", scaled[batch, head, 0], _tensor(view.ruled[0])
    )
    for rule, expected in zip(problem.elementwise, view.ruled[1:], strict=True):
        with torch.no_grad():
            scaled = rule.apply(scaled, *row.indices())
        name = type(rule).__name__
        yield Step.of(
            name, _RULES.get(type(rule), _own_formula)(rule), "rule", scaled[batch, head, 0], _tensor(expected)
        )
    yield Step.of("mask", _mask_formula(view, problem), "reference", done.masked[batch, head, 0], _tensor(view.masked))
    # Run the whole call: tables in its mask and rules have an entry for each of its rows.
    whole, want = replace(problem, dropout=0.0), Want(rows=[token])
    chosen = choose("explain", whole, want)
    with torch.no_grad():
        weights = chosen.run(whole, want).rows
    assert weights is not None
    sink = exact.sink_logit(problem.scores, head)
    formula = "p[j] = exp(s[j]) / Σ exp(s)" if sink is None else f"p[j] = exp(s[j]) / (exp({sink:.4g}) + Σ exp(s))"
    yield Step.of("softmax", formula, chosen.name, weights[batch, head, 0], _tensor(view.weights))


_RULES: dict[type[ScoreRule], Callable[[Any], str]] = {
    Alibi: lambda rule: "s[j] = s[j] - slope |i - j|",
    RelativeBias: lambda rule: "s[j] = s[j] + table[i - j]",
    SoftCap: lambda rule: f"s[j] = {rule.cap:g} tanh(s[j] / {rule.cap:g})",
    DenseBias: lambda rule: "s[j] = s[j] + bias[i, j]",
}


def _own_formula(rule: ScoreRule) -> str:
    return f"s[j] = {rule!r}"


def _mask_formula(view: _Exact, problem: Problem) -> str:
    total = len(view.allowed)
    if problem.mask is None:
        return f"no mask: all {total} keys are allowed"
    return f"s[j] = -inf outside {problem.mask!r}: {int(view.allowed.sum())} of {total} keys are allowed"


def _output_steps(
    subject: AttentionRun, module: MultiHeadAttention, batch: int, head: int, token: int
) -> Iterator[Step]:
    layer = module.output_projection
    assert layer is not None
    assert subject.output is not None
    width = module.head_dim
    rows = slice(head * width, (head + 1) * width)
    parts = []
    for each in range(module.num_heads):
        view = _exact_head(subject, subject.place(batch, each, token), token)
        columns = layer.weight[:, each * width : (each + 1) * width]
        parts.append(exact.project(view.output, exact.as_array(columns), None))
    with torch.no_grad():
        part = torch.nn.functional.linear(subject.heads[batch, head, token], layer.weight[:, rows])
    yield Step.of("head's part", f"y[h] = Wo[:, {rows.start}:{rows.stop}] o", "projection", part, _tensor(parts[head]))
    total = np.array([math.fsum(column) for column in zip(*parts, strict=True)])
    if layer.bias is not None:
        total = total + exact.as_array(layer.bias)
    plus = " + b" if layer.bias is not None else ""
    formula = f"y = Σ y[h] over {module.num_heads} heads{plus}"
    yield Step.of("output", formula, "module", subject.output[batch, token], _tensor(total))


def _tensor(array: Array) -> Float[Tensor, "..."]:
    return torch.from_numpy(np.ascontiguousarray(array))
