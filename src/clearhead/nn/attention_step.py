"""The kernels' calls of one self-attention with its projections, and the step that they make."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from ctypes import Structure

import torch
from torch import Tensor

from clearhead.backends import native
from clearhead.backends.native_library import Verb
from clearhead.backends.native_memory import new_tensor
from clearhead.backends.native_prepared import Written
from clearhead.backends.native_projection import Product, WeightGradients, run_all
from clearhead.backends.native_work import BackwardWork, ForwardWork, Rows
from clearhead.functional import attention
from clearhead.nn.step import Step, WayBack, layers_of
from clearhead.problem import Problem
from clearhead.projection import Layer, project
from clearhead.shapes import Float
from clearhead.statistics import Want

__all__ = ["AttentionBackward", "AttentionForward", "AttentionStep", "attended_by_parts", "by_head"]

_NOTHING = Want()


def by_head(projected: Sequence[Tensor], leading: tuple[int, int], counts: tuple[int, int, int]) -> tuple[Tensor, ...]:
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
    return by_head(projected, (problem.batch, problem.q_len), counts)


def _side_by_side(heads: Tensor) -> Float[Tensor, "rows width"]:
    return heads.transpose(1, 2).reshape(heads.shape[0] * heads.shape[2], -1)


class AttentionForward:
    """Projections, attention and the heads' mixing, written down.

    Args:
        problem: of hollow tensors.
        rows: ``[batch * len, in]``.
        layers: of queries, keys and values, or one that makes all three; the last one mixes the heads.
        seed: of the attention's dropout.
        training: whether ``kept`` holds what backward reads besides.

    Attributes:
        calls: in order.
        output: ``[batch, len, out]``.
        kept: what is projected; the heads; while training their rows' statistics, and exact output where it is kept.
        stays: tensors that the calls read and that stay where they are.
    """

    def __init__(
        self, problem: Problem, rows: Float[Tensor, "rows in"], layers: Sequence[Layer], seed: int, training: bool
    ) -> None:
        *sources, (weight, bias) = layers
        products = [Product([(rows, own)], right_turned=True, bias=added) for own, added in sources]
        projected = [product.output for product in products]
        own = problem.with_tensors(*_by_head_of(problem, projected)).with_seed(seed)
        attended = ForwardWork(own, _NOTHING, for_backward=training)
        self.output = new_tensor(rows, (problem.batch, problem.q_len, weight.shape[0]))
        mixed = Product(
            [(_side_by_side(attended.output), weight)], right_turned=True, bias=bias,
            output=self.output.view(len(rows), -1),
        )  # fmt: skip
        statistics = [] if attended.rows is None else [attended.rows.softmax]
        if attended.rows is not None and attended.rows.output is not None and rows.dtype != torch.float32:
            statistics.append(attended.rows.output)
        self.kept = [*projected, attended.output, *statistics]
        self.calls: list[tuple[Verb, Structure]] = [*(product.call for product in products), attended.call, mixed.call]
        self.stays = attended.held
        self._held = (products, attended, mixed)


class AttentionBackward:
    """The way back, written down: products before the attention's, and behind it.

    Args:
        problem: of hollow tensors.
        arrived: the output's gradient, ``[rows, out]``.
        rows: what forward read.
        layers: as forward had them.
        kept: what forward kept.
        seed: as forward had it.
        needs: of ``rows``, and of each layer's weight and bias.
    """

    def __init__(
        self, problem: Problem, arrived: Float[Tensor, "rows out"], rows: Float[Tensor, "rows in"],
        layers: Sequence[Layer], kept: Sequence[Tensor], seed: int, needs: Sequence[bool],
    ) -> None:  # fmt: skip
        *sources, (weight, _) = layers
        projected, (heads, softmax, *exact) = kept[: len(sources)], kept[len(sources) :]
        own = heads if heads.dtype == torch.float32 else exact[0] if exact else None
        self.problem, self.statistics = (
            problem.with_tensors(*_by_head_of(problem, projected)).with_seed(seed),
            Rows(own, None, softmax),
        )
        self._mixed = WeightGradients(arrived, _side_by_side(heads), *needs[-2:])
        self._before, self._after = [*self._mixed.products], list[Product]()
        self._own, self.of_x = list[WeightGradients](), list[Tensor]()
        self._attended: BackwardWork | None = None
        self.between: list[Tensor] = []
        self._without = len(needs) - 2
        if any(needs[:-2]):
            self._add_attention(arrived, rows, projected, sources, weight, needs)

    def _add_attention(
        self, arrived: Tensor, rows: Tensor, projected: Sequence[Tensor], sources: Sequence[Layer], weight: Tensor,
        needs: Sequence[bool],
    ) -> None:  # fmt: skip
        problem = self.problem
        of_joined = Product([(arrived, weight)])
        self._before.append(of_joined)
        of_projected = [new_tensor(part, tuple(part.shape)) for part in projected]
        self._of_heads = of_joined.output.view(problem.batch, problem.q_len, problem.num_heads, -1).transpose(1, 2)
        self._into = _by_head_of(problem, of_projected)
        self._attended = BackwardWork(problem, self.statistics, self._of_heads, into=self._into)
        self.between = [of_joined.output, *of_projected, self._attended.delta]
        self._own = [
            WeightGradients(part, rows, *needs[1 + 2 * place : 3 + 2 * place])
            for place, part in enumerate(of_projected)
        ]
        self._after = [product for layer in self._own for product in layer.products]
        if needs[0]:
            self.of_x = [new_tensor(rows, (problem.batch, problem.q_len, rows.shape[1]))]
            terms = [(part, layer[0]) for part, layer in zip(of_projected, sources, strict=True)]
            self._after.append(Product(terms, output=self.of_x[0].view(len(rows), -1)))

    @property
    def calls(self) -> list[tuple[Verb, Structure]]:
        """In order."""
        attended = [] if self._attended is None else [self._attended.call]
        return [*(product.call for product in self._before), *attended, *(product.call for product in self._after)]

    @property
    def stays(self) -> list[Tensor]:
        """Tensors that the calls read and that stay where they are."""
        return [] if self._attended is None else self._attended.held

    @property
    def of_layers(self) -> list[Tensor]:
        """Gradients of weights and biases that the products write, in their order."""
        return [part for layer in (*self._own, self._mixed) for part in layer.written]

    def found(self) -> list[Tensor | None]:
        """Gradients of ``rows``, and of each layer's weight and bias, once the calls are made."""
        mixed = [*self._mixed.found()]
        if self._attended is None:
            return [None] * self._without + mixed
        of_x = self.of_x[0] if self.of_x else None
        return [of_x, *(part for layer in self._own for part in layer.found()), *mixed]

    def run_contained(self) -> None:
        """Make the calls where NaN or inf may meet a mask."""
        run_all(self._before)
        if self._attended is None:
            return
        gradients = native.gradients(self.problem, self.statistics, native.Arrived(self._of_heads))
        for place, gradient in zip(self._into, gradients, strict=True):
            place.copy_(gradient)
        run_all(self._after)


def attended_by_parts(
    problem: Problem, x: Float[Tensor, "batch len in"], layers: Sequence[Layer], seed: int
) -> Float[Tensor, "batch len out"]:
    """A self-attention with its projections by functions that autograd and watchers know."""
    *sources, last = layers
    projected = [project(x, *layer).flatten(0, 1) for layer in sources]
    output = attention(
        *_by_head_of(problem, projected), mask=problem.mask, scores=problem.scores, scale=problem.scale,
        dropout=problem.dropout, seed=seed, query_offset=problem.query_offset, backend=native.BACKEND.name,
    )  # fmt: skip
    return project(output.transpose(1, 2).flatten(-2), *last)


class AttentionStep(Step):
    """Self-attention with its projections: a weight and a bias for each of its layers, the last one behind the
    others."""

    def __init__(self, problem: Problem, training: bool, layout: Hashable | None) -> None:
        super().__init__(problem, training, layout, [problem.dropout])

    def write_forward(self, rows: Tensor, tensors: Sequence[Tensor | None], seeds: Sequence[int]) -> Written:
        own = AttentionForward(self.problem, rows, layers_of(tensors), seeds[0], self.training)
        return Written(own.calls, [*own.kept, own.output], own.stays, own)

    def write_backward(
        self, arrived: Tensor, rows: Tensor, inputs: Sequence[Tensor | None], kept: Sequence[Tensor],
        seeds: Sequence[int], needs: Sequence[bool],
    ) -> WayBack:  # fmt: skip
        layers = layers_of(inputs[1:])
        return _AttentionWayBack(AttentionBackward(self.problem, arrived, rows, layers, kept, seeds[0], needs))

    def by_parts(self, x: Tensor, tensors: Sequence[Tensor | None], seeds: Sequence[int]) -> Tensor:
        return attended_by_parts(self.problem, x, layers_of(tensors), seeds[0])


class _AttentionWayBack(WayBack):
    def __init__(self, own: AttentionBackward) -> None:
        self._own = own

    def written(self) -> Written:
        own = self._own
        return Written(own.calls, [*own.of_x, *own.of_layers, *own.between], own.stays, own)

    def found(self) -> list[Tensor | None]:
        return self._own.found()

    def contained(self) -> list[Tensor | None]:
        self._own.run_contained()
        return self._own.found()
