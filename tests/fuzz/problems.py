"""Random problems: nested masks, rules, sizes, dtypes, layouts, each part also in plain arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import clearhead as ch
from clearhead.verify.case import LAYOUTS, laid_out

__all__ = ["Drawn", "Meant", "problems"]

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
DEPTH = 4

#: Mostly float32: the other dtypes differ only in rounding.
DTYPES = (torch.float32, torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
#: Small lengths around the kernels' six rows and the tile borders, sometimes more than one tile.
LENGTHS = (1, 2, 3, 5, 6, 7, 8, 13, 16, 17, 24, 31, 33, 65, 97, 129)


@dataclass(frozen=True)
class Drawn:
    """Sizes of a problem, and the seed of its numbers."""

    batch: int
    kv_heads: int
    group: int
    q_len: int
    k_len: int
    head_dim: int
    value_dim: int
    offset: int
    seed: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def noise(self, *shape: int, salt: int) -> Tensor:
        generator = torch.Generator().manual_seed(31 * self.seed + salt)
        return torch.randn(shape, generator=generator, dtype=torch.float64)


@dataclass(eq=False)
class Meant:
    """A problem: the arguments of clearhead's call, and the same in plain arithmetic.

    Attributes:
        learned: tensors of the rules that require gradients.
        plain: the rules as functions ``(score, batch, head, q_pos, k_pos, learned) -> score``.
        sink: the index of a sink's logits in ``learned``.
    """

    drawn: Drawn
    tensors: tuple[Tensor, Tensor, Tensor]
    mask: ch.Mask | None
    allowed: Predicate
    rules: list[Callable[[list[Tensor]], ch.ScoreRule]] = field(default_factory=list)
    plain: list[Callable[..., Tensor]] = field(default_factory=list)
    learned: list[Tensor] = field(default_factory=list)
    sink: int | None = None
    scale: float | None = None
    poison: float | None = None
    dropout: float = 0.0

    def options(self, learned: list[Tensor]) -> dict[str, Any]:
        return {
            "mask": self.mask,
            "scores": tuple(rule(learned) for rule in self.rules),
            "scale": self.scale,
            "query_offset": self.drawn.offset,
            "dropout": self.dropout,
            "seed": self.drawn.seed,
        }

    def __repr__(self) -> str:
        query, _, value = self.tensors
        rules = [rule(self.learned) for rule in self.rules]
        return (
            f"Meant({self.drawn}, {query.dtype}, strides {query.stride()} {value.stride()}, mask={self.mask!r}, "
            f"rules={rules}, scale={self.scale}, poison={self.poison}, "
            f"dropout={self.dropout})"
        )


def _pick(number: int) -> st.SearchStrategy[int]:
    return st.integers(0, number)


@st.composite
def _leaves(draw: st.DrawFn, size: Drawn) -> tuple[ch.Mask, Predicate]:
    """One mask without parts."""
    kinds = ["causal", "window", "prefix", "padding", "global", "strided", "dense", "function"]
    if size.offset >= 0:
        kinds += ["blocks"]
        kinds += ["documents", "ids"] if size.offset + size.q_len <= size.k_len else []
    kind = draw(st.sampled_from(kinds))
    if kind == "causal":
        return ch.Causal(), lambda b, h, i, j: j <= i
    if kind == "window":
        past, future = draw(_pick(9)), draw(_pick(3))
        return ch.Window(past, future), lambda b, h, i, j: (j >= i - past) & (j <= i + future)
    if kind in ("prefix", "global"):
        count = draw(_pick(size.k_len))
        if kind == "prefix":
            return ch.Prefix(count), lambda b, h, i, j: j < count
        return ch.Global(count), lambda b, h, i, j: (i < count) | (j < count)
    if kind == "strided":
        stride = draw(st.integers(1, 5))
        return ch.Strided(stride), lambda b, h, i, j: (i - j) % stride == 0
    if kind == "function":
        step = draw(st.integers(2, 5))
        meaning: Predicate = lambda b, h, i, j: (i + 2 * j + h + b) % step != 0  # noqa: E731
        return ch.MaskFunction(meaning), meaning
    return _table(kind, size, draw(_pick(7)))


def _table(kind: str, size: Drawn, salt: int) -> tuple[ch.Mask, Predicate]:
    """Masks with tensors, which come from a seed so that few choices are drawn."""
    generator = torch.Generator().manual_seed(salt)

    def whole(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    if kind == "padding":
        lengths = whole(size.k_len + 1, size.batch)
        return ch.Padding(lengths), lambda b, h, i, j: j < lengths[b]
    if kind == "ids":
        ids = whole(4, size.batch, size.k_len) - 1
        return ch.Documents(ids=ids), lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (ids[b, i] >= 0)
    if kind == "documents":
        starts = (whole(4, size.k_len) == 0).long()
        numbers = starts.cumsum(0) - starts[0]
        lengths = torch.bincount(numbers)
        return ch.Documents(lengths=lengths), lambda b, h, i, j: numbers[i] == numbers[j]
    if kind == "blocks":
        side = 1 + salt
        rows, columns = -(-(size.q_len + size.offset) // side), -(-size.k_len // side)
        table = whole(2, rows, columns) > 0
        return ch.Blocks(table, side), lambda b, h, i, j: table[i // side, j // side]
    batch, heads = (size.batch if salt & 1 else 1), (size.heads if salt & 2 else 1)
    allowed = whole(2, batch, heads, size.q_len, size.k_len) > 0
    offset = size.offset
    return ch.Dense(allowed), lambda b, h, i, j: allowed[b % batch, h % heads, i - offset, j]


@st.composite
def _masks(draw: st.DrawFn, size: Drawn, depth: int = DEPTH) -> tuple[ch.Mask, Predicate]:
    """A mask expression nested to ``depth``."""
    kind = draw(st.sampled_from(("leaf", "leaf", "and", "or", "not"))) if depth else "leaf"
    if kind == "leaf":
        return draw(_leaves(size))
    mask, allowed = draw(_masks(size, depth - 1))
    if kind == "not":
        return ~mask, lambda b, h, i, j: ~allowed(b, h, i, j)
    other, also = draw(_masks(size, depth - 1))
    if kind == "and":
        return mask & other, lambda b, h, i, j: allowed(b, h, i, j) & also(b, h, i, j)
    return mask | other, lambda b, h, i, j: allowed(b, h, i, j) | also(b, h, i, j)


def _add_rule(meant: Meant, kind: str) -> None:
    """Add a score rule and its plain form; its learned tensor is appended to ``learned``."""
    size, place = meant.drawn, len(meant.learned)
    heads, offset = size.heads, size.offset
    if kind == "alibi":
        slopes = torch.tensor([2.0 ** (-1.0 - head) for head in range(heads)], dtype=torch.float64)
        meant.rules.append(lambda learned: ch.Alibi(slopes=slopes))
        meant.plain.append(lambda s, b, h, i, j, learned: s - slopes.to(s.dtype)[h] * (i - j).abs())
    elif kind == "relative":
        meant.learned.append(size.noise(heads, 7, salt=11))
        meant.rules.append(lambda learned: ch.RelativeBias(learned[place]))
        meant.plain.append(lambda s, b, h, i, j, learned: s + learned[place].to(s.dtype)[h, (i - j).clamp(-3, 3) + 3])
    elif kind == "cap":
        meant.rules.append(lambda learned: ch.SoftCap(2.0))
        meant.plain.append(lambda s, b, h, i, j, learned: 2.0 * torch.tanh(s / 2.0))
    elif kind == "bias":
        meant.learned.append(size.noise(size.batch, 1, size.q_len, size.k_len, salt=12))
        meant.rules.append(lambda learned: ch.DenseBias(learned[place]))
        meant.plain.append(lambda s, b, h, i, j, learned: s + learned[place].to(s.dtype)[b, 0, i - offset, j])
    elif kind == "function":
        meant.rules.append(lambda learned: ch.ScoreFunction(lambda s, b, h, i, j: 1.25 * s - 0.0625 * (i - j).abs()))
        meant.plain.append(lambda s, b, h, i, j, learned: 1.25 * s - 0.0625 * (i - j).abs())
    elif kind == "traced":
        meant.learned.append(size.noise(heads, 7, salt=14))
        meant.rules.append(
            lambda learned: ch.ScoreFunction(
                lambda s, b, h, i, j: s + learned[place].to(s.dtype)[h, (i - j).clamp(-3, 3) + 3]
            )
        )
        meant.plain.append(lambda s, b, h, i, j, learned: s + learned[place].to(s.dtype)[h, (i - j).clamp(-3, 3) + 3])
    elif kind == "sink" and meant.sink is None:
        meant.sink = place
        meant.learned.append(size.noise(heads, salt=13))
        meant.rules.append(lambda learned: ch.Sink(learned[place]))


RULES = ("alibi", "relative", "cap", "bias", "function", "traced", "sink")


@st.composite
def problems(draw: st.DrawFn) -> Meant:
    """A whole problem."""
    q_len, k_len = draw(st.sampled_from(LENGTHS)), draw(st.sampled_from(LENGTHS))
    size = Drawn(
        batch=draw(st.integers(1, 3)),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)),
        q_len=q_len,
        k_len=k_len,
        head_dim=draw(st.sampled_from((8, 1, 3, 16, 33))),
        value_dim=draw(st.sampled_from((8, 1, 5, 16))),
        offset=draw(st.sampled_from((0, k_len - q_len, 3))),
        seed=draw(_pick(99)),
    )
    dtype, layout = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(("plain", *LAYOUTS)))
    shapes = (
        (size.heads, q_len, size.head_dim),
        (size.kv_heads, k_len, size.head_dim),
        (size.kv_heads, k_len, size.value_dim),
    )
    query, key, value = (
        laid_out(size.noise(size.batch, *shape, salt=salt).to(dtype), layout) for salt, shape in enumerate(shapes)
    )
    masked = draw(st.integers(0, 5)) > 0
    mask, allowed = draw(_masks(size)) if masked else (None, lambda b, h, i, j: torch.ones_like(b + h + i + j) > 0)
    meant = Meant(size, (query, key, value), mask, allowed)
    for kind in draw(st.lists(st.sampled_from(RULES), max_size=2)):
        _add_rule(meant, kind)
    meant.scale = draw(st.sampled_from((None, None, 1.0, 0.0, -0.3)))
    meant.poison = draw(st.sampled_from((None, None, None, None, torch.nan, torch.inf))) if masked else None
    meant.dropout = draw(st.sampled_from((0.0, 0.0, 0.0, 0.3)))
    return meant
