"""Sparse attention, exact on its pattern: patterns as masks, top-k keys of each query, blocks chosen by a router."""

from clearhead.sparse.dilated import dilated_attention
from clearhead.sparse.patterns import big_bird, covered, dilated, longformer, strided
from clearhead.sparse.router import routed
from clearhead.sparse.top_k import top_k_attention

__all__ = [
    "big_bird",
    "covered",
    "dilated",
    "dilated_attention",
    "longformer",
    "routed",
    "strided",
    "top_k_attention",
]
