"""The demo's printed output: digits as blocks of characters, and results as sentences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from torch import Tensor

from clearhead.demo.digits import INTENSITIES, SIDE, token_name
from clearhead.demo.exact import Agreement
from clearhead.demo.inside import InfluentialHead
from clearhead.demo.speed import Speed

__all__ = ["agreement_lines", "beside", "blocks", "explained_lines", "speed_lines"]

_SHADES = " ░▒▓█"


def blocks(numbers: Sequence[float], highest: float) -> list[str]:
    """An 8 x 8 map in shades of grey with a frame, two characters per pixel.

    >>> blocks([16.0] * 64, 16.0)[1]
    '│████████████████│'
    """
    shades = [_SHADES[min(len(_SHADES) - 1, int(len(_SHADES) * max(0.0, n) / highest))] for n in numbers]
    rows = ["".join(2 * shade for shade in shades[start : start + SIDE]) for start in range(0, SIDE * SIDE, SIDE)]
    line = "─" * (2 * SIDE)
    return [f"┌{line}┐", *(f"│{row}│" for row in rows), f"└{line}┘"]


def beside(*texts: Sequence[str], gap: str = "   ") -> list[str]:
    """Blocks of lines next to each other."""
    widths = [max(map(len, text), default=0) for text in texts]
    rows = zip_longest(*texts, fillvalue="")
    return [gap.join(line.ljust(width) for line, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def explained_lines(
    ids: Tensor,
    number: int,
    truth: int,
    probabilities: Sequence[float],
    focus: InfluentialHead,
    lost: float,
    received: Sequence[float],
    weights: Sequence[float],
) -> list[str]:
    """One digit, its prediction, and the attention of its most influential head."""
    predicted = max(range(len(probabilities)), key=lambda label: probabilities[label])
    verdict = "which is right" if predicted == truth else f"but it is {truth}"
    head = f"head {focus.head} of layer {focus.layer}"
    said = [
        "",
        f"held-out digit {number}: predicted {predicted} with probability {probabilities[predicted]:.4f}, {verdict}",
        "",
        f"most influential: {head}",
        f"(without it the log-probability of {predicted} falls by {lost:.4f})",
        "",
        f"pixels with the most attention, over all 64 queries: {_most(received)}",
        f"from pixel {token_name(focus.token)}, where its output is largest: {_most(weights)}",
        "(row, column) counted from 0",
    ]
    digit = ["digit", *blocks(ids.tolist(), INTENSITIES - 1)]
    looks = [f"{head} attends to", *blocks(received, max(received))]
    return [*beside(digit, looks), *said[1:]]


def _most(weights: Sequence[float], count: int = 5) -> str:
    heaviest = sorted(range(len(weights)), key=lambda token: -weights[token])[:count]
    return ", ".join(f"{token_name(token)} {weights[token]:.3f}" for token in heaviest)


def agreement_lines(agreement: Agreement) -> list[str]:
    """Result of the check against float64, two lines."""
    layer, head = agreement.place
    heads = sum(map(len, agreement.worst))
    verdict = "as exact as float32 allows" if agreement.holds else "NOT as exact as float32 allows"
    return [
        f"worst difference {agreement.largest:.1e}, in head {head} of layer {layer}: {verdict}",
        f"({heads} heads on {agreement.sequences} held-out digits, their real queries, keys and values, against "
        f"NumPy's float64; the textbook formula in float32 differs by {agreement.largest_textbook:.1e})",
    ]


def speed_lines(speed: Speed) -> list[str]:
    """The two speeds and the conditions of the measurement."""
    times = f"{speed.times:.2f} times as fast" if speed.times >= 1 else f"{1 / speed.times:.2f} times as slow"
    return [
        f"clearhead {1e3 * speed.ours.median:.3f} ms, torch.nn.MultiheadAttention with the same weights "
        f"{1e3 * speed.torch.median:.3f} ms: {times}",
        f"({speed.conditions()}; outputs differ by at most {speed.difference:.1e})",
    ]
