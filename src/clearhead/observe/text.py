"""An explanation as plain text tables."""

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


def as_text(explanation: Explanation, *, all_rows: bool = False) -> str:
    """The heading, the steps, the keys, the vectors and the worst difference."""
    blocks = [
        heading(explanation),
        _steps(explanation),
        _keys(explanation, all_rows),
        _vectors(explanation),
        verdict(explanation),
    ]
    return "\n\n".join(blocks)


def heading(explanation: Explanation) -> str:
    """One line with the token, head, layer, number of keys, dtype and backend."""
    parts = [
        f"token {explanation.token} {printable(explanation.label)!r}",
        f"head {explanation.head} of {explanation.num_heads}",
    ]
    if explanation.layer is not None:
        parts.append(f"layer {explanation.layer or 'attention'}")
    parts += [
        f"{len(explanation.tokens)} keys",
        str(explanation.dtype).removeprefix("torch."),
        f"backend {explanation.backend}",
    ]
    return " · ".join(parts)


def verdict(explanation: Explanation) -> str:
    """The worst difference from float64, and the dtype's epsilon."""
    epsilon = torch.finfo(explanation.dtype).eps
    worst = explanation.worst
    return (
        f"worst difference from float64: {worst.difference:.1e} (step {worst.name!r}; "
        f"the epsilon of {str(explanation.dtype).removeprefix('torch.')} is {epsilon:.1e})"
    )


def _steps(explanation: Explanation) -> str:
    head = ["", "step", "formula", "shape", "computed by", "difference"]
    rows = [
        [str(place), step.name, step.formula, str(list(step.shape)), step.by, f"{step.difference:.1e}"]
        for place, step in enumerate(explanation.steps, start=1)
    ]
    return table(head, rows, right={0, 5})


def columns(explanation: Explanation) -> list[tuple[str, Tensor]]:
    """The columns of the table of keys: each step from score to weight."""
    wanted = ("query", "keys", "values", "turned query", "turned keys", "mask", "weighted sum", "head's part", "output")
    shown = [step for step in explanation.steps if step.name not in wanted]
    titles = {"scores": "score", "scaling": "scaled", "softmax": "weight"}
    return [(titles.get(step.name, step.name), step.value) for step in shown]


def shown_keys(explanation: Explanation, most: int) -> list[int]:
    """Indices of the ``most`` heaviest keys, in order of position."""
    count = len(explanation.tokens)
    if count <= most:
        return list(range(count))
    heaviest = sorted(range(count), key=lambda place: -float(explanation.weights[place]))[:most]
    return sorted(heaviest)


def _keys(explanation: Explanation, all_rows: bool) -> str:
    count = len(explanation.tokens)
    shown = shown_keys(explanation, count if all_rows else _MOST_KEYS)
    values = columns(explanation)
    head = ["key", "token", *(title for title, _ in values), ""]
    heaviest = max((float(weight) for weight in explanation.weights), default=0.0)
    rows = []
    for place in shown:
        numbers = [number(float(value[place])) for _, value in values]
        if not bool(explanation.allowed[place]):
            end = "masked"
        else:
            end = "█" * round(_BAR * float(explanation.weights[place]) / heaviest) if heaviest > 0 else ""
        rows.append([str(place), printable(explanation.tokens[place]), *numbers, end])
    drawn = table(head, rows, right=set(range(2, 2 + len(values))) | {0})
    if len(shown) < count:
        rest = 1.0 - float(explanation.weights[shown].sum()) if heaviest > 0 else 0.0
        drawn += f"\n(the {len(shown)} heaviest of {count} keys; the others hold {max(0.0, rest):.4f} of the weight)"
    if count and not bool(explanation.allowed.any()):
        drawn += "\n(the token may attend to nothing: its weights and its output are 0)"
    return drawn


def _vectors(explanation: Explanation) -> str:
    names = ("turned query" if explanation.step("turned query") else "query", "weighted sum", "head's part", "output")
    lines = []
    for name in names:
        step = explanation.step(name)
        if step is None:
            continue
        values = [number(float(value)) for value in step.value[:_MOST_CHANNELS]]
        more = f"  … {step.value.numel()} channels" if step.value.numel() > _MOST_CHANNELS else ""
        lines.append(f"{name:<13}{' '.join(values)}{more}")
    return "\n".join(lines)


def number(value: float) -> str:
    """A number in few characters, with aligned signs.

    >>> number(0.5), number(-1e6)
    (' 0.5000', '-1.00e+06')
    """
    if not math.isfinite(value):
        return str(value)
    return f"{value: .4f}" if abs(value) < 1e4 else f"{value: .2e}"


def printable(label: str) -> str:
    """A token's text on one line: control characters escaped, long texts truncated.

    >>> printable("a\\nb")
    'a\\\\nb'
    """
    plain = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in label)
    return plain if len(plain) <= _LONGEST_LABEL else plain[: _LONGEST_LABEL - 1] + "…"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: set[int]) -> str:
    """A plain text table; the columns in ``right`` are right-aligned."""
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
    """Columns of a text in a terminal: wide characters take two, combining ones none."""
    wide = sum(unicodedata.east_asian_width(sign) in "WF" for sign in text)
    return len(text) + wide - sum(unicodedata.combining(sign) > 0 for sign in text)
