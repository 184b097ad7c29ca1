"""An explanation as an HTML fragment without scripts or external files; every text is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from clearhead.observe.text import columns, heading, number, printable, shown_keys, verdict

if TYPE_CHECKING:
    from clearhead.observe.explanation import Explanation

__all__ = ["as_html"]

_MOST_KEYS = 64
_CELL = "padding:2px 10px;text-align:{side};font-variant-numeric:tabular-nums;white-space:nowrap"
_HEAD = "padding:2px 10px;text-align:{side};border-bottom:1px solid currentColor;font-weight:600"


def as_html(explanation: Explanation) -> str:
    """The steps and the keys as two HTML tables, in the colours of the surrounding page."""
    return (
        '<div class="clearhead-explain" style="font-family:system-ui,sans-serif;font-size:13px;overflow-x:auto">'
        f"<p><strong>{escape(heading(explanation))}</strong></p>{_steps(explanation)}{_keys(explanation)}<p>{escape(verdict(explanation))}</p></div>"
    )


def _steps(explanation: Explanation) -> str:
    rows = (
        [str(place), step.name, step.formula, str(list(step.shape)), step.by, f"{step.difference:.1e}"]
        for place, step in enumerate(explanation.steps, start=1)
    )
    head = ["", "step", "formula", "shape", "computed by", "difference"]
    return _table("Steps, each compared with float64", head, map(_escaped, rows), right={0, 5})


def _keys(explanation: Explanation) -> str:
    values = columns(explanation)
    shown = shown_keys(explanation, _MOST_KEYS)
    rows = []
    for place in shown:
        numbers = [number(float(value[place])) for _, value in values]
        cells = _escaped([str(place), printable(explanation.tokens[place]), *numbers])
        rows.append(
            [*cells, _bar(float(explanation.weights[place])) if bool(explanation.allowed[place]) else "<i>masked</i>"]
        )
    head = ["key", "token", *(title for title, _ in values), ""]
    title = (
        "Keys"
        if len(shown) == len(explanation.tokens)
        else f"The {len(shown)} heaviest of {len(explanation.tokens)} keys"
    )
    return _table(title, head, rows, right={0, *range(2, 2 + len(values))})


def _bar(weight: float) -> str:
    width = round(160 * min(1.0, max(0.0, weight)), 1)
    return (
        f'<span style="display:inline-block;height:10px;width:{width}px;background:#3572b0;'
        f'vertical-align:middle" title="{weight:.6f}"></span>'
    )


def _escaped(cells: Iterable[str]) -> list[str]:
    return [escape(cell) for cell in cells]


def _table(title: str, head: list[str], rows: Iterable[list[str]], right: set[int]) -> str:
    sides = ["right" if place in right else "left" for place in range(len(head))]
    top = "".join(
        f'<th scope="col" style="{_HEAD.format(side=side)}">{escape(cell)}</th>'
        for cell, side in zip(head, sides, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f'<td style="{_CELL.format(side=side)}">{cell}</td>' for cell, side in zip(row, sides, strict=True))
        + "</tr>"
        for row in rows
    )
    caption = f'<caption style="text-align:left;padding:6px 10px">{escape(title)}</caption>'
    return (
        f'<table style="border-collapse:collapse">{caption}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'
    )
