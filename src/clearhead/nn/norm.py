"""Norms of blocks, computed by the CPU kernels within fused layers and under ``set_invariant(True)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.arguments import one_of
from clearhead.backends.containment import without_autocast
from clearhead.backends.recorded import is_recorded, recorded_gradients
from clearhead.choices import is_invariant
from clearhead.nn.linear import refuse_hooks
from clearhead.nn.spec import NormLike
from clearhead.ops.kinds import NormKind
from clearhead.ops.library import library
from clearhead.projection import are_plain
from clearhead.shapes import Float
from clearhead.torch_private import is_hooked

__all__ = [
    "LayerNorm",
    "NormLike",
    "RMSNorm",
    "apply_norm",
    "new_norm",
    "norm_of",
    "normed",
    "normed_by_torch",
    "takes_norm",
]

#: Norms by name.
_NORMS: Final = ("layer", "rms")
_EPSILON: Final = 1e-5


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm``; under ``set_invariant(True)`` by the kernels, as in a fused layer."""

    def forward(self, input: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """``input`` with mean 0 and variance 1 in each row, times the weight, plus the bias."""
        return _in_one_order(self, input, super().forward)


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm``; under ``set_invariant(True)`` by the kernels, as in a fused layer."""

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """``x`` with a mean square of 1 in each row, times the weight."""
        return _in_one_order(self, x, super().forward)


def _in_one_order(norm: nn.Module, x: Tensor, by_torch: Callable[[Tensor], Tensor]) -> Tensor:
    """``norm(x)`` with the bits of a fused layer under ``set_invariant(True)``, where the kernels take the norm."""
    like = _read(norm, x) if is_invariant() and not torch.compiler.is_compiling() else None
    if like is None:
        return by_torch(x)
    # Autocast does not cast a norm's input.
    with without_autocast(x.device.type):
        return normed(x, like) if takes_norm(x, like) else by_torch(x)


_KINDS: Final[dict[Any, NormKind]] = {
    nn.LayerNorm: NormKind.LAYER,
    nn.RMSNorm: NormKind.RMS,
    LayerNorm: NormKind.LAYER,
    RMSNorm: NormKind.RMS,
}


def _read(norm: nn.Module, x: Tensor) -> NormLike | None:
    kind = _KINDS.get(type(norm))
    if not isinstance(norm, nn.LayerNorm | nn.RMSNorm) or kind is None or norm.normalized_shape != x.shape[-1:]:
        return None
    if norm.eps is None and x.dtype is not torch.float32:
        return None
    epsilon = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    return (kind, float(epsilon)), (norm.weight, getattr(norm, "bias", None))


def norm_of(norm: nn.Module, x: Tensor) -> NormLike | None:
    """Kind and epsilon, weight and bias, of a norm over the last axis of ``x`` that is not hooked; or None."""
    return None if is_hooked(norm) else _read(norm, x)


def apply_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """``norm(x)``; under ``set_invariant(True)`` by the kernels, whose sums have the order of those in fused layers.

    A norm of torch that is hooked is torch's, and raises.
    """
    if type(norm) in (nn.LayerNorm, nn.RMSNorm) and is_invariant():
        if is_hooked(norm):
            refuse_hooks(type(norm).__name__)
        return _in_one_order(norm, x, norm)
    output: Tensor = norm(x)
    return output


def new_norm(function: str, norm: str, width: int, *, bias: bool) -> nn.LayerNorm | nn.RMSNorm:
    """A norm by name: ``"layer"``, or ``"rms"``, which subtracts no mean and has no bias.

    Papers: Ba et al. 2016, section 3; Zhang and Sennrich 2019, section 4.

    Raises:
        UnsupportedError: another name.

    >>> new_norm("EncoderBlock", "rms", 8, bias=True)
    RMSNorm((8,), eps=1e-05, elementwise_affine=True)
    """
    if one_of(function, "norm", norm, _NORMS, "The usual one is 'layer'.") == "rms":
        return RMSNorm(width, eps=_EPSILON)
    return LayerNorm(width, eps=_EPSILON, bias=bias)


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
