"""What the modules check of their arguments, and say when it is wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.errors import ShapeError, UnsupportedError

__all__ = ["check_tokens", "positive", "probability"]


def positive(function: str, argument: str, value: int) -> int:
    """``value``, once it is known to be a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ShapeError.about(
            function, argument, must="be a whole number of at least 1", got=repr(value)[:80], then="Pass an int."
        )
    return value


def probability(function: str, argument: str, value: float) -> float:
    """``value``, once it is known to be a probability below 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < 1.0:
        raise ShapeError.about(
            function, argument, must="be a probability from 0 up to, but not, 1", got=repr(value)[:80],
            then="0.0 switches it off.",
        )  # fmt: skip
    return float(value)


def check_tokens(function: str, argument: str, x: object, width: int, weight: Tensor) -> None:
    """Raise unless ``x`` is ``[batch, len, width]`` or ``[len, width]`` of the dtype and device of ``weight``."""
    if not isinstance(x, Tensor) or x.ndim not in (2, 3) or x.shape[-1] != width:
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError.about(
            function, argument, must=f"have axes [batch, len, {width}] or [len, {width}]", got=got,
            then="Check the width, and that the batch comes first.",
        )  # fmt: skip
    if x.device != weight.device:
        raise UnsupportedError.about(
            function, argument, must=f"be on the module's device {weight.device}", got=x.device,
            then="Move one of them with .to(device).",
        )  # fmt: skip
    converts = torch.is_autocast_enabled(x.device.type) and x.is_floating_point()
    if x.dtype != weight.dtype and not converts:
        raise UnsupportedError.about(
            function, argument, must=f"have the module's dtype {weight.dtype}", got=x.dtype,
            then="Convert with .to(dtype), or run under torch.autocast.",
        )  # fmt: skip
