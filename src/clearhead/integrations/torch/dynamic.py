"""Linear layers that ``torch.ao.quantization.quantize_dynamic`` made, on clearhead's kernels."""

from __future__ import annotations

from torch import Tensor
from torch.ao.nn.quantized.dynamic import Linear as DynamicLinear

from clearhead.integrations.recast import stands_for
from clearhead.integrations.torch.quantized import compute_quantized
from clearhead.invariance import eager_if_invariant

__all__ = ["SwappedDynamicLinear"]


@stands_for(DynamicLinear)
class SwappedDynamicLinear(DynamicLinear):
    """``torch.ao.nn.quantized.dynamic.Linear`` on clearhead's kernels."""

    @eager_if_invariant
    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight^T + bias``; by torch's code where the kernels cannot read the call."""
        output = compute_quantized(self, x, None)
        return super().forward(x) if output is None else output  # type: ignore[no-untyped-call]
