"""Checks of tensors: memory, readable elements, elements that share memory; and whether calls are traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

__all__ = ["has_memory", "is_hollow", "traces", "without_overlap"]

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


def without_overlap(tensor: Tensor) -> Tensor:
    """The tensor, copied if elements share memory: other libraries' kernels misread such tensors.

    Views of ``unfold``, ``as_strided`` and ``expand`` are such. Leading axes that repeat the same matrices, with a
    stride of 0, are read correctly and not copied.

    >>> windows = torch.arange(5.0).unfold(0, 3, 1)
    >>> windows.stride(), without_overlap(windows).stride()
    ((1, 1), (3, 1))
    """
    if tensor.is_contiguous():
        return tensor
    leading = tensor.ndim - 2
    axes = enumerate(zip(tensor.stride(), tensor.shape, strict=True))
    steps = sorted(axis for place, axis in axes if axis[1] > 1 and (axis[0] > 0 or place >= leading))
    # Each axis must step over the whole extent of the axes within it.
    extent = 1
    for step, size in steps:
        if step < extent:
            return tensor.contiguous()
        extent += step * (size - 1)
    return tensor
