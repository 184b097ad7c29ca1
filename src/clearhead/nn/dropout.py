"""Dropout of activations: many times faster on a CPU than torch's own, and added to a residual on the way."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from clearhead.nn.linear import looked_at
from clearhead.ops.dropout import LEVELS, dropped, takes
from clearhead.problem import draw_seed
from clearhead.projection import recorded, unlooked
from clearhead.shapes import Float
from clearhead.tensors import traces
from clearhead.torch_private import transforms

__all__ = ["Dropout", "is_plain", "plus_dropped", "plus_dropped_rows"]


def is_plain(*tensors: Tensor) -> bool:
    """Whether tensors hold numbers to compute with here.

    Nested tensors and other subclasses, tensors without storage, traced ones and those inside ``torch.func``'s
    transforms do not; torch's own forward knows what to do with each.
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
    """``torch.nn.Dropout`` whose numbers are a function of one seed and the place, which backward knows too.

    The probability is taken to the nearest 1/65536, and what is kept is divided by exactly what is kept on average.
    What is dropped is 0 whatever it was. Small inputs, other dtypes and devices, ``inplace``, compiled and transformed
    code get torch's own, and so does everything where there are no CPU kernels.

    Args:
        p: probability of dropping an entry, while training only.
        inplace: as in torch.

    >>> Dropout(0.5).eval()(torch.ones(2)).tolist()
    [1.0, 1.0]
    """

    def forward(self, input: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        levels = self.levels(input)
        return super().forward(input) if levels is None else _drop(input, levels, None)

    def levels(self, x: Tensor) -> int | None:
        """How many of ``LEVELS`` are dropped; None where that is torch's to do."""
        if not self.training or self.inplace or torch.compiler.is_compiling():
            return None
        levels = round(self.p * LEVELS)
        known = 0 < levels < LEVELS and is_plain(x) and x.numel() >= _MANY
        return levels if known and takes(x) and unlooked() else None


def plus_dropped(residual: Float[Tensor, "..."], dropout: nn.Module, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """``residual + dropout(x)``, in one pass where ``dropout`` is a ``Dropout`` that nobody looks at.

    >>> plus_dropped(torch.ones(2), Dropout(0.5).eval(), torch.ones(2)).tolist()
    [2.0, 2.0]
    """
    alike = is_plain(residual) and residual.shape == x.shape and residual.dtype is x.dtype and residual.is_cpu
    if alike and isinstance(dropout, Dropout) and type(dropout).forward is Dropout.forward:
        levels = None if looked_at(dropout) else dropout.levels(x)
        if levels is not None:
            return _drop(x, levels, residual)
    found: Tensor = residual + dropout(x)
    return found


#: Numbers from which on a call is worth what it costs besides.
_MANY: Final = 2**14
#: Numbers of a row from which on rows are drawn for one by one, as in a product's way out: the kernels draw for so many
#: at once.
_WIDE: Final = 128


def plus_dropped_rows(
    residual: Float[Tensor, "*batch width"], levels: int, x: Float[Tensor, "*batch width"]
) -> Float[Tensor, "*batch width"]:
    """``residual + dropout(x)`` by the kernels, however small, with the numbers that a layer in one step has."""
    return _drop(x, levels, residual, by_row=True)


def _drop(x: Tensor, levels: int, residual: Tensor | None, *, by_row: bool = False) -> Tensor:
    seed = draw_seed(levels)
    if not by_row and (x.dim() == 0 or x.shape[-1] < _WIDE):
        row = None if residual is None else residual.reshape(1, -1)
        return _drop_rows(x.reshape(1, -1), levels, seed, row).reshape(x.shape)
    return _drop_rows(x, levels, seed, residual)


def _drop_rows(x: Tensor, levels: int, seed: int, residual: Tensor | None) -> Tensor:
    if torch.is_grad_enabled() and (x.requires_grad or (residual is not None and residual.requires_grad)):
        output: Tensor = _Dropped.apply(x, levels, seed, residual)  # type: ignore[no-untyped-call]
        return output
    return dropped(x, levels, seed, residual)


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: int, seed: int, residual: Tensor | None) -> Tensor:
        ctx.drop = levels, seed
        return dropped(x, levels, seed, residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, _, _, needs_residual = ctx.needs_input_grad
        of_x = _dropped_gradient(grad, *ctx.drop) if needs_x else None
        return of_x, None, None, grad if needs_residual else None


def _dropped_gradient(grad: Tensor, levels: int, seed: int) -> Tensor:
    if recorded(grad):
        return grad * dropped(torch.ones(grad.shape, dtype=grad.dtype), levels, seed)
    return dropped(grad, levels, seed)
