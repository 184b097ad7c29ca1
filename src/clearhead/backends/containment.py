"""Containment of NaN and infinity: a token that no query may attend to affects no output and no gradient.

A weight of zero times NaN is NaN, so a matrix multiplication spreads NaN from masked tokens. Elements that are NaN or
infinite are therefore zeroed before the multiplication, and what they add to the sum over allowed places by IEEE
arithmetic is added afterwards. Backward does the same: a NaN or infinite gradient of a row reaches the keys that the
row may attend to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.problem import Problem
from clearhead.scores import ScoreRule
from clearhead.shapes import Bool, Float
from clearhead.tensors import has_memory, is_hollow, traces
from clearhead.torch_private import constant_when_compiled, differentiates_forward

__all__ = [
    "Contained",
    "all_finite",
    "contained",
    "is_readable",
    "matmul",
    "not_finite_terms",
    "only_finite",
    "scores_of",
    "without_autocast",
]

#: Queries whose masks are evaluated at a time.
_STRIP: Final = 128


def is_readable(tensor: Tensor) -> bool:
    """Whether the tensor's elements can be read: False for meta and fake tensors, under vmap and in graphs."""
    if torch.compiler.is_compiling() or is_hollow(tensor):
        return False
    if has_memory(tensor):
        return True
    # Wrappers of `torch.func.grad` and `jvp` can be read, those of vmap raise.
    try:
        tensor.detach().sum().item()
    except RuntimeError:
        return False
    return True


def all_finite(*tensors: Tensor) -> bool:
    """Whether every element is finite, in one pass and without a copy.

    False too if the sum of finite elements overflows; callers then take the slower path.
    """
    return all(math.isfinite(float(tensor.detach().sum(dtype=_sum_dtype(tensor)))) for tensor in tensors)


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    # torch adds bfloat16 in float32 and rounds the sum, which takes a sixth of the time of converting each element.
    return torch.float32 if tensor.dtype == torch.float16 else tensor.dtype


def only_finite(tensor: Tensor) -> Tensor:
    """The tensor with 0 in place of NaN and infinity."""
    return tensor.masked_fill(~torch.isfinite(tensor), 0.0)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Disable autocast where it is enabled: it would round matrix multiplications, in backward too, to 16 bits."""
    if _has_autocast(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


# The compiler of torch 2.11 cannot trace it in a backward pass.
@constant_when_compiled
def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


def matmul(
    left: Float[Tensor, "*batch rows x"],
    right: Float[Tensor, "*batch x columns"],
    allowed: Bool[Tensor, "*batch rows x"] | None = None,
) -> Float[Tensor, "*batch rows columns"]:
    """``left @ right``, differentiable any number of times; backward keeps the precision under autocast.

    With ``allowed``, the sum is over allowed places: NaN and infinity in ``right``, or in the gradient of the output,
    affect only rows that may read them, by IEEE arithmetic; ``left`` is 0 at places that are not allowed.
    """
    # An autograd function cannot be traced, and has no rule for forward-mode differentiation.
    if traces() or differentiates_forward():
        return _multiplied(left, right, allowed)
    output: Tensor = _Matmul.apply(left, right, allowed)  # type: ignore[no-untyped-call]
    return output


def scores_of(
    query: Float[Tensor, "*batch q_len dim"],
    key: Float[Tensor, "*batch k_len dim"],
    allowed: Bool[Tensor, "*batch q_len k_len"],
) -> Float[Tensor, "*batch q_len k_len"]:
    """``query @ key.mT``, differentiable any number of times, whose gradients are sums over allowed places."""
    if traces() or differentiates_forward():
        return query @ key.mT
    output: Tensor = _Scores.apply(query, key, allowed)  # type: ignore[no-untyped-call]
    return output


def not_finite_terms(
    left: Float[Tensor, "*batch rows x"],
    right: Float[Tensor, "*batch x columns"],
    allowed: Bool[Tensor, "*batch rows x"] | None,
) -> Float[Tensor, "*batch rows columns"]:
    """What NaN and infinity in ``right`` add to ``left @ right`` over allowed places: 0, infinity or NaN."""

    def meet(places: Tensor, elements: Tensor) -> Tensor:
        return places.to(left.dtype) @ elements.to(left.dtype) > 0.0

    positive, negative = left > 0.0, left < 0.0
    neither = ~(positive | negative)
    if allowed is None:
        anywhere = torch.ones_like(positive)
    else:
        anywhere = allowed.expand(left.shape)
        positive, negative, neither = positive & allowed, negative & allowed, neither & allowed
    above, below = right == torch.inf, right == -torch.inf
    undefined = meet(neither, above | below) | meet(anywhere, right.isnan())
    rising = meet(positive, above) | meet(negative, below)
    falling = meet(positive, below) | meet(negative, above)
    nothing = torch.zeros(undefined.shape, dtype=left.dtype, device=left.device)
    terms = nothing.masked_fill(rising, torch.inf) + nothing.masked_fill(falling, -torch.inf)
    return terms.masked_fill(undefined, torch.nan)


def _multiplied(left: Tensor, right: Tensor, allowed: Tensor | None) -> Tensor:
    if allowed is None:
        return left @ right
    bad = ~torch.isfinite(right)
    if is_readable(right) and not bool(bad.any()):
        return left @ right
    return left @ right.masked_fill(bad, 0.0) + not_finite_terms(left, right, allowed)


class _Matmul(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(left: Tensor, right: Tensor, allowed: Tensor | None) -> Tensor:
        return _multiplied(left, right, allowed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        left, right, allowed = ctx.saved_tensors
        of_left, of_right, _ = ctx.needs_input_grad
        with without_autocast(grad.device.type):
            return (
                matmul(grad, right.mT) if of_left else None,
                matmul(left.mT, grad, None if allowed is None else allowed.mT) if of_right else None,
                None,
            )


class _Scores(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(query: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
        return query @ key.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        query, key, allowed = ctx.saved_tensors
        of_query, of_key, _ = ctx.needs_input_grad
        with without_autocast(grad.device.type):
            return (
                matmul(grad, key, allowed) if of_query else None,
                matmul(grad.mT, query, allowed.mT) if of_key else None,
                None,
            )


@dataclass(frozen=True)
class Contained:
    """A problem whose NaN and infinity were set to 0, and the rows that they affect.

    Attributes:
        problem: the problem with finite tensors.
        spoiled: rows whose scores have a NaN gradient.
        unweighted: those of them whose weights are NaN.
        channels: channels in which a row's gradient to values is NaN.
        infinite: where the query and where the key had NaN or infinity; None unless one had infinity.
    """

    problem: Problem
    spoiled: Bool[Tensor, "batch heads q_len"]
    unweighted: Bool[Tensor, "batch heads q_len"]
    channels: Bool[Tensor, "batch heads q_len value_dim"]
    infinite: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of_arrived(cls, problem: Problem, grad_output: Tensor) -> Contained:
        """Only the output's gradient contains NaN or infinity."""
        channels = ~torch.isfinite(grad_output)
        rows = channels.any(dim=-1)
        return cls(problem, rows & _attending(problem), torch.zeros_like(rows), channels)

    def spoil(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of query, key and value with NaN at the places that spoiled rows affect."""
        query, key, value = grads if self.infinite is None else self._beside_infinity(grads, *self.infinite)
        of_values = self.channels | self.unweighted[..., None]
        reached = _reached(self.problem, torch.cat([self.spoiled[..., None], of_values], dim=-1))
        return [
            query.masked_fill(self.spoiled[..., None], torch.nan),
            key.masked_fill(reached[..., :1], torch.nan),
            value.masked_fill(reached[..., 1:], torch.nan),
        ]

    def _beside_infinity(self, grads: Sequence[Tensor], bad_query: Tensor, bad_key: Tensor) -> list[Tensor]:
        """Gradients with NaN in the channels in which a row, or a key, meets infinity with a weight of 0."""
        query, key, value = grads
        per_head = bad_key.repeat_interleave(self.problem.num_heads // self.problem.num_kv_heads, dim=1)
        read = torch.zeros_like(query, dtype=torch.bool)
        for rows, allowed in _strips(self.problem):
            places = allowed.expand(*per_head.shape[:2], -1, per_head.shape[2])
            read[:, :, rows] = places.to(torch.float32) @ per_head.to(torch.float32) > 0.0
        reached = _reached(self.problem, bad_query)
        return [query.masked_fill(read, torch.nan), key.masked_fill(reached, torch.nan), value]

    def spoil_learned(self, rule: ScoreRule, grad: Tensor) -> Tensor:
        """The gradient of a bias tensor with NaN at the elements that spoiled rows read."""
        (learned,) = rule.parameters()
        batch, head, q_pos, k_pos = self.problem.indices()
        read = torch.zeros_like(learned)
        for rows, allowed in _strips(self.problem):
            places = (allowed & self.spoiled[:, :, rows, None]).to(read.dtype)
            with torch.enable_grad():
                biases = rule.apply(torch.zeros_like(places), batch, head, q_pos[:, :, rows], k_pos)
            read += torch.autograd.grad(biases, learned, places)[0]
        return grad.masked_fill(read != 0.0, torch.nan)


def contained(
    problem: Problem,
    output: Tensor,
    lse: Float[Tensor, "batch heads q_len"],
    grad_output: Tensor,
    rows: Bool[Tensor, "batch heads q_len"] | None,
) -> Contained:
    """Prepare a backward pass over tensors with NaN or infinity.

    Args:
        problem: the problem.
        output: the output of forward.
        lse: the log-sum-exp of forward.
        grad_output: the output's gradient.
        rows: rows at which a gradient of a statistic is NaN or infinite; None for none.
    """
    # The largest number in place of infinity: it makes the same weights of 0, and of 1 under a soft cap.
    query, key = (torch.nan_to_num(tensor, nan=0.0) for tensor in (problem.query, problem.key))
    value = only_finite(problem.value)
    channels = ~torch.isfinite(grad_output)
    unweighted = ~(torch.isfinite(lse) | (lse == -torch.inf))
    spoiled = unweighted | ~torch.isfinite(output).all(dim=-1) | channels.any(dim=-1)
    spoiled = spoiled if rows is None else spoiled | rows
    infinite = None
    if bool(problem.query.isinf().any() or problem.key.isinf().any()):
        infinite = (~torch.isfinite(problem.query), ~torch.isfinite(problem.key))
    spoiled = spoiled & _attending(problem)
    # Scores of finite tokens may overflow.
    query = query.masked_fill(unweighted[..., None], 0.0)
    return Contained(problem.with_tensors(query, key, value), spoiled, unweighted, channels, infinite)


def _attending(problem: Problem) -> Bool[Tensor, "batch heads q_len"]:
    """Rows that may attend to a key. The others are empty: their gradients are 0 for every gradient of the output."""
    attending = torch.zeros(
        problem.batch, problem.num_heads, problem.q_len, dtype=torch.bool, device=problem.query.device
    )
    for rows, allowed in _strips(problem):
        attending[:, :, rows] = allowed.any(dim=-1)
    return attending


def _reached(
    problem: Problem, flags: Bool[Tensor, "batch heads q_len flags"]
) -> Bool[Tensor, "batch kv_heads k_len flags"]:
    """For each key and flag, whether a row with the flag may attend to the key."""
    counts = torch.zeros(problem.batch, problem.num_heads, problem.k_len, flags.shape[3], device=flags.device)
    for rows, allowed in _strips(problem):
        counts += allowed.mT.to(counts.dtype) @ flags[:, :, rows].to(counts.dtype)
    grouped: Tensor = (counts > 0.0).unflatten(1, (problem.num_kv_heads, -1)).any(dim=2)
    return grouped


def _strips(problem: Problem) -> Iterator[tuple[slice, Bool[Tensor, "batch heads rows k_len"]]]:
    """Strips of queries, and the keys that their rows may attend to."""
    batch, head, q_pos, k_pos = problem.indices()
    for start in range(0, problem.q_len, _STRIP):
        rows = slice(start, start + _STRIP)
        yield rows, _allowed(problem, rows, (batch, head, q_pos[:, :, rows], k_pos))


def _allowed(problem: Problem, rows: slice, indices: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """The mask of some rows from its parts, so that a user's function is not called a second time."""
    _, _, q_pos, k_pos = indices
    allowed = torch.ones_like(q_pos - k_pos, dtype=torch.bool)
    if problem.mask is None:
        return allowed
    parts = problem.mask_parts
    if parts.keys_before is not None:
        allowed &= q_pos - k_pos <= parts.keys_before
    if parts.keys_after is not None:
        allowed &= k_pos - q_pos <= parts.keys_after
    if parts.intervals is not None:
        start, stop = (_rows_of(bound, rows)[..., None, :] for bound in parts.interval_bounds)
        allowed = allowed & ((k_pos[..., None] >= start) & (k_pos[..., None] < stop)).any(dim=-1)
    if parts.dense is not None:
        allowed = allowed & _rows_of(parts.dense.allowed, rows)
    for part in (*parts.rest, *(() if parts.blocks is None else (parts.blocks,))):
        allowed = allowed & part.allows(*indices)
    return allowed


def _rows_of(tensor: Tensor, rows: slice) -> Tensor:
    """A strip of a tensor whose axis of queries may be of size 1."""
    return tensor if tensor.shape[2] == 1 else tensor[:, :, rows]
