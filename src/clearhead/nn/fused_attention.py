"""Self-attention with its projections as one step of autograd: two stretches of kernels instead of a dozen calls.

Between two large products Python finds nothing of itself in the caches, and whatever it does takes several times as
long as elsewhere: up to a tenth of a training step of a thousand tokens. Here the products and the attention are
written down first and then run, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from clearhead.backends import native
from clearhead.backends.native_library import run
from clearhead.backends.native_memory import new_tensor
from clearhead.backends.native_projection import Product, WeightGradients, run_all
from clearhead.backends.native_projection import check as check_product
from clearhead.backends.native_work import BackwardWork, ForwardWork, Rows, check
from clearhead.dispatch import choose
from clearhead.functional import attention
from clearhead.masks import Mask
from clearhead.problem import Problem, draw_seed
from clearhead.projection import KINDS, has_choice, kernels_take, project, recorded
from clearhead.scores import ScoreRule
from clearhead.shapes import Float
from clearhead.statistics import Want
from clearhead.watch import watched

__all__ = ["Layer", "self_attention"]

#: A linear layer's weight ``[out, in]`` and bias ``[out]``, or none.
Layer: TypeAlias = tuple[Tensor, Tensor | None]

_FUNCTION = "attention"
_NOTHING = Want()


def self_attention(
    x: Float[Tensor, "*batch len in"],
    sources: Sequence[Layer],
    last: Layer,
    *,
    num_heads: int,
    num_kv_heads: int,
    mask: Mask | None = None,
    scores: ScoreRule | Iterable[ScoreRule] = (),
    scale: float | None = None,
    dropout: float = 0.0,
    query_offset: int | None = None,
    backend: str = "auto",
) -> Float[Tensor, "*batch len out"] | None:
    """``attention`` of heads that are projected from one input, projected back: the same numbers in one step.

    ``concat_h(attention(x Wq_h, x Wk_h, x Wv_h)) Wo``

    Args:
        x: ``[batch, len, in]``.
        sources: the layers of queries, keys and values; or one that makes all three side by side.
        last: the layer that mixes the heads.
        num_heads: of queries.
        num_kv_heads: of keys and values.
        mask: as in ``attention``, and so are those that follow.
        scores: none whose tensors learn.
        scale: see there.
        dropout: see there; its seed is drawn as there.
        query_offset: see there.
        backend: see there.

    Returns:
        ``[batch, len, out]``; None where the CPU kernels are not what every part would use, or somebody looks at a
        part, for whoever asks to take them one by one.

    Raises:
        ShapeError, MaskError, UnsupportedError: as ``attention``.

    Cost: that of the parts. Kept for backward are ``x``, queries, keys, values, the heads' output, in 16 bits
    beyond 256 tokens in float32 too, and two numbers for each row of scores.
    """
    if torch.compiler.is_compiling() or watched() or _has_any_global_hook() or x.dim() != 3 or 0 in x.shape:
        return None
    layers = (*sources, last)
    tensors = [part for layer in layers for part in layer]
    training = torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in (x, *tensors))
    kinds, joined = KINDS if training else KINDS[:1], last[0].shape[-1]
    if not has_choice(x, *sources[0]) or not all(kernels_take(kinds, x, *layer) for layer in sources):
        return None
    if not kernels_take(kinds, x, *last, width=joined):
        return None
    leading = (x.shape[0], x.shape[1])
    projected = tuple(new_tensor(x, (leading[0] * leading[1], weight.shape[0])) for weight, _ in sources)
    problem = Problem.of(
        _FUNCTION, *_by_head(projected, leading, (num_heads, num_kv_heads, num_kv_heads)), mask=mask, scores=scores,
        scale=scale, dropout=dropout, seed=0, query_offset=query_offset,
    )  # fmt: skip
    if problem.rule_parameters or choose(_FUNCTION, problem, _NOTHING, backend) is not native.BACKEND:
        return None
    # Only now, so that whoever goes on without this step finds the generator as it was.
    problem = replace(problem, seed=draw_seed(dropout))
    if training:
        output: Tensor = _SelfAttention.apply(problem, projected, x, *tensors)  # type: ignore[no-untyped-call]
        return output
    return _forward(problem, projected, x, layers, for_backward=False)[0]


def _by_head(projected: Sequence[Tensor], leading: tuple[int, int], counts: tuple[int, int, int]) -> tuple[Tensor, ...]:
    """Queries, keys and values ``[batch, heads, len, dim]`` in ``[rows, width]`` each, or in one that holds them side
    by side; ``counts`` are their heads."""
    if len(projected) == 1:
        rows = projected[0].view(*leading, sum(counts), -1)
        return tuple(part.transpose(1, 2) for part in rows.split(counts, dim=2))
    pairs = zip(projected, counts, strict=True)
    return tuple(part.view(*leading, count, -1).transpose(1, 2) for part, count in pairs)


def _by_head_of(problem: Problem, projected: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same for a problem of self-attention."""
    counts = (problem.num_heads, problem.num_kv_heads, problem.num_kv_heads)
    return _by_head(projected, (problem.batch, problem.q_len), counts)


def _forward(
    problem: Problem, projected: Sequence[Tensor], x: Tensor, layers: Sequence[Layer], *, for_backward: bool
) -> tuple[Tensor, Float[Tensor, "rows width"], Rows | None]:
    """The output, after writing what is projected, which the problem is about; and what backward needs besides: the
    heads side by side, and their rows."""
    *sources, (weight, bias) = layers
    rows = x.reshape(-1, x.shape[-1])
    products = [
        Product([(rows, own)], right_turned=True, bias=added, output=output)
        for (own, added), output in zip(sources, projected, strict=True)
    ]
    attended = ForwardWork(problem, _NOTHING, for_backward=for_backward)
    joined = attended.output.transpose(1, 2).reshape(len(rows), -1)
    output = new_tensor(x, (*x.shape[:2], weight.shape[0]))
    mixed = Product([(joined, weight)], right_turned=True, bias=bias, output=output.view(len(rows), -1))
    code, done = run([*(product.call for product in products), attended.call, mixed.call])
    if done == len(products):
        check("ch_forward", code)
    check_product(code)
    return output, joined, attended.rows


class _SelfAttention(torch.autograd.Function):
    """``x``, then a weight and a bias or None for each layer."""

    @staticmethod
    def forward(
        ctx: Any, problem: Problem, projected: tuple[Tensor, ...], x: Tensor, *tensors: Tensor | None
    ) -> Tensor:
        output, joined, rows = _forward(problem, projected, x, _layers(tensors), for_backward=True)
        assert rows is not None
        # What is saved goes when backward is done; the problem stays as long as the output does.
        ctx.problem = problem.without_numbers()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *tensors, *projected, joined, rows.output, rows.lse, rows.softmax)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        count = len(needs)
        if grad is None:
            return (None,) * (2 + count)
        # Asked for once: a checkpoint hands them out a single time.
        saved = ctx.saved_tensors
        given, kept = saved[:count], saved[count:]
        if recorded(grad):
            return None, None, *_known_gradients(ctx.problem, grad, given, needs)
        *projected, joined, output, lse, softmax = kept
        layers, rows = _layers(given[1:]), Rows(output, lse, softmax)
        return None, None, *_gradients(ctx.problem, grad, given[0], layers, projected, joined, rows, needs)


def _layers(tensors: Sequence[Tensor | None]) -> list[Layer]:
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    return [(weight, bias) for weight, bias in pairs if weight is not None]


def _gradients(
    problem: Problem, grad: Tensor, x: Tensor, layers: Sequence[Layer], projected: Sequence[Tensor], joined: Tensor,
    rows: Rows, needs: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Of ``x`` and each layer's weight and bias; what is not needed is None."""
    *sources, (weight, _) = layers
    flat, arrived = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    mixed = WeightGradients(arrived, joined, *needs[-2:])
    if not any(needs[:-2]):
        run_all(mixed.products)
        return [None] * (len(needs) - 2) + [*mixed.found()]
    of_joined = Product([(arrived, weight)])
    of_projected = [new_tensor(part, tuple(part.shape)) for part in projected]
    problem = problem.with_tensors(*_by_head_of(problem, projected))
    of_heads = of_joined.output.view(problem.batch, problem.q_len, problem.num_heads, -1).transpose(1, 2)
    into = _by_head_of(problem, of_projected)
    attended = BackwardWork(problem, rows, of_heads, into=into)
    own = [
        WeightGradients(part, flat, *needs[1 + 2 * place : 3 + 2 * place]) for place, part in enumerate(of_projected)
    ]
    of_x = Product([(part, layer[0]) for part, layer in zip(of_projected, sources, strict=True)]) if needs[0] else None
    before = [*mixed.products, of_joined]
    after = [product for layer in own for product in layer.products] + ([] if of_x is None else [of_x])
    code, done = run([*(product.call for product in before), attended.call, *(product.call for product in after)])
    if done == len(before) and not check("ch_backward", code):
        # Rare: NaN or inf behind a mask, which takes a look of its own.
        found = native.gradients(problem, rows, native.Arrived(of_heads))
        for place, gradient in zip(into, found, strict=True):
            place.copy_(gradient)
        run_all(after)
    else:
        check_product(code)
    each = [part for layer in (*own, mixed) for part in layer.found()]
    return [None if of_x is None else of_x.output.view(x.shape), *each]


def _known_gradients(
    problem: Problem, grad: Tensor, tensors: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The same by parts that autograd and watchers know, from the inputs alone."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        parts = [
            part.view_as(part) if part is not None and needed else part
            for part, needed in zip(tensors, needs, strict=True)
        ]
        x, *layers = parts[0], *_layers(parts[1:])
        assert x is not None
        *sources, last = layers
        projected = [project(x, *layer).flatten(0, 1) for layer in sources]
        output = attention(
            *_by_head_of(problem, projected), mask=problem.mask, scores=problem.scores, scale=problem.scale,
            dropout=problem.dropout, seed=problem.seed, query_offset=problem.query_offset, backend=native.BACKEND.name,
        )  # fmt: skip
        output = project(output.transpose(1, 2).flatten(-2), *last)
        wanted = [part for part, needed in zip(parts, needs, strict=True) if part is not None and needed]
        found = iter(torch.autograd.grad(output, wanted, grad, create_graph=again, allow_unused=True))
    return [next(found) if part is not None and needed else None for part, needed in zip(parts, needs, strict=True)]
