"""clearhead: attention for PyTorch that you can run, write, see into, and trust."""

from typing import TYPE_CHECKING

from clearhead import bridges, nn, positions, sparse
from clearhead.backends.native_memory import release_memory
from clearhead.bridges import swap, unswap
from clearhead.cache import KVCache
from clearhead.errors import ClearheadError, DataError, MaskError, ShapeError, UnsupportedError
from clearhead.functional import attention, explain_dispatch, observe_attention
from clearhead.inspector import view
from clearhead.linear import linear_attention
from clearhead.masks import (
    Blocks,
    Causal,
    Dense,
    Documents,
    Global,
    Mask,
    MaskFunction,
    Padding,
    Prefix,
    Strided,
    Window,
)
from clearhead.observe import explain, trace
from clearhead.pack import pack, unpack
from clearhead.scores import Alibi, DenseBias, RelativeBias, ScoreFunction, ScoreRule, Sink, SoftCap
from clearhead.statistics import Observation, Want

if TYPE_CHECKING:
    # When it runs, the packages of these names, which can be called.
    from clearhead.observe import observe
    from clearhead.verify import verify
else:
    from clearhead import verify

__all__ = [
    "Alibi",
    "Blocks",
    "Causal",
    "ClearheadError",
    "DataError",
    "Dense",
    "DenseBias",
    "Documents",
    "Global",
    "KVCache",
    "Mask",
    "MaskError",
    "MaskFunction",
    "Observation",
    "Padding",
    "Prefix",
    "RelativeBias",
    "ScoreFunction",
    "ScoreRule",
    "ShapeError",
    "Sink",
    "SoftCap",
    "Strided",
    "UnsupportedError",
    "Want",
    "Window",
    "attention",
    "bridges",
    "explain",
    "explain_dispatch",
    "linear_attention",
    "nn",
    "observe",
    "observe_attention",
    "pack",
    "positions",
    "release_memory",
    "sparse",
    "swap",
    "trace",
    "unpack",
    "unswap",
    "verify",
    "view",
]

__version__ = "0.1.0"
