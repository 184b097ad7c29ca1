"""Linear layers and dropout of torch on clearhead's kernels: parts of its transformer layers, and of any model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from clearhead.choices import SMALL, is_invariant
from clearhead.integrations.recast import stands_for
from clearhead.invariance import eager_if_invariant
from clearhead.nn.dropout import Dropout, is_plain
from clearhead.nn.linear import reads_layers, weights_of
from clearhead.ops.packed_weight import PackedParameter
from clearhead.projection import Gain, gemm_gains_alone, layer_gains, project

__all__ = ["LINEARS", "SwappedDropout", "SwappedLinear", "SwappedLinearOfFewRows", "is_plain", "linear_gains"]


def linear_gains(module: nn.Module, *, alone: bool) -> Gain | None:
    """The calls for which a linear layer of any model is to be swapped.

    Args:
        module: a part of the model.
        alone: whether it is no part of a replaced layer.

    Returns:
        The calls; none if the table of processors names torch's GEMM for all. None if the module is no plain
        ``nn.Linear``, or has no choice of GEMM.
    """
    # A parametrized layer has a class of its own, or computes its weight in a hook.
    if type(module) is not nn.Linear or "forward" in vars(module) or not isinstance(module.weight, nn.Parameter):
        return None
    return layer_gains(module.weight, alone=alone)


#: Elements of an input below which the choice of a GEMM takes longer than it saves.
_FEW_ELEMENTS: Final = 2**10


@stands_for(nn.Linear)
class SwappedLinear(nn.Linear):
    """``nn.Linear`` on clearhead's GEMM."""

    @eager_if_invariant
    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        # A compiler must not evaluate sizes.
        small = torch.compiler.is_compiling()
        if not small and not isinstance(weight, PackedParameter):
            size = input.numel()
            # The table names torch's GEMM for small calls with gradients; known here, it costs no more than torch's
            # module.
            learns = torch.is_grad_enabled() and (weight.requires_grad or input.requires_grad)
            small = size < _FEW_ELEMENTS or (learns and size * self.out_features < SMALL)
        if small and not is_invariant():
            return functional.linear(input, weight, bias)
        # Subclasses, traced tensors and the like are computed by torch there.
        return project(input, weight, bias)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "qconfig" and value is None:
            warnings.warn(
                "swapped linear layers are not quantised: torch.ao.quantization looks for the class torch.nn.Linear. "
                "Call clearhead.unswap(model) first, or quantise before swap.",
                stacklevel=2,
            )
        super().__setattr__(name, value)  # type: ignore[arg-type]


@stands_for(nn.Linear)
class SwappedLinearOfFewRows(SwappedLinear):
    """``nn.Linear`` whose calls of few rows are on clearhead's GEMM, where torch's is as fast for others."""

    @eager_if_invariant
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self._gains(input) else functional.linear(input, self.weight, self.bias)

    def _gains(self, input: Tensor) -> bool:
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and not is_invariant()):
            return False
        rows = input.numel() // max(1, self.in_features)
        return gemm_gains_alone("forward", self.weight.dtype, rows, self.weight.numel())


#: What a plain linear layer becomes, by the calls that gain.
LINEARS: Final[Mapping[Gain, type[SwappedLinear]]] = {Gain.ALL: SwappedLinear, Gain.FEW_ROWS: SwappedLinearOfFewRows}
for _kind in LINEARS.values():
    reads_layers(_kind, weights_of)


@stands_for(nn.Dropout)
class SwappedDropout(Dropout):
    """``nn.Dropout`` on clearhead's kernel."""
