"""Bridges: where other libraries' conventions become ours, and back.

``bridges.transformers`` is imported when it is first asked for, as it needs the extra ``hf``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from clearhead.bridges.swap import SwapReport, swap, unswap
from clearhead.bridges.torch_mha import (
    from_additive,
    from_forbidden,
    from_key_padding,
    from_zero_forbids,
    to_forbidden,
)

__all__ = [
    "SwapReport",
    "from_additive",
    "from_forbidden",
    "from_key_padding",
    "from_zero_forbids",
    "swap",
    "to_forbidden",
    "unswap",
]


def __getattr__(name: str) -> Any:
    if name == "transformers":
        return import_module("clearhead.bridges.transformers")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
