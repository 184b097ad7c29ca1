"""Linear: torch's linear layer on the faster product."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clearhead.projection import check_variable, project
from clearhead.shapes import Float

__all__ = ["Linear"]


class Linear(nn.Linear):
    """``torch.nn.Linear`` whose product is ``clearhead.projection.project``: same parameters, same numbers.

    ``x @ weight^T + bias``

    Args:
        in_features: width of what comes in.
        out_features: width of what goes out.
        bias: whether a bias is added.
        device: where parameters lie; torch's default.
        dtype: of the parameters; torch's default.

    Raises:
        UnsupportedError: ``CLEARHEAD_PROJECTION`` asks for what there is not.

    Cost: ``2 * rows * in_features * out_features`` operations.

    >>> import torch
    >>> Linear(3, 5)(torch.zeros(2, 3)).shape
    torch.Size([2, 5])
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        # Here, so that a misspelled variable is told where the model is built, not in some later step.
        check_variable()
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)

    def forward(self, input: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        """The layer's product."""
        return project(input, self.weight, self.bias)
