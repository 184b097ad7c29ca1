"""Linear layers whose weight is stored as integers or in panels: the operators, and the gradient of their input."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from clearhead.ops.kinds import Activation
from clearhead.ops.packed_weight import PackedWeight
from clearhead.ops.quantized_weight import QuantizedWeight
from clearhead.shapes import Float

__all__ = ["StoredWeight", "multiply_stored", "project_stored"]

#: A weight ``[out, in]`` that is no tensor of its elements.
StoredWeight: TypeAlias = PackedWeight | QuantizedWeight


def project_stored(
    x: Float[Tensor, "*batch in"],
    weight: StoredWeight,
    bias: Float[Tensor, " out"] | None = None,
) -> Float[Tensor, "*batch out"]:
    """``x @ weight^T + bias`` for a weight of integers, or in panels, which is read once and written nowhere.

    With ``weight.rounding`` the rows of ``x`` are rounded to integers too, and sums are exact. The gradient of ``x`` is
    that of the weight in floating point, as if nothing was rounded; the weight has none.

    Args:
        x: ``[*batch, in]`` in float32, bfloat16 or float16, on the CPU; in the dtype of a weight in panels.
        weight: ``[out, in]``.
        bias: ``[out]`` in the dtype of ``x``, or None.

    Returns:
        ``[*batch, out]`` in the dtype of ``x``.

    Raises:
        RuntimeError: shapes or dtypes do not fit.

    Cost: ``2 * rows * in * out`` operations; with few rows the time to read the weight.

    >>> weight = QuantizedWeight(torch.tensor([[1, -2]], dtype=torch.int8), torch.tensor([[0.5]]))
    >>> from clearhead.ops.library import library
    >>> library() is None or project_stored(torch.tensor([2.0, 3.0]), weight).item() == -2.0
    True
    """
    learns = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    if not learns:
        return multiply_stored(x, weight, bias)
    projected: Tensor = _Stored.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return projected


def multiply_stored(
    x: Float[Tensor, "*batch in"],
    weight: StoredWeight,
    bias: Float[Tensor, " out"] | None,
    activation: Activation = Activation.PLAIN,
) -> Float[Tensor, "*batch out"]:
    """``activation(x @ weight^T + bias)``, which autograd does not record; arguments as ``project_stored``."""
    output: Tensor
    if isinstance(weight, PackedWeight):
        output = torch.ops.clearhead.linear_packed.default(x, weight.panels, weight.shape[0], bias, int(activation))
    else:
        output = torch.ops.clearhead.linear_quantized.default(
            x, weight.read, weight.scale, weight.offset, bias, int(weight.rounding), *weight.bounds, int(activation)
        )
    return output


class _Stored(torch.autograd.Function):
    """``x``, a stored weight, and a bias or None; backward consists of torch's operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return multiply_stored(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (grad,) = grads
        needs_x, _, needs_bias = ctx.needs_input_grad
        of_x = grad @ _in_floating_point(ctx.weight, grad.dtype) if needs_x else None
        return of_x, None, grad.flatten(0, -2).sum(0) if needs_bias else None


def _in_floating_point(weight: StoredWeight, dtype: torch.dtype) -> Tensor:
    return weight.dense().to(dtype) if isinstance(weight, PackedWeight) else weight.dequantized(dtype)
