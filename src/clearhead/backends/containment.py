"""Keeping NaN and inf where they belong: a token that nobody may attend to touches nobody.

Zero weight times NaN is NaN, so a product with masked tokens in it spreads them. Tokens that are not
finite are therefore zeroed before the products, and put back as NaN where the mask lets them through:
a row that attends to such a key is NaN, a row that attends to such a value is NaN in that channel. Backward
likewise: a gradient that arrives at a row and is not finite reaches the keys that this row may attend to.
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
from clearhead.torch_private import differentiates_forward

__all__ = [
    "Contained",
    "all_finite",
    "clean_rows",
    "contained",
    "is_readable",
    "matmul",
    "only_finite",
    "without_autocast",
]

#: Queries whose masks are written out at a time.
_STRIP: Final = 128


def is_readable(tensor: Tensor) -> bool:
    """Whether the tensor's numbers may be looked at: not those of meta and fake tensors, nor those of vmap."""
    if is_hollow(tensor):
        return False
    if has_memory(tensor):
        return True
    # Of the wrapped tensors those of `torch.func.grad` and `jvp` can be read, and those of vmap raise.
    try:
        tensor.detach().sum().item()
    except RuntimeError:
        return False
    return True


def all_finite(*tensors: Tensor) -> bool:
    """Whether every entry is finite, in one pass and without a copy.

    A sum that overflows on finite entries gives a harmless false alarm.
    """
    return all(math.isfinite(float(tensor.detach().sum(dtype=_sum_dtype(tensor)))) for tensor in tensors)


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def clean_rows(
    tensor: Float[Tensor, "batch heads len dim"],
) -> tuple[Float[Tensor, "batch heads len dim"], Bool[Tensor, "batch heads len"]]:
    """The tensor with tokens that are not finite set to 0, and which tokens those were."""
    bad = ~torch.isfinite(tensor).all(dim=-1)
    return tensor.masked_fill(bad[..., None], 0.0), bad


def only_finite(tensor: Tensor) -> Tensor:
    """The tensor with 0 in place of each number that is not finite."""
    return tensor.masked_fill(~torch.isfinite(tensor), 0.0)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Autocast off where it is on: backward may be called within it, and it would round products to 16 bits."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def matmul(
    left: Float[Tensor, "*batch rows x"],
    right: Float[Tensor, "*batch x columns"],
    allowed: Bool[Tensor, "*batch rows x"] | None = None,
) -> Float[Tensor, "*batch rows columns"]:
    """``left @ right``, differentiable any number of times, and in this precision also where autocast is on by then.

    With ``allowed``, what is not finite in ``right``, or arrives as a gradient of the product, makes NaN where a row
    may read it and touches nothing else; ``left`` is 0 at what is not allowed.
    """
    # A function of our own is no part of a trace, and torch would forget what its tangents depend on.
    if traces() or differentiates_forward():
        return _multiplied(left, right, allowed)
    output: Tensor = _Matmul.apply(left, right, allowed)  # type: ignore[no-untyped-call]
    return output


def _multiplied(left: Tensor, right: Tensor, allowed: Tensor | None) -> Tensor:
    if allowed is None:
        return left @ right
    bad = ~torch.isfinite(right)
    if is_readable(right) and not bool(bad.any()):
        return left @ right
    touched = allowed.to(right.dtype) @ bad.to(right.dtype) > 0
    return (left @ right.masked_fill(bad, 0.0)).masked_fill(touched, torch.nan)


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


@dataclass(frozen=True)
class Contained:
    """A problem whose tokens that are not finite were set to 0, and what that hides.

    Attributes:
        problem: the work on finite tensors.
        spoiled: rows whose scores have no finite gradient.
        unweighted: those of them whose very weights are not finite.
        channels: what of a row is not finite to the values that it attends to.
    """

    problem: Problem
    spoiled: Bool[Tensor, "batch heads q_len"]
    unweighted: Bool[Tensor, "batch heads q_len"]
    channels: Bool[Tensor, "batch heads q_len value_dim"]

    @classmethod
    def of_arrived(cls, problem: Problem, grad_output: Tensor) -> Contained:
        """Where nothing but the gradient that arrived is not finite."""
        channels = ~torch.isfinite(grad_output)
        rows = channels.any(dim=-1)
        return cls(problem, rows & _attending(problem), torch.zeros_like(rows), channels)

    def spoil(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of query, key and value with NaN where a spoiled row reaches, and nowhere else."""
        query, key, value = grads
        of_values = self.channels | self.unweighted[..., None]
        reached = _reached(self.problem, torch.cat([self.spoiled[..., None], of_values], dim=-1))
        return [
            query.masked_fill(self.spoiled[..., None], torch.nan),
            key.masked_fill(reached[..., :1], torch.nan),
            value.masked_fill(reached[..., 1:], torch.nan),
        ]

    def spoil_learned(self, rule: ScoreRule, grad: Tensor) -> Tensor:
        """The gradient of a bias's tensor with NaN where a spoiled row reads it."""
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
    """Prepare a backward pass over numbers that are not all finite.

    ``output`` and ``lse`` are what forward gave, ``rows`` those at which another gradient arrives that is not finite.
    """
    query, key, value = (clean_rows(tensor)[0] for tensor in (problem.query, problem.key, problem.value))
    channels = ~torch.isfinite(grad_output)
    unweighted = ~(torch.isfinite(lse) | (lse == -torch.inf))
    spoiled = unweighted | ~torch.isfinite(output).all(dim=-1) | channels.any(dim=-1)
    spoiled = spoiled if rows is None else spoiled | rows
    return Contained(problem.with_tensors(query, key, value), spoiled & _attending(problem), unweighted, channels)


def _attending(problem: Problem) -> Bool[Tensor, "batch heads q_len"]:
    """Rows that may attend to anything: the others are empty, and their gradients 0 whatever arrives."""
    attending = torch.zeros(
        problem.batch, problem.num_heads, problem.q_len, dtype=torch.bool, device=problem.query.device
    )
    for rows, allowed in _strips(problem):
        attending[:, :, rows] = allowed.any(dim=-1)
    return attending


def _reached(
    problem: Problem, flags: Bool[Tensor, "batch heads q_len marks"]
) -> Bool[Tensor, "batch kv_heads k_len marks"]:
    """The marks of the rows that may attend to each key."""
    counts = torch.zeros(problem.batch, problem.num_heads, problem.k_len, flags.shape[3], device=flags.device)
    for rows, allowed in _strips(problem):
        counts += allowed.mT.to(counts.dtype) @ flags[:, :, rows].to(counts.dtype)
    grouped: Tensor = (counts > 0.0).unflatten(1, (problem.num_kv_heads, -1)).any(dim=2)
    return grouped


def _strips(problem: Problem) -> Iterator[tuple[slice, Bool[Tensor, "batch heads rows k_len"]]]:
    """Which keys the rows may attend to, a strip of queries at a time."""
    batch, head, q_pos, k_pos = problem.indices()
    for start in range(0, problem.q_len, _STRIP):
        rows = slice(start, start + _STRIP)
        yield rows, _allowed(problem, rows, (batch, head, q_pos[:, :, rows], k_pos))


def _allowed(problem: Problem, rows: slice, indices: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """The mask of some rows from its parts: a user's function was asked when they were made, and is not asked again."""
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
    """A strip of a tensor whose axis of queries may be 1 for all of them."""
    return tensor if tensor.shape[2] == 1 else tensor[:, :, rows]
