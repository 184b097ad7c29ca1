"""Bridges: where other libraries' conventions become ours, and back."""

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
