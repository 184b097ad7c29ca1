"""Every class of transformers that has a faster one here: parts, and layers of the kinds that are known."""

from __future__ import annotations

# These say which sources they know.
from clearhead.bridges import transformers_blocks, transformers_rotary
from clearhead.bridges.transformers_parts import faster, original

__all__ = ["faster", "original", "transformers_blocks", "transformers_rotary"]
