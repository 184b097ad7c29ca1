"""Sparse patterns against full causal attention over growing lengths: the cost, and the length where each is faster.

All contenders of a length run in interleaved rounds on the same tensors. They do different work, so each is first
checked against its own pattern: some rows in float64 by the textbook formula with the same mask, with their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final, Self

import torch
from torch import Tensor

from clearhead.benchmark.sheets import Sheet
from clearhead.benchmark.table import milliseconds
from clearhead.benchmark.timing import Timing, interleaved
from clearhead.errors import UnsupportedError
from clearhead.functional.exact import attention
from clearhead.masks import Causal, Mask, Window
from clearhead.masks.base import index_tensors
from clearhead.sparse import (
    big_bird,
    dilated,
    dilated_attention,
    longformer,
    routed,
    strided,
    top_k_attention,
)

__all__ = [
    "FULL",
    "SPARSE",
    "SparsePoint",
    "SparseRow",
    "measure_sparse",
    "overtaken_at",
    "sparse_rows",
    "sparse_sheet",
]

SPARSE: Final = "sparse"
FULL: Final = "full causal"
_LENGTHS: Final = tuple(2**power for power in range(10, 16))
_CHECKED_ROWS: Final = 8
#: Tolerance of a contender's error, as a multiple of the textbook formula's rounding error.
_ALLOWANCE: Final = 8.0
_FEWEST_ROUNDS: Final = 3
_WINDOW, _DILATION, _KEEP, _TOP = 256, 4, 8, 32

_Run = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class SparseContender:
    """A call and its pattern: a mask, and the number of keys that a row keeps (None: all)."""

    call: _Run
    mask: Mask
    keep: int | None = None


def masked_contender(mask: Mask) -> SparseContender:
    return SparseContender(lambda q, k, v: attention(q, k, v, mask=mask), mask)


def contenders_of(length: int, query: Tensor, key: Tensor) -> dict[str, SparseContender]:
    """All contenders by name. Masks are built beforehand, but the router's mask is part of its call."""
    stride = 2 ** math.ceil(math.log2(length) / 2)

    def by_router(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=routed(q, k, keep=_KEEP))

    return {
        FULL: masked_contender(Causal()),
        f"window {_WINDOW}": masked_contender(Causal() & Window(_WINDOW - 1)),
        f"longformer {2 * _WINDOW} + 16 global": masked_contender(Causal() & longformer(length, 2 * _WINDOW, 16)),
        "big bird 64 x (3 + 2 global + 3 random)": masked_contender(Causal() & big_bird(length)),
        f"dilated {_WINDOW} by {_DILATION}": SparseContender(
            lambda q, k, v: dilated_attention(q, k, v, stride=_DILATION, before=_WINDOW - 1),
            dilated(_DILATION, _WINDOW - 1),
        ),
        "strided by sqrt(length)": SparseContender(
            lambda q, k, v: dilated_attention(q, k, v, stride=stride, local=stride - 1), strided(stride)
        ),
        f"routed {_KEEP} blocks of 64": SparseContender(by_router, routed(query, key, keep=_KEEP)),
        f"top {_TOP} keys": SparseContender(
            lambda q, k, v: top_k_attention(q, k, v, k=_TOP, mask=Causal()), Causal(), _TOP
        ),
    }


@dataclass(frozen=True, kw_only=True)
class SparseRow:
    """All patterns at one length.

    Args:
        length: number of tokens.
        training: whether the backward pass is included.
        heads: number of heads.
        head_dim: width of a head.
        dtype: of the tensors.
    """

    length: int
    training: bool
    heads: int = 4
    head_dim: int = 64
    dtype: torch.dtype = torch.float32

    @property
    def mode(self) -> str:
        """``"forward"`` or ``"forward+backward"``."""
        return "forward+backward" if self.training else "forward"

    @property
    def title(self) -> str:
        """Description of the work."""
        return f"1x{self.heads}x{self.length}x{self.head_dim} {self.mode} {str(self.dtype)[6:]}"

    def small(self) -> Self:
        """A few hundred tokens, for tests."""
        return replace(self, length=self.length // 8, heads=2, head_dim=8)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, with a fixed seed."""
        generator = torch.Generator().manual_seed(self.length)
        shape = (1, self.heads, self.length, self.head_dim)
        query, key, value = (
            torch.randn(shape, generator=generator).to(self.dtype).requires_grad_(self.training) for _ in range(3)
        )
        return query, key, value


def sparse_rows() -> list[SparseRow]:
    """Rows of the lengths from 1k to 32k, forward and training."""
    return [SparseRow(length=length, training=training) for training, length in product((False, True), _LENGTHS)]


@dataclass(frozen=True, kw_only=True)
class SparsePoint:
    """All patterns at one length, measured.

    Attributes:
        title: description of the work.
        mode: ``"forward"`` or ``"forward+backward"``.
        length: number of tokens.
        timings: the timing of each pattern, in seconds per call.
        errors: largest error of each pattern against float64, relative to the largest number of its tensor.
    """

    title: str
    mode: str
    length: int
    timings: Mapping[str, Timing]
    errors: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """The point as JSON values."""
        contenders = {
            name: {
                "seconds": timing.to_dict(),
                "times_full": self.times_full(name),
                "relative_error": self.errors[name],
            }
            for name, timing in self.timings.items()
        }
        return {"title": self.title, "mode": self.mode, "length": self.length, "contenders": contenders}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The point that ``to_dict`` wrote."""
        contenders = values["contenders"]
        return cls(
            **{name: values[name] for name in ("title", "mode", "length")},
            timings={name: Timing.of(tuple(one["seconds"]["runs"])) for name, one in contenders.items()},
            errors={name: one["relative_error"] for name, one in contenders.items()},
        )

    def times_full(self, name: str) -> float:
        """A pattern's median time divided by full attention's."""
        return self.timings[name].median / self.timings[FULL].median


def measure_sparse(row: SparseRow, *, repeats: int, seconds: float | None) -> SparsePoint:
    """Check every pattern of a length, then time all of them in interleaved rounds.

    Args:
        row: the length and the mode.
        repeats: rounds of the interleaved timing.
        seconds: time after which the rounds stop, but not before the third.

    Raises:
        UnsupportedError: a contender does not compute its pattern.
    """
    query, key, value = row.tensors()
    contenders = contenders_of(row.length, query, key)
    picked = _picked_rows(row.length)
    errors = {name: _checked(row, name, one, picked) for name, one in contenders.items()}

    def timed(call: _Run) -> Callable[[], object]:
        if not row.training:
            return lambda: call(query, key, value)
        weight = torch.ones_like(query)
        return lambda: torch.autograd.grad(call(query, key, value), (query, key, value), weight)

    calls = {name: timed(one.call) for name, one in contenders.items()}
    timings = interleaved(calls, repeats=repeats, warmup=0, seconds=seconds, fewest=_FEWEST_ROUNDS)
    return SparsePoint(title=row.title, mode=row.mode, length=row.length, timings=timings, errors=errors)


def _picked_rows(length: int) -> Tensor:
    """Queries whose numbers are compared; not the first ones, whose few keys make gradients cancel."""
    rows: Tensor = torch.linspace(length // 4, length - 1, _CHECKED_ROWS).long().unique()
    return rows


def _allowed(row: SparseRow, one: SparseContender, picked: Tensor) -> Tensor:
    batch, head, _, k_pos = index_tensors(1, row.heads, row.length, row.length, 0, None)
    allowed = one.mask.allows(batch, head, picked.view(1, 1, -1, 1), k_pos)
    return allowed.expand(1, row.heads, -1, row.length)


def _checked(row: SparseRow, name: str, one: SparseContender, picked: Tensor) -> float:
    """Largest error of a contender on the picked rows, including gradients in training."""
    inputs, allowed = row.tensors(), _allowed(row, one, picked)
    weight = torch.zeros_like(inputs[0])
    weight[:, :, picked] = torch.randn(weight[:, :, picked].shape, generator=torch.Generator().manual_seed(1)).to(
        weight.dtype
    )
    output = one.call(*inputs)
    ours = [output[:, :, picked], *(torch.autograd.grad(output, inputs, weight) if row.training else ())]
    exact = _by_rows(row, torch.float64, one.keep, picked, allowed, weight)
    plain = _by_rows(row, row.dtype, one.keep, picked, allowed, weight)
    worst = 0.0
    for got, textbook, wanted in zip(ours, plain, exact, strict=True):
        size = float(wanted.detach().abs().max())
        error, allowance = (float((part.double() - wanted).detach().abs().max()) / size for part in (got, textbook))
        if not error <= _ALLOWANCE * (allowance + torch.finfo(row.dtype).eps):
            raise UnsupportedError.about(
                "bench",
                f"contender {name!r}",
                must=f"compute its pattern in '{row.title}'",
                got=f"a relative error of {error:.1e} where the textbook formula has {allowance:.1e}",
                then="Wrong results are not timed.",
            )
        worst = max(worst, error)
    return worst


def _by_rows(
    row: SparseRow, dtype: torch.dtype, keep: int | None, picked: Tensor, allowed: Tensor, weight: Tensor
) -> list[Tensor]:
    """The picked rows by the textbook formula, and in training their gradients."""
    leaves = [tensor.detach().to(dtype).requires_grad_(row.training) for tensor in row.tensors()]
    query, key, value = leaves
    scores = (query[:, :, picked] @ key.transpose(-2, -1) / math.sqrt(row.head_dim)).masked_fill(~allowed, -torch.inf)
    if keep is not None:
        best = scores.detach().argsort(dim=-1, descending=True, stable=True)[..., :keep]
        scores = scores.masked_fill(torch.ones_like(allowed).scatter(-1, best, False), -torch.inf)
    output = torch.softmax(scores, dim=-1) @ value
    if not row.training:
        return [output]
    return [output, *torch.autograd.grad(output, leaves, weight[:, :, picked].to(dtype))]


def overtaken_at(points: Sequence[SparsePoint], name: str) -> int | None:
    """The shortest length from which a pattern is always faster than full attention; None where there is none."""
    shortest = None
    for point in sorted(points, key=lambda point: point.length, reverse=True):
        if point.times_full(name) >= 1.0:
            break
        shortest = point.length
    return shortest


def sparse_sheet(points: Sequence[SparsePoint]) -> Sheet:
    """Medians in ms of each pattern and length, relative to full attention, and the length where it becomes faster."""
    lengths = sorted({point.length for point in points})
    rows, notes = [], []
    for mode in dict.fromkeys(point.mode for point in points):
        of_mode = sorted((point for point in points if point.mode == mode), key=lambda point: point.length)
        by_length = {point.length: point for point in of_mode}
        for name in of_mode[0].timings:
            cells = [_cell(by_length[length], name) if length in by_length else "" for length in lengths]
            place = overtaken_at(of_mode, name)
            verdict = "" if name == FULL else "not here" if place is None else f"from {place}"
            rows.append([f"{name}, {mode}", *cells, verdict])
        if len(of_mode) > 1:
            notes.append(f"{mode}, time grows with length to the power of: {_growths(of_mode)}")
    worst = max(error for point in points for error in point.errors.values())
    notes.append(f"largest error against float64 on the rows that were checked: {worst:.1e}")
    return Sheet(
        title=SPARSE,
        about="cost of sparse patterns against length, and where each overtakes full causal attention",
        header=["pattern", *map(str, lengths), "overtakes"],
        rows=rows,
        notes=notes,
    )


def _cell(point: SparsePoint, name: str) -> str:
    times = "" if name == FULL else f" ({point.times_full(name):.2f}x)"
    return f"{milliseconds(point.timings[name].median)}{times}"


def _growths(points: Sequence[SparsePoint]) -> str:
    """Exponents of the growth of time with length, from the last two lengths."""
    last, before = points[-1], points[-2]
    return ", ".join(
        f"{name} {math.log(last.timings[name].median / before.timings[name].median, last.length / before.length):.2f}"
        for name in last.timings
    )
