"""Which path each kind of product takes: measured once per process and kind, then kept, so that same inputs give same
bits.

On some processors torch's float32 product runs at half the rate that the others reach on the same numbers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from clearhead.errors import UnsupportedError
from clearhead.locks import lock_for_process
from clearhead.projection.paths import KINDS, NATIVE, ONEDNN, PATHS, TORCH, Path

__all__ = ["DTYPES", "Choice", "check_variable", "choice", "choices", "hold", "measured", "told"]

_VARIABLE: Final = "CLEARHEAD_PROJECTION"
#: What the measurement multiplies, and how often: some 20 milliseconds for each kind.
_ROWS, _WIDTH, _ROUNDS = 512, 512, 5
#: How much faster oneDNN must be, so that a tie stays with torch. In bfloat16 torch's own product is oneDNN's too, with
#: a copy of the bias into the output before it: the difference is smaller, and steadier.
_MARGINS: Final = {torch.float32: 1.1, torch.bfloat16: 1.03}
#: How much faster either must be than the kernels. They give the same bits at any number of threads, add the input
#: gradients of several layers within one product and a bias's gradient on the way, which is not measured here.
_LEAD: Final = 1.2
#: How many times the fastest one's time a call may take to be tried again.
_HOPELESS: Final = 10
#: How often the kernels are measured again before they are left out.
_DOUBTS: Final = 6
#: Of the tensors that have a choice.
DTYPES: Final = tuple(_MARGINS)


@dataclass(frozen=True)
class Choice:
    """By which path one kind of product runs in this process, and why.

    Attributes:
        kind: ``"forward"``, ``"input gradient"`` or ``"weight gradient"``.
        dtype: ``"float32"`` or ``"bfloat16"``.
        path: ``"torch"``, ``"onednn"`` or ``"native"``.
        reason: in words.
        gflops: the measured rate of each path that was measured; None for one that is not here, fails or computes
            something else.
        narrow: the path of products with a small weight, where it is another: the kernels lay out and round a tile at a
            time, which shows where each number of it takes few steps.
    """

    kind: str
    dtype: str
    path: str
    reason: str
    gflops: Mapping[str, float | None] = field(default_factory=dict)
    narrow: str | None = None


_LOCK: Final = lock_for_process()
_CHOICES: Final[dict[tuple[str, torch.dtype], Choice]] = {}


def choice(kind: str, dtype: torch.dtype = torch.float32) -> Choice:
    """The path of a kind of product, decided at the first call and then kept.

    Raises:
        UnsupportedError: ``CLEARHEAD_PROJECTION`` asks for what there is not.

    >>> choice("forward").path in ("torch", "onednn", "native")
    True
    """
    found = _CHOICES.get((kind, dtype))
    if found is None:
        with _LOCK:
            found = _CHOICES.get((kind, dtype)) or _decide(kind, dtype)
            _CHOICES[kind, dtype] = found
    return found


def choices(dtype: torch.dtype) -> tuple[tuple[str, str | None], ...]:
    """The path of every kind of product, and that of narrow ones: what is kept of calls holds while these do."""
    return tuple((found.path, found.narrow) for found in (choice(kind, dtype) for kind in KINDS))


def told(dtype: torch.dtype = torch.float32) -> dict[str, list[str | None]]:
    """What ``choices`` says, by kind of product, to be written down for another process.

    >>> sorted(told())
    ['forward', 'input gradient', 'weight gradient']
    """
    return {kind: [*pair] for kind, pair in zip(KINDS, choices(dtype), strict=True)}


def hold(paths: object, dtype: torch.dtype = torch.float32) -> str | None:
    """Take the paths that another process was ``told``, whatever is faster here; or, in words, why not.

    What was measured a second time may be another path where two are close, and its last digits are others.
    """
    found: dict[str, Choice] = {}
    try:
        forced = check_variable(dtype)
        if isinstance(paths, dict):
            for kind in KINDS:
                path, narrow = paths[kind]
                found[kind] = Choice(kind, str(dtype)[6:], path, "as it was before", narrow=narrow)
        named = {name for own in found.values() for name in (own.path, own.narrow) if name is not None}
        absent = [f"{name} {why}" for name in sorted(named) if (why := PATHS[name].absent(dtype)) is not None]
    except (KeyError, TypeError, ValueError, UnsupportedError):
        found, absent, forced = {}, [], None
    if forced is not None and any(own.path != forced for own in found.values()):
        return f"{_VARIABLE}={forced}"
    if not found or absent:
        return "; ".join(absent) or "the paths are not told"
    with _LOCK:
        _CHOICES.update({(kind, dtype): own for kind, own in found.items()})
    return None


def measured(kind: str, dtype: torch.dtype = torch.float32) -> Choice:
    """The choice with the rates of all paths, measured now where the choice did not need them.

    >>> measured("forward").gflops["torch"] > 0
    True
    """
    found = choice(kind, dtype)
    return found if found.gflops else replace(found, gflops=_rates(kind, dtype))


def check_variable(dtype: torch.dtype = torch.float32) -> str | None:
    """The path that ``CLEARHEAD_PROJECTION`` forces, if it forces one.

    Raises:
        UnsupportedError: it names no path, or one that is not there for the dtype.
    """
    forced = os.environ.get(_VARIABLE, "")
    if not forced:
        return None
    if forced not in PATHS:
        raise UnsupportedError.about(
            "project", _VARIABLE, must=f"be one of {', '.join(PATHS)}", got=repr(forced)[:80],
            then="Unset it to let the fastest one be measured.",
        )  # fmt: skip
    absent = PATHS[forced].absent(dtype)
    if absent is not None:
        there = " or ".join(name for name, path in PATHS.items() if path.absent(dtype) is None)
        raise UnsupportedError.about(
            "project", _VARIABLE, must=f"be {there} for {str(dtype)[6:]} here", got=f"{forced}, but {absent}",
            then="Unset it.",
        )  # fmt: skip
    return forced


def _decide(kind: str, dtype: torch.dtype) -> Choice:
    name = str(dtype)[6:]
    forced = check_variable(dtype)
    if forced is not None:
        return Choice(kind, name, forced, f"{_VARIABLE}={forced}")
    absent = [why for path in PATHS.values() if (why := path.absent(dtype)) is not None]
    if len(absent) == len(PATHS) - 1:
        return Choice(kind, name, TORCH.name, "; ".join(absent))
    rates = _rates(kind, dtype)
    for _ in range(_DOUBTS):
        if rates[NATIVE.name] is None or _fastest(rates, _MARGINS[dtype]) is NATIVE:
            break
        # A core that somebody else took for these milliseconds must not cost the whole process its kernels.
        rates = _better(rates, _rates(kind, dtype))
    # A weight's gradient sums over tokens, however small the weight is.
    narrow = None if kind == "weight gradient" else _fastest({**rates, NATIVE.name: None}, _MARGINS[dtype]).name
    return Choice(kind, name, _fastest(rates, _MARGINS[dtype]).name, "measured", rates, narrow)


def _fastest(rates: Mapping[str, float | None], margin: float) -> Path:
    """The kernels unless another path leads; between those, torch's own unless oneDNN's is faster by a margin."""
    known = {path: rate for path in PATHS.values() if (rate := rates[path.name]) is not None}
    other = ONEDNN if known.get(ONEDNN, 0.0) >= margin * known[TORCH] else TORCH
    return NATIVE if NATIVE in known and known[other] <= _LEAD * known[NATIVE] else other


def _better(one: Mapping[str, float | None], other: Mapping[str, float | None]) -> dict[str, float | None]:
    """The best of two measurements: others on the machine can only slow a path down."""
    return {name: max((rate for rate in (one[name], other[name]) if rate is not None), default=None) for name in one}


@torch.no_grad()
def _rates(kind: str, dtype: torch.dtype) -> dict[str, float | None]:
    """GFLOP/s of every path on one product; None for one that cannot be used."""
    # A generator of its own: measuring must not move the user's random numbers.
    generator = torch.Generator("cpu").manual_seed(0)
    second = _ROWS if kind == "weight gradient" else _WIDTH
    left, right = (
        torch.rand(rows, _WIDTH, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
        for rows in (_ROWS, second)
    )
    calls = {name: _call(path, kind, left, right) for name, path in PATHS.items() if path.absent(dtype) is None}
    usable = {name: call for name, call in calls.items() if name == TORCH.name or _agrees(call, calls[TORCH.name])}
    return {**dict.fromkeys(PATHS), **_timed(usable)}


def _call(path: Path, kind: str, left: Tensor, right: Tensor) -> Callable[[], Tensor]:
    """One product of a kind, with what a layer with a bias asks beside it."""
    if kind == "forward":
        return lambda: path.forward(left, right, left[0])
    if kind == "input gradient":
        return lambda: path.input_gradient([(left, right)])
    return lambda: path.weight_gradient(left, right, True)[0]


def _timed(calls: Mapping[str, Callable[[], Tensor]]) -> dict[str, float]:
    """GFLOP/s of each call's best round; others on the machine can only slow one down."""
    seconds = dict.fromkeys(calls, float("inf"))
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            # Torch's product in bfloat16, where oneDNN has none, takes a hundred times as long: once is enough.
            if _HOPELESS * min(seconds.values()) < seconds[name] < float("inf"):
                continue
            started = time.perf_counter()
            call()
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    return {name: round(2e-9 * _ROWS * _WIDTH**2 / best, 1) for name, best in seconds.items()}


def _agrees(call: Callable[[], Tensor], reference: Callable[[], Tensor]) -> bool:
    """Whether a path runs and computes what torch computes; also the first, slow call of each."""
    try:
        found = call()
    except RuntimeError:
        return False
    own = reference()
    return torch.allclose(found, own, rtol=max(1e-3, 2 * torch.finfo(own.dtype).eps))
