"""A part of a call of attention, for some of its heads, queries and keys, as a call of its own.

Positions in a part are relative to its first key, so masks and rules that read absolute positions or heads are shifted,
and tensors with an axis of heads, queries or keys are sliced. Parts of equal rows compute equal scores and dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import UnsupportedError
from clearhead.masks.base import Both, Either, Mask, Not, does_as
from clearhead.masks.intervals import Intervals
from clearhead.masks.tables import Blocks, Dense
from clearhead.problem import Problem
from clearhead.scores import Alibi, DenseBias, RelativeBias, ScoreFunction, ScoreRule, Sink, SoftCap

__all__ = ["Region", "cut_mask", "cut_rule", "part_of", "pulled"]


@dataclass(frozen=True)
class Region:
    """Ranges of heads, queries and keys of a whole call, by absolute position."""

    heads: range
    queries: range
    keys: range

    @property
    def query_offset(self) -> int:
        """Position of the first query, relative to the first key."""
        return self.queries.start - self.keys.start


class _ShiftedMask(Mask):
    """A mask whose first head and position are not those of ``part``."""

    fields = ("part", "first_head", "first_key")
    position_dependent = True

    def __init__(self, part: Mask, first_head: int, first_key: int) -> None:
        self.part, self.first_head, self.first_key = part, first_head, first_key

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return self.part.allows(batch, head + self.first_head, q_pos + self.first_key, k_pos + self.first_key)

    def intervals(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_len: int) -> Intervals | None:
        first = self.first_key
        whole = self.part.intervals(batch, head + self.first_head, q_pos + first, first + k_len)
        if whole is None:
            return None
        return Intervals((whole.start - first).clamp(0, k_len), (whole.stop - first).clamp(0, k_len))


class _ShiftedRule(ScoreRule):
    """A rule whose first head and position are not those of ``rule``."""

    fields = ("rule", "first_head", "first_key")
    position_dependent = True

    def __init__(self, rule: ScoreRule, first_head: int, first_key: int) -> None:
        self.rule, self.first_head, self.first_key = rule, first_head, first_key

    def apply(self, score: Tensor, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        first = self.first_key
        return self.rule.apply(score, batch, head + self.first_head, q_pos + first, k_pos + first)

    def parameters(self) -> list[Tensor]:
        return self.rule.parameters()


def cut_mask(mask: Mask, region: Region) -> Mask:
    """The mask of a part of a call.

    Args:
        mask: the mask of the whole call, placed.
        region: the part; its queries' positions are those of the whole call.
    """
    if does_as(mask, Dense):
        assert isinstance(mask, Dense)
        part = Dense(_sliced(mask.allowed, region, mask.first))
        return part.placed(region.query_offset)
    if type(mask) in (Both, Either, Not):
        return type(mask)(*(cut_mask(part, region) for part in mask.parts()))  # type: ignore[attr-defined]
    if does_as(mask, Blocks):
        assert isinstance(mask, Blocks)
        heads = slice(region.heads.start, region.heads.stop)
        # The table has this part's heads, so only positions are left to shift.
        mask = mask.mapped(lambda table: table[:, heads] if table.shape[1] > 1 else table)
        region = replace(region, heads=range(len(region.heads)))
    first_head = region.heads.start if mask.head_dependent else 0
    first_key = 0 if mask.relative else region.keys.start
    # A wrapper hides what a mask is, and with it the kernels' faster ways.
    return mask if first_head == first_key == 0 else _ShiftedMask(mask, first_head, first_key)


def cut_rule(rule: ScoreRule, region: Region) -> ScoreRule:
    """The score rule of a part of a call; its tensors are views of the rule's, so gradients reach those.

    Args:
        rule: the rule of the whole call, placed.
        region: the part; its queries' positions are those of the whole call.
    """
    heads = slice(region.heads.start, region.heads.stop)
    match rule:
        case SoftCap():
            return rule
        case Alibi() | RelativeBias() | Sink():
            return rule.mapped(lambda table: table[heads] if table.shape[0] > 1 else table)
        case DenseBias():
            return DenseBias(_sliced(rule.bias, region, rule.first)).placed(region.query_offset)
    if (region.heads.start, region.keys.start) == (0, 0):
        return rule
    if does_as(rule, ScoreFunction, "apply"):
        assert isinstance(rule, ScoreFunction)
        return ScoreFunction(_moved(rule.fn, region.heads.start, region.keys.start)).bound()
    return _ShiftedRule(rule, region.heads.start, region.keys.start)


def part_of(whole: Problem, region: Region, query: Tensor, key: Tensor, value: Tensor) -> Problem:
    """A part of a call as a problem.

    Args:
        whole: the whole call, of which only sizes, mask, rules and numbers are read.
        region: the part's heads, queries and keys.
        query: ``[batch, heads, q_len, head_dim]`` of the part.
        key: ``[batch, kv_heads, k_len, head_dim]`` of the part.
        value: ``[batch, kv_heads, k_len, value_dim]`` of the part.
    """
    if whole.token_numbers is not None:
        raise UnsupportedError.about(
            "attention",
            "dropout",
            must="be 0 for a part of packed sequences under set_invariant(True)",
            got=whole.dropout,
            then="Pad the sequences.",
        )
    first_batch, first_head, first_key = whole.origin
    with torch.enable_grad():
        # Also in an autograd function: gradients reach parameters through views of them.
        rules = tuple(cut_rule(rule, region) for rule in whole.scores)
    return replace(
        whole,
        query=query,
        key=key,
        value=value,
        mask=None if whole.mask is None else cut_mask(whole.mask, region),
        scores=rules,
        query_offset=region.query_offset,
        origin=(first_batch, first_head + region.heads.start, first_key + region.keys.start),
    )


def pulled(learned: Sequence[Tensor], parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the parameters of a whole call, from those of a part's.

    Args:
        learned: parameters of the whole call.
        parameters: those of the part: views of ``learned``, tensors computed from them, or some of them themselves.
        grads: gradients of ``parameters``.
    """
    if not parameters or not learned:
        return [torch.zeros_like(one) for one in learned]
    computed = torch.autograd.grad(parameters, learned, grads, allow_unused=True)
    return [torch.zeros_like(one) if grad is None else grad for one, grad in zip(learned, computed, strict=True)]


def _sliced(table: Tensor, region: Region, first: int) -> Tensor:
    """``[batch | 1, heads | 1, q_len | 1, k_len | 1]`` of a whole call, for a part; its rows start at ``first``."""
    ranges = (region.heads, range(region.queries.start - first, region.queries.stop - first), region.keys)
    for axis, part in enumerate(ranges, start=1):
        if table.shape[axis] > 1:
            table = table.narrow(axis, part.start, len(part))
    return table


def _moved(fn: Callable[..., Any], first_head: int, first_key: int) -> Callable[..., Any]:
    """A score function of a part's heads and positions."""

    def moved(score: Tensor, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Any:
        return fn(score, batch, head + first_head, q_pos + first_key, k_pos + first_key)

    # Errors name the user's function.
    moved.__name__, moved.__qualname__ = (getattr(fn, name, "fn") for name in ("__name__", "__qualname__"))
    return moved
