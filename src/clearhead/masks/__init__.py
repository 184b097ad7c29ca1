"""Masks: predicates over absolute positions that say which keys a query may attend to.

``True`` means *may attend*. A mask defines ``allows(batch, head, q_pos, k_pos)`` over index tensors that broadcast. If
each query's keys form a few intervals, the mask also defines ``intervals``, which backends use to skip empty tiles.
Masks combine with ``&``, ``|`` and ``~``; the intervals of a combination follow from those of its parts.
"""

from clearhead.masks.base import Mask
from clearhead.masks.block_mask import from_block_mask
from clearhead.masks.function import MaskFunction
from clearhead.masks.positional import Causal, Global, Prefix, Strided, Window
from clearhead.masks.sequences import Documents, Padding
from clearhead.masks.tables import Blocks, Dense

__all__ = [
    "Blocks",
    "Causal",
    "Dense",
    "Documents",
    "Global",
    "Mask",
    "MaskFunction",
    "Padding",
    "Prefix",
    "Strided",
    "Window",
    "from_block_mask",
]
