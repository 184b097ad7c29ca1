"""Attention to the k keys of largest score of each query: a backend finds them, then attention runs on them alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.arguments import whole
from clearhead.backends.backward_reads import backward_reads
from clearhead.backends.containment import without_autocast
from clearhead.backends.recorded import is_recorded, recorded_gradients, with_learned
from clearhead.choices import refuse_if_invariant
from clearhead.dispatch import run
from clearhead.errors import UnsupportedError
from clearhead.masks import Mask
from clearhead.problem import Problem
from clearhead.scores import ScoreRule, check_reached, differentiated
from clearhead.shapes import Bool, Float, Int
from clearhead.statistics import Want
from clearhead.torch_op import Operator, output_like
from clearhead.torch_private import transforms

__all__ = ["top_k_attention"]

_NAME: Final = "top_k_attention"

#: Elements of gathered keys at once: 1 MiB in float32, which fits a core's L2 cache together with the values.
STRIP_ELEMENTS: Final = 2**18


def top_k_attention(
    query: Float[Tensor, "*leading q_len head_dim"],
    key: Float[Tensor, "*kv_leading k_len head_dim"],
    value: Float[Tensor, "*kv_leading k_len value_dim"],
    *,
    k: int,
    mask: Mask | None = None,
    scores: ScoreRule | Iterable[ScoreRule] | None = (),
    scale: float | None = None,
    query_offset: int | None = None,
    backend: str = "auto",
) -> Float[Tensor, "*leading q_len value_dim"]:
    """Attention of each query to the ``k`` keys with its largest scores; all other keys are forbidden.

    ``softmax(s_j for j in the k largest of rules(scale * query @ key^T) under the mask) @ value``

    The choice of keys has no gradient; gradients flow through the scores and values of the chosen keys. Of equal scores
    the earlier key is chosen. A query that may attend to fewer than ``k`` keys attends to all of them; the output of a
    query without keys is 0.

    Args:
        query: ``[batch, heads, q_len, head_dim]``; leading axes may be missing and then count as 1.
        key: ``[batch, kv_heads, k_len, head_dim]``; ``kv_heads`` divides ``heads``.
        value: ``[batch, kv_heads, k_len, value_dim]``.
        k: number of keys per query, 1 or more; all if there are fewer.
        mask: which keys a query may attend to; ``None`` allows all.
        scores: score rules, applied in order before keys are chosen. A ``Sink`` does not count as a key.
        scale: factor on ``query @ key^T``; by default ``1 / sqrt(head_dim)``.
        query_offset: absolute position of the first query; required if ``q_len != k_len`` and positions matter.
        backend: the backend that finds the keys: ``"auto"``, or the name of one with the statistics ``top_k`` and
            ``lse``.

    Returns:
        ``[batch, heads, q_len, value_dim]`` in query's dtype, with as many leading axes as ``query``.

    Raises:
        ShapeError: ``k`` is not a whole number of at least 1, or shapes do not fit.
        MaskError: the mask does not fit, or needs a ``query_offset``.
        UnsupportedError: the backend does not support the call, or it runs under a transform of ``torch.func``.

    Cost: finding the keys computes all scores (``2 * q_len * k_len * head_dim`` operations per head, forward only) and
    stores ``q_len * k`` indices; attention and its backward are ``O(q_len * k * head_dim)``, in strips of a few MiB.

    Paper: Gupta et al. 2021, "Memory-efficient transformers via top-k attention", section 2.

    >>> import torch
    >>> x = torch.eye(3)
    >>> top_k_attention(x, x, x, k=1)
    tensor([[1., 0., 0.],
            [0., 1., 0.],
            [0., 0., 1.]])
    """
    k = whole(_NAME, "k", k, low=1, then="It is how many keys each query keeps.")
    if torch.compiler.is_compiling():
        (output,) = _OPERATOR(
            query, key, value, asked=k, mask=mask, scores=scores, scale=scale, query_offset=query_offset,
            backend=backend,
        )  # fmt: skip
        return output
    problem = Problem.of(_NAME, query, key, value, mask=mask, scores=scores, scale=scale, query_offset=query_offset)
    (output,) = _attend(problem, k, backend)
    return output.reshape(output.shape[2 - problem.leading :])


def _attend(problem: Problem, k: int, backend: str) -> list[Tensor]:
    if transforms():
        raise UnsupportedError.about(
            _NAME,
            "query",
            must="not be under a transform of torch.func",
            got="a transform such as vmap or grad",
            then="Give batches as the first axis, and differentiate with torch.autograd.",
        )
    refuse_if_invariant(_NAME, "k", got=f"{k}: torch computes the scores", then="Use a mask, or ch.invariant(False).")
    chosen = _choose(problem, min(k, problem.k_len), backend)
    read = backward_reads(problem).tensors if torch.is_grad_enabled() else []
    output: Tensor = _TopK.apply(  # type: ignore[no-untyped-call]
        problem, chosen, read, problem.query, problem.key, problem.value, *problem.rule_parameters
    )
    return [output]


_OPERATOR: Final = Operator(_NAME, _attend, output_like)


@dataclass(frozen=True)
class _Chosen:
    """The keys of each query, and the rows with NaN, whose keys are meaningless."""

    keys: Int[Tensor, "batch heads q_len k"]
    spoiled: Bool[Tensor, "batch heads q_len"]


def _choose(problem: Problem, k: int, backend: str) -> _Chosen:
    if k == 0:
        rows = problem.query.shape[:3]
        none = torch.empty((*rows, 0), dtype=torch.int64, device=problem.query.device)
        return _Chosen(none, none.new_zeros(rows, dtype=torch.bool))
    # The output of this call is not read, so its values have one channel.
    narrow = problem.with_tensors(problem.query, problem.key, problem.value[..., :1])
    with torch.no_grad():
        observation = run(_NAME, narrow, Want(top_k=k, lse=True), backend)
    assert observation.top_indices is not None
    assert observation.lse is not None
    return _Chosen(observation.top_indices, observation.lse.isnan())


@dataclass(frozen=True)
class _GatheredStrip:
    """Some queries with their keys: the keys' indices among all rows of keys, and whether the mask allows each."""

    queries: slice
    rows: Int[Tensor, " picked"]
    indices: tuple[Tensor, Tensor, Tensor, Tensor]
    allowed: Bool[Tensor, "batch heads queries k"] | None

    def gather(self, source: Float[Tensor, "rows dim"], dtype: torch.dtype) -> Float[Tensor, "b heads queries k dim"]:
        """The rows of the chosen keys; zeros for forbidden keys, whose elements may be NaN."""
        picked = source.index_select(0, self.rows)
        return self.reached(picked.view(*self.indices[3].shape, source.shape[1]).to(dtype))

    def reached(self, picked: Float[Tensor, "b heads queries k dim"]) -> Float[Tensor, "b heads queries k dim"]:
        """The rows with 0 for forbidden keys, which 0 times a gradient of NaN would otherwise affect."""
        return picked if self.allowed is None else picked.masked_fill(~self.allowed[..., None], 0.0)


def _strips(problem: Problem, keys: Tensor) -> Iterator[_GatheredStrip]:
    """Strips of queries with their keys; none if there are no keys."""
    batch, head, q_pos, _ = problem.indices()
    group = problem.num_heads // problem.num_kv_heads
    first = (batch * problem.num_kv_heads + head // group) * problem.k_len
    if keys.shape[3] == 0:
        return
    width = max(problem.head_dim, problem.value_dim)
    step = max(1, STRIP_ELEMENTS // max(1, problem.batch * problem.num_heads * keys.shape[3] * width))
    for start in range(0, problem.q_len, step):
        queries = slice(start, min(start + step, problem.q_len))
        k_pos = keys[:, :, queries]
        indices = (batch, head, q_pos[:, :, queries], k_pos)
        allowed = None
        if problem.mask is not None:
            allowed = problem.mask.allows(*indices).expand_as(k_pos)
            allowed = None if bool(allowed.all()) else allowed
        yield _GatheredStrip(queries, (k_pos + first).flatten(), indices, allowed)


def _scores(problem: Problem, query: Tensor, keys: Tensor) -> Tensor:
    """Scaled scores of the gathered keys."""
    return (query[..., None, :] @ keys.mT)[..., 0, :] * problem.scale


def _ruled(problem: Problem, strip: _GatheredStrip, scores: Tensor) -> Tensor:
    """The scores after the rules."""
    for rule in problem.elementwise:
        scores = rule.apply(scores, *strip.indices)
    return scores


def _weighed(problem: Problem, strip: _GatheredStrip, scores: Tensor, values: Tensor) -> Tensor:
    """Softmax of the scores of gathered keys times their values; 0 for an empty row."""
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
    """Attention of strips of queries to their keys, which backward gathers again; rule parameters are inputs too."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, chosen: _Chosen, read: list[Tensor], *tensors: Tensor) -> Tensor:
        query, key, value = tensors[:3]
        flat_key, flat_value = key.reshape(-1, key.shape[3]), value.reshape(-1, value.shape[3])
        output = query.new_zeros((*query.shape[:3], value.shape[3]))
        work = problem.work_dtype
        # Autocast would round float32 inputs to 16 bits.
        with without_autocast(query.device.type):
            for strip in _strips(problem, chosen.keys):
                scores = _scores(problem, query[:, :, strip.queries].to(work), strip.gather(flat_key, work))
                scores = _ruled(problem, strip, scores)
                output[:, :, strip.queries] = _weighed(problem, strip, scores, strip.gather(flat_value, work))
        ctx.problem, ctx.rules = problem, len(tensors) > 3
        # Tensors that backward reads without a copy are saved too, so that autograd raises if one was written into.
        ctx.save_for_backward(query, key, value, chosen.keys, *read)
        # A NaN among the keys that a query may attend to makes its output NaN, chosen or not.
        return output.masked_fill_(chosen.spoiled[..., None], torch.nan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, keys, *_ = ctx.saved_tensors
        problem = ctx.problem
        parameters = ctx.problem.rule_parameters if ctx.rules else ()
        if is_recorded(*grads):
            compute = partial(_recorded_forward, problem, keys)
            inputs = (query, key, value, *parameters)
            return None, None, None, *recorded_gradients(compute, inputs, grads, ctx.needs_input_grad[3:])
        # Backward may run under autocast, which would round to 16 bits.
        with without_autocast(query.device.type):
            gradients = _gradients(problem.with_tensors(query, key, value), keys, grads[0], ctx.rules)
        return None, None, None, *gradients


def _recorded_forward(problem: Problem, keys: Tensor, inputs: list[Tensor | None]) -> list[Tensor]:
    """The output from query, key, value and the rules' parameters, by operations that autograd records."""
    query, key, value = (part for part in inputs[:3] if part is not None)
    if keys.shape[3] == 0:
        return [query.new_zeros((*query.shape[:3], value.shape[3]))]
    problem = with_learned(problem, inputs[3:])
    flat_key, flat_value = key.reshape(-1, key.shape[3]), value.reshape(-1, value.shape[3])
    work, outputs = problem.work_dtype, []
    for strip in _strips(problem, keys):
        scores = _scores(problem, query[:, :, strip.queries].to(work), strip.gather(flat_key, work))
        outputs.append(_weighed(problem, strip, _ruled(problem, strip, scores), strip.gather(flat_value, work)))
    return [torch.cat(outputs, dim=2).to(query.dtype)]


def _gradients(problem: Problem, keys: Tensor, grad_output: Tensor, rules: bool) -> list[Tensor]:
    """Gradients of query, key, value and the rules' parameters."""
    work = problem.work_dtype
    parameters = problem.rule_parameters if rules else []
    sources = [tensor.reshape(-1, tensor.shape[3]) for tensor in (problem.key, problem.value)]
    totals = [torch.zeros_like(source, dtype=work) for source in sources]
    rule_totals = [torch.zeros_like(tensor, dtype=work) for tensor in parameters]
    grad_query = torch.zeros_like(problem.query, dtype=work)
    for place, strip in enumerate(_strips(problem, keys)):
        gathered = (problem.query[:, :, strip.queries].to(work), *(strip.gather(source, work) for source in sources))
        upstream = grad_output[:, :, strip.queries].to(work)
        strip_grads = _pulled(problem, strip, gathered, upstream, parameters, first=place == 0)
        grad_query[:, :, strip.queries] = strip_grads[0]
        for total, grad in zip(totals, strip_grads[1:3], strict=True):
            total.index_add_(0, strip.rows, strip.reached(grad).flatten(0, 3))
        for total, grad in zip(rule_totals, strip_grads[3:], strict=True):
            total += grad
    inputs = (problem.query, problem.key, problem.value)
    totals_by_input = [
        grad_query,
        *(total.view(tensor.shape) for total, tensor in zip(totals, inputs[1:], strict=True)),
    ]
    cast = [grad.to(tensor.dtype) for grad, tensor in zip(totals_by_input, inputs, strict=True)]
    return cast + [grad.to(tensor.dtype) for grad, tensor in zip(rule_totals, parameters, strict=True)]


def _pulled(
    problem: Problem,
    strip: _GatheredStrip,
    gathered: tuple[Tensor, ...],
    upstream: Tensor,
    parameters: list[Tensor],
    *,
    first: bool,
) -> list[Tensor]:
    """Gradients of a strip's queries, gathered keys and values, and the rules' parameters, in that order.

    Softmax, rules and matrix multiplications are differentiated separately, so that an error of a user's function names
    it. The tensors that the rules read are checked at the first strip only.
    """
    query, keys, values = (part.detach().requires_grad_() for part in gathered)
    with torch.enable_grad():
        raw = _scores(problem, query, keys)
        scores_in = raw.detach().requires_grad_()
        scores_out = _ruled(problem, strip, scores_in)
        ends = scores_out.detach().requires_grad_()
        output = _weighed(problem, strip, ends, values)
    asked = [ends, values, *parameters]
    grads = torch.autograd.grad(output, asked, upstream, allow_unused=True)
    grad, grad_values, *totals = [_or_zero(part, like) for part, like in zip(grads, asked, strict=True)]
    if scores_out is not scores_in:
        pulled, learned = _through_rules(problem, strip, scores_in, scores_out, grad, parameters, first=first)
        grad = _or_zero(pulled, raw)
        totals = [total if part is None else total + part for total, part in zip(totals, learned, strict=True)]
    return [*torch.autograd.grad(raw, [query, keys], grad), grad_values, *totals]


def _through_rules(
    problem: Problem,
    strip: _GatheredStrip,
    scores_in: Tensor,
    scores_out: Tensor,
    grad: Tensor,
    parameters: list[Tensor],
    *,
    first: bool,
) -> tuple[Tensor | None, Sequence[Tensor | None]]:
    """Gradients of the scores before the rules and of each parameter; None for those without one."""
    if not scores_out.requires_grad:
        return None, [None] * len(parameters)
    if first:
        check_reached(problem.elementwise, scores_out, scores_in, parameters)
    grad_in, *learned = differentiated(problem.elementwise, scores_out, scores_in, parameters, grad, strip.indices)
    if grad_in is not None and strip.allowed is not None:
        grad_in = grad_in.masked_fill(~strip.allowed, 0.0)
    return grad_in, learned


def _or_zero(grad: Tensor | None, like: Tensor) -> Tensor:
    """A gradient, or zeros for None."""
    return torch.zeros_like(like) if grad is None else grad
