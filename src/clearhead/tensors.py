"""Checks: whether a tensor has memory and readable elements, and whether calls are traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

__all__ = ["has_memory", "is_hollow", "traces"]

#: Whether ``torch.jit.trace`` records the calls of this thread: it cannot record an ``autograd.Function``.
traces: Final[Callable[[], bool]] = torch.jit.is_tracing  # type: ignore[attr-defined]


def has_memory(tensor: Tensor) -> bool:
    """Whether the tensor has memory of its own: False for wrappers of ``torch.func`` and ``is_grads_batched``.

    >>> has_memory(torch.zeros(2))
    True
    """
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def is_hollow(tensor: Tensor) -> bool:
    """Whether the tensor is a shape without elements: on the meta device, or a fake tensor.

    >>> is_hollow(torch.zeros(2, device="meta")), is_hollow(torch.zeros(2))
    (True, False)
    """
    if tensor.is_meta:
        return True
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return False
    # A fake tensor has a device, but its storage is on the meta device.
    try:
        return tensor.untyped_storage().device.type == "meta"
    except (NotImplementedError, RuntimeError):
        return False
