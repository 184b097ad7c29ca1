"""GPT-2's blocks: LayerNorm before each sublayer, queries, keys and values from one product, learned positions.

A block is one step, cache and all, as Llama's layer is. Elsewhere its parts are taken one by one.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from clearhead.bridges.transformers_attention import NAME, scale_of
from clearhead.bridges.transformers_parts import feedforward_of, norm_of, plain_layer
from clearhead.bridges.transformers_source import digest_of, known_by_source
from clearhead.bridges.transformers_step import Kind, hooked_now, layer_in_one_step
from clearhead.nn.feedforward import drop_of
from clearhead.nn.fused_attention import Projections
from clearhead.nn.fused_layer import LayerParts

__all__ = ["ATTENTION", "BLOCK"]

#: GPT2Attention's source.
ATTENTION: Final = "5b6241c4acea9a8e"
#: GPT2Block's.
BLOCK: Final = "90f90b64665d3916"


def _block(
    module: Any, hidden_states: Tensor, past_key_values: Any = None, attention_mask: Any = None,
    encoder_hidden_states: Any = None, encoder_attention_mask: Any = None, use_cache: Any = False, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """GPT-2's block in one step, where it attends to no memory."""
    if encoder_hidden_states is not None:
        return None
    options = {name: option for name, option in kwargs.items() if name not in _UNREAD}
    return layer_in_one_step(_KIND, module, hidden_states, attention_mask, past_key_values, options)


def _dropout(attention: Any) -> float:
    return attention.attn_dropout.p if attention.training else 0.0


def _marks_of(attention: Any) -> tuple[object, ...]:
    return attention.scaling, attention.head_dim, attention.split_size, _dropout(attention)


def _parts_of(block: Any, x: Tensor) -> LayerParts | None:
    attention = block.attn
    if digest_of(type(attention).forward) != ATTENTION or attention.config._attn_implementation != NAME:
        return None
    norms = [norm for own in (block.ln_1, block.ln_2) if (norm := norm_of(own, x)) is not None]
    source, last = plain_layer(attention.c_attn), plain_layer(attention.c_proj)
    fed, after = feedforward_of(block.mlp), drop_of(attention.resid_dropout)
    if source is None or last is None or fed is None or after is None or len(norms) < 2 or hooked_now(attention):
        return None
    heads, rest = divmod(attention.split_size, attention.head_dim)
    if rest or source[0].shape[0] != 3 * attention.split_size:
        return None
    scale = scale_of(attention.scaling, attention.head_dim)
    own = Projections([source], last, heads, heads, scale=scale, dropout=_dropout(attention))
    return LayerParts(
        [own], fed.layers, norms, norm_first=True, activation=fed.activation, after=(after, fed.after), hidden=0.0
    )


#: Options that GPT-2's attention is given and does not read.
_UNREAD: Final = ("position_ids",)
_KIND: Final = Kind("attn", _marks_of, _parts_of)
known_by_source(BLOCK, _block)
