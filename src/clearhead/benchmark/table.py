"""Tables of the results for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from clearhead.benchmark.peers import OURS, short_name
from clearhead.benchmark.results import SettingResult, Timed
from clearhead.benchmark.timing import geometric_mean

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["contenders", "milliseconds", "summary", "tables"]


def contenders(results: Sequence[Timed]) -> list[str]:
    """Names of all contenders, in order of first appearance."""
    return list(dict.fromkeys(name for result in results for name in (*result.timings, *result.left_out)))


def tables(results: Sequence[SettingResult]) -> Iterator[Table]:
    """One table per level: medians in milliseconds, ratio to clearhead, and quartiles."""
    from rich.table import Table

    for level in dict.fromkeys(result.setting.level for result in results):
        rows = [result for result in results if result.setting.level == level]
        names = contenders(rows)
        table = Table(title=_title(level), title_justify="left", show_lines=True)
        table.add_column("work")
        for name in names:
            table.add_column(short_name(name), justify="right")
        for result in rows:
            table.add_row(_work(result), *(_cell(result, name) for name in names))
        yield table


def _title(level: str) -> str:
    what = {
        "attention": "Attention alone: batch x heads x length x head_dim; extra memory at the peak in MiB",
        "module": "Module with projections, the same weights for all",
    }
    return f"{what[level]}\nms per call, median of interleaved runs, (times clearhead), [quartiles]"


def _work(result: SettingResult) -> str:
    setting = result.setting
    kind = "causal" if setting.causal else "full"
    shape = "x".join(map(str, setting.shape))
    return f"{setting.mode} {str(setting.dtype)[6:]} {kind}\n{shape} ({result.backend})"


def _cell(result: SettingResult, name: str) -> str:
    if name in result.left_out:
        return "left out"
    timing = result.timings[name]
    ratio = "" if name == OURS else f" ({result.ratio(name):.2f}x)"
    memory = f" {result.extra_bytes[name] / 2**20:.1f} MiB" if name in result.extra_bytes else ""
    low, high = milliseconds(timing.q1), milliseconds(timing.q3)
    return f"{milliseconds(timing.median)}{ratio}\n[{low}, {high}]{memory}"


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds with three digits.

    >>> milliseconds(0.012345)
    '12.3'
    """
    return f"{1e3 * seconds:.3g}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


def summary(results: Sequence[SettingResult]) -> Iterator[str]:
    """One line per level and mode: time of the other contenders relative to clearhead over all settings."""
    for level, mode in dict.fromkeys((result.setting.level, result.setting.mode) for result in results):
        rows = [r for r in results if (r.setting.level, r.setting.mode) == (level, mode)]
        parts = []
        for name in contenders(rows):
            ratios = [result.ratio(name) for result in rows if name in result.timings]
            if name != OURS and ratios:
                mean = geometric_mean(ratios)
                parts.append(f"{name} {mean:.2f}x ({min(ratios):.2f} to {max(ratios):.2f})")
        yield f"{level} {mode}, time against clearhead's (geometric mean, range): {'; '.join(parts)}"
