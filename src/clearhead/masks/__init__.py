"""Masks: who may attend to whom, as predicates over absolute positions that know their shape.

``True`` means *may attend*. A mask defines ``allows(batch, head, q_pos, k_pos)`` over index tensors
that broadcast; where its rows are runs of keys it also says so (``intervals``). Masks combine with
``&``, ``|`` and ``~``; what a combination knows follows from its parts.
"""

from clearhead.masks.base import Mask
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
]
