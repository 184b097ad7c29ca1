"""Bridges: where other libraries' conventions become ours, and back."""

from clearhead.bridges.torch_mha import (
    from_additive,
    from_forbidden,
    from_key_padding,
    from_zero_forbids,
    to_forbidden,
)

__all__ = ["from_additive", "from_forbidden", "from_key_padding", "from_zero_forbids", "to_forbidden"]
