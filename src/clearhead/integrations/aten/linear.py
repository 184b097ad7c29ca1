"""ATen's matrix multiplications behind linear layers, forward and backward, by the table of processors."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from clearhead import choices
from clearhead.errors import ClearheadError
from clearhead.integrations.aten.kernel import AtenKernel
from clearhead.projection.paths import TORCH, Path
from clearhead.projection.selection import gemm_gains_alone, gemm_path, has_paths

__all__ = ["LINEAR", "choose_path"]

_FORWARD, _INPUT, _WEIGHT = "forward", "input gradient", "weight gradient"


def choose_path(left: Tensor, right: Tensor) -> tuple[str, Path] | None:
    """Which of a linear layer's three GEMMs ``left @ right`` is, by the strides, and its path; None for torch's."""
    if not has_paths(left.dtype) or right.dtype is not left.dtype or left.dim() != 2 or right.dim() != 2:
        return None
    (rows, steps), (inner, columns) = left.shape, right.shape
    large = rows * steps * columns >= choices.SMALL or choices.is_invariant()
    if inner != steps or not (large or steps * columns >= choices.LARGE_WEIGHT_BFLOAT16):
        return None
    (left_row, left_step), (right_step, right_column) = left.stride(), right.stride()
    if left_step == 1 and 1 in (right_step, right_column):
        kind = _FORWARD if right_step == 1 else _INPUT
        path = gemm_path(left.dtype, rows, columns, steps, kind=kind, training=torch.is_grad_enabled())
    elif left_row == 1 and right_column == 1:
        kind = _WEIGHT
        path = gemm_path(left.dtype, steps, rows, columns, kind=kind)
    else:
        return None
    gains = path is not TORCH and gemm_gains_alone(kind, left.dtype, rows, steps * columns)
    return (kind, path) if gains else None


def _mm(left: Tensor, right: Tensor) -> Tensor | None:
    """``left @ right``."""
    chosen = choose_path(left, right)
    if chosen is None:
        return None
    kind, path = chosen
    try:
        if kind == _FORWARD:
            return path.forward(left, right.t(), None)
        if kind == _INPUT:
            return path.input_gradient([(left, right)])
        return path.weight_gradient(left.t(), right, False)[0]
    except (ClearheadError, RuntimeError):
        return None


def _addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor | None:
    """``bias + left @ right`` for a bias of one row."""
    if beta != 1 or alpha != 1 or bias.dim() != 1 or bias.dtype is not left.dtype:
        return None
    chosen = choose_path(left, right)
    if chosen is None or chosen[0] == _WEIGHT or len(bias) != right.shape[1]:
        return None
    try:
        return chosen[1].forward(left, right.t(), bias)
    except (ClearheadError, RuntimeError):
        return None


def _mm_out(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor | None:
    return _written(_mm(left, right), out)


def _addmm_out(
    bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor
) -> Tensor | None:
    return _written(_addmm(bias, left, right, beta=beta, alpha=alpha), out)


def _written(result: Tensor | None, out: Tensor) -> Tensor | None:
    """``out`` with the result in it; torch's kernel resizes ``out``, or refuses it."""
    fits = result is not None and out.shape == result.shape and out.dtype is result.dtype
    return out.copy_(result) if fits and result is not None else None


#: Matrix multiplications, functional and into a given tensor, which compiled programs call.
LINEAR: Final = (
    AtenKernel("mm", _mm),
    AtenKernel("mm.out", _mm_out),
    AtenKernel("addmm", _addmm),
    AtenKernel("addmm.out", _addmm_out),
)
