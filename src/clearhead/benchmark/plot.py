"""Plots of the results."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from clearhead.benchmark.peers import OURS
from clearhead.benchmark.results import SettingResult

__all__ = ["plot_svg"]

# Okabe and Ito's colours, which colour-blind readers can distinguish.
_COLOURS = {
    OURS: "#0072b2",
    "scaled_dot_product_attention": "#e69f00",
    "nn.MultiheadAttention": "#d55e00",
    "nn.MultiheadAttention, weights": "#cc79a7",
    "textbook formula": "#7f7f7f",
}
_ROW_INCHES = 0.95


def plot_svg(results: Sequence[SettingResult], *, caption: str) -> bytes:
    """Medians with their quartiles, one group of bars for each setting, as an SVG file.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the extra ``bench`` brings it.
    """
    import matplotlib
    from matplotlib.figure import Figure

    levels = [level for level in ("attention", "module") if any(r.setting.level == level for r in results)]
    tallest = max(sum(result.setting.level == level for result in results) for level in levels)
    # Built without pyplot, so a notebook's backend and open figures do not change.
    figure = Figure(figsize=(8.5 * len(levels), 1.6 + _ROW_INCHES * tallest), layout="constrained")
    axes = figure.subplots(1, len(levels), squeeze=False)
    for axis, level in zip(axes[0], levels, strict=True):
        _bars(axis, [result for result in results if result.setting.level == level])
        axis.set_title(level)
    figure.supxlabel(f"milliseconds per call, median and quartiles (shorter is better)\n{caption}", fontsize=9)
    stream = io.BytesIO()
    # Fixed salt and no date: the same results give the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "clearhead"}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()


def _bars(axis: Any, results: Sequence[SettingResult]) -> None:
    names = [name for name in _COLOURS if any(name in result.timings for result in results)]
    height = 0.8 / len(names)
    for place, name in enumerate(names):
        present = [(row, result.timings[name]) for row, result in enumerate(results) if name in result.timings]
        centres = [row - 0.4 + (place + 0.5) * height for row, _ in present]
        medians = [1e3 * timing.median for _, timing in present]
        spread = [
            [1e3 * (timing.median - timing.q1) for _, timing in present],
            [1e3 * (timing.q3 - timing.median) for _, timing in present],
        ]
        axis.barh(centres, medians, height=height, xerr=spread, color=_COLOURS[name], label=name, ecolor="#333333")
    axis.set_yticks(range(len(results)), [result.setting.title.partition(" ")[2] for result in results])
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.legend(fontsize=8)
    axis.grid(axis="x", which="both", alpha=0.3)
