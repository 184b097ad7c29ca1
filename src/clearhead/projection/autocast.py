"""Autocast under ``set_invariant(True)``: its casts are made before the kernels' calls, since torch's GEMMs add in an
order that depends on the sizes of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from clearhead.choices import is_invariant
from clearhead.torch_private import differentiates_forward, transforms

__all__ = ["noted_casts", "operand_cast"]

_NOTED: ContextVar[dict[int, torch.dtype] | None] = ContextVar("clearhead_noted_casts", default=None)


@contextmanager
def noted_casts() -> Iterator[dict[int, torch.dtype]]:
    """The dtypes of the gradients of cast parameters, by ``id``, of the calls in a ``with`` block.

    Such a gradient is rounded to the dtype, and so is each sum of several.

    >>> weight = torch.nn.Parameter(torch.ones(1, 1))
    >>> from clearhead.invariance import invariant
    >>> with noted_casts() as casts, invariant(), torch.autocast("cpu", torch.bfloat16):
    ...     rounded = operand_cast()(weight)
    >>> casts[id(weight)]
    torch.bfloat16
    """
    casts: dict[int, torch.dtype] = {}
    token = _NOTED.set(casts)
    try:
        yield casts
    finally:
        _NOTED.reset(token)


def operand_cast() -> Callable[[Tensor], Tensor] | None:
    """The cast that autocast makes of a GEMM's operand; None where it is off or does not decide, or outside of the
    setting. A cast of float64 and of other devices' tensors returns the tensor itself.

    The operands are to be used with autocast off.
    """
    if not torch.is_autocast_enabled("cpu") or not is_invariant() or torch.compiler.is_compiling():
        return None
    if transforms() or differentiates_forward():
        return None
    return _cast


def _cast(operand: Tensor) -> Tensor:
    if not operand.is_cpu or not operand.is_floating_point() or operand.dtype is torch.float64:
        return operand
    dtype, noted = torch.get_autocast_dtype("cpu"), _NOTED.get()
    if noted is not None and operand.is_leaf and operand.requires_grad:
        noted[id(operand)] = dtype
    return operand.to(dtype)
