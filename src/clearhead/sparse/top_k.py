"""Attention to each query's k best keys: found by the kernels, then computed on those keys alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.backends.once import once
from clearhead.dispatch import run
from clearhead.errors import ShapeError
from clearhead.masks import Mask
from clearhead.problem import Problem
from clearhead.scores import ScoreRule
from clearhead.shapes import Bool, Float, Int
from clearhead.statistics import Want

__all__ = ["top_k_attention"]

#: Numbers of gathered keys held at once: 1 MiB in float32, which stays in a core's cache with its values beside it.
_STRIP_NUMBERS: Final = 2**18


def top_k_attention(
    query: Float[Tensor, "*leading q_len head_dim"],
    key: Float[Tensor, "*kv_leading k_len head_dim"],
    value: Float[Tensor, "*kv_leading k_len value_dim"],
    *,
    k: int,
    mask: Mask | None = None,
    scores: ScoreRule | Iterable[ScoreRule] = (),
    scale: float | None = None,
    query_offset: int | None = None,
    backend: str = "auto",
) -> Float[Tensor, "*leading q_len value_dim"]:
    """Attention of each query to the k keys with its largest scores, all other keys forbidden.

    ``softmax(s_j for j in the k largest of rules(scale * query @ key^T) under the mask) @ value``

    Which keys are the best is found without gradient; gradients flow through the chosen scores and values alone. Of
    equal scores the earlier key is taken. A query that may attend to fewer than ``k`` keys attends to all of them.

    Args:
        query: as in ``attention``, and so are the other tensors.
        key: as in ``attention``.
        value: as in ``attention``.
        k: how many keys a query keeps, 1 or more; all where there are fewer.
        mask: as in ``attention``.
        scores: as in ``attention``; the rules act before keys are chosen. A ``Sink`` is no key.
        scale: as in ``attention``.
        query_offset: as in ``attention``.
        backend: finds the best keys; as in ``observe_attention``.

    Returns:
        ``[batch, heads, q_len, value_dim]`` in query's dtype, with as many leading axes as ``query`` had.

    Raises:
        ShapeError: ``k`` is not a whole number of at least 1, or shapes do not fit.
        MaskError, UnsupportedError: as in ``observe_attention``.

    Cost: finding the keys scores all pairs (``2 * q_len * k_len * head_dim`` operations a head, forward only) and
    holds ``q_len * k`` indices; the attention and its backward are ``O(q_len * k * head_dim)``, in strips of a few MiB.

    Paper: Gupta et al. 2021, "Memory-efficient transformers via top-k attention", section 2.

    >>> import torch
    >>> x = torch.eye(3)
    >>> top_k_attention(x, x, x, k=1)
    tensor([[1., 0., 0.],
            [0., 1., 0.],
            [0., 0., 1.]])
    """
    problem = Problem.of(
        "top_k_attention", query, key, value, mask=mask, scores=scores, scale=scale, query_offset=query_offset
    )
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ShapeError.about(
            "top_k_attention", "k", must="be a whole number of at least 1", got=repr(k)[:80],
            then="It is how many keys each query keeps.",
        )  # fmt: skip
    chosen = _choose(problem, min(k, problem.k_len), backend)
    output: Tensor = _TopK.apply(  # type: ignore[no-untyped-call]
        problem, chosen, problem.query, problem.key, problem.value, *problem.rule_parameters
    )
    return output.reshape(output.shape[2 - problem.leading :])


@dataclass(frozen=True)
class _Chosen:
    """The keys of each query, and the rows that hold a NaN, whose keys mean nothing."""

    keys: Int[Tensor, "batch heads q_len k"]
    spoiled: Bool[Tensor, "batch heads q_len"]


def _choose(problem: Problem, k: int, backend: str) -> _Chosen:
    # Nobody reads the output of this call, so its values are one channel wide.
    narrow = problem.with_tensors(problem.query, problem.key, problem.value[..., :1])
    with torch.no_grad():
        seen = run("top_k_attention", narrow, Want(top_k=k, lse=True), backend)
    assert seen.top_indices is not None
    assert seen.lse is not None
    return _Chosen(seen.top_indices, seen.lse.isnan())


@dataclass(frozen=True)
class _Strip:
    """Some queries with their keys: where these lie among all rows of keys, and whether the mask allows each."""

    queries: slice
    rows: Int[Tensor, " picked"]
    indices: tuple[Tensor, Tensor, Tensor, Tensor]
    allowed: Bool[Tensor, "batch heads queries k"] | None

    def gather(self, source: Float[Tensor, "rows dim"], dtype: torch.dtype) -> Float[Tensor, "b heads queries k dim"]:
        """The rows of the chosen keys; zeros for forbidden ones, which may hold anything."""
        picked = source.index_select(0, self.rows).view(*self.indices[3].shape, -1).to(dtype)
        return picked if self.allowed is None else picked.masked_fill(~self.allowed[..., None], 0.0)


def _strips(problem: Problem, keys: Tensor) -> Iterator[_Strip]:
    batch, head, q_pos, _ = problem.indices()
    group = problem.num_heads // problem.num_kv_heads
    first = (batch * problem.num_kv_heads + head // group) * problem.k_len
    width = max(problem.head_dim, problem.value_dim)
    step = max(1, _STRIP_NUMBERS // max(1, problem.batch * problem.num_heads * keys.shape[3] * width))
    for start in range(0, problem.q_len, step):
        queries = slice(start, min(start + step, problem.q_len))
        k_pos = keys[:, :, queries]
        indices = (batch, head, q_pos[:, :, queries], k_pos)
        allowed = None
        if problem.mask is not None:
            allowed = problem.mask.allows(*indices).expand_as(k_pos)
            allowed = None if bool(allowed.all()) else allowed
        yield _Strip(queries, (k_pos + first).flatten(), indices, allowed)


def _attend(problem: Problem, strip: _Strip, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The textbook formula on gathered keys and values; an empty row gives 0."""
    scores = (query[..., None, :] @ keys.mT)[..., 0, :] * problem.scale
    for rule in problem.elementwise:
        scores = rule.apply(scores, *strip.indices)
    if strip.allowed is not None:
        scores = scores.masked_fill(~strip.allowed, -torch.inf)
    if problem.sink is not None:
        logits = problem.sink.logits.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, logits], dim=-1)
    largest = scores.detach().amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - largest.masked_fill(largest == -torch.inf, 0.0))
    total = weights.sum(dim=-1, keepdim=True)
    weights = (weights / total.masked_fill(total == 0.0, 1.0))[..., : values.shape[3]]
    return (weights[..., None, :] @ values)[..., 0, :]


class _TopK(torch.autograd.Function):
    """Strips of queries on their own keys; backward gathers again. Rule parameters ride along."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, chosen: _Chosen, *tensors: Tensor) -> Tensor:
        query, key, value = tensors[:3]
        flat_key, flat_value = key.reshape(-1, key.shape[3]), value.reshape(-1, value.shape[3])
        output = query.new_empty((*query.shape[:3], value.shape[3]))
        work = problem.work_dtype
        for strip in _strips(problem, chosen.keys):
            picked = (strip.gather(flat_key, work), strip.gather(flat_value, work))
            output[:, :, strip.queries] = _attend(problem, strip, query[:, :, strip.queries].to(work), *picked)
        ctx.problem, ctx.rules = problem, len(tensors) > 3
        ctx.save_for_backward(query, key, value, chosen.keys)
        # A NaN among the keys a query may attend to is not hidden by leaving it out.
        return output.masked_fill_(chosen.spoiled[..., None], torch.nan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, keys = ctx.saved_tensors
        problem = ctx.problem
        # Backward may be called within autocast, which would round the products to 16 bits.
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            found = _gradients(problem.with_tensors(query, key, value), keys, grads[0], ctx.rules)
        return None, None, *once(found, (query, key, value, *grads))


def _gradients(problem: Problem, keys: Tensor, grad_output: Tensor, rules: bool) -> list[Tensor]:
    """Gradients of query, key, value and the rules' parameters."""
    work = problem.work_dtype
    parameters = problem.rule_parameters if rules else []
    sources = [tensor.reshape(-1, tensor.shape[3]) for tensor in (problem.key, problem.value)]
    totals = [torch.zeros_like(source, dtype=work) for source in sources]
    rule_totals = [torch.zeros_like(tensor, dtype=work) for tensor in parameters]
    grad_query = torch.empty_like(problem.query, dtype=work)
    for strip in _strips(problem, keys):
        leaves = [problem.query[:, :, strip.queries].to(work), *(strip.gather(source, work) for source in sources)]
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        with torch.enable_grad():
            output = _attend(problem, strip, *leaves)
        own = torch.autograd.grad(
            output, [*leaves, *parameters], grad_output[:, :, strip.queries].to(work), allow_unused=True,
        )  # fmt: skip
        grad_query[:, :, strip.queries] = _or_zero(own[0], leaves[0])
        for total, leaf, grad in zip(totals, leaves[1:], own[1:3], strict=True):
            total.index_add_(0, strip.rows, _or_zero(grad, leaf).flatten(0, 3))
        for total, grad in zip(rule_totals, own[3:], strict=True):
            if grad is not None:
                total += grad
    inputs = (problem.query, problem.key, problem.value)
    found = [grad_query, *(total.view(tensor.shape) for total, tensor in zip(totals, inputs[1:], strict=True))]
    cast = [grad.to(tensor.dtype) for grad, tensor in zip(found, inputs, strict=True)]
    return cast + [grad.to(tensor.dtype) for grad, tensor in zip(rule_totals, parameters, strict=True)]


def _or_zero(grad: Tensor | None, like: Tensor) -> Tensor:
    """A gradient, 0 where a rule let none through."""
    return torch.zeros_like(like) if grad is None else grad
