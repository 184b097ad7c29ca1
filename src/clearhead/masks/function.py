"""A mask that is a user's function, and how a user's functions are called."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from clearhead.errors import ClearheadError, MaskError
from clearhead.masks.base import Mask, seen

__all__ = ["MaskFunction", "call_user_function", "function_name"]


class MaskFunction(Mask):
    """A user's predicate ``fn(batch, head, q_pos, k_pos) -> bool`` over index tensors that broadcast.

    Args:
        fn: called with int64 tensors shaped to broadcast; must return bool of their broadcast shape (or less).

    >>> MaskFunction(lambda batch, head, q_pos, k_pos: (q_pos + k_pos) % 2 == 0).dense(2, 2).int().tolist()
    [[1, 0], [0, 1]]
    """

    fields = ("fn",)
    position_dependent = True

    def __init__(self, fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
        if not callable(fn):
            raise MaskError.about("MaskFunction", "fn", must="be callable", got=seen(fn), then="Pass a function.")
        self.fn = fn

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        allowed = call_user_function("MaskFunction", self.fn, MaskError, batch, head, q_pos, k_pos)
        shape = torch.broadcast_shapes(batch.shape, head.shape, q_pos.shape, k_pos.shape)
        if allowed.dtype != torch.bool or not _broadcasts(allowed.shape, shape):
            raise MaskError.about(
                "MaskFunction", "fn", must=f"return bool that broadcasts to {tuple(shape)}",
                got=f"{seen(allowed)} from {function_name(self.fn)}",
                then="Combine comparisons of the arguments with & | ~.",
            )  # fmt: skip
        return allowed.reshape((1,) * (len(shape) - allowed.ndim) + allowed.shape)


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    padded = (1,) * (len(target) - len(shape)) + tuple(shape)
    return len(padded) == len(target) and all(own in (1, size) for own, size in zip(padded, target, strict=True))


def function_name(fn: Callable[..., Tensor]) -> str:
    return str(getattr(fn, "__qualname__", type(fn).__name__))


def call_user_function(
    function: str, fn: Callable[..., Tensor], error: type[ClearheadError], *arguments: Tensor
) -> Tensor:
    """Call a user's function; what it raises or returns wrongly is reported with its name and the tile it saw."""
    try:
        result = fn(*arguments)
    except Exception as failure:
        q_pos, k_pos = arguments[-2], arguments[-1]
        raise error.about(
            function, "fn", must="run on index tensors that broadcast",
            got=f"{type(failure).__name__}: {failure} from {function_name(fn)} "
                f"on a tile of queries {tuple(q_pos.shape)} and keys {tuple(k_pos.shape)}",
            then="Use tensor operations; positions are int64 tensors.",
        ) from failure  # fmt: skip
    if not isinstance(result, Tensor):
        raise error.about(
            function, "fn", must="return a tensor", got=f"{type(result).__name__} from {function_name(fn)}",
            then="Return a tensor built from the arguments.",
        )  # fmt: skip
    return result
