"""A function of one place, evaluated at many places by ``torch.vmap``: FlexAttention's functions take scalars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["at_places"]


def at_places(fn: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    """A function of scalars at every place of some tensors.

    Args:
        fn: takes one scalar tensor for each argument.
        *arguments: tensors that broadcast against each other.

    Returns:
        The results, in the broadcast shape; an axis on which ``fn`` does not depend has stride 0. Axes of a result
        that is no scalar follow.
    """
    shape = torch.broadcast_shapes(*(argument.shape for argument in arguments))
    aligned = [one.reshape((1,) * (len(shape) - one.ndim) + tuple(one.shape)) for one in arguments]
    mapped = fn
    # The first axis is mapped outermost, so that at each level it is the first one of each argument.
    for axis in reversed([axis for axis, size in enumerate(shape) if size != 1]):
        mapped = torch.vmap(mapped, in_dims=tuple(0 if one.shape[axis] != 1 else None for one in aligned))
    with _LooksUp():
        result = mapped(*(one.reshape([size for size in one.shape if size != 1]) for one in aligned))
    for axis, size in enumerate(shape):
        result = result.unsqueeze(axis) if size == 1 else result
    return result


class _LooksUp(TorchFunctionMode):
    """Makes ``table[index]`` an operation that ``torch.vmap`` maps: Python would ask the index for a number."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            table, index = args
            indices = index if isinstance(index, tuple) else (index,)
            # Numbers among the tensors are indices too; slices and None are left to torch.
            if any(isinstance(one, Tensor) for one in indices) and all(map(_is_index, indices)):
                on = [torch.as_tensor(one, device=table.device) for one in indices]
                return torch.ops.aten.index.Tensor(table, on)
        return func(*args, **(kwargs or {}))


def _is_index(value: object) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, int) and not isinstance(value, bool))
