"""The paths of a linear layer's three GEMMs: torch's, oneDNN's, and the CPU kernels'."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.ops.library import library
from clearhead.ops.packed_weight import Weight
from clearhead.torch_private import onednn_linear

__all__ = [
    "KINDS",
    "NATIVE",
    "ONEDNN",
    "PATHS",
    "TORCH",
    "Layer",
    "Path",
    "Term",
    "flat",
    "layers_of",
    "onednn_has_bfloat16",
]

#: The kinds of GEMM, each with its own choice of path.
KINDS: Final = ("forward", "input gradient", "weight gradient")
#: A linear layer's weight ``[out, in]``, in floating point, packed or as integers, and bias ``[out]`` or None.
Layer: TypeAlias = tuple[Weight, Tensor | None]
#: An output's gradient ``[*batch, out]`` and the weight ``[out, in]`` that multiplies it in backward.
Term: TypeAlias = tuple[Tensor, Tensor]
#: Largest number of gradients that one of the kernels' GEMMs sums.
MAX_TERMS: Final = 4
#: Rows that one of oneDNN's GEMMs sums over: longer sums are slower and less exact.
_BLOCK: Final = 512


@dataclass(frozen=True)
class Path:
    """An implementation of a linear layer's GEMMs.

    Attributes:
        name: its name in ``CLEARHEAD_PROJECTION``.
        absent: returns why it is not available for a dtype, or None.
        forward: computes ``[*batch, out]`` from ``x [*batch, in]``, ``weight [out, in]`` and a bias.
        input_gradient: the sum over terms of ``grad @ weight``.
        weight_gradient: ``grad^T @ x`` of ``[rows, out]`` and ``[rows, in]``, and if requested the bias's gradient, the
            sum of ``grad`` over rows.
        prepares: whether each new number of rows costs 0.3 ms or more.
    """

    name: str
    absent: Callable[[torch.dtype], str | None]
    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    input_gradient: Callable[[Sequence[Term]], Tensor]
    weight_gradient: Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
    prepares: bool = False


def _added(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Sequence[Term]], Tensor]:
    """A path's ``input_gradient`` from a function for one term."""

    def added(terms: Sequence[Term]) -> Tensor:
        total = product(*terms[0])
        for term in terms[1:]:
            total = total + product(*term)
        return total

    return added


def _torch_weight_gradient(grad: Tensor, x: Tensor, sums: bool) -> tuple[Tensor, Tensor | None]:
    return grad.t() @ x, grad.sum(0) if sums else None


def _onednn_absent(dtype: torch.dtype) -> str | None:
    if not torch.backends.mkldnn.is_available():
        return "this torch was built without oneDNN"
    if onednn_linear() is None:
        return "this torch has no operator mkldnn::_linear_pointwise"
    return None if dtype is not torch.bfloat16 or onednn_has_bfloat16() else "oneDNN has no bfloat16 on this processor"


@cache
def onednn_has_bfloat16() -> bool:
    """Whether oneDNN computes in bfloat16 here: without AVX-512 the operator raises."""
    one = torch.ones(1, 1, dtype=torch.bfloat16, device="cpu")
    try:
        _onednn(one, one)
    except RuntimeError:
        return False
    return True


def _kernels_absent(_dtype: torch.dtype) -> str | None:
    return None if library() is not None else "the CPU kernels are not installed"


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # oneDNN ignores the stride of a bias.
    dense = None if bias is None else bias.contiguous()
    linear = onednn_linear()
    assert linear is not None
    return linear(_dense(x), _dense(weight), dense, "none", [], "")


def _dense(x: Tensor) -> Tensor:
    """The tensor, copied unless it or its transpose is contiguous; oneDNN's operator documents no other layouts."""
    return x if x.is_contiguous() or (x.dim() == 2 and x.t().is_contiguous()) else x.contiguous()


def _onednn_weight_gradient(grad: Tensor, x: Tensor, sums: bool) -> tuple[Tensor, Tensor | None]:
    """The weight gradient, a block of rows at a time."""
    # In bfloat16 each block would be rounded before it is added.
    blocks = max(1, round(len(x) / _BLOCK)) if x.dtype is torch.float32 else 1
    sizes = [_BLOCK] * (blocks - 1)
    sizes.append(len(x) - sum(sizes))
    parts = zip(_dense(grad).split(sizes), _dense(x).split(sizes), strict=True)
    total = _onednn(*(part.t() for part in next(parts)))
    for grad_part, x_part in parts:
        total += _onednn(grad_part.t(), x_part.t())
    return total, grad.sum(0) if sums else None


def flat(x: Tensor) -> Tensor:
    """``[rows, width]``, also for zero rows."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def layers_of(tensors: Sequence[Tensor | None]) -> list[Layer]:
    """Pairs of weight and bias, from a flat sequence."""
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    return [(weight, bias) for weight, bias in pairs if weight is not None]


def _kernel_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output: Tensor = torch.ops.clearhead.linear.default(x, weight, bias)
    return output


def _kernel_input_gradient(terms: Sequence[Term]) -> Tensor:
    together = [terms[first : first + MAX_TERMS] for first in range(0, len(terms), MAX_TERMS)]
    grads: list[Tensor] = [
        torch.ops.clearhead.linear_input_gradient.default([grad for grad, _ in some], [weight for _, weight in some])
        for some in together
    ]
    return grads[0] if len(grads) == 1 else torch.stack(grads).sum(0)


def _kernel_weight_gradient(grad: Tensor, x: Tensor, sums: bool) -> tuple[Tensor, Tensor | None]:
    weight, bias = torch.ops.clearhead.linear_weight_gradient.default(grad, x, sums)
    return weight, bias if sums else None


TORCH: Final = Path("torch", lambda _dtype: None, F.linear, _added(torch.matmul), _torch_weight_gradient)
ONEDNN: Final = Path(
    "onednn",
    _onednn_absent,
    _onednn,
    _added(lambda grad, weight: _onednn(grad, weight.t())),
    _onednn_weight_gradient,
    prepares=True,
)
NATIVE: Final = Path("native", _kernels_absent, _kernel_forward, _kernel_input_gradient, _kernel_weight_gradient)
PATHS: Final[Mapping[str, Path]] = {path.name: path for path in (TORCH, ONEDNN, NATIVE)}
