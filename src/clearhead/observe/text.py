"""An explanation as a table of plain text."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from clearhead.observe.explanation import Explanation

__all__ = ["as_text", "columns", "heading", "number", "printable", "shown_keys", "table", "verdict"]

_MOST_KEYS = 24
_MOST_CHANNELS = 8
_BAR = 24
_LONGEST_LABEL = 20


def as_text(seen: Explanation, *, all_rows: bool = False) -> str:
    """Heading, the steps, the keys, the vectors, and the worst difference."""
    blocks = [heading(seen), _steps(seen), _keys(seen, all_rows), _vectors(seen), verdict(seen)]
    return "\n\n".join(blocks)


def heading(seen: Explanation) -> str:
    """Which token, head and layer this is about."""
    parts = [f"token {seen.token} {printable(seen.label)!r}", f"head {seen.head} of {seen.num_heads}"]
    if seen.layer is not None:
        parts.append(f"layer {seen.layer or 'attention'}")
    parts += [f"{len(seen.tokens)} keys", str(seen.dtype).removeprefix("torch."), f"backend {seen.backend}"]
    return " · ".join(parts)


def verdict(seen: Explanation) -> str:
    """The worst difference, beside what the dtype can tell apart."""
    epsilon = torch.finfo(seen.dtype).eps
    worst = seen.worst
    return (
        f"worst difference from float64: {worst.difference:.1e} (step {worst.name!r}; "
        f"{str(seen.dtype).removeprefix('torch.')} tells numbers near 1 apart from {epsilon:.1e} on)"
    )


def _steps(seen: Explanation) -> str:
    head = ["", "step", "formula", "shape", "computed by", "difference"]
    rows = [
        [str(place), step.name, step.formula, str(list(step.shape)), step.by, f"{step.difference:.1e}"]
        for place, step in enumerate(seen.steps, start=1)
    ]
    return table(head, rows, right={0, 5})


def columns(seen: Explanation) -> list[tuple[str, Tensor]]:
    """The rows of numbers that a table of keys shows: each step from score to weight."""
    wanted = ("query", "keys", "values", "turned query", "turned keys", "mask", "weighted sum", "head's part", "output")
    kept = [step for step in seen.steps if step.name not in wanted]
    titles = {"scores": "score", "scaling": "scaled", "softmax": "weight"}
    return [(titles.get(step.name, step.name), step.value) for step in kept]


def shown_keys(seen: Explanation, most: int) -> list[int]:
    """Indices of the ``most`` heaviest keys, in order of position."""
    count = len(seen.tokens)
    if count <= most:
        return list(range(count))
    heaviest = sorted(range(count), key=lambda place: -float(seen.weights[place]))[:most]
    return sorted(heaviest)


def _keys(seen: Explanation, all_rows: bool) -> str:
    count = len(seen.tokens)
    shown = shown_keys(seen, count if all_rows else _MOST_KEYS)
    values = columns(seen)
    head = ["key", "token", *(title for title, _ in values), ""]
    heaviest = max((float(weight) for weight in seen.weights), default=0.0)
    rows = []
    for place in shown:
        numbers = [number(float(value[place])) for _, value in values]
        if not bool(seen.allowed[place]):
            end = "masked"
        else:
            end = "█" * round(_BAR * float(seen.weights[place]) / heaviest) if heaviest > 0 else ""
        rows.append([str(place), printable(seen.tokens[place]), *numbers, end])
    drawn = table(head, rows, right=set(range(2, 2 + len(values))) | {0})
    if len(shown) < count:
        rest = 1.0 - float(seen.weights[shown].sum()) if heaviest > 0 else 0.0
        drawn += f"\n(the {len(shown)} heaviest of {count} keys; the others hold {max(0.0, rest):.4f} of the weight)"
    if count and not bool(seen.allowed.any()):
        drawn += "\n(the token may attend to nothing: its weights and its output are 0)"
    return drawn


def _vectors(seen: Explanation) -> str:
    names = ("turned query" if seen.step("turned query") else "query", "weighted sum", "head's part", "output")
    lines = []
    for name in names:
        step = seen.step(name)
        if step is None:
            continue
        values = [number(float(value)) for value in step.value[:_MOST_CHANNELS]]
        more = f"  … {step.value.numel()} channels" if step.value.numel() > _MOST_CHANNELS else ""
        lines.append(f"{name:<13}{' '.join(values)}{more}")
    return "\n".join(lines)


def number(value: float) -> str:
    """A number in few characters, signs aligned.

    >>> number(0.5), number(-1e6)
    (' 0.5000', '-1.00e+06')
    """
    if not math.isfinite(value):
        return str(value)
    return f"{value: .4f}" if abs(value) < 1e4 else f"{value: .2e}"


def printable(label: str) -> str:
    """A token's text on one line: control characters spelled out, long ones cut.

    >>> printable("a\\nb")
    'a\\\\nb'
    """
    plain = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in label)
    return plain if len(plain) <= _LONGEST_LABEL else plain[: _LONGEST_LABEL - 1] + "…"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: set[int]) -> str:
    widths = [max(map(_cells, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(_lines([head, *rows], widths, right))


def _lines(rows: Sequence[Sequence[str]], widths: Sequence[int], right: set[int]) -> Iterator[str]:
    for row in rows:
        cells = []
        for place, (cell, width) in enumerate(zip(row, widths, strict=True)):
            gap = " " * (width - _cells(cell))
            cells.append(gap + cell if place in right else cell + gap)
        yield "  ".join(cells).rstrip()


def _cells(text: str) -> int:
    """Columns that a terminal takes for a text: wide characters take two, combining ones none."""
    wide = sum(unicodedata.east_asian_width(sign) in "WF" for sign in text)
    return len(text) + wide - sum(unicodedata.combining(sign) > 0 for sign in text)
