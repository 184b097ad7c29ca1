"""Other libraries' models and conventions: an alias of ``clearhead.integrations``.

``bridges.transformers`` is imported on first use, as it needs the extra ``hf``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from clearhead.integrations.report import SwapReport
from clearhead.integrations.swap import swap, unswap
from clearhead.integrations.torch.polarity import (
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
