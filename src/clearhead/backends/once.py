"""Gradients that cannot be differentiated again say so, instead of being constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import UnsupportedError

__all__ = ["once"]


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise UnsupportedError.about(
            "attention", "create_graph", must="be False on this backend", got="a second derivative",
            then="Use backend='reference', which can be differentiated any number of times.",
        )  # fmt: skip


def once(grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The gradients, tied to what they depend on where autograd is recording (``create_graph=True``).

    Raises:
        UnsupportedError: not here, but when one of them is differentiated.
    """
    if not torch.is_grad_enabled():
        return list(grads)
    return list(_Once.apply(len(grads), *grads, *inputs))  # type: ignore[no-untyped-call]
