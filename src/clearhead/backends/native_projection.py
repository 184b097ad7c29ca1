"""Products of linear layers by the CPU kernels: forward, input gradient, weight gradient, and sums of several."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from clearhead.backends.native_header import (
    DTYPES,
    MAX_TERMS,
    MAX_THREADS,
    Activation,
    Code,
    Gate,
    ProjectionDescription,
    Term,
    Verb,
)
from clearhead.backends.native_library import isa_index, library, message, new_description, run
from clearhead.backends.native_memory import new_tensor
from clearhead.shapes import Float

__all__ = [
    "MAX_TERMS",
    "Activation",
    "Gate",
    "Product",
    "WeightGradients",
    "absent",
    "check",
    "layer_product",
    "lies_plainly",
    "product",
    "rows_of",
    "run_all",
    "run_calls",
]


def absent() -> str | None:
    """Why there are no kernels, or None."""
    return None if library() is not None else "the CPU kernels are not here"


class Product:
    """A linear layer's product, written down: ``run`` writes ``output``.

    ``activation(sum(left @ right for left, right in terms) + bias)``, summed in float32 and rounded once.

    Args:
        terms: at most ``MAX_TERMS`` pairs of one dtype, ``[rows, steps]`` and ``[steps, columns]``; as they lie in
            memory where ``turned``. They may be written until ``run``.
        left_turned: every left lies as ``[steps, rows]``.
        right_turned: every right lies as ``[columns, steps]``. Where each is the view of one that lies the other way,
            that one is read.
        bias: ``[columns]``, added to every row.
        activation: of each sum.
        dropped: of ``LEVELS`` numbers how many become 0 in the end, at random; the others are divided by what is kept.
        seed: of dropout.
        sloped: whether ``slope`` is written: how much each number of the output grows with its sum.
        gate: ``[rows, columns]``, on the way back: slopes, by which each sum is multiplied, or a relu's output; where
            that is not above 0 the result is 0, and ``dropped`` says how many it dropped.
        gate_kind: which of them.
        slope_gate: ``[rows, columns]``, beside slopes as a gate: ``slope`` is written, each sum multiplied by this.
        row_sums: ``[rows]``, contiguous, is written: the sums of the one left along its steps. Only where left is
            turned.
        output: ``[rows, columns]`` to write; a new one when left out.

    Cost: ``2 * rows * steps * columns`` operations; room for right, at most some 16 MiB, and with more than some
    thousand steps for the output in float32. The same bits whatever the number of threads is.
    """

    def __init__(
        self,
        terms: Sequence[tuple[Float[Tensor, "rows steps"], Float[Tensor, "steps columns"]]],
        *,
        left_turned: bool = False,
        right_turned: bool = False,
        bias: Float[Tensor, " columns"] | None = None,
        activation: Activation = Activation.PLAIN,
        dropped: int = 0,
        seed: int = 0,
        sloped: bool = False,
        gate: Float[Tensor, "rows columns"] | None = None,
        gate_kind: Gate = Gate.OUTPUT,
        slope_gate: Float[Tensor, "rows columns"] | None = None,
        row_sums: Float[Tensor, " rows"] | None = None,
        output: Float[Tensor, "rows columns"] | None = None,
    ) -> None:
        if all(map(_lies_turned, rights := [right for _, right in terms])):
            # GPT-2's layers hold their weights as [in, out]: what lies in columns is read where it is too.
            terms = [(left, right.t()) for (left, _), right in zip(terms, rights, strict=True)]
            right_turned = not right_turned
        laid = [(rows_of(left), rows_of(right)) for left, right in terms]
        left, right = laid[0]
        own = new_description(ProjectionDescription)
        own.threads = min(torch.get_num_threads(), MAX_THREADS)
        own.dtype, own.num_terms = DTYPES[left.dtype], len(laid)
        own.left_turned, own.right_turned = left_turned, right_turned
        rows, columns = left.shape[1 if left_turned else 0], right.shape[0 if right_turned else 1]
        own.rows, own.columns = rows, columns
        for place, (one, other) in enumerate(laid):
            steps = one.shape[0 if left_turned else 1]
            assert steps == other.shape[1 if right_turned else 0]
            own.terms[place] = Term(one.data_ptr(), other.data_ptr(), one.stride(0), other.stride(0), steps)
        self.output = new_tensor(left, (rows, columns)) if output is None else output
        own.output, own.output_row = self.output.data_ptr(), self.output.stride(0)
        dense = None if bias is None else bias.detach().resolve_neg().contiguous()
        if dense is not None:
            assert dense.shape == (columns,)
            own.bias = dense.data_ptr()
        own.activation, own.dropped, own.seed = activation, dropped, seed
        self.slope = new_tensor(left, (rows, columns)) if sloped or slope_gate is not None else None
        if self.slope is not None:
            own.slope, own.slope_row = self.slope.data_ptr(), self.slope.stride(0)
        if gate is not None:
            gate = rows_of(gate)
            assert gate.shape == (rows, columns)
            assert gate.dtype is left.dtype
            own.gate, own.gate_row, own.gate_kind = gate.data_ptr(), gate.stride(0), gate_kind
        if slope_gate is not None:
            assert slope_gate.shape == (rows, columns)
            assert slope_gate.dtype is left.dtype
            own.slope_gate, own.slope_gate_row = slope_gate.data_ptr(), slope_gate.stride(0)
        if row_sums is not None:
            own.row_sums = row_sums.data_ptr()
        self.description = own
        self._held = (laid, dense, gate, slope_gate, row_sums)

    @property
    def call(self) -> tuple[Verb, ProjectionDescription]:
        """What ``native_library.run`` takes."""
        return Verb.PROJECT, self.description

    def run(self) -> Float[Tensor, "rows columns"]:
        """Write the output and return it.

        >>> left, right = torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> Product([(left, right), (left, right)]).run()
        tensor([[2., 4.],
                [6., 8.]])
        """
        kernels = library()
        assert kernels is not None
        check(kernels.ch_project(ctypes.byref(self.description)))
        return self.output


class WeightGradients:
    """Gradients of one layer's weight and bias, and the products that write them: one for each part, or none.

    Args:
        parts: the gradient of the layer's output, ``[rows, out]``, and what the layer read, ``[rows, in]``; a pair for
            each stretch of outputs, in their order, where these were made from inputs of their own.
        needs_weight: whether the weight's is wanted.
        needs_bias: whether the bias's is.
    """

    def __init__(
        self, parts: Sequence[tuple[Float[Tensor, "rows out"], Float[Tensor, "rows in"]]], needs_weight: bool,
        needs_bias: bool,
    ) -> None:  # fmt: skip
        self.products: list[Product] = []
        self._weight: Tensor | None = None
        self._sums: Tensor | None = None
        self._parts, self._needs_bias = parts, needs_bias
        if not needs_weight:
            return
        widths = [grad.shape[1] for grad, _ in parts]
        first, x = parts[0]
        self._weight = new_tensor(first, (sum(widths), x.shape[1]))
        self._sums = first.new_empty(sum(widths)) if needs_bias else None
        sums = [None] * len(parts) if self._sums is None else self._sums.split(widths)
        self.products = [
            Product([part], left_turned=True, row_sums=own, output=rows)
            for part, own, rows in zip(parts, sums, self._weight.split(widths), strict=True)
        ]

    @property
    def written(self) -> list[Tensor]:
        """What the products write: nothing, the weight's, or both."""
        return [part for part in (self._weight, self._sums) if part is not None]

    def found(self) -> tuple[Float[Tensor, "out in"] | None, Float[Tensor, " out"] | None]:
        """Both, once the products have run; None for one that is not wanted."""
        if self._weight is not None or not self._needs_bias:
            return self._weight, self._sums
        return None, torch.cat([grad.sum(0) for grad, _ in self._parts])


def product(
    terms: Sequence[tuple[Float[Tensor, "rows steps"], Float[Tensor, "steps columns"]]], **options: Any
) -> Float[Tensor, "rows columns"]:
    """``Product(terms, **options).run()``: a new ``[rows, columns]``."""
    return Product(terms, **options).run()


def layer_product(
    x: Float[Tensor, "rows in"], weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "rows out"]:
    """``product([(x, weight)], right_turned=True, bias=bias)``, written down in two thirds of the time: of a few rows
    the product itself takes no longer."""
    if _lies_turned(weight) or not (bias is None or lies_plainly(bias)):
        return product([(x, weight)], right_turned=True, bias=bias)
    x, weight = rows_of(x), rows_of(weight)
    own = ProjectionDescription.from_buffer_copy(_one_layer(x.dtype, torch.get_num_threads(), isa_index()))
    (own.rows, steps), (own.columns, width) = x.shape, weight.shape
    assert steps == width
    output = new_tensor(x, (own.rows, own.columns))
    term = own.terms[0]
    term.left, term.left_row, term.steps = x.data_ptr(), x.stride(0), steps
    term.right, term.right_row = weight.data_ptr(), weight.stride(0)
    own.output, own.output_row = output.data_ptr(), output.stride(0)
    if bias is not None:
        assert bias.shape == (own.columns,)
        own.bias = bias.data_ptr()
    kernels = library()
    assert kernels is not None
    check(kernels.ch_project(ctypes.byref(own)))
    return output


@lru_cache(maxsize=32)
def _one_layer(dtype: torch.dtype, threads: int, isa: int) -> bytes:
    """What the descriptions of such products have alike."""
    own = new_description(ProjectionDescription)
    assert own.isa == isa
    own.threads, own.dtype, own.num_terms, own.right_turned = min(threads, MAX_THREADS), DTYPES[dtype], 1, 1
    return bytes(own)


class _Called(Protocol):
    @property
    def call(self) -> tuple[Verb, ctypes.Structure]:
        """What ``native_library.run`` takes."""


def run_all(works: Sequence[_Called]) -> None:
    """Make the calls that are written down, of what the kernels take."""
    run_calls([work.call for work in works])


def run_calls(calls: Sequence[tuple[Verb, ctypes.Structure]]) -> None:
    """The same for calls."""
    if calls:
        check(run(calls)[0])


def check(code: int) -> None:
    """Raise where a product's code is not ``OK``: what is let through, the kernels take."""
    if code == Code.NO_MEMORY:
        raise MemoryError(f"clearhead: a linear layer's product: {message(code)}")
    if code != Code.OK:
        raise RuntimeError(f"clearhead: a linear layer's product failed: {message(code)}")


def lies_plainly(tensor: Tensor) -> bool:
    """Whether the kernels read a weight or a bias where it lies."""
    in_rows = tensor.stride(-1) == 1 or tensor.shape[-1] <= 1
    return (in_rows or (tensor.dim() == 2 and _lies_turned(tensor))) and not tensor.is_neg()


def _lies_turned(matrix: Float[Tensor, "rows columns"]) -> bool:
    """Whether a matrix lies with its columns one after the other, and is read there."""
    return matrix.stride(0) == 1 and matrix.stride(1) != 1 and not matrix.is_neg()


def rows_of(matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """The matrix with a contiguous last axis."""
    matrix = matrix.detach().resolve_neg() if matrix.is_neg() else matrix
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] <= 1 else matrix.detach().contiguous()
