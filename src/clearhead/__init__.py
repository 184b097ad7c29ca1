"""clearhead: attention for PyTorch that you can run, write, see into, and trust.

Public names are imported when they are first read, so that ``import clearhead`` costs next to nothing.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clearhead import bridges, distributed, functional, nn, positions, sparse
    from clearhead.cache import KVCache
    from clearhead.errors import CacheFullError, ClearheadError, DataError, MaskError, ShapeError, UnsupportedError
    from clearhead.functional.exact import attention, explain_dispatch, observe_attention
    from clearhead.inspector import view
    from clearhead.integrations.accelerate import accelerate
    from clearhead.integrations.freeze import freeze, unfreeze
    from clearhead.integrations.swap import swap, unswap
    from clearhead.invariance import invariant, set_invariant
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

    # At run time `observe` and `verify` are the packages of these functions, which can be called.
    from clearhead.observe.explain import explain
    from clearhead.observe.observe import observe
    from clearhead.observe.trace import trace
    from clearhead.ops.memory import release_memory
    from clearhead.packing import pack, unpack
    from clearhead.paged_cache import PagedKVCache
    from clearhead.scores import Alibi, DenseBias, RelativeBias, ScoreFunction, ScoreRule, Sink, SoftCap
    from clearhead.statistics import Observation, Want
    from clearhead.verify.models import verify_model
    from clearhead.verify.suite import verify
else:
    from clearhead.command_process import begin as _begin

    # Before torch is imported.
    _begin()

    from clearhead.lazy import lazy_names, lazy_operators
    from clearhead.ops.binary import load as _load

    _load()
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "clearhead.integrations.accelerate": "accelerate",
            "clearhead.integrations.freeze": "freeze unfreeze",
            "clearhead.integrations.swap": "swap unswap",
            "clearhead.cache": "KVCache",
            "clearhead.errors": "CacheFullError ClearheadError DataError MaskError ShapeError UnsupportedError",
            "clearhead.functional.exact": "attention explain_dispatch observe_attention",
            "clearhead.inspector": "view",
            "clearhead.invariance": "invariant set_invariant",
            "clearhead.linear": "linear_attention",
            "clearhead.masks": "Blocks Causal Dense Documents Global Mask MaskFunction Padding Prefix Strided Window",
            "clearhead.observe.explain": "explain",
            "clearhead.observe.trace": "trace",
            "clearhead.ops.memory": "release_memory",
            "clearhead.packing": "pack unpack",
            "clearhead.paged_cache": "PagedKVCache",
            "clearhead.scores": "Alibi DenseBias RelativeBias ScoreFunction ScoreRule Sink SoftCap",
            "clearhead.statistics": "Observation Want",
            "clearhead.verify.models": "verify_model",
        },
    )
    lazy_operators(
        {
            "clearhead.compiled_gradients": "attention_compiled_gradients",
            "clearhead.linear.packed": "linear_documents linear_documents_backward",
            "clearhead.sparse.top_k": "top_k_attention top_k_attention_backward",
            "clearhead.torch_op": ("attention attention_backward observe_attention observe_attention_backward"),
        }
    )

__all__ = [
    "Alibi",
    "Blocks",
    "CacheFullError",
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
    "PagedKVCache",
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
    "accelerate",
    "attention",
    "bridges",
    "distributed",
    "explain",
    "explain_dispatch",
    "freeze",
    "functional",
    "invariant",
    "linear_attention",
    "nn",
    "observe",
    "observe_attention",
    "pack",
    "positions",
    "release_memory",
    "set_invariant",
    "sparse",
    "swap",
    "trace",
    "unfreeze",
    "unpack",
    "unswap",
    "verify",
    "verify_model",
    "view",
]

__version__ = "0.1.0"
