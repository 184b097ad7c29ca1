"""The kernels' calls of one self-attention with its projections: written down once, then made again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from ctypes import Structure
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

from clearhead.backends import native
from clearhead.backends.native_library import Code, Verb
from clearhead.backends.native_memory import new_tensor
from clearhead.backends.native_prepared import Kept, Stretches, Written
from clearhead.backends.native_projection import Product, WeightGradients, rows_of, run_all
from clearhead.backends.native_projection import check as check_product
from clearhead.backends.native_work import BackwardWork, ForwardWork, Rows, check
from clearhead.masks.parts import parts_of
from clearhead.problem import Problem
from clearhead.shapes import Float
from clearhead.statistics import Want

__all__ = ["Given", "Layer", "Step", "by_head", "by_head_of", "layers_of"]

#: A linear layer's weight ``[out, in]`` and bias ``[out]``, or none.
Layer: TypeAlias = tuple[Tensor, Tensor | None]

_NOTHING = Want()


def by_head(projected: Sequence[Tensor], leading: tuple[int, int], counts: tuple[int, int, int]) -> tuple[Tensor, ...]:
    """Queries, keys and values ``[batch, heads, len, dim]`` in ``[rows, width]`` each, or in one that holds them side
    by side; ``counts`` are their heads."""
    if len(projected) == 1:
        rows = projected[0].view(*leading, sum(counts), -1)
        return tuple(part.transpose(1, 2) for part in rows.split(counts, dim=2))
    pairs = zip(projected, counts, strict=True)
    return tuple(part.view(*leading, count, -1).transpose(1, 2) for part, count in pairs)


def by_head_of(problem: Problem, projected: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same for a problem of self-attention."""
    counts = (problem.num_heads, problem.num_kv_heads, problem.num_kv_heads)
    return by_head(projected, (problem.batch, problem.q_len), counts)


def _side_by_side(heads: Tensor) -> Float[Tensor, "rows width"]:
    return heads.transpose(1, 2).reshape(heads.shape[0] * heads.shape[2], -1)


def layers_of(tensors: Sequence[Tensor | None]) -> list[Layer]:
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    return [(weight, bias) for weight, bias in pairs if weight is not None]


class Step:
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
        own = self.problem.with_tensors(*by_head_of(self.problem, projected))
        return own.with_seed(seed)

    def forward(self, x: Tensor, tensors: Sequence[Tensor | None], seed: int) -> list[Tensor]:
        """What is projected; the heads; while training their rows' statistics, and exact output where it is kept; and
        the output."""
        rows = rows_of(x.reshape(-1, x.shape[-1]))
        reads = [rows, *[part for part in tensors if part is not None], *self._edges]
        writes, code, done = self._calls.forward.run(
            reads, lambda: self._forward_calls(rows, layers_of(tensors), seed), seed
        )
        if done == len(tensors) // 2 - 1:
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

    def backward(self, given: Given, needs: tuple[bool, ...]) -> list[Tensor | None]:
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


_CALLS: Final = Kept[Stretches](64)


@dataclass
class Given:
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

    def __init__(self, problem: Problem, given: Given, needs: Sequence[bool]) -> None:
        *sources, (weight, _) = layers_of(given.tensors)
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
        self._into = by_head_of(problem, of_projected)
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
