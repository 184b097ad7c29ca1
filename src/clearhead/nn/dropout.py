"""Dropout of activations by the CPU kernels, with the residual's addition in the same pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from clearhead.batch_part import current, first_row, row_numbers, rows_of_whole
from clearhead.nn.linear import looked_at
from clearhead.ops.dropout import LEVELS, dropped_at, takes
from clearhead.problem import draw_seed
from clearhead.projection import recorded, unlooked
from clearhead.shapes import Float, Int
from clearhead.tensors import traces
from clearhead.torch_private import transforms

__all__ = ["Dropout", "Placed", "drop", "is_plain", "plus_dropped"]

#: Gives a tensor's place in a whole that several processes have: the number of each of its rows, and its first column.
Placed: TypeAlias = Callable[[Tensor], tuple[Int[Tensor, " rows"], int]]


def is_plain(*tensors: Tensor) -> bool:
    """Whether the kernels can read the tensors.

    Nested tensors and other subclasses, tensors without storage, traced ones and those inside ``torch.func``'s
    transforms cannot be read; torch's forward handles each.
    """
    if torch.compiler.is_compiling():
        return not any(tensor.is_nested for tensor in tensors)
    if traces() or transforms():
        return False
    return all(
        type(tensor) in (Tensor, nn.Parameter) and not tensor.is_nested and tensor.device.type != "meta"
        for tensor in tensors
    )


class Dropout(nn.Dropout):
    """``torch.nn.Dropout`` by the CPU kernels: which elements are dropped is a function of a seed and their positions.

    The seed is drawn from torch's generator. The probability is rounded to the nearest 1/65536, and the remaining
    elements are divided by the share that remains on average. A dropped element is 0 even where it was NaN or
    infinity. On a CPU all layers draw so, fused or op by op. Other devices, compiled and transformed code use torch's
    dropout, as does a machine without the CPU kernels.

    Args:
        p: probability of dropping an element, while training only.
        inplace: whether the input is overwritten.

    Attributes:
        placed: where the input stands in a whole tensor, of which other processes have other parts; None for a whole.

    >>> Dropout(0.5).eval()(torch.ones(2)).tolist()
    [1.0, 1.0]
    """

    placed: Placed | None = None

    def forward(self, input: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        levels = self.levels(input)
        if levels is None:
            return self._of_whole(input) if self.p > 0.0 and current() is not None else super().forward(input)
        if levels == 0:
            return input
        output = drop(input, levels, placed=self.placed)
        return input.copy_(output) if self.inplace else output

    def _of_whole(self, x: Tensor) -> Tensor:
        """torch's dropout of the whole batch that ``x`` is a part of, at the part's rows."""
        if not self.training or x.dim() < 2:
            return super().forward(x)
        ones = x.new_ones(rows_of_whole(x.shape), x.shape[-1])
        factors = nn.functional.dropout(ones, self.p).narrow(0, first_row(x.shape), x.shape[:-1].numel())
        return x * factors.view(x.shape)

    def levels(self, x: Tensor) -> int | None:
        """How many of ``LEVELS`` are dropped; None where torch's own dropout is called."""
        if not self.training or torch.compiler.is_compiling():
            return None
        levels = round(self.p * LEVELS)
        return levels if levels < LEVELS and is_plain(x) and takes(x) and unlooked() else None


def plus_dropped(residual: Float[Tensor, "..."], dropout: nn.Module, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """``residual + dropout(x)``, in one pass where ``dropout`` is a ``Dropout`` that has no hooks.

    >>> plus_dropped(torch.ones(2), Dropout(0.5).eval(), torch.ones(2)).tolist()
    [2.0, 2.0]
    """
    fits = is_plain(residual) and residual.shape == x.shape and residual.dtype is x.dtype and residual.is_cpu
    if fits and isinstance(dropout, Dropout) and type(dropout).forward is Dropout.forward:
        levels = None if looked_at(dropout) else dropout.levels(x)
        if levels:
            return drop(x, levels, residual, placed=dropout.placed)
    output: Tensor = residual + dropout(x)
    return output


def drop(
    x: Float[Tensor, "*batch width"],
    levels: int,
    residual: Float[Tensor, "*batch width"] | None = None,
    *,
    placed: Placed | None = None,
) -> Float[Tensor, "*batch width"]:
    """Dropout by the CPU kernels with a seed from torch's generator, plus ``residual``.

    Args:
        x: plain, of a dtype that the kernels take.
        levels: how many of ``LEVELS`` elements are dropped on average.
        residual: of the same shape and dtype.
        placed: where ``x`` stands in a whole tensor.
    """
    seed = draw_seed(levels)
    place = (row_numbers(x.shape), 0) if placed is None else placed(x)
    if torch.is_grad_enabled() and (x.requires_grad or (residual is not None and residual.requires_grad)):
        output: Tensor = _Dropped.apply(x, levels, seed, residual, place)  # type: ignore[no-untyped-call]
        return output
    return _dropped(x, levels, seed, place, residual)


#: Numbers of a tensor's rows, or of its first row, and its first column.
_Place: TypeAlias = tuple[Tensor | int, int]


def _dropped(x: Tensor, levels: int, seed: int, place: _Place, residual: Tensor | None = None) -> Tensor:
    return dropped_at(x, levels, seed, *place, residual)


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: int, seed: int, residual: Tensor | None, place: _Place) -> Tensor:
        ctx.drop = levels, seed, place
        return _dropped(x, levels, seed, place, residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, _, _, needs_residual, _ = ctx.needs_input_grad
        of_x = _dropped_gradient(grad, *ctx.drop) if needs_x else None
        return of_x, None, None, grad if needs_residual else None, None


def _dropped_gradient(grad: Tensor, levels: int, seed: int, place: _Place) -> Tensor:
    if recorded(grad):
        return grad * _dropped(torch.ones(grad.shape, dtype=grad.dtype), levels, seed, place)
    return _dropped(grad, levels, seed, place)
