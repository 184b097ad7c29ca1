"""Weights of other libraries' modules, in the layout of ours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from clearhead.errors import ShapeError

__all__ = ["HeadWeight", "copy_into", "side_by_side", "torch_projections", "weight_and_bias"]

#: A projection of one head: its weight, its weight and bias, or an ``nn.Linear`` with both.
HeadWeight = Tensor | tuple[Tensor, Tensor | None] | nn.Linear


def torch_projections(module: nn.MultiheadAttention) -> tuple[list[Tensor], list[Tensor] | None]:
    """Weights, and biases where it has them, of torch's query, key, value and output projection."""
    if module.in_proj_weight is not None:
        weights = list(module.in_proj_weight.chunk(3))
    else:
        weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    weights.append(module.out_proj.weight)
    if module.in_proj_bias is None:
        return weights, None
    return weights, [*module.in_proj_bias.chunk(3), module.out_proj.bias]


def weight_and_bias(function: str, role: str, part: HeadWeight) -> tuple[Tensor, Tensor | None]:
    if isinstance(part, nn.Linear):
        return part.weight, part.bias
    weight, bias = part if isinstance(part, tuple) else (part, None)
    fits = isinstance(weight, Tensor) and weight.ndim == 2 and weight.is_floating_point()
    if not fits or (bias is not None and not (isinstance(bias, Tensor) and bias.shape == weight.shape[:1])):
        raise ShapeError.about(
            function,
            role,
            must="be a weight [out, in], with a bias [out] if any",
            got=[tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__ for each in (weight, bias)],
            then="Weights lie as in nn.Linear; transpose those that multiply from the right.",
        )
    return weight, bias


def side_by_side(function: str, role: str, parts: Sequence[HeadWeight]) -> tuple[Tensor, Tensor | None]:
    """The weights of one role of all heads as one projection."""
    pairs = [weight_and_bias(function, role, part) for part in parts]
    if len({(weight.shape, bias is None) for weight, bias in pairs}) > 1:
        raise ShapeError.about(
            function,
            role,
            must="have the same shape in every head, and a bias in all or none",
            got=[tuple(weight.shape) for weight, _ in pairs],
            then="Heads of different sizes are modules of their own.",
        )
    biases = [bias for _, bias in pairs if bias is not None]
    return torch.cat([weight for weight, _ in pairs]), torch.cat(biases) if biases else None


@torch.no_grad()
def copy_into(target: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    target.weight.copy_(weight)
    if target.bias is not None:
        target.bias.copy_(torch.zeros_like(target.bias) if bias is None else bias)
