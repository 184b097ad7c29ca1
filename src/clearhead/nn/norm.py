"""Norms of a block by name, computed by the CPU kernels."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.arguments import one_of
from clearhead.backends.recorded import is_recorded, recorded_gradients
from clearhead.nn.spec import NormLike
from clearhead.ops.kinds import NormKind
from clearhead.ops.library import library
from clearhead.projection import are_plain
from clearhead.shapes import Float

__all__ = ["NormLike", "new_norm", "normed", "normed_by_torch", "takes_norm"]

#: Norms by name.
_NORMS: Final = ("layer", "rms")
_EPSILON: Final = 1e-5


def new_norm(function: str, norm: str, width: int, *, bias: bool) -> nn.LayerNorm | nn.RMSNorm:
    """A norm by name: ``"layer"``, or ``"rms"``, which subtracts no mean and has no bias.

    Papers: Ba et al. 2016, section 3; Zhang and Sennrich 2019, section 4.

    Raises:
        UnsupportedError: another name.

    >>> new_norm("EncoderBlock", "rms", 8, bias=True)
    RMSNorm((8,), eps=1e-05, elementwise_affine=True)
    """
    if one_of(function, "norm", norm, _NORMS, "The usual one is 'layer'.") == "rms":
        return nn.RMSNorm(width, eps=_EPSILON)
    return nn.LayerNorm(width, eps=_EPSILON, bias=bias)


def normed(x: Float[Tensor, "*batch width"], norm: NormLike) -> Float[Tensor, "*batch width"]:
    """``norm`` of each row, for tensors that ``takes_norm`` accepts.

    >>> import torch
    >>> one = (NormKind.LAYER, 0.0), (None, None)
    >>> library() is None or normed(torch.tensor([[1.0, 3.0]]), one).tolist()
    [[-1.0, 1.0]]
    """
    (kind, epsilon), (weight, bias) = norm
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in (x, weight, bias)):
        output: Tensor = _Norm.apply(kind, epsilon, x, weight, bias)  # type: ignore[no-untyped-call]
        return output
    output, _ = torch.ops.clearhead.norm.default(x, weight, bias, kind, epsilon)
    return output


def takes_norm(x: Float[Tensor, "*batch width"], norm: NormLike) -> bool:
    """Whether the operator accepts ``x``, which may be any object."""
    given = [part for part in norm[1] if part is not None]
    if library() is None or x.dim() == 0 or x.numel() == 0 or not are_plain(x, *given):
        return False
    return all(part.shape == x.shape[-1:] and part.stride() == (1,) and not part.is_neg() for part in given)


def normed_by_torch(x: Float[Tensor, "*batch width"], norm: NormLike) -> Float[Tensor, "*batch width"]:
    """The same by torch's operators."""
    (kind, epsilon), (weight, bias) = norm
    if kind is NormKind.LAYER:
        return F.layer_norm(x, x.shape[-1:], weight, bias, epsilon)
    if kind is NormKind.RMS_FROM_ONE and weight is not None:
        # No 16-bit dtype holds the sum.
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), [x.shape[-1]], 1 + weight.to(wide), epsilon).to(x.dtype)
    return F.rms_norm(x, [x.shape[-1]], weight, epsilon)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: NormKind, epsilon: float, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        output: Tensor
        output, moments = torch.ops.clearhead.norm.default(x, weight, bias, kind, epsilon, True)
        ctx.kind, ctx.epsilon = kind, epsilon
        ctx.save_for_backward(x, weight, bias, moments)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, moments = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        if is_recorded(grad):

            def compute(inputs: list[Tensor | None]) -> list[Tensor]:
                copy, *pair = inputs
                assert copy is not None
                return [normed_by_torch(copy, ((ctx.kind, ctx.epsilon), (pair[0], pair[1])))]

            return None, None, *recorded_gradients(compute, (x, weight, bias), [grad], needs)
        of_x, of_weight, of_bias = torch.ops.clearhead.norm_gradients.default(
            grad, x, moments, weight, bias, ctx.kind, ctx.epsilon, needs[1], needs[2]
        )
        return None, None, of_x, of_weight if needs[1] else None, of_bias if needs[2] else None
