"""Masks of other conventions to ours, and back.

Here ``True`` means *may attend*, everywhere. ``torch.nn.MultiheadAttention`` and its relatives mean the opposite,
other code writes 0 and 1, or adds a large negative number to the scores. Each convention has one function here that
says its name; nothing else in clearhead knows about them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.arguments import real_number, repr_of, whole_number
from clearhead.errors import MaskError
from clearhead.masks import Dense, Mask, Padding
from clearhead.scores import DenseBias
from clearhead.shapes import Bool, Float

__all__ = ["from_additive", "from_forbidden", "from_key_padding", "from_zero_forbids", "to_forbidden"]


def from_forbidden(forbidden: Bool[Tensor, "*leading q_len k_len"], *, num_heads: int | None = None) -> Dense:
    """A mask in which ``True`` forbids, as torch's ``attn_mask``, as ours.

    Args:
        forbidden: bool ``[q_len, k_len]``, ``[batch * num_heads, q_len, k_len]`` as torch has it, or
            ``[batch, heads, q_len, k_len]``.
        num_heads: needed for three axes, to tell batch from heads.

    Raises:
        MaskError: not bool, or another number of axes.

    >>> import torch
    >>> from_forbidden(torch.ones(2, 2, dtype=torch.bool).triu(1)).dense(2, 2).int().tolist()
    [[1, 0], [1, 1]]
    """
    if not isinstance(forbidden, Tensor) or forbidden.dtype != torch.bool:
        raise MaskError.about(
            "from_forbidden",
            "forbidden",
            must="be a bool tensor",
            got=_shape_and_dtype(forbidden),
            then="A float mask is added to scores: use from_additive.",
        )
    return Dense(~_four_axes("from_forbidden", "forbidden", forbidden, num_heads))


def from_zero_forbids(mask: Tensor) -> Dense:
    """A mask in which 0 forbids and all else allows, as in code that fills ``mask == 0``, as ours.

    Args:
        mask: any dtype; ``[q_len, k_len]`` or ``[batch, heads, q_len, k_len]``, any axis may be 1.

    >>> import torch
    >>> from_zero_forbids(torch.ones(2, 2).tril()).dense(2, 2).int().tolist()
    [[1, 0], [1, 1]]
    """
    if not isinstance(mask, Tensor):
        raise MaskError.about(
            "from_zero_forbids", "mask", must="be a tensor", got=_shape_and_dtype(mask), then="Use torch.as_tensor."
        )
    return Dense(_four_axes("from_zero_forbids", "mask", mask != 0, None))


def from_key_padding(padding: Bool[Tensor, "batch k_len"]) -> Mask:
    """torch's ``key_padding_mask``, in which ``True`` marks padding, as ours.

    Returns:
        ``Padding`` where all padding is to the right, which keeps work to the real tokens; else ``Dense``.

    Raises:
        MaskError: not bool ``[batch, k_len]``.

    >>> import torch
    >>> from_key_padding(torch.tensor([[False, False, True]]))
    Padding(lengths=[2])
    """
    if not isinstance(padding, Tensor) or padding.dtype != torch.bool or padding.ndim != 2:
        raise MaskError.about(
            "from_key_padding",
            "padding",
            must="be bool [batch, k_len]",
            got=_shape_and_dtype(padding),
            then="True marks padding.",
        )
    real = ~padding
    if bool((real[:, :-1] >= real[:, 1:]).all()):
        return Padding(real.sum(dim=-1))
    return Dense(real[:, None, None, :])


def from_additive(
    bias: Float[Tensor, "*leading q_len k_len"], *, num_heads: int | None = None, forbids: float = -1e4
) -> tuple[Dense | None, tuple[DenseBias, ...]]:
    """A float mask that is added to scores, as a mask and the score rule that is left.

    Minus infinity, -1e9 and the dtype's smallest number are all used to forbid. They differ in a row that is
    forbidden throughout: infinity gives NaN, a finite number an average over what was forbidden. Here all three
    become a real mask, under which such a row is 0.

    Args:
        bias: ``[q_len, k_len]``, ``[batch * num_heads, q_len, k_len]`` or ``[batch, heads, q_len, k_len]``.
        num_heads: needed for three axes, to tell batch from heads.
        forbids: entries at or below it forbid.

    Returns:
        The mask, None where nothing is forbidden; and the rules, none where all that is left is 0.

    Raises:
        MaskError: not floating point, or another number of axes.

    >>> import torch
    >>> mask, rules = from_additive(torch.tensor([[0.0, -torch.inf], [0.0, -1e9]]))
    >>> mask.dense(2, 2).int().tolist(), rules
    ([[1, 0], [1, 0]], ())
    """
    if not isinstance(bias, Tensor) or not bias.is_floating_point() or bias.is_meta:
        raise MaskError.about(
            "from_additive",
            "bias",
            must="be a floating point tensor",
            got=_shape_and_dtype(bias),
            then="A bool mask is from_forbidden's.",
        )
    limit = real_number(forbids)
    if limit is None:
        raise MaskError.about(
            "from_additive", "forbids", must="be a number", got=repr_of(forbids), then="Pass one far below all biases."
        )
    bias = _four_axes("from_additive", "bias", bias, num_heads)
    allowed = bias > limit
    rest = bias.masked_fill(~allowed, 0.0)
    mask = None if bool(allowed.all()) else Dense(allowed)
    return mask, (DenseBias(rest),) if bias.requires_grad or bool((rest != 0.0).any()) else ()


def to_forbidden(
    mask: Mask, q_len: int, k_len: int, *, query_offset: int | None = None
) -> Bool[Tensor, "*leading q_len k_len"]:
    """One of our masks as booleans in which ``True`` forbids, as torch's ``attn_mask`` takes them.

    Returns:
        ``[q_len, k_len]``, or ``[batch | 1, heads | 1, q_len, k_len]`` where it differs between them; torch's module
        takes the latter expanded and flattened to ``[batch * num_heads, q_len, k_len]``.

    >>> from clearhead.masks import Causal
    >>> to_forbidden(Causal(), 2, 2).int().tolist()
    [[0, 1], [0, 0]]
    """
    if not isinstance(mask, Mask):
        raise MaskError.about(
            "to_forbidden", "mask", must="be a mask", got=type(mask).__name__, then="Booleans need ~ alone."
        )
    return ~mask.dense(q_len, k_len, query_offset=query_offset)


def _four_axes(function: str, argument: str, tensor: Tensor, num_heads: int | None) -> Tensor:
    """``[batch | 1, heads | 1, q_len, k_len]``."""
    if tensor.ndim in (2, 4):
        return tensor.reshape((1,) * (4 - tensor.ndim) + tensor.shape)
    heads = whole_number(num_heads)
    if tensor.ndim != 3 or heads is None or heads < 1 or tensor.shape[0] % heads:
        raise MaskError.about(
            function,
            argument,
            must="have axes [q_len, k_len], [batch, heads, q_len, k_len], or with num_heads "
            "[batch * num_heads, q_len, k_len]",
            got=f"{_shape_and_dtype(tensor)}, num_heads {repr_of(num_heads)}",
            then="Pass num_heads, or give batch and heads an axis each.",
        )
    split: Tensor = tensor.unflatten(0, (-1, heads))
    return split


def _shape_and_dtype(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return type(value).__name__
