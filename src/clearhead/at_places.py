"""A function of one place, evaluated at many places by ``torch.vmap``: FlexAttention's functions take scalars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from clearhead.tracing import INDICES, SCORE, takes_scalars, trace

__all__ = ["SCALARS", "OfScalars", "at_places"]

#: How error texts describe the arguments of these functions, and how to write one.
SCALARS: Final = {
    "takes": "scalar tensors, under torch.vmap",
    "then": "Use tensor operations: torch.where(q_idx > 3, x, y) for a branch, table[h, q_idx - kv_idx] for a look-up.",
}


class OfScalars:
    """A record of a function of scalars: of the indices of a place, and before them of a score or of nothing."""

    fn: Callable[..., Any]
    #: Whether tensors that broadcast can take the place of the scalars; None if that is not known yet.
    elementwise: bool | None = None

    def at_places(self, *arguments: Tensor) -> Tensor:
        """The function at every place of some tensors."""
        if all(argument.ndim == 0 for argument in arguments):
            # Within torch's own flex_attention, on a GPU.
            return self.fn(*arguments)  # type: ignore[no-any-return]
        if self.elementwise is None:
            self.__dict__["elementwise"] = _is_elementwise(self.fn, arguments)
        result: Tensor = self.fn(*arguments) if self.elementwise else at_places(self.fn, *arguments)
        return result


def _is_elementwise(fn: Callable[..., Any], arguments: Sequence[Tensor]) -> bool:
    """Whether a function consists of elementwise operations and of look-ups by complete indices, as tracing shows."""
    facts = ((SCORE,) if len(arguments) > len(INDICES) else ()) + INDICES
    # The last place; zeros stand for an argument without elements.
    places = [F.pad(argument.detach().flatten(), (1, 0))[-1:].view(1, 1, 1, 1) for argument in arguments]
    traced = trace(fn, list(zip(places, facts, strict=True)))
    return traced is not None and takes_scalars(traced)


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
    if 0 in shape:
        # torch.vmap maps over no axis without places.
        only = at_places(fn, *(argument.new_zeros(()) for argument in arguments))
        return only.new_empty((*shape, *only.shape))
    aligned = [one.reshape((1,) * (len(shape) - one.ndim) + tuple(one.shape)) for one in arguments]
    mapped: Callable[..., Tensor] = partial(_one_tensor, fn)
    # The first axis is mapped outermost, so that at each level it is the first one of each argument.
    for axis in reversed([axis for axis, size in enumerate(shape) if size != 1]):
        mapped = torch.vmap(mapped, in_dims=tuple(0 if one.shape[axis] != 1 else None for one in aligned))
    with _LooksUp():
        result = mapped(*(one.reshape([size for size in one.shape if size != 1]) for one in aligned))
    for axis, size in enumerate(shape):
        result = result.unsqueeze(axis) if size == 1 else result
    return result


def _one_tensor(fn: Callable[..., Any], *scalars: Tensor) -> Tensor:
    result = fn(*scalars)
    if not isinstance(result, Tensor):
        raise TypeError(f"it returns {type(result).__name__} and no tensor")
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
