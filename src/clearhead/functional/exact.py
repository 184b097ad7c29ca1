"""The public functions of attention: compute it, observe it, and report which backend would run."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from clearhead import compiled, onnx_graph, torch_op
from clearhead.backends import native
from clearhead.dispatch import DispatchReport, report, run
from clearhead.functional.jagged import JaggedAttention, is_jagged
from clearhead.masks import Causal, Mask
from clearhead.problem import Problem
from clearhead.scores import ScoreRule
from clearhead.shapes import Float
from clearhead.statistics import Observation, Want, check_want

__all__ = ["attention", "explain_dispatch", "observe_attention"]

_NOTHING = Want()
#: Backends whose plain calls go straight to the operator.
_DIRECT = ("auto", "native")


def attention(
    query: Float[Tensor, "*leading q_len head_dim"],
    key: Float[Tensor, "*kv_leading k_len head_dim"],
    value: Float[Tensor, "*kv_leading k_len value_dim"],
    *,
    mask: Mask | None = None,
    scores: ScoreRule | Iterable[ScoreRule] | None = (),
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    query_offset: int | None = None,
    backend: str = "auto",
) -> Float[Tensor, "*leading q_len value_dim"]:
    """Exact scaled dot-product attention.

    ``softmax(rules(scale * query @ key^T) where the mask allows) @ value``, over keys, for every query head.

    Args:
        query: ``[batch, heads, q_len, head_dim]``; leading axes may be missing and then count as 1. All three may be
            jagged nested tensors ``[batch, heads, jagged len, head_dim]``, or without the heads; positions are then
            those within each sequence.
        key: ``[batch, kv_heads, k_len, head_dim]``; ``kv_heads`` divides ``heads``, and query head ``h`` reads
            key head ``h // (heads // kv_heads)``.
        value: ``[batch, kv_heads, k_len, value_dim]``.
        mask: which keys a query may attend to; ``None`` allows all. ``True`` in a mask means may attend.
        scores: score rules, applied to scaled scores in order, before the mask; ``None`` and ``()`` apply none.
        scale: factor on ``query @ key^T``; by default ``1 / sqrt(head_dim)``.
        dropout: probability of dropping a weight; the others are divided by ``1 - dropout``.
        seed: seed of the dropout; by default drawn from torch's generator.
        query_offset: absolute position of the first query; required if ``q_len != k_len`` and positions matter.
        backend: ``"auto"``, or the name of a backend, which runs the call or raises its reasons against it.

    Returns:
        ``[batch, heads, q_len, value_dim]`` in query's dtype, with as many leading axes as ``query``, and jagged as it
        is. A query that may attend to no key has an output of 0 and a gradient of 0.

    Raises:
        ShapeError: shapes, lengths or numbers do not fit.
        MaskError: the mask does not fit, or needs a ``query_offset``.
        UnsupportedError: the backend does not support the dtype, the device or the combination of arguments.

    Cost: ``4 * batch * heads * q_len * k_len * head_dim`` operations, without the tiles that the mask empties;
    beyond small sizes memory grows with the lengths and not with their product.

    Paper: Vaswani et al. 2017, "Attention is all you need", section 3.2.1.

    >>> import torch, clearhead as ch
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> ch.attention(x, x, x, mask=ch.Causal(), scale=1.0)
    tensor([[1.0000, 0.0000],
            [0.2689, 0.7311]])
    """
    if torch.compiler.is_compiling():
        scores = (scores,) if isinstance(scores, ScoreRule) else tuple(scores or ())
        if onnx_graph.exporting():
            return onnx_graph.attention(
                query, key, value, mask=mask, scores=scores, scale=scale, dropout=dropout, query_offset=query_offset
            )
        traced = compiled.attention(
            query,
            key,
            value,
            mask=mask,
            scores=scores,
            scale=scale,
            dropout=dropout,
            query_offset=query_offset,
            backend=backend,
        )
        return traced if traced is not None else torch_op.attention(
            query, key, value, mask=mask, scores=scores, scale=scale, dropout=dropout, seed=seed,
            query_offset=query_offset, backend=backend,
        )  # fmt: skip
    no_rules = scores is None or (type(scores) is tuple and not scores)
    plain = no_rules and (mask is None or type(mask) is Causal) and type(backend) is str
    if plain and backend in _DIRECT and seed is query_offset is None and type(dropout) is float and not dropout:
        output = native.plain(query, key, value, causal=mask is not None, scale=scale, auto=backend == "auto")
        if output is not None:
            return output
    if is_jagged(query) or is_jagged(key) or is_jagged(value):
        call = JaggedAttention.of("attention", (query, key, value), mask, scores, query_offset)
        options = {"scale": scale, "dropout": dropout, "seed": seed, "backend": backend, **call.options}
        return call.restored(attention(*call.tensors, **options), query)
    problem = Problem.of(
        "attention", query, key, value, mask=mask, scores=scores, scale=scale, dropout=dropout, seed=seed,
        query_offset=query_offset,
    )  # fmt: skip
    output = run("attention", problem, _NOTHING, backend).output
    return output.reshape(output.shape[2 - problem.leading :])


def observe_attention(
    query: Float[Tensor, "*leading q_len head_dim"],
    key: Float[Tensor, "*kv_leading k_len head_dim"],
    value: Float[Tensor, "*kv_leading k_len value_dim"],
    *,
    want: Want,
    mask: Mask | None = None,
    scores: ScoreRule | Iterable[ScoreRule] | None = (),
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    query_offset: int | None = None,
    backend: str = "auto",
) -> Observation:
    """Attention and statistics of its weights, computed in one call.

    Args:
        query: ``[batch, heads, q_len, head_dim]``; leading axes may be missing and then count as 1.
        key: ``[batch, kv_heads, k_len, head_dim]``; ``kv_heads`` divides ``heads``.
        value: ``[batch, kv_heads, k_len, value_dim]``.
        want: a ``Want`` that names the statistics, such as ``Want(entropy=True, top_k=4)``.
        mask: which keys a query may attend to; ``None`` allows all.
        scores: score rules, applied to scaled scores in order, before the mask; ``None`` and ``()`` apply none.
        scale: factor on ``query @ key^T``; by default ``1 / sqrt(head_dim)``.
        dropout: probability of dropping a weight; statistics describe the weights before dropout.
        seed: seed of the dropout; by default drawn from torch's generator.
        query_offset: absolute position of the first query; required if ``q_len != k_len`` and positions matter.
        backend: ``"auto"``, or the name of a backend, which runs the call or raises its reasons against it.

    Returns:
        An ``Observation`` with the output and the requested statistics.

    Raises:
        ShapeError: shapes, lengths or numbers do not fit, or a field of ``want`` is out of range.
        MaskError: the mask does not fit, or needs a ``query_offset``.
        UnsupportedError: the backend does not support the call, or one of the statistics.

    Cost: up to a second pass over the scores, besides that of ``attention``; no statistic but ``rows`` needs memory for
    all weights.

    >>> import torch, clearhead as ch
    >>> x = torch.eye(2)
    >>> ch.observe_attention(x, x, x, mask=ch.Causal(), want=ch.Want(entropy=True, rows=[0])).rows
    tensor([[1., 0.]])
    """
    check_want("observe_attention", want)
    if torch.compiler.is_compiling():
        return torch_op.observe_attention(
            query, key, value, want=want, mask=mask, scores=scores, scale=scale, dropout=dropout, seed=seed,
            query_offset=query_offset, backend=backend,
        )  # fmt: skip
    problem = Problem.of(
        "observe_attention", query, key, value, mask=mask, scores=scores, scale=scale, dropout=dropout, seed=seed,
        query_offset=query_offset,
    )  # fmt: skip
    want.check("observe_attention", (problem.batch, problem.num_heads, problem.q_len, problem.k_len))
    observation = run("observe_attention", problem, want, backend)
    return observation.with_leading(problem.leading)


def explain_dispatch(
    query: Float[Tensor, "*leading q_len head_dim"],
    key: Float[Tensor, "*kv_leading k_len head_dim"],
    value: Float[Tensor, "*kv_leading k_len value_dim"],
    *,
    want: Want | None = None,
    mask: Mask | None = None,
    scores: ScoreRule | Iterable[ScoreRule] | None = (),
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    query_offset: int | None = None,
    backend: str = "auto",
) -> DispatchReport:
    """Report which backend would run a call, and the reasons against each of the others, without running it.

    Args:
        query: ``[batch, heads, q_len, head_dim]``; leading axes may be missing and then count as 1.
        key: ``[batch, kv_heads, k_len, head_dim]``; ``kv_heads`` divides ``heads``.
        value: ``[batch, kv_heads, k_len, value_dim]``.
        want: a ``Want`` that names statistics; by default none.
        mask: which keys a query may attend to; ``None`` allows all.
        scores: score rules, applied to scaled scores in order, before the mask; ``None`` and ``()`` apply none.
        scale: factor on ``query @ key^T``; by default ``1 / sqrt(head_dim)``.
        dropout: probability of dropping a weight.
        seed: seed of the dropout.
        query_offset: absolute position of the first query; required if ``q_len != k_len`` and positions matter.
        backend: ``"auto"``, or the name of a backend.

    Returns:
        A ``DispatchReport``; its ``str`` is a short table.

    Raises:
        ShapeError: shapes, lengths or numbers do not fit.
        MaskError: the mask does not fit, or needs a ``query_offset``.
        UnsupportedError: no backend has the name, or ``want`` is no ``Want``.

    >>> import torch, clearhead as ch
    >>> x = torch.zeros(4, 8)
    >>> print(ch.explain_dispatch(x, x, x, scores=[ch.SoftCap(30.0)], backend="tiled").choice)
    tiled
    """
    want = _NOTHING if want is None else want
    check_want("explain_dispatch", want)
    problem = Problem.of(
        "explain_dispatch", query, key, value, mask=mask, scores=scores, scale=scale, dropout=dropout,
        seed=0 if seed is None else seed, query_offset=query_offset,
    )  # fmt: skip
    want.check("explain_dispatch", (problem.batch, problem.num_heads, problem.q_len, problem.k_len))
    return report("explain_dispatch", problem, want, backend)
