"""The jobs of the tab "Worked example": attention on a small worksheet, each step with its formula and shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.lab.work import Ticket, Work
from clearhead.lab.worked_presets import PRESETS
from clearhead.lab.worked_script import script
from clearhead.lab.worked_sheet import LIMITS, Worksheet
from clearhead.observe import trace
from clearhead.observe.points import Points

__all__ = ["WORKS", "compute"]

Step = dict[str, Any]
_BELOW: Final = "₁₂₃₄₅₆₇₈"


def start(params: Mapping[str, Any], ticket: Ticket) -> dict[str, Any]:
    """The preset worksheets, and the size limits."""
    return {"presets": [preset.as_json() for preset in PRESETS], "limits": dict(LIMITS)}


def compute(params: Mapping[str, Any], ticket: Ticket) -> dict[str, Any]:
    """Every step of the worksheet, computed by ``MultiHeadAttention`` in float64.

    Returns:
        ``steps``: for each its ``id``, ``symbol``, ``title``, ``formula``, ``shapes``, ``head``, ``values`` (rows; null
        for minus infinity) and ``recipe``, the inputs of a cell. ``scale``; ``mask`` by name; ``empty``: queries that
        may attend to nothing; ``difference``: between the module's output and ``weights · V``.
    """
    sheet = Worksheet.of(params)
    module = sheet.module()
    with torch.no_grad(), trace(module) as traced:
        output = module(sheet.X, mask=sheet.mask)
    points = traced[0]
    steps = [*_projections(sheet, points), *_heads(sheet, points), *_joined(sheet, output)]
    recomputed = points.weights @ points.value
    return {
        "steps": steps,
        "scale": sheet.scale,
        "head_dim": sheet.head_dim,
        "mask": "none" if sheet.mask is None else type(sheet.mask).__name__,
        "empty": [row for row, any_key in enumerate(sheet.allowed.any(dim=1).tolist()) if not any_key],
        "difference": float((recomputed - points.head_outputs).abs().max()),
    }


def exported(params: Mapping[str, Any], ticket: Ticket) -> dict[str, str]:
    """The worksheet as a Python script that prints the same values."""
    return {"name": "worked_example.py", "script": script(Worksheet.of(params))}


def _side_by_side(heads: Tensor) -> Tensor:
    """``[1, heads, tokens, head_dim]`` as ``[tokens, heads * head_dim]``."""
    return heads[0].transpose(0, 1).flatten(1)


def _step(
    name: str,
    symbol: str,
    title: str,
    formula: str,
    shapes: str,
    values: Tensor,
    recipe: dict[str, Any],
    head: int | None = None,
) -> Step:
    return {
        "id": name if head is None else f"{name}.{head}",
        "name": name,
        "symbol": symbol,
        "title": title,
        "formula": formula,
        "shapes": f"{shapes} → {_shape(values)}",
        "head": head,
        "recipe": recipe,
        "values": [[number if math.isfinite(number) else None for number in row] for row in values.tolist()],
    }


def _shape(table: Tensor) -> str:
    return f"{table.shape[0]}×{table.shape[1]}"


def _projections(sheet: Worksheet, points: Points) -> Iterator[Step]:
    for letter, title, heads in (
        ("q", "queries", points.query),
        ("k", "keys", points.key),
        ("v", "values", points.value),
    ):
        weight, bias, symbol = f"W_{letter}", f"b_{letter}", letter.upper()
        biased = bool(sheet.biases)
        yield _step(
            symbol,
            symbol,
            title,
            f"{symbol} = X · {weight}" + (f" + {bias}" if biased else ""),
            f"{_shape(sheet.X)} · {_shape(sheet.weights[weight])}",
            _side_by_side(heads),
            {"kind": "product", "left": "X", "right": weight, "bias": bias if biased else None},
        )


def _heads(sheet: Worksheet, points: Points) -> Iterator[Step]:
    for head in range(sheet.heads):
        if sheet.heads > 1:
            yield from _split(sheet, points, head)
        yield from _attention(sheet, points, head)


def _split(sheet: Worksheet, points: Points, head: int) -> Iterator[Step]:
    first = head * sheet.head_dim
    for symbol, title, heads in (
        ("Q", "queries", points.query),
        ("K", "keys", points.key),
        ("V", "values", points.value),
    ):
        of_head = f"{symbol}{_BELOW[head]}"
        formula = f"{of_head} = columns {first + 1} to {first + sheet.head_dim} of {symbol}"
        whole = f"{sheet.X.shape[0]}×{sheet.heads * sheet.head_dim}"
        recipe = {"kind": "columns", "of": symbol, "first": first}
        yield _step(symbol, of_head, f"{title} of head {head + 1}", formula, whole, heads[0, head], recipe, head)


def _attention(sheet: Worksheet, points: Points, head: int) -> Iterator[Step]:
    many = sheet.heads > 1
    subscript, suffix = (_BELOW[head], f".{head}") if many else ("", "")
    query, key, value = (part[0, head] for part in (points.query, points.key, points.value))
    square = f"{query.shape[0]}×{query.shape[0]}"
    root = f"√{sheet.head_dim}" if sheet.own_scale is None else None

    def symbol(name: str) -> str:
        return f"{name}{subscript}"

    yield _step(
        "scores",
        symbol("S"),
        "scores",
        f"{symbol('S')} = {symbol('Q')} · {symbol('K')}ᵀ",
        f"{_shape(query)} · {key.shape[1]}×{key.shape[0]}",
        points.scores[0, head],
        {"kind": "dots", "left": f"Q{suffix}", "right": f"K{suffix}"},
        head,
    )
    yield _step(
        "scaled",
        symbol("Z"),
        "scaled scores",
        f"{symbol('Z')} = {symbol('S')} / {root}" if root else f"{symbol('Z')} = {symbol('S')} × {sheet.scale:.4g}",
        square,
        points.scaled[0, head],
        {"kind": "scaled", "of": f"scores.{head}"},
        head,
    )
    yield _step(
        "masked",
        symbol("M"),
        "masked scores",
        f"{symbol('M')} = {symbol('Z')}, or −∞ where forbidden",
        square,
        points.masked[0, head],
        {"kind": "masked", "of": f"scaled.{head}"},
        head,
    )
    yield _step(
        "weights",
        symbol("A"),
        "weights",
        f"{symbol('A')} = softmax({symbol('M')}) by row",
        square,
        points.weights[0, head],
        {"kind": "softmax", "of": f"masked.{head}"},
        head,
    )
    yield _step(
        "output",
        symbol("O"),
        f"output of head {head + 1}" if many else "output",
        f"{symbol('O')} = {symbol('A')} · {symbol('V')}",
        f"{square} · {_shape(value)}",
        points.head_outputs[0, head],
        {"kind": "product", "left": f"weights.{head}", "right": f"V{suffix}", "bias": None},
        head,
    )


def _joined(sheet: Worksheet, output: Tensor) -> Iterator[Step]:
    if sheet.heads == 1:
        return
    parts = [f"O{_BELOW[head]}" for head in range(sheet.heads)]
    shapes = f"{sheet.heads} of {sheet.X.shape[0]}×{sheet.head_dim}"
    recipe = {"kind": "concat", "of": [f"output.{head}" for head in range(sheet.heads)]}
    yield _step("concat", "O", "output, heads side by side", f"O = [{', '.join(parts)}]", shapes, output, recipe)


WORKS: tuple[Work, ...] = (
    Work(name="worked-start", run=start, seconds=5.0),
    Work(name="worked", run=compute, seconds=10.0),
    Work(name="worked-script", run=exported, seconds=5.0),
)
