"""Fakes of the operators of single layers and of blocks: their results' shapes, strides and dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.ops.block_shapes import BlockShapes, read_blocks, saved_shapes

__all__ = ["LAYER_FAKES", "empty_heads"]


def empty_heads(like: Tensor, dim: int) -> Tensor:
    """``[batch, heads, len, dim]`` whose heads are laid out as those of ``like`` after the operator's copy, if any."""
    batch, heads, length, last = like.shape
    copied = like.numel() > 0 and last > 1 and like.stride(3) != 1
    if not copied and like.stride(1) < like.stride(2):
        row = heads * dim
        return like.new_empty_strided((batch, heads, length, dim), (length * row, dim, row, 1))
    return like.new_empty((batch, heads, length, dim))


def _linear(x: Tensor, weight: Tensor, **others: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _linear_quantized(x: Tensor, scale: Tensor, **others: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], scale.shape[0]))


def _linear_packed(x: Tensor, out: int, **others: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], out))


def _pack_weight(weight: Tensor) -> Tensor:
    # The instruction set decides the width of a panel.
    size = torch.library.get_ctx().new_dynamic_size
    return weight.new_empty((size(), size(), size()), dtype=torch.uint8)


def _unpack_weight(like: Tensor, **others: Any) -> Tensor:
    return like.new_empty(tuple(like.shape))


def _linear_input_gradient(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    return grads[0].new_empty((*grads[0].shape[:-1], weights[0].shape[1]))


def _linear_weight_gradient(grad: Tensor, x: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
    outputs = grad.shape[-1]
    return x.new_empty((outputs, x.shape[-1])), x.new_empty((outputs if bias else 0,))


def _norm(x: Tensor, training: bool = False, **others: Any) -> tuple[Tensor, Tensor]:
    rows = math.prod(x.shape[:-1]) if training and x.shape[-1] != 0 else 0
    return x.new_empty(tuple(x.shape)), x.new_empty((rows, 2), dtype=torch.float32)


def _norm_gradients(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, of_weight: bool, of_bias: bool, **others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    wanted = (of_weight and weight is not None, of_bias and bias is not None)
    of_weight_and_bias = (x.new_empty((x.shape[-1] if each else 0,)) for each in wanted)
    return x.new_empty(tuple(x.shape)), *of_weight_and_bias  # type: ignore[return-value]


def _rotary(x: Tensor, **others: Any) -> Tensor:
    return empty_heads(x, x.shape[3])


def _token_angles(cosine: Tensor, **others: Any) -> Tensor:
    # What the tensors hold decides the number of rows.
    rows = torch.library.get_ctx().new_dynamic_size()
    return cosine.new_empty((rows, cosine.shape[2]))


def _dropout_add(x: Tensor, **others: Any) -> Tensor:
    return x.new_empty(tuple(x.shape))


def _cache_append(**others: Any) -> None:
    return None


def _block(tokens: Sequence[Tensor], tensors: Sequence[Tensor], integers: Sequence[int], **others: Any) -> Tensor:
    return _block_output(tokens[0], read_blocks([part.shape for part in tensors], integers)[0])


def _block_forward(
    tokens: Sequence[Tensor], tensors: Sequence[Tensor], integers: Sequence[int], **others: Any
) -> list[Tensor]:
    x = tokens[0]
    (block,) = read_blocks([part.shape for part in tensors], integers)
    saved = saved_shapes(block, [part.shape for part in tokens], x.dtype)
    return [_block_output(x, block), *(x.new_empty(shape, dtype=dtype) for shape, dtype in saved)]


def _block_output(x: Tensor, block: BlockShapes) -> Tensor:
    return x.new_empty((*x.shape[:2], x.shape[2] if block.residual else block.outputs))


def _block_backward(
    tokens: Sequence[Tensor], tensors: Sequence[Tensor], needs: Sequence[int], **others: Any
) -> tuple[list[Tensor], bool]:
    """Without elements all are finite."""
    given = zip((*tokens, *tensors), needs, strict=True)
    return [part.new_empty(tuple(part.shape)) for part, needed in given if needed], True


LAYER_FAKES: Final[dict[str, Callable[..., Any]]] = {
    "linear": _linear,
    "linear_quantized": _linear_quantized,
    "linear_packed": _linear_packed,
    "pack_weight": _pack_weight,
    "unpack_weight": _unpack_weight,
    "linear_input_gradient": _linear_input_gradient,
    "linear_weight_gradient": _linear_weight_gradient,
    "norm": _norm,
    "norm_gradients": _norm_gradients,
    "rotary": _rotary,
    "token_angles": _token_angles,
    "dropout_add": _dropout_add,
    "cache_append": _cache_append,
    "paged_append": _cache_append,
    "block": _block,
    "block_forward": _block_forward,
    "block_backward": _block_backward,
}
"""As ``FAKES``, of the operators of single layers and of blocks."""
