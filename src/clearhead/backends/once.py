"""Gradients that cannot be differentiated again say so, instead of being constants, and come one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from clearhead.errors import UnsupportedError

__all__ = ["once", "one_at_a_time"]

Grad = TypeVar("Grad", Tensor, Tensor | None)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise _no_second("a second derivative")


def _no_second(got: str) -> UnsupportedError:
    return UnsupportedError.about(
        "attention", "create_graph", must="be False on this backend", got=got,
        then="Use backend='reference', which can be differentiated any number of times.",
    )  # fmt: skip


def once(grads: Sequence[Grad], inputs: Sequence[Tensor]) -> list[Grad]:
    """The gradients, tied to what they depend on where autograd is recording (``create_graph=True``).

    Raises:
        UnsupportedError: not here, but when one of them is differentiated; here where forward differentiation is.
    """
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(one).tangent is not None for one in inputs):
        raise _no_second("a gradient with a tangent")
    if not torch.is_grad_enabled():
        return list(grads)
    found = [grad for grad in grads if grad is not None]
    tied = iter(_Once.apply(len(found), *found, *inputs))  # type: ignore[no-untyped-call]
    return [grad if grad is None else next(tied) for grad in grads]


def one_at_a_time(*grads: Tensor | None) -> None:
    """Refuse several gradients that arrive as one (``is_grads_batched=True``).

    Raises:
        UnsupportedError: they do.
    """
    if any(grad is not None and is_legacy_batchedtensor(grad) for grad in grads):
        raise UnsupportedError.about(
            "attention", "is_grads_batched", must="be False on this backend", got="several gradients at once",
            then="Take them one by one, or use backend='reference'.",
        )  # fmt: skip
