"""Dilated and strided attention in ``1 / stride`` of the cost: tokens of equal ``position % stride`` are a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.arguments import whole
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.functional.exact import attention, observe_attention
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
    """Attention of each query to every ``stride``-th key, and optionally to the keys directly before it.

    Equal to ``attention(..., mask=dilated(stride, before, after) | (Causal() & Window(local)))``.

    Tokens with the same ``position % stride`` attend only to each other, so each such group is computed as a sequence
    of ``len / stride`` tokens. The nearest keys are a second attention; the two are merged by their log-sum-exps.

    Args:
        query: ``[batch, heads, len, head_dim]``; leading axes may be missing and then count as 1.
        key: ``[batch, kv_heads, len, head_dim]``, of the same tokens; ``kv_heads`` divides ``heads``.
        value: ``[batch, kv_heads, len, value_dim]``.
        stride: distance between two keys, 1 or more.
        before: number of such keys before the query's position; None for all.
        after: number of such keys after the query's position; None for all.
        local: number of keys directly before the query's position that it attends to as well; requires ``after=0``.
            ``stride - 1`` gives the ``strided`` pattern.
        scale: factor on ``query @ key^T``; by default ``1 / sqrt(head_dim)``.
        backend: ``"auto"``, or the name of a backend.

    Returns:
        ``[batch, heads, len, value_dim]`` in query's dtype, with as many leading axes as ``query``.

    Raises:
        ShapeError: a number is out of range, or lengths differ.
        UnsupportedError: ``local`` is combined with ``after != 0``, or the backend does not support the call.

    Cost: ``len ** 2 / stride`` scores, or ``len * (before + after + 1)``, and ``len * local`` more; half of each if
    causal. One copy of the tensors if the batch size is above 1.

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
            must="be 0 unless after is 0",
            got=f"local={local}, after={keys_after}",
            then="Use attention(mask=ch.sparse.dilated(...) | ch.Window(...)).",
        )
    # A larger stride than the sequence is equal to its length, without padding.
    return min(stride, max(1, problem.q_len)), keys_before, keys_after, local


def _reach(keys_before: int | None, keys_after: int | None) -> Mask | None:
    """The mask among the tokens of equal ``position % stride``."""
    if keys_before is not None:
        return Window(keys_before, keys_after) if keys_after is not None else Not(Causal()) | Window(keys_before)
    if keys_after is None:
        return None
    return Causal() if keys_after == 0 else Causal() | Window(0, keys_after)


def _real(mask: Mask | None, problem: Problem, stride: int) -> Mask | None:
    """The mask without the padding of the split sequences; under a causal mask no real query attends to it."""
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
    """Attention to the nearest keys and to disjoint keys further back: a weighted mean of two softmaxes."""
    scale, want = problem.scale, Want(lse=True)
    near = observe_attention(*inputs, mask=Causal() & Window(local), want=want, scale=scale, backend=backend)
    # The compiler cannot trace `~` of an object.
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
    """Undo ``_split``."""
    joined: Tensor = tensor.unflatten(0, (-1, stride)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    return joined[:, :, :length]
