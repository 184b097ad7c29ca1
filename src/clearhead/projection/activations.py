"""Activations of feedforward layers: their codes in the kernels, and their formulas in torch's operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.ops.kinds import Activation as Kind
from clearhead.ops.kinds import Gate

__all__ = ["ACTIVATIONS", "ActivationFormula"]


@dataclass(frozen=True)
class ActivationFormula:
    """An activation: its codes in the kernels, and its formula in torch's operators.

    Attributes:
        kind: the kernels' code.
        gate: what forward saves for backward: the activation's output, or its derivative.
        formula: the activation in torch's operators.
        backward: the input's gradient from the output's gradient and the input, in differentiable operators.
    """

    kind: Kind
    gate: Gate
    formula: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


_BACK: Final = torch.ops.aten


def _gelu(kind: Kind, approximate: str) -> ActivationFormula:
    return ActivationFormula(
        kind,
        Gate.SLOPE,
        lambda x: F.gelu(x, approximate=approximate),
        lambda grad, x: _BACK.gelu_backward(grad, x, approximate=approximate),
    )


def _silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    # torch's operator silu_backward is not differentiable.
    passes = x.sigmoid()
    return grad * (passes * (1 + x * (1 - passes)))


#: Slope of the sigmoid that approximates the normal distribution function.
_STEEP: Final = 1.702


def _quick_gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    passes = (_STEEP * x).sigmoid()
    return grad * (passes * (1 + _STEEP * x * (1 - passes)))


#: Activations by name; GELU's two approximations are those of Hendrycks and Gimpel 2016, section 2.
ACTIVATIONS: Final[Mapping[str, ActivationFormula]] = {
    "relu": ActivationFormula(Kind.RELU, Gate.OUTPUT, F.relu, lambda grad, x: grad * (x > 0)),
    "gelu": _gelu(Kind.GELU, "none"),
    "gelu_tanh": _gelu(Kind.GELU_TANH, "tanh"),
    "silu": ActivationFormula(Kind.SILU, Gate.SLOPE, F.silu, _silu_backward),
    "quick_gelu": ActivationFormula(
        Kind.QUICK_GELU, Gate.SLOPE, lambda x: x * torch.sigmoid(_STEEP * x), _quick_gelu_backward
    ),
}
