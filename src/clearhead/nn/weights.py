"""Weights of other libraries' modules, in the layout of ours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from clearhead.errors import ShapeError, UnsupportedError

__all__ = ["HeadWeight", "WeightAndBias", "copy_into", "heads_side_by_side", "torch_projections"]

#: A projection of one head: its weight, its weight and bias, or an ``nn.Linear`` with both.
HeadWeight = Tensor | tuple[Tensor, Tensor | None] | nn.Linear
WeightAndBias = tuple[Tensor, Tensor | None]


def torch_projections(function: str, module: nn.MultiheadAttention) -> list[WeightAndBias]:
    """Weight, and bias if any, of torch's query, key, value and output projection; raises for other modules."""
    if not isinstance(module, nn.MultiheadAttention):
        raise UnsupportedError.about(
            function, "module", must="be a torch.nn.MultiheadAttention", got=type(module).__name__,
            then="Copy its projections with from_heads.",
        )  # fmt: skip
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        raise UnsupportedError.about(
            function,
            "module",
            must="have no extra key",
            got="add_zero_attn" if module.add_zero_attn else "add_bias_kv",
            then="A zero key with a zero value is scores=[ch.Sink(0.0)].",
        )
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    if module.in_proj_bias is None:
        return [(weight, None) for weight in (*weights, module.out_proj.weight)]
    return [*zip(weights, module.in_proj_bias.chunk(3), strict=True), (module.out_proj.weight, module.out_proj.bias)]


def _weight_and_bias(function: str, role: str, part: HeadWeight) -> WeightAndBias:
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


def heads_side_by_side(
    function: str, heads: Sequence[tuple[HeadWeight, HeadWeight, HeadWeight]], output: HeadWeight | None
) -> list[WeightAndBias]:
    """The weights of single heads as one query, key and value projection; and ``output`` where it is given."""
    lists = isinstance(heads, Sequence) and all(isinstance(head, Sequence) for head in heads)
    if not lists or len(heads) == 0 or any(len(head) != 3 for head in heads):
        raise ShapeError.about(
            function, "heads", must="hold one (query, key, value) of weights per head",
            got=f"{len(heads)} heads" if lists else type(heads).__name__, then="Pass [(w_q, w_k, w_v)].",
        )  # fmt: skip
    joined = [
        _side_by_side(function, role, [head[place] for head in heads])
        for place, role in enumerate(("query", "key", "value"))
    ]
    head_dims = [len(weight) // len(heads) for weight, _ in joined]
    if len(set(head_dims)) > 1:
        raise ShapeError.about(
            function, "heads", must="have one head_dim for query, key and value", got=head_dims,
            then="Weights are [head_dim, width], as in nn.Linear.",
        )  # fmt: skip
    return joined if output is None else [*joined, _weight_and_bias(function, "output", output)]


def _side_by_side(function: str, role: str, parts: Sequence[HeadWeight]) -> WeightAndBias:
    """The weights of one role of all heads as one projection."""
    pairs = [_weight_and_bias(function, role, part) for part in parts]
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
