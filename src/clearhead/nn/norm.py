"""Norms of a block by name, and by the CPU kernels, as a function that autograd knows: what a layer in one step does,
for its parts."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.arguments import one_of
from clearhead.backends.native_library import library
from clearhead.backends.native_norm import Norm, NormBackward, NormForward, NormKind
from clearhead.backends.native_projection import rows_of, run_all
from clearhead.projection import are_plain, recorded
from clearhead.shapes import Float

__all__ = ["NormLike", "new_norm", "normed", "normed_by_torch", "takes_norm"]

#: A norm's kind and epsilon, its weight and bias.
NormLike: TypeAlias = tuple[tuple[NormKind, float], tuple[Tensor | None, Tensor | None]]
#: Norms by name.
_NORMS: Final = ("layer", "rms")
_EPSILON: Final = 1e-5


def new_norm(function: str, norm: str, width: int, *, bias: bool) -> nn.LayerNorm | nn.RMSNorm:
    """The norm that blocks call ``"layer"`` or ``"rms"``; the latter, which moves no mean, has no bias.

    Papers: Ba et al. 2016, section 3; Zhang and Sennrich 2019, section 4.

    Raises:
        UnsupportedError: another name.

    >>> new_norm("EncoderBlock", "rms", 8, bias=True)
    RMSNorm((8,), eps=1e-05, elementwise_affine=True)
    """
    if one_of(function, "norm", norm, _NORMS, "The usual one is 'layer'.") == "rms":
        return nn.RMSNorm(width, eps=_EPSILON)
    return nn.LayerNorm(width, eps=_EPSILON, bias=bias)


def normed(x: Float[Tensor, "*batch width"], norm: Norm) -> Float[Tensor, "*batch width"]:
    """``norm`` of each row, of what the kernels take.

    >>> import torch
    >>> from clearhead.backends.native_library import library
    >>> one = Norm(NormKind.LAYER, 0.0, None, None)
    >>> library() is None or normed(torch.tensor([[1.0, 3.0]]), one).tolist()
    [[-1.0, 1.0]]
    """
    parts = (x, norm.weight, norm.bias)
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in parts):
        output: Tensor = _Normed.apply(norm.kind, norm.epsilon, *parts)  # type: ignore[no-untyped-call]
        return output
    own = NormForward(_rows(x), norm)
    run_all([own])
    return own.output.view(x.shape)


def takes_norm(x: Float[Tensor, "*batch width"], norm: Norm) -> bool:
    """Whether the kernels take the norm of ``x``, which may be anything."""
    given = [part for part in (norm.weight, norm.bias) if part is not None]
    if library() is None or x.dim() == 0 or x.numel() == 0 or not are_plain(x, *given):
        return False
    return all(part.shape == x.shape[-1:] and part.stride() == (1,) and not part.is_neg() for part in given)


def normed_by_torch(x: Float[Tensor, "*batch width"], norm: Norm) -> Float[Tensor, "*batch width"]:
    """The same by torch's operators."""
    if norm.kind is NormKind.LAYER:
        return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.epsilon)
    weight = norm.weight
    if norm.kind is NormKind.RMS_FROM_ONE and weight is not None:
        # No 16-bit dtype has the sum.
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), [x.shape[-1]], 1 + weight.to(wide), norm.epsilon).to(x.dtype)
    return F.rms_norm(x, [x.shape[-1]], weight, norm.epsilon)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: NormKind, epsilon: float, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        rows = _rows(x)
        own = NormForward(rows, Norm(kind, epsilon, weight, bias), keep_moments=True)
        run_all([own])
        ctx.kind, ctx.epsilon = kind, epsilon
        ctx.save_for_backward(x, weight, bias, own.moments)
        output: Tensor = torch.ops.aten._unsafe_view(own.output, x.shape)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, moments = ctx.saved_tensors
        norm = Norm(ctx.kind, ctx.epsilon, weight, bias)
        if recorded(grad):
            return None, None, *_known_gradients(grad, x, norm, ctx.needs_input_grad[2:])
        arrived, rows = _rows(grad), _rows(x)
        own = NormBackward(arrived, rows, moments, norm, needs=ctx.needs_input_grad[3:])
        run_all([own])
        return None, None, own.of_sum.view(x.shape), *own.of_norm


def _rows(x: Tensor) -> Float[Tensor, "rows width"]:
    return rows_of(x.reshape(-1, x.shape[-1])).contiguous()


def _known_gradients(grad: Tensor, x: Tensor, norm: Norm, needs: tuple[bool, ...]) -> list[Tensor | None]:
    """The same by operators that can be differentiated again."""
    again = torch.is_grad_enabled()
    inputs = (x, norm.weight, norm.bias)
    with torch.enable_grad():
        parts = [None if part is None else part.view_as(part) for part in inputs]
        assert parts[0] is not None
        output = normed_by_torch(parts[0], norm._replace(weight=parts[1], bias=parts[2]))
        wanted = [part for part, needed in zip(parts, needs, strict=True) if part is not None and needed]
        found = iter(torch.autograd.grad(output, wanted, grad, create_graph=again))
    return [next(found) if part is not None and needed else None for part, needed in zip(parts, needs, strict=True)]
