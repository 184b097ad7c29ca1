"""Attention functions with faults in boundary cases only.

Empty calls, sizes beyond one tile or grid, divisible lengths, storage offsets, and the range of floating point values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.verify.broken_calls import Attention, as_torch_s, only_where
from tests.verify.steps import RIGHT, Broken, but, take_causal, take_drop, take_forbid

__all__ = ["BROKEN_LIMITS"]

_TILE = 64


def _at_output(change: Callable[[Tensor, Tensor], Tensor]) -> Attention:
    """The correct attention with a changed output."""
    return as_torch_s(lambda query, key, value, **options: change(RIGHT(query, key, value, **options), key))


class _Backward(torch.autograd.Function):
    """Identity; backward changes the gradient, given ``saved``."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, saved: Any, change: Callable[[Tensor, Any], Tensor]) -> Tensor:
        ctx.saved, ctx.change = saved, change
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.change(grads[0], ctx.saved), None, None


# Nothing ----------------------------------------------------------------------------------------------------------


def _of_no_batch(output: Tensor, key: Tensor) -> Tensor:
    """Without a sequence the output has another shape."""
    return output if output.shape[0] else output.flatten(0, 1)


class _KeysOfOneQuery(torch.autograd.Function):
    """Without a query the gradient of the keys is not written."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, query: Tensor) -> Tensor:
        ctx.queries = query.shape[2]
        return key.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return (grads[0] if ctx.queries else torch.full_like(grads[0], 3.0)), None


def _unwritten_gradient(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return RIGHT(query, _KeysOfOneQuery.apply(key, query), value, **options)  # type: ignore[no-untyped-call]


# Masks ------------------------------------------------------------------------------------------------------------


def _first_axis_of_sequences(scores: Tensor, mask: Tensor) -> Tensor:
    return take_forbid(scores, mask[:, None] if mask.ndim == 3 else mask)


def _first_of_three(scores: Tensor, mask: Tensor) -> Tensor:
    return take_forbid(scores, mask[:1] if mask.ndim == 3 else mask)


def _by_sixteens(scores: Tensor, mask: Tensor) -> Tensor:
    """If a row is divisible by sixteen, its bools are loaded by sixteens in reverse order."""
    reversed_order = mask.dtype == torch.bool and mask.shape[-1] % 16 == 0
    return take_forbid(scores, mask.unflatten(-1, (-1, 16)).flip(-1).flatten(-2) if reversed_order else mask)


def _mask_of_first_split(scores: Tensor, mask: Tensor) -> Tensor:
    """The keys of one query are split among workers by 128, all of which read the mask of the first."""
    if scores.shape[2] == 1 and mask.ndim == 4:
        mask = mask[..., torch.arange(mask.shape[-1]) % 128]
    return take_forbid(scores, mask)


def _last_tile_skipped(q_len: int, k_len: int) -> Tensor:
    """``<`` instead of ``<=`` if the last row's keys end with a tile."""
    allowed = take_causal(q_len, k_len)
    if q_len % _TILE == 0 and k_len >= q_len:
        allowed[-1, q_len - 1] = False
    return allowed


def _base_2(scores: Tensor) -> Tensor:
    """Scores times log2(e), for which the lowest finite value overflows."""
    empty = (scores == -torch.inf).all(dim=-1, keepdim=True)
    in_base_2 = scores.masked_fill(empty, 0.0) * math.log2(math.e)
    terms = torch.exp2(in_base_2 - in_base_2.amax(dim=-1, keepdim=True))
    return (terms / terms.sum(dim=-1, keepdim=True)).masked_fill(empty, 0.0)


def _clamps(grad: Tensor, mask: Tensor) -> Tensor:
    mask.data.clamp_(min=-1e4)
    return grad


def _clamps_mask_in_backward(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    output = RIGHT(query, key, value, attn_mask, is_causal=is_causal)
    added = attn_mask is not None and attn_mask.dtype != torch.bool
    return _Backward.apply(output, attn_mask, _clamps) if added else output  # type: ignore[no-any-return]


def _learns_with_others(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Runs without a graph if none of query, key and value requires a gradient."""
    wanted = query.requires_grad or key.requires_grad or value.requires_grad
    return RIGHT(query, key, value, **options) if wanted else RIGHT(query, key, value, **options).detach()


class _RepeatedOnce(torch.autograd.Function):
    """Expands a mask of one row; its gradient is that of the first query, not the sum."""

    @staticmethod
    def forward(ctx: Any, mask: Tensor, q_len: int) -> Tensor:
        return mask.expand(*mask.shape[:2], q_len, mask.shape[3]).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][:, :, :1].clone(), None


def _row_of_first_query(scores: Tensor, mask: Tensor) -> Tensor:
    one_row = mask.dtype != torch.bool and mask.ndim == 4 and mask.shape[2] == 1
    return take_forbid(scores, _RepeatedOnce.apply(mask, scores.shape[2]) if one_row else mask)


# Sizes ------------------------------------------------------------------------------------------------------------


def _width_of_128(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Widths between 128 and 256 are treated as 128."""
    factor, width = query.shape[-1] ** -0.5, 128 if 128 < query.shape[-1] < 256 else query.shape[-1]
    options["scale"] = factor if options.get("scale") is None else options["scale"]
    return RIGHT(query[..., :width], key[..., :width], value, **options)


def _sequences_of_a_grid(output: Tensor, key: Tensor) -> Tensor:
    return torch.where(torch.arange(output.shape[0]).view(-1, 1, 1, 1) < 65535, output, 0.0)


_TURNED_GROUPS = but(groups=lambda tensor, heads: tensor.repeat(1, heads // tensor.shape[1], 1, 1))


def _group_rows_by_tiles(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """From the second tile of a group's rows on, the key head is wrong."""
    output, group = RIGHT(query, key, value, **options), query.shape[1] // key.shape[1]
    if group == 1:
        return output
    early = torch.arange(query.shape[2])[:, None] * group < _TILE
    return torch.where(early, output, _TURNED_GROUPS(query, key, value, **options))


def _equal_shares(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """The keys of one query are split among two workers, whose results are averaged without weights."""
    cut = key.shape[2] // 2
    halves = (
        RIGHT(query, key[:, :, part], value[:, :, part], **options) for part in (slice(None, cut), slice(cut, None))
    )
    return sum(halves, start=torch.zeros(())) / 2.0


def _long_decode(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    unmasked = options.get("attn_mask") is None and not options.get("is_causal")
    return query.shape[2] == 1 and key.shape[2] >= 128 and query.shape[1] != key.shape[1] and unmasked


# Dropout, gradients -------------------------------------------------------------------------------------------------


def _same_in_every_tile(axis: int) -> Callable[[Tensor, float], Tensor]:
    """Each tile uses the same random numbers."""

    def drop(weights: Tensor, p: float) -> Tensor:
        if not p:
            return weights
        drawn = torch.rand_like(weights).index_select(axis, torch.arange(weights.shape[axis]) % _TILE)
        return weights * (drawn >= p) / (1.0 - p)

    return drop


def _square_dropout(weights: Tensor, p: float) -> Tensor:
    """Dropout for as many keys as queries; weights of further keys are never dropped."""
    size = weights.shape[2]
    return torch.cat([take_drop(weights[..., :size], p), weights[..., size:] / (1.0 - p)], dim=-1)


def _from_the_start(grad: Tensor, saved: Any) -> Tensor:
    """Read with strides, but without the storage offset."""
    return torch.as_strided(grad, grad.shape, grad.stride(), 0)


def _offset_ignored(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return _Backward.apply(RIGHT(query, key, value, **options), None, _from_the_start)  # type: ignore[no-any-return]


BROKEN_LIMITS: dict[str, Broken] = {
    "NaN without keys": Broken(_at_output(lambda output, key: output if key.shape[2] else output / 0.0), "empty calls"),
    "ones without keys": Broken(
        _at_output(lambda output, key: output if key.shape[2] else output + 1.0), "empty calls"
    ),
    "another shape without sequences": Broken(_at_output(_of_no_batch), "empty calls"),
    "gradients not written without queries": Broken(as_torch_s(_unwritten_gradient), "empty calls"),
    "mask of three axes by sequences": Broken(but(forbid=_first_axis_of_sequences), "masks of three axes"),
    "mask of three axes of the first head": Broken(but(forbid=_first_of_three), "masks of three axes"),
    "masks divisible by sixteen reversed": Broken(but(forbid=_by_sixteens), "masks"),
    "mask of the first split in decode": Broken(but(forbid=_mask_of_first_split), "masks and lengths"),
    "the last key's tile skipped at divisible lengths": Broken(but(causal=_last_tile_skipped), "causal flag"),
    "lowest values of a float mask overflow": Broken(but(softmax=_base_2), "float mask"),
    "float mask written to by backward": Broken(_clamps_mask_in_backward, "inputs unchanged"),
    "float mask does not learn alone": Broken(as_torch_s(_learns_with_others), "float mask in gradients"),
    "float mask of one row learns of one query": Broken(but(forbid=_row_of_first_query), "float mask in gradients"),
    "widths above 128 cut": Broken(as_torch_s(_width_of_128), "widths"),
    "sequences beyond a grid left out": Broken(_at_output(_sequences_of_a_grid), "many heads and sequences"),
    "a group's rows beyond a tile read another head": Broken(as_torch_s(_group_rows_by_tiles), "grouped heads"),
    "splits of a grouped decode in equal shares": Broken(only_where(_long_decode, _equal_shares), "grouped heads"),
    "dropout alike in every tile of keys": Broken(but(drop=_same_in_every_tile(3)), "dropout"),
    "dropout alike in every tile of queries": Broken(but(drop=_same_in_every_tile(2)), "dropout"),
    "keys beyond the number of queries never dropped": Broken(but(drop=_square_dropout), "dropout"),
    "start of the gradient ignored": Broken(as_torch_s(_offset_ignored), "gradient layouts"),
    "float16 scores overflow before they are scaled": Broken(RIGHT, "huge scores", dtype=torch.float16),
}
"""These functions by their fault."""
