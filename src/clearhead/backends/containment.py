"""Keeping NaN and inf where they belong: a token that nobody may attend to touches nobody.

Zero weight times NaN is NaN, so a product with masked tokens in it spreads them. Tokens that are not
finite are therefore zeroed before the products, and put back as NaN where the mask lets them through:
a row that attends to such a key is NaN, a row that attends to such a value is NaN in that channel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from clearhead.problem import Problem
from clearhead.shapes import Bool, Float

__all__ = ["Contained", "all_finite", "clean_rows", "contained"]

#: Queries whose masks are written out at a time.
_STRIP: Final = 128


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


@dataclass(frozen=True)
class Contained:
    """A problem whose tokens that are not finite were set to 0, and what that hides.

    Attributes:
        problem: the work on finite tensors.
        spoiled: rows whose output is not finite.
        unweighted: those of them whose very weights are not.
    """

    problem: Problem
    spoiled: Bool[Tensor, "batch heads q_len"]
    unweighted: Bool[Tensor, "batch heads q_len"]

    def finite(self, rows: Float[Tensor, "batch heads q_len dim"]) -> Float[Tensor, "batch heads q_len dim"]:
        """The rows with 0 in place of those that are spoiled."""
        return rows.masked_fill(self.spoiled[..., None], 0.0)

    def spoil(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of query, key and value with NaN where a spoiled row reaches, and nowhere else."""
        query, key, value = grads
        reached, weighed = (_reached(self.problem, rows)[..., None] for rows in (self.spoiled, self.unweighted))
        return [
            query.masked_fill(self.spoiled[..., None], torch.nan),
            key.masked_fill(reached, torch.nan),
            value.masked_fill(weighed, torch.nan),
        ]


def contained(problem: Problem, output: Tensor, lse: Float[Tensor, "batch heads q_len"]) -> Contained:
    """Prepare a backward pass over numbers that are not all finite; ``output`` and ``lse`` are what forward gave."""
    query, key, value = (clean_rows(tensor)[0] for tensor in (problem.query, problem.key, problem.value))
    unweighted = ~(torch.isfinite(lse) | (lse == -torch.inf))
    spoiled = unweighted | ~torch.isfinite(output).all(dim=-1)
    return Contained(problem.with_tensors(query, key, value), spoiled, unweighted)


def _reached(problem: Problem, rows: Bool[Tensor, "batch heads q_len"]) -> Bool[Tensor, "batch kv_heads k_len"]:
    """Keys that at least one of the rows may attend to, found a strip of queries at a time."""
    batch, head, q_pos, k_pos = problem.indices()
    found = torch.zeros(problem.batch, problem.num_heads, problem.k_len, dtype=torch.bool, device=rows.device)
    for start in range(0, problem.q_len, _STRIP):
        own = rows[:, :, start : start + _STRIP, None]
        if problem.mask is not None:
            own = own & problem.mask.allows(batch, head, q_pos[:, :, start : start + _STRIP], k_pos)
        found |= own.any(dim=2)
    grouped: Tensor = found.unflatten(1, (problem.num_kv_heads, -1)).any(dim=2)
    return grouped
