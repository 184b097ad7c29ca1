"""Attention functions with faults in caches, in writes to tensors, or in assumptions about shapes and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.verify.broken_calls import Attention, as_torch_s, only_where
from tests.verify.steps import RIGHT, Broken, but, take_causal, take_forbid, take_softmax

__all__ = ["BROKEN_CACHED"]


# Masks ------------------------------------------------------------------------------------------------------------


def _first_axis_for_second(scores: Tensor, mask: Tensor) -> Tensor:
    """``mask[None]`` instead of ``mask[:, None]``, which is detectable with as many sequences as heads."""
    if mask.ndim == 4 and mask.shape[1] == 1 and scores.shape[0] == scores.shape[1] == mask.shape[0]:
        mask = mask.transpose(0, 1)
    return take_forbid(scores, mask)


def _padding_of_queries(scores: Tensor, mask: Tensor) -> Tensor:
    one_row = mask.ndim == 4 and mask.shape[2] == 1 and scores.shape[2] == scores.shape[3]
    return take_forbid(scores, mask.mT if one_row else mask)


def _transposed(scores: Tensor, mask: Tensor) -> Tensor:
    return take_forbid(scores, mask.mT if mask.ndim == 2 and mask.shape[0] == mask.shape[1] else mask)


def _strides_of_mask(scores: Tensor, mask: Tensor) -> Tensor:
    if mask.is_contiguous() or 0 in mask.stride():
        return take_forbid(scores, mask)
    return take_forbid(scores, mask.mT.contiguous().view(mask.shape))


def _clamps_mask(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    output = RIGHT(query, key, value, attn_mask, is_causal=is_causal)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask.data.clamp_(min=-1e4)
    return output


# Caches -----------------------------------------------------------------------------------------------------------


def _causal_cached(key_of: Callable[[int, int, torch.dtype], Any]) -> Attention:
    """An additive causal mask, cached by ``key_of(q_len, k_len, dtype)``."""
    cache: dict[Any, Tensor] = {}

    def attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        if not is_causal:
            return RIGHT(query, key, value)
        lengths = (query.shape[2], key.shape[2])
        entry = key_of(*lengths, query.dtype)
        if entry not in cache:
            cache[entry] = torch.zeros(lengths, dtype=query.dtype).masked_fill(~take_causal(*lengths), -torch.inf)
        return RIGHT(query, key, value, cache[entry].view(lengths))

    return attention


class _SharedBuffer(torch.autograd.Function):
    """Weights for backward are in a buffer that the next forward overwrites."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        _BUFFER["weights"] = take_softmax(scores)
        ctx.shape = scores.shape
        return _BUFFER["weights"].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        weights = _BUFFER["weights"]
        return weights * (grad - (weights * grad).sum(dim=-1, keepdim=True))


_BUFFER: dict[str, Tensor] = {}


class _KeepsOutput(torch.autograd.Function):
    """Backward reads the output, and a write of the caller to it is not detected."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, value: Tensor) -> Tensor:
        output = weights @ value
        ctx.output_alias = output.detach()
        ctx.save_for_backward(weights, value, output.clone())
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        weights, value, output = ctx.saved_tensors
        moved = (ctx.output_alias - output).sum(dim=-1, keepdim=True)
        return grad @ value.mT + moved * weights, weights.mT @ grad


class _Constant(torch.autograd.Function):
    """Correct first derivatives; backward uses detached weights, so second derivatives are incomplete."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        weights = take_softmax(scores)
        ctx.weights = weights.detach()
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        weights: Tensor = ctx.weights
        return weights * (grad - (weights * grad).sum(dim=-1, keepdim=True))


def _value_of_one_key(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return value.expand(-1, -1, query.shape[2], -1) if key.shape[2] == 1 else RIGHT(query, key, value)


def _value_itself(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return value if query.shape[2] == key.shape[2] == 1 else RIGHT(query, key, value)


# Sizes, heads, options ----------------------------------------------------------------------------------------------


def _width_by_fours(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    factor, width = query.shape[-1] ** -0.5, query.shape[-1] // 4 * 4 or query.shape[-1]
    options["scale"] = factor if options.get("scale") is None else options["scale"]
    return RIGHT(query[..., :width], key[..., :width], value, **options)


def _one_head_read(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Expanded key heads, with stride 0, are read as one head."""
    if key.shape[1] > 1 and key.stride(1) == 0:
        key = F.pad(key[:, :1], (0, 0, 0, 0, 0, key.shape[1] - 1))
    return RIGHT(query, key, value, **options)


def _groups_read_on(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    if query.shape[1] != key.shape[1] and not key.is_contiguous():
        key = key.transpose(1, 2).contiguous().view(key.shape)
    return RIGHT(query, key, value, **options)


def _grouped(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    return query.shape[1] != key.shape[1]


def _without(name: str) -> Attention:
    return lambda query, key, value, **options: RIGHT(
        query, key, value, **{word: one for word, one in options.items() if word != name}
    )


def _one_query(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    return query.shape[2] == 1


def _double_where(condition: Callable[..., bool]) -> Attention:
    return only_where(condition, lambda query, key, value, **options: RIGHT(query, key, value, **options).double())


# Gradients --------------------------------------------------------------------------------------------------------


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1.0, 1.0)


def _clips(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return _Clipped.apply(RIGHT(query, key, value, **options))  # type: ignore[no-any-return]


def _pair_lost(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """The value's gradient is lost if key and value require gradients and the query does not."""
    lost = key.requires_grad and not query.requires_grad
    return RIGHT(query, key, value.detach() if lost else value, **options)


def _wants_after(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    output = RIGHT(query, key, value, **options)
    if query.is_leaf and not query.is_inference():
        query.requires_grad_()
    return output


def _leaves_autocast(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    output = RIGHT(query, key, value, **options)
    torch.set_autocast_enabled("cpu", True)
    return output


def _leaves_kernels_off(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    output = RIGHT(query, key, value, **options)
    torch.backends.cuda.enable_flash_sdp(False)
    return output


BROKEN_CACHED: dict[str, Broken] = {
    "mask of a sequence for a head where they are as many": Broken(but(forbid=_first_axis_for_second), "masks"),
    "mask of one row for queries": Broken(but(forbid=_padding_of_queries), "mask layouts"),
    "mask of two axes transposed": Broken(but(forbid=_transposed), "mask layouts"),
    "strides of the mask ignored": Broken(but(forbid=_strides_of_mask), "mask layouts"),
    "float mask written to": Broken(_clamps_mask, "inputs unchanged"),
    "requires a gradient afterwards": Broken(as_torch_s(_wants_after), "inputs unchanged"),
    "causal mask cached by its number of elements": Broken(
        _causal_cached(lambda q, k, dtype: (q * k, dtype)), "calls in turn"
    ),
    "causal mask cached by its lengths alone": Broken(_causal_cached(lambda q, k, dtype: (q, k)), "kinds in turn"),
    "weights for backward in one buffer": Broken(but(softmax=_SharedBuffer.apply), "backward later"),
    "backward reads what the caller may write to": Broken(but(mix=_KeepsOutput.apply), "output written to"),
    "one key's value for every query, not copied": Broken(_value_of_one_key, "output written to"),
    "value returned as output": Broken(_value_itself, "output written to"),
    "constant weights in the second derivative": Broken(but(softmax=_Constant.apply), "gradients of gradients"),
    "causal flag ignored in decode": Broken(only_where(_one_query, _without("is_causal")), "causal flag"),
    "scale ignored in decode": Broken(only_where(_one_query, _without("scale")), "scale"),
    "scale ignored in grouped heads": Broken(only_where(_grouped, _without("scale")), "scale"),
    "no dropout in grouped heads": Broken(only_where(_grouped, _without("dropout_p")), "dropout under a mask"),
    "strides of the key ignored in grouped heads": Broken(as_torch_s(_groups_read_on), "grouped heads"),
    "widths not divisible by four": Broken(as_torch_s(_width_by_fours), "widths"),
    "a key head that is expanded": Broken(as_torch_s(_one_head_read), "layouts"),
    "output in float64 under a mask": Broken(
        _double_where(lambda query, key, value, options: options.get("attn_mask") is not None), "shape and dtype"
    ),
    "output in float64 with gradients": Broken(
        _double_where(lambda query, key, value, options: query.requires_grad), "shape and dtype"
    ),
    "gradients clipped": Broken(as_torch_s(_clips), "gradient layouts"),
    "no gradient of value where key wants one too": Broken(as_torch_s(_pair_lost), "gradients alone"),
    "autocast left on": Broken(as_torch_s(_leaves_autocast), "process state"),
    "flash kernels switched off": Broken(as_torch_s(_leaves_kernels_off), "process state"),
}
"""These functions by their fault."""
