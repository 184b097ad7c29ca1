"""Check of every backend on small, unusual shapes before anything is timed."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TypedDict

import torch

from clearhead.benchmark.cases import Comparison
from clearhead.benchmark.peers import OURS, TensorWork
from clearhead.dispatch import BACKENDS
from clearhead.errors import UnsupportedError

__all__ = ["check_backends"]


class _SmallCall(TypedDict, total=False):
    shape: tuple[int, int, int, int]
    causal: bool
    kv_heads: int
    k_len: int
    window: int


# Lengths that no tile size divides, one token, grouped heads, a window, one query over many keys.
_SMALL_CALLS: tuple[_SmallCall, ...] = (
    {"shape": (1, 1, 1, 8), "causal": False},
    {"shape": (2, 3, 67, 24), "causal": False},
    {"shape": (1, 2, 301, 64), "causal": True},
    {"shape": (1, 4, 131, 40), "causal": True, "kv_heads": 2},
    {"shape": (1, 2, 197, 72), "causal": True, "window": 20},
    {"shape": (1, 8, 1, 128), "causal": False, "kv_heads": 2, "k_len": 517},
)
_DTYPES = (torch.float32, torch.bfloat16)


def check_backends() -> dict[str, int]:
    """Compare every backend with float64, forward and backward, in float32 and bfloat16.

    Returns:
        The number of calls that each backend supports; 0 where it cannot run here.

    Raises:
        UnsupportedError: a backend computes wrong numbers or raises an error.
    """
    names = [name for name in BACKENDS if name != "reference"]
    return {name: sum(_passes(name, *each) for each in product(_SMALL_CALLS, _DTYPES, (False, True))) for name in names}


def _passes(backend: str, call: _SmallCall, dtype: torch.dtype, training: bool) -> bool:
    """Whether the backend supports the call; raises where its numbers are wrong."""
    work = TensorWork(
        call["shape"],
        dtype,
        causal=call["causal"],
        training=training,
        kv_heads=call.get("kv_heads"),
        k_len=call.get("k_len"),
        window=call.get("window"),
        asked=backend,
    )
    if work.backend != backend:
        return False
    name = f"{OURS}, backend {backend}"
    title = f"{'forward+backward' if training else 'forward'} {str(dtype)[6:]} of {call}"
    exact, plain = partial(work.by_rows, torch.float64), partial(work.by_rows, dtype)
    try:
        Comparison(title=title, calls={name: work.call(OURS)}, exact=exact, plain=plain).check()
    except RuntimeError as error:
        raise UnsupportedError.about(
            "bench",
            f"contender {name!r}",
            must=f"compute '{title}'",
            got=" ".join(str(error).split()),
            then="Nothing is timed while a backend is broken.",
        ) from error
    return True
