"""Matrix multiplication and triangular solve, with higher derivatives; autocast does not round gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.backends import containment
from clearhead.backends.containment import without_autocast
from clearhead.shapes import Float
from clearhead.tensors import traces
from clearhead.torch_private import differentiates_forward

__all__ = ["matmul", "solve_unitriangular"]


def matmul(
    left: Float[Tensor, "*batch rows x"], right: Float[Tensor, "*batch x columns"]
) -> Float[Tensor, "*batch rows columns"]:
    """``left @ right``, differentiable any number of times."""
    # The compiler cannot trace checks of modes, and derives backward itself.
    return left @ right if torch.compiler.is_compiling() else containment.matmul(left, right)


def solve_unitriangular(
    strict: Float[Tensor, "*batch size size"], right: Float[Tensor, "*batch size columns"], *, upper: bool = False
) -> Float[Tensor, "*batch size columns"]:
    """``(I + strict)^-1 @ right``, differentiable any number of times.

    Args:
        strict: a matrix that is 0 on and above the diagonal.
        right: the right-hand sides.
        upper: whether ``strict`` is 0 on and below the diagonal instead.
    """
    # An autograd function cannot be traced, and has no rule for forward-mode differentiation.
    if torch.compiler.is_compiling() or traces() or differentiates_forward():
        return _solution(strict, right, upper)
    solution: Tensor = _Solved.apply(strict, right, upper)  # type: ignore[no-untyped-call]
    return solution


def _solution(strict: Tensor, right: Tensor, upper: bool) -> Tensor:
    solution: Tensor = torch.linalg.solve_triangular(strict, right, upper=upper, unitriangular=True)
    return solution


class _Solved(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(strict: Tensor, right: Tensor, upper: bool) -> Tensor:
        return _solution(strict, right, upper)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
        strict, _, ctx.upper = inputs
        ctx.save_for_backward(strict, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        strict, solution = ctx.saved_tensors
        with without_autocast(grad.device.type):
            of_right = solve_unitriangular(strict.mT, grad, upper=not ctx.upper)
            if not ctx.needs_input_grad[0]:
                return None, of_right, None
            of_strict = -matmul(of_right, solution.mT)
        return (of_strict.triu(1) if ctx.upper else of_strict.tril(-1)), of_right, None
