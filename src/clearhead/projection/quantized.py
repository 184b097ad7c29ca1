"""Linear layers whose weight is 8-bit or 4-bit integers: the operator, and the gradient of its input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.ops.kinds import Rounding
from clearhead.shapes import Float

__all__ = ["QuantizedWeight", "project_quantized"]

_WHOLE: Final = (-128, 127)


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight ``[out, in]`` of integers: ``scale * integer + offset``, with a scale and an offset for each group.

    Attributes:
        codes: int8 ``[out, in]``; or uint8 ``[out, in / 2]``, two integers of 0 to 15 a byte, the lower half first.
        scale: float32 ``[out, groups]``.
        offset: the same; None for 0.
        rounding: how the layer's input is rounded to integers.
        bounds: least and largest integer of a rounded input.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor | None = None
    rounding: Rounding = Rounding.NONE
    bounds: tuple[int, int] = _WHOLE

    @property
    def bits(self) -> int:
        """Bits of an integer."""
        return 4 if self.codes.dtype is torch.uint8 else 8

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)``."""
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.bits

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.shape[1] // max(1, self.scale.shape[1])

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "out in"]:
        """The weight in floating point, computed in float32, or in float64 for that dtype.

        >>> weight = QuantizedWeight(torch.tensor([[1, -2]], dtype=torch.int8), torch.tensor([[0.5]]))
        >>> weight.dequantized()
        tensor([[ 0.5000, -1.0000]])
        """
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
        grouped = codes.to(wide).unflatten(1, (self.scale.shape[1], -1)) * self.scale.to(wide)[..., None]
        if self.offset is not None:
            grouped = grouped + self.offset.to(wide)[..., None]
        dense: Tensor = grouped.flatten(1).to(dtype)
        return dense


def project_quantized(
    x: Float[Tensor, "*batch in"], weight: QuantizedWeight, bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "*batch out"]:
    """``x @ weight^T + bias`` for a weight of integers, which are read once and never written as floats.

    With ``weight.rounding`` the rows of ``x`` are rounded to integers too, and sums are exact. The gradient of ``x`` is
    that of the dequantised weight, as if nothing was rounded; the weight has none.

    Args:
        x: ``[*batch, in]`` in float32, bfloat16 or float16, on the CPU.
        weight: ``[out, in]``.
        bias: ``[out]`` in the dtype of ``x``, or None.

    Returns:
        ``[*batch, out]`` in the dtype of ``x``.

    Raises:
        RuntimeError: shapes or dtypes do not fit.

    Cost: ``2 * rows * in * out`` operations; with few rows the time to read the integers.

    >>> weight = QuantizedWeight(torch.tensor([[1, -2]], dtype=torch.int8), torch.tensor([[0.5]]))
    >>> from clearhead.ops.library import library
    >>> library() is None or project_quantized(torch.tensor([2.0, 3.0]), weight).item() == -2.0
    True
    """
    learns = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    if not learns:
        return _computed(x, weight, bias)
    projected: Tensor = _Quantized.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return projected


def _computed(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    output: Tensor = torch.ops.clearhead.linear_quantized.default(
        x, weight.codes, weight.scale, weight.offset, bias, int(weight.rounding), *weight.bounds
    )
    return output


class _Quantized(torch.autograd.Function):
    """``x``, the weight of integers, and a bias or None; backward consists of torch's operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return _computed(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (grad,) = grads
        needs_x, _, needs_bias = ctx.needs_input_grad
        of_x = grad @ ctx.weight.dequantized(grad.dtype) if needs_x else None
        return of_x, None, grad.flatten(0, -2).sum(0) if needs_bias else None
