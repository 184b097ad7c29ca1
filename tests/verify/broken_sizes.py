"""Attention functions with faults above some number of heads, sequences or threads, or in random state and memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import clearhead as ch
from tests.verify.broken_calls import Attention, as_torch_s, only_where
from tests.verify.steps import RIGHT, Broken, but, take_forbid, take_groups, take_scores

__all__ = ["BROKEN_SIZES"]


# Heads and sequences ----------------------------------------------------------------------------------------------


def _wrapped(tensor: Tensor, axis: int, size: int) -> Tensor:
    """Indices along ``axis`` are taken modulo ``size``."""
    return tensor.index_select(axis, torch.arange(tensor.shape[axis]) % size)


def _keys_wrapped(axis: int, size: int) -> Attention:
    return but(scores=lambda query, key, value, scale: take_scores(query, _wrapped(key, axis, size), value, scale))


def _masks_wrapped(axis: int, size: int) -> Attention:
    return but(forbid=lambda scores, mask: take_forbid(scores, _wrapped(mask, axis, size) if mask.ndim == 4 else mask))


def _late_heads_unlearned(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    key = torch.cat([key[:, :32], key[:, 32:].detach()], dim=1)
    return take_scores(query, key, value, scale)


def _late_groups_by_turns(tensor: Tensor, heads: int) -> Tensor:
    """The first 16 key heads are repeated in the correct order, the others in the wrong one."""
    group = heads // tensor.shape[1]
    early, late = tensor[:, :16], tensor[:, 16:]
    return torch.cat([take_groups(early, early.shape[1] * group), late.repeat(1, group, 1, 1)], dim=1)


def _one_mask_a_group(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """All heads of a group use the mask of its first head."""
    mask, group = options.get("attn_mask"), query.shape[1] // key.shape[1]
    if mask is not None and mask.ndim == 4 and mask.shape[1] > 1:
        options["attn_mask"] = mask[:, ::group].repeat_interleave(group, dim=1)
    return RIGHT(query, key, value, **options)


# Threads ----------------------------------------------------------------------------------------------------------


def _rows_left_out(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Rows that do not divide evenly among threads are left out."""
    output, threads = RIGHT(query, key, value, **options), torch.get_num_threads()
    computed = torch.arange(query.shape[2]) < query.shape[2] // threads * threads
    return output.masked_fill(~computed[:, None], 0.0)


def _nobody_helps(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """With one thread nothing is computed."""
    output = RIGHT(query, key, value, **options)
    return output if torch.get_num_threads() > 1 else output * 0.0


def _shares_not_added(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """The key's gradient contains only the first thread's rows."""
    rows = -(-query.shape[2] // torch.get_num_threads())
    parts = (
        take_scores(query[:, :, :rows], key, value, scale),
        take_scores(query[:, :, rows:], key.detach(), value, scale),
    )
    return torch.cat(parts, dim=2)


# Random numbers ---------------------------------------------------------------------------------------------------


def _seeds_anyway(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """A seed for dropout is drawn without dropout."""
    torch.randint(2**62, ())
    return RIGHT(query, key, value, **options)


class _Drawing(torch.autograd.Function):
    """Draws a random number in backward."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        torch.randint(2**62, ())
        return grad


def _seeds_in_backward(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return _Drawing.apply(RIGHT(query, key, value, **options))  # type: ignore[no-any-return]


class _SeedsAtEval(torch.nn.MultiheadAttention):
    def forward(self, *inputs: Any, **options: Any) -> Any:
        if self.dropout > 0.0:
            torch.randint(2**62, ())
        return super().forward(*inputs, **options)


# Memory -----------------------------------------------------------------------------------------------------------


class _Recomputed(torch.autograd.Function):
    """Linear memory in forward; backward allocates the whole score matrix."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return ch.attention(query, key, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        scores = query.detach() @ key.detach().mT
        with torch.enable_grad():
            output = ch.attention(query, key, value)
        gradients = torch.autograd.grad(output, (query, key, value), grad)
        del scores
        return gradients


def _whole_in_backward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _Recomputed.apply(query, key, value)  # type: ignore[no-any-return]


def _decodes(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    return query.shape[2] == 1


_HEADS, _SEQUENCES = 1, 0
_MANY = "many heads and sequences"

BROKEN_SIZES: dict[str, Broken] = {
    **{f"keys of head h % {size}": Broken(_keys_wrapped(_HEADS, size), _MANY) for size in (8, 16, 32)},
    **{f"keys of sequence b % {size}": Broken(_keys_wrapped(_SEQUENCES, size), _MANY) for size in (4, 8, 16)},
    "mask of head h % 32": Broken(_masks_wrapped(_HEADS, 32), _MANY),
    "mask of sequence b % 8": Broken(_masks_wrapped(_SEQUENCES, 8), _MANY),
    "keys of head h % 32 in decode": Broken(only_where(_decodes, _keys_wrapped(_HEADS, 32)), _MANY),
    "no gradient for keys beyond head 32": Broken(but(scores=_late_heads_unlearned), _MANY),
    "groups beyond key head 16 in the wrong order": Broken(but(groups=_late_groups_by_turns), "grouped heads"),
    "mask of the first head of a group for the group": Broken(as_torch_s(_one_mask_a_group), "grouped heads"),
    "rows that do not divide among the threads left out": Broken(as_torch_s(_rows_left_out), "threads"),
    "nothing computed with one thread": Broken(as_torch_s(_nobody_helps), "threads"),
    "one thread's share of the key's gradient": Broken(but(scores=_shares_not_added), "threads"),
    "a random number without dropout": Broken(as_torch_s(_seeds_anyway), "process state"),
    "a random number in backward": Broken(as_torch_s(_seeds_in_backward), "process state"),
    "a module that draws at eval": Broken(_SeedsAtEval, "process state", "mha"),
    "whole scores": Broken(RIGHT, "memory", linear_memory=True),
    "whole scores in backward": Broken(_whole_in_backward, "memory", linear_memory=True),
}
"""These functions by their fault."""
