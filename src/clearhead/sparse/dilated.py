"""Dilated and strided attention at its true cost: tokens of equal remainder are sequences of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.arguments import whole
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.functional import attention, observe_attention
from clearhead.masks import Causal, Mask, Padding, Window
from clearhead.masks.base import Not
from clearhead.problem import Problem
from clearhead.shapes import Float
from clearhead.statistics import Want

__all__ = ["dilated_attention"]

_NAME = "dilated_attention"


def dilated_attention(
    query: Float[Tensor, "*leading len head_dim"],
    key: Float[Tensor, "*kv_leading len head_dim"],
    value: Float[Tensor, "*kv_leading len value_dim"],
    *,
    stride: int,
    before: int | None = None,
    after: int | None = 0,
    local: int = 0,
    scale: float | None = None,
    backend: str = "auto",
) -> Float[Tensor, "*leading len value_dim"]:
    """Attention to every ``stride``-th key, and to the nearest ones besides.

    ``attention(..., mask=dilated(stride, before, after) | (Causal() & Window(local)))``

    Tokens with the same ``position % stride`` attend to each other alone, so they are laid out as sequences of
    ``len / stride`` tokens. The nearest keys are a second attention; log-sum-exps merge the two.

    Args:
        query: as in ``attention``; queries and keys are the same tokens.
        key: as in ``attention``.
        value: as in ``attention``.
        stride: distance between neighbouring keys, 1 or more.
        before: how many such keys back; None for all.
        after: how many ahead; None for all.
        local: how many keys directly before its own a query sees too; needs ``after=0``. With ``stride - 1`` this is
            the ``strided`` pattern.
        scale: factor on ``query @ key^T``; by default ``1 / sqrt(head_dim)``.
        backend: as in ``attention``.

    Returns:
        ``[batch, heads, len, value_dim]`` in query's dtype, with as many leading axes as ``query`` had.

    Raises:
        ShapeError: a number out of range, or lengths that differ.
        UnsupportedError: ``local`` together with keys ahead.

    Cost: ``len ** 2 / stride`` scores, or ``len * (before + after + 1)``, and ``len * local``, a causal half of each
    left out; and one copy of the tensors where there is more than one batch.

    Papers: Child et al. 2019, "Generating long sequences with sparse transformers", section 4.2; Beltagy et al. 2020,
    "Longformer", section 3.1; merging: Dao et al. 2022, "FlashAttention", section 3.1.

    >>> import torch
    >>> x = torch.eye(4)
    >>> dilated_attention(x, x, x, stride=2, scale=0.0)
    tensor([[1.0000, 0.0000, 0.0000, 0.0000],
            [0.0000, 1.0000, 0.0000, 0.0000],
            [0.5000, 0.0000, 0.5000, 0.0000],
            [0.0000, 0.5000, 0.0000, 0.5000]])
    """
    problem = Problem.of(_NAME, query, key, value, scale=scale)
    stride, before, after, local = _checked(problem, stride, before, after, local)
    inputs = (problem.query, problem.key, problem.value)
    if not local:
        mask = _reach(before, after)
        split = [_split(tensor, stride) for tensor in inputs]
        mask = _real(mask, problem, stride)
        output = _joined(attention(*split, mask=mask, scale=scale, backend=backend), stride, problem.q_len)
    else:
        output = _with_local(problem, inputs, stride, before, local, backend)
    return output.reshape(output.shape[2 - problem.leading :])


def _checked(
    problem: Problem, stride: int, keys_before: int | None, keys_after: int | None, local: int
) -> tuple[int, int | None, int | None, int]:
    stride, local = whole(_NAME, "stride", stride, low=1), whole(_NAME, "local", local, low=0)
    keys_before = None if keys_before is None else whole(_NAME, "before", keys_before, low=0)
    keys_after = None if keys_after is None else whole(_NAME, "after", keys_after, low=0)
    if problem.q_len != problem.k_len:
        raise ShapeError.about(
            _NAME,
            "key",
            must=f"have query's length {problem.q_len}",
            got=f"shape {tuple(problem.key.shape)}",
            then="For other lengths use attention(mask=ch.sparse.dilated(...)).",
        )
    if local and keys_after != 0:
        raise UnsupportedError.about(
            _NAME,
            "local",
            must="be 0 where keys ahead are seen",
            got=f"local={local}, after={keys_after}",
            then="Use attention(mask=ch.sparse.dilated(...) | ch.Window(...)).",
        )
    # Tokens that are further apart than the sequence is long have no other; nothing is filled up for them.
    return min(stride, max(1, problem.q_len)), keys_before, keys_after, local


def _reach(keys_before: int | None, keys_after: int | None) -> Mask | None:
    """Keys of a query among the tokens of its own remainder."""
    if keys_before is not None:
        return Window(keys_before, keys_after) if keys_after is not None else Not(Causal()) | Window(keys_before)
    if keys_after is None:
        return None
    return Causal() if keys_after == 0 else Causal() | Window(0, keys_after)


def _real(mask: Mask | None, problem: Problem, stride: int) -> Mask | None:
    """Without the tokens that fill the last ones up; no real query sees those before it in a causal mask."""
    short = -problem.q_len % stride
    if not short or isinstance(mask, Causal):
        return mask
    count = -(-problem.q_len // stride)
    lengths = torch.tensor([count] * (stride - short) + [count - 1] * short)
    filled = Padding(lengths.repeat(problem.batch))
    return filled if mask is None else mask & filled


def _with_local(
    problem: Problem, inputs: tuple[Tensor, ...], stride: int, before: int | None, local: int, backend: str
) -> Tensor:
    """Nearest keys and those further back are disjoint, and the softmax over both is a weighted mean of two."""
    scale, want = problem.scale, Want(lse=True)
    near = observe_attention(*inputs, mask=Causal() & Window(local), want=want, scale=scale, backend=backend)
    # The compiler follows no `~` of an object.
    beyond = Causal() & Not(Window(local // stride))
    mask = _real(beyond if before is None else beyond & Window(before), problem, stride)
    split = [_split(tensor, stride) for tensor in inputs]
    far = observe_attention(*split, mask=mask, want=want, scale=scale, backend=backend)
    assert near.lse is not None
    assert far.lse is not None
    far_lse = _joined(far.lse[..., None], stride, problem.q_len)
    both = torch.logaddexp(near.lse[..., None], far_lse)
    parts = ((near.output, near.lse[..., None]), (_joined(far.output, stride, problem.q_len), far_lse))
    merged = sum(part.to(both.dtype) * torch.exp(lse - both) for part, lse in parts)
    assert isinstance(merged, Tensor)
    return merged.to(near.output.dtype)


def _split(tensor: Tensor, stride: int) -> Tensor:
    """``[batch, heads, len, dim]`` as ``[batch * stride, heads, ceil(len / stride), dim]``."""
    filled = torch.nn.functional.pad(tensor, (0, 0, 0, -tensor.shape[2] % stride))
    sequences: Tensor = filled.unflatten(2, (-1, stride)).permute(0, 3, 1, 2, 4).flatten(0, 1)
    return sequences


def _joined(tensor: Tensor, stride: int, length: int) -> Tensor:
    """What ``_split`` took apart, whole again."""
    whole_again: Tensor = tensor.unflatten(0, (-1, stride)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    return whole_again[:, :, :length]
