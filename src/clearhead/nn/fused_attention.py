"""Self-attention with its projections as one step of autograd: two stretches of kernels instead of a dozen calls.

Between two large products Python finds nothing of itself in the caches, and whatever it does takes several times as
long as elsewhere: up to a tenth of a training step of a thousand tokens. Here the products and the attention are
written down first and then run, one after the other; and what was written down for one layout of tensors is kept, so
that from the third call on only addresses change.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from ctypes import Structure
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from clearhead.backends import native
from clearhead.backends.native_library import Code, Verb
from clearhead.backends.native_memory import new_tensor
from clearhead.backends.native_prepared import Kept, Stretches, Written
from clearhead.backends.native_projection import Product, WeightGradients, lies_plainly, rows_of, run_all
from clearhead.backends.native_projection import check as check_product
from clearhead.backends.native_work import BackwardWork, ForwardWork, Rows, check
from clearhead.dispatch import choose
from clearhead.functional import attention
from clearhead.masks import Mask
from clearhead.masks.parts import parts_of
from clearhead.problem import Problem, draw_seed
from clearhead.projection import KINDS, are_plain, choices, has_choice, kernels_take, project, recorded
from clearhead.scores import ScoreRule
from clearhead.shapes import Float
from clearhead.statistics import Want
from clearhead.watch import watched

__all__ = ["Layer", "self_attention"]

#: A linear layer's weight ``[out, in]`` and bias ``[out]``, or none.
Layer: TypeAlias = tuple[Tensor, Tensor | None]

_FUNCTION = "attention"
_NOTHING = Want()
#: What options of calls that may recur are; others are for ``Problem`` to look at each time.
_SIMPLE: Final = (int, float, str, type(None))


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
    tensors = [part for layer in (*sources, last) for part in layer]
    rules = (scores,) if isinstance(scores, ScoreRule) else tuple(scores)
    training = torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in (x, *tensors))
    options = (scale, dropout, query_offset, backend)
    recurs = (
        not rules and are_plain(x, *tensors) and all(lies_plainly(part) for part in tensors if part is not None)
        and all(type(option) in _SIMPLE for option in options)
    )  # fmt: skip
    layout = (
        x.shape, x.dtype, *(None if part is None else part.shape for part in tensors), num_heads, num_kv_heads,
        *options, training, torch.get_num_threads(), *(choices(x.dtype) if recurs else ()),
    )  # fmt: skip
    step = _KEPT.get((id(mask), layout)) if recurs else None
    if step is None or not step.is_current():
        problem = _problem_like(
            x, sources, last, training, backend, (num_heads, num_kv_heads, num_kv_heads), mask=mask, scores=rules,
            scale=scale, dropout=dropout, query_offset=query_offset,
        )  # fmt: skip
        if problem is None:
            return None
        # One that had to be placed first is another, and may have copied numbers that somebody writes into later.
        recurs = recurs and problem.mask is mask and _is_said_by_runs(problem)
        step = _Step(problem, training, layout if recurs else None)
        if recurs:
            _KEPT.put((id(mask), layout), step)
    # Only now, so that whoever goes on without this step finds the generator as it was.
    seed = draw_seed(dropout)
    if training:
        output: Tensor = _SelfAttention.apply(step, seed, x, *tensors)  # type: ignore[no-untyped-call]
        return output
    return step.forward(x, tensors, seed)[-1]


def _problem_like(
    x: Tensor, sources: Sequence[Layer], last: Layer, training: bool, backend: str, counts: tuple[int, int, int],
    **options: Any,
) -> Problem | None:  # fmt: skip
    """The problem without numbers, where the CPU kernels are what every part would use."""
    kinds = KINDS if training else KINDS[:1]
    if not has_choice(x, *sources[0]) or not all(kernels_take(kinds, x, *layer) for layer in sources):
        return None
    if not kernels_take(kinds, x, *last, width=last[0].shape[-1]):
        return None
    leading = (x.shape[0], x.shape[1])
    hollow = [x.new_empty(1).expand(leading[0] * leading[1], weight.shape[0]) for weight, _ in sources]
    problem = Problem.of(_FUNCTION, *_by_head(hollow, leading, counts), seed=0, **options)
    if problem.rule_parameters or choose(_FUNCTION, problem, _NOTHING, backend) is not native.BACKEND:
        return None
    return problem


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


def _side_by_side(heads: Tensor) -> Float[Tensor, "rows width"]:
    return heads.transpose(1, 2).reshape(heads.shape[0] * heads.shape[2], -1)


def _is_said_by_runs(problem: Problem) -> bool:
    """Whether a mask is a band and runs of keys, which are asked for again: a table, or a user's function, may say
    something else each time."""
    if problem.mask is None:
        return True
    parts = problem.mask_parts
    return not parts.rest and parts.dense is None and parts.blocks is None


class _Step:
    """What calls of one layout under one mask share: a problem without numbers, and the kernels' calls.

    Args:
        problem: of hollow tensors.
        training: whether forward keeps what backward needs.
        layout: of calls that may come again, so that the kernels' are kept; None of others.
    """

    def __init__(self, problem: Problem, training: bool, layout: Hashable | None) -> None:
        self.problem, self.training = problem, training
        # Each batch of packed sequences has a mask of its own, which differs in where its runs begin and end alone.
        self._edges: tuple[Tensor, ...] = ()
        if layout is not None and problem.mask is not None:
            parts = problem.mask_parts
            self._edges = () if parts.runs is None else parts.edges
            layout = (layout, parts.before, parts.after, problem.query_offset, *(edge.shape for edge in self._edges))
        self._calls = Stretches(may_recur=False) if layout is None else _CALLS.get(layout) or Stretches(may_recur=True)
        if layout is not None:
            _CALLS.put(layout, self._calls)

    def is_current(self) -> bool:
        """Whether the mask's tensors are still what they were: somebody may have written into them."""
        own = self.problem
        if own.mask is None or not tuple(own.mask.tensors()):
            return True
        size = (own.batch, own.num_heads, own.q_len, own.k_len)
        return parts_of(own.mask, size, own.query_offset) is own.mask_parts

    def problem_of(self, projected: Sequence[Tensor], seed: int) -> Problem:
        """The problem with its numbers."""
        own = self.problem.with_tensors(*_by_head_of(self.problem, projected))
        return own.with_seed(seed)

    def forward(self, x: Tensor, tensors: Sequence[Tensor | None], seed: int) -> list[Tensor]:
        """What is projected; the heads; while training their rows' statistics, and exact output where it is kept; and
        the output."""
        rows, layers = rows_of(x.reshape(-1, x.shape[-1])), _layers(tensors)
        reads = [rows, *(part for part in tensors if part is not None), *self._edges]
        writes, code, done = self._calls.forward.run(reads, lambda: self._forward_calls(rows, layers, seed), seed)
        if done == len(layers) - 1:
            check("ch_forward", code)
        check_product(code)
        return writes

    def _forward_calls(self, rows: Tensor, layers: Sequence[Layer], seed: int) -> Written:
        *sources, (weight, bias) = layers
        products = [Product([(rows, own)], right_turned=True, bias=added) for own, added in sources]
        projected = [product.output for product in products]
        attended = ForwardWork(self.problem_of(projected, seed), _NOTHING, for_backward=self.training)
        output = new_tensor(rows, (self.problem.batch, self.problem.q_len, weight.shape[0]))
        mixed = Product(
            [(_side_by_side(attended.output), weight)], right_turned=True, bias=bias, output=output.view(len(rows), -1)
        )
        kept = [] if attended.rows is None else [attended.rows.softmax]
        if attended.rows is not None and attended.rows.output is not None and rows.dtype != torch.float32:
            kept.append(attended.rows.output)
        return Written(
            [*(product.call for product in products), attended.call, mixed.call],
            [*projected, attended.output, *kept, output], attended.held, (products, attended, mixed),
        )  # fmt: skip

    def backward(self, given: _Given, needs: tuple[bool, ...]) -> list[Tensor | None]:
        """Gradients of ``x`` and each layer's weight and bias; what is not needed is None."""
        made: list[_Backward] = []

        def write_down() -> Written:
            made.append(_Backward(self.problem_of(given.projected, given.seed), given, needs))
            return made[-1].written()

        reads = [*given.reads(), *self._edges]
        writes, code, _ = self._calls.backward(needs).run(reads, write_down, given.seed)
        if code == Code.NOT_FINITE:
            # Rare: NaN or inf behind a mask, which takes a look of its own.
            return _Backward(self.problem_of(given.projected, given.seed), given, needs).contained()
        check_product(code)
        if made:
            return made[-1].found()
        found = iter(writes)
        return [next(found) if needed else None for needed in needs]


#: A mask's id is its own as long as the step holds the mask.
_KEPT: Final = Kept[_Step](64)
_CALLS: Final = Kept[Stretches](64)


@dataclass
class _Given:
    """What backward reads: the gradient and ``x`` as rows, the shape of ``x``, weights and biases, and what forward
    left."""

    arrived: Float[Tensor, "rows out"]
    rows: Float[Tensor, "rows in"]
    shape: tuple[int, ...]
    tensors: Sequence[Tensor | None]
    projected: Sequence[Tensor]
    heads: Tensor
    kept: Sequence[Tensor]
    seed: int

    @property
    def row_statistics(self) -> Rows:
        softmax, *exact = self.kept
        own = self.heads if self.heads.dtype == torch.float32 else exact[0] if exact else None
        return Rows(own, None, softmax)

    def reads(self) -> list[Tensor]:
        """Tensors that lie elsewhere each time."""
        parts = [part for part in self.tensors if part is not None]
        return [self.arrived, self.rows, *parts, *self.projected, self.heads, *self.kept]


class _Backward:
    """The calls of one backward: products before the attention's, and behind it."""

    def __init__(self, problem: Problem, given: _Given, needs: Sequence[bool]) -> None:
        *sources, (weight, _) = _layers(given.tensors)
        self._problem, self._given = problem, given
        self._mixed = WeightGradients(given.arrived, _side_by_side(given.heads), *needs[-2:])
        self._before, self._after = [*self._mixed.products], list[Product]()
        self._own, self._of_x = list[WeightGradients](), list[Tensor]()
        self._attended: BackwardWork | None = None
        self._between: list[Tensor] = []
        self._without = len(needs) - 2
        if any(needs[:-2]):
            self._add_attention(sources, weight, needs)

    def _add_attention(self, sources: Sequence[Layer], weight: Tensor, needs: Sequence[bool]) -> None:
        problem, given = self._problem, self._given
        of_joined, rows = Product([(given.arrived, weight)]), given.rows
        self._before.append(of_joined)
        of_projected = [new_tensor(part, tuple(part.shape)) for part in given.projected]
        self._of_heads = of_joined.output.view(problem.batch, problem.q_len, problem.num_heads, -1).transpose(1, 2)
        self._into = _by_head_of(problem, of_projected)
        self._attended = BackwardWork(problem, given.row_statistics, self._of_heads, into=self._into)
        self._between = [of_joined.output, *of_projected, self._attended.delta]
        self._own = [
            WeightGradients(part, rows, *needs[1 + 2 * place : 3 + 2 * place])
            for place, part in enumerate(of_projected)
        ]
        self._after = [product for layer in self._own for product in layer.products]
        if needs[0]:
            self._of_x = [new_tensor(rows, given.shape)]
            terms = [(part, layer[0]) for part, layer in zip(of_projected, sources, strict=True)]
            self._after.append(Product(terms, output=self._of_x[0].view(len(rows), -1)))

    def written(self) -> Written:
        """Results first, in the order of what is needed."""
        attended = self._attended
        calls: list[tuple[Verb, Structure]] = [product.call for product in self._before]
        calls += [] if attended is None else [attended.call]
        calls += [product.call for product in self._after]
        results = [*self._of_x, *(part for layer in (*self._own, self._mixed) for part in layer.written)]
        return Written(calls, [*results, *self._between], [] if attended is None else attended.held, self)

    def found(self) -> list[Tensor | None]:
        """Of ``x`` and each layer's weight and bias, once the calls are made."""
        mixed = [*self._mixed.found()]
        if self._attended is None:
            return [None] * self._without + mixed
        of_x = self._of_x[0] if self._of_x else None
        return [of_x, *(part for layer in self._own for part in layer.found()), *mixed]

    def contained(self) -> list[Tensor | None]:
        """The same where NaN or inf may meet a mask."""
        run_all(self._before)
        arrived = native.Arrived(self._of_heads)
        gradients = native.gradients(self._problem, self._given.row_statistics, arrived)
        for place, gradient in zip(self._into, gradients, strict=True):
            place.copy_(gradient)
        run_all(self._after)
        return self.found()


class _SelfAttention(torch.autograd.Function):
    """``x``, then a weight and a bias or None for each layer."""

    @staticmethod
    def forward(ctx: Any, step: _Step, seed: int, x: Tensor, *tensors: Tensor | None) -> Tensor:
        *kept, output = step.forward(x, tensors, seed)
        ctx.step, ctx.seed = step, seed
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *tensors, *kept)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        count = len(needs)
        if grad is None:
            return (None,) * (2 + count)
        # Asked for once: a checkpoint hands them out a single time.
        saved = ctx.saved_tensors
        x, *tensors = saved[:count]
        if recorded(grad):
            return None, None, *_known_gradients(ctx.step.problem.with_seed(ctx.seed), grad, saved[:count], needs)
        sources = len(_layers(tensors)) - 1
        projected, (heads, *kept) = saved[count : count + sources], saved[count + sources :]
        arrived, rows = (rows_of(part.reshape(-1, part.shape[-1])) for part in (grad, x))
        given = _Given(arrived, rows, tuple(x.shape), tensors, projected, heads, kept, ctx.seed)
        return None, None, *ctx.step.backward(given, needs)


def _layers(tensors: Sequence[Tensor | None]) -> list[Layer]:
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    return [(weight, bias) for weight, bias in pairs if weight is not None]


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
