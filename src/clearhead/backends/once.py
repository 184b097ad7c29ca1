"""Gradients that cannot be differentiated again say so, instead of being constants, and come one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from clearhead.errors import UnsupportedError

__all__ = ["once", "one_at_a_time"]

Grad = TypeVar("Grad", Tensor, Tensor | None)

#: Where there is another way: one of attention's backends is the formula itself.
_INSTEAD: Final = {"attention": "Use backend='reference', which can be differentiated any number of times."}


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.function = function
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise _refused(ctx.function, "create_graph", "a second derivative")


def _refused(function: str, option: str, got: str) -> UnsupportedError:
    where = " on this backend" if function in _INSTEAD else ""
    then = _INSTEAD.get(function, "Its gradients are differentiated no further, and come one by one.")
    return UnsupportedError.about(function, option, must=f"be False{where}", got=got, then=then)


def once(grads: Sequence[Grad], inputs: Sequence[Tensor], function: str = "attention") -> list[Grad]:
    """The gradients, tied to what they depend on where autograd is recording (``create_graph=True``).

    Args:
        grads: of a backward pass.
        inputs: what they depend on.
        function: the verb that errors speak of.

    Raises:
        UnsupportedError: not here, but when one of them is differentiated; here where forward differentiation is.
    """
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(one).tangent is not None for one in inputs):
        raise _refused(function, "create_graph", "a gradient with a tangent")
    if not torch.is_grad_enabled():
        return list(grads)
    found = [grad for grad in grads if grad is not None]
    tied = iter(_Once.apply(function, len(found), *found, *inputs))  # type: ignore[no-untyped-call]
    return [grad if grad is None else next(tied) for grad in grads]


def one_at_a_time(*grads: Tensor | None, function: str = "attention") -> None:
    """Refuse several gradients that arrive as one (``is_grads_batched=True``).

    Raises:
        UnsupportedError: they do.
    """
    if any(grad is not None and is_legacy_batchedtensor(grad) for grad in grads):
        raise _refused(function, "is_grads_batched", "several gradients at once")
