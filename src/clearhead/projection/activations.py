"""What stands between a feedforward's layers: activations as the kernels know them, and as torch's operators."""

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
    """An activation as the kernels know it, and as torch's operators.

    Attributes:
        kind: the kernels' name for it.
        gate: what forward keeps for the way back: its output, or how much each number of that grows.
        formula: in torch's operators.
        backward: of a gradient and what the activation was given, in operators that can be differentiated again.
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
    # Torch's own operator cannot be differentiated again.
    passes = x.sigmoid()
    return grad * (passes * (1 + x * (1 - passes)))


#: How steep the sigmoid is that stands for the normal distribution.
_STEEP: Final = 1.702


def _quick_gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    passes = (_STEEP * x).sigmoid()
    return grad * (passes * (1 + _STEEP * x * (1 - passes)))


#: Activations by name; GELU's two short forms are those of Hendrycks and Gimpel 2016, section 2.
ACTIVATIONS: Final[Mapping[str, ActivationFormula]] = {
    "relu": ActivationFormula(Kind.RELU, Gate.OUTPUT, F.relu, lambda grad, x: grad * (x > 0)),
    "gelu": _gelu(Kind.GELU, "none"),
    "gelu_tanh": _gelu(Kind.GELU_TANH, "tanh"),
    "silu": ActivationFormula(Kind.SILU, Gate.SLOPE, F.silu, _silu_backward),
    "quick_gelu": ActivationFormula(
        Kind.QUICK_GELU, Gate.SLOPE, lambda x: x * torch.sigmoid(_STEEP * x), _quick_gelu_backward
    ),
}
