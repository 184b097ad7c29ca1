"""Layers and attentions of transformers' models as one fused operation: the only file that calls the executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from clearhead.choices import is_invariant
from clearhead.integrations.torch.parts import is_plain
from clearhead.integrations.torch.unpadded import Packed
from clearhead.integrations.transformers.attention import NAME, is_causal_alone, planned
from clearhead.integrations.transformers.cache import (
    CacheLayer,
    cache_layer_of,
    count_tokens,
    may_cache_memory,
    of_memory,
    of_own_tokens,
)
from clearhead.integrations.transformers.calls import Arguments
from clearhead.integrations.transformers.families import AttentionRow
from clearhead.integrations.transformers.masks import MaskTensor, mask_of_tensor, symbolic_mask
from clearhead.integrations.transformers.match import LayerMatch, at, first_of
from clearhead.integrations.transformers.parts import Formulas
from clearhead.integrations.transformers.relative import bias_rule, buckets_of, disentangled_bias
from clearhead.integrations.transformers.rotary import angles_of, fits
from clearhead.integrations.transformers.specs import attention_of, hooked, layer_of
from clearhead.masks import Causal, Mask
from clearhead.masks.base import conjuncts
from clearhead.masks.parts import is_padding, is_table
from clearhead.nn.cache_view import CacheView
from clearhead.nn.fused import fused_attention, fused_layers, is_fused_attention, of_parts, takes_parts
from clearhead.nn.norm import normed
from clearhead.nn.reading import cached_reading
from clearhead.nn.spec import LayerParts, Projections, Stack
from clearhead.positions import rotated_by_token
from clearhead.projection import NATIVE, Layer, are_plain, project, project_activate_project
from clearhead.scores import DenseBias, ScoreRule
from clearhead.shapes import Float
from clearhead.torch_private import implementation_of
from clearhead.watch import watched

__all__ = [
    "LEAST_UNPADDED",
    "LayerCall",
    "attention_output",
    "call_of",
    "is_ours",
    "is_relative",
    "layer_output",
    "may_fuse",
    "run_fused",
    "unpadded_of",
    "with_memory",
]

#: Padded tokens times width squared from which removing padding saves time.
LEAST_UNPADDED: Final = 2**22
_AXES: Final = 3
#: Linear layers of queries, keys and values.
_SEPARATE: Final = 3


# ---- what a call reads --------------------------------------------------------------------------------------


class LayerCall(NamedTuple):
    """What a fused call reads, besides weights.

    Attributes:
        tokens: the layer's own and, unless its keys and values are cached, the memory.
        masks: of each attention of each layer; or of one layer, the same for all.
        causal: whether the first attention is causal where no mask was given.
        caches: what each attention of each layer reads from a KV cache.
        growing: the KV caches of the own tokens, of each layer where there are some.
        rotary: cosines and sines, of each layer or the same for all; None where it rotates nothing.
        packed: how padding was removed, and is to be restored; None where it stays.
    """

    tokens: tuple[Tensor, ...]
    masks: tuple[Mask | None, ...]
    causal: bool
    caches: tuple[CacheView | None, ...]
    growing: tuple[CacheLayer, ...]
    rotary: tuple[Float[Tensor, "_rows head_dim"] | None, ...]
    packed: Packed | None = None

    def without_padding(self, unpadded: tuple[Packed, Mask] | None) -> LayerCall:
        """The same of real tokens alone, as ``unpadded_of`` says."""
        if unpadded is None:
            return self
        packed, mask = unpadded
        rotary = tuple(None if angles is None else packed.angles(angles) for angles in self.rotary)
        tokens = (packed.pack(self.tokens[0])[None],)
        return self._replace(tokens=tokens, masks=(mask,) * len(self.masks), rotary=rotary, packed=packed)


def may_fuse(given: Arguments) -> bool:
    x = given.tokens
    if not isinstance(x, Tensor) or not are_plain(x) or x.dim() != _AXES:
        return False
    # A cache passes no gradients on.
    return given.cache is None or not torch.is_grad_enabled()


def is_ours(core: Any) -> bool:
    """Whether an attention's implementation is ``"clearhead"``."""
    return implementation_of(getattr(core, "config", None)) == NAME


def _rotary_of(core: Any, given: Arguments) -> Any:
    """The cosines and sines of a call, of windowed or full attention where the layer is given both."""
    if len(given.rotary) > 1:
        return given.rotary[bool(getattr(core, "is_sliding", False))]
    return given.rotary[0]


def _is_causal(core: Any, interface: bool) -> bool:
    """Whether attention to the layer's own tokens is causal where no mask is given."""
    return is_causal_alone(core) if interface else bool(first_of((core,), ("is_causal", "is_decoder")))


def call_of(core: Any, projections: Projections, given: Arguments, interface: bool) -> LayerCall | None:
    """What attention to the layer's own tokens reads; None if the original code is to compute it."""
    x, head_dim, rotary = given.tokens, projections.last[0].shape[1] // projections.num_heads, None
    if projections.rotary is not None:
        rotary = angles_of(_rotary_of(core, given), x.dtype)
        if rotary is None or not fits(rotary, x, head_dim):
            return None
    cache = None
    if given.cache is not None:
        cache = cache_layer_of(of_own_tokens(given.cache), getattr(core, "layer_idx", None))
        if cache is None:
            return None
    causal = _is_causal(core, interface) if given.is_causal is None else given.is_causal
    is_readable, mask = _mask_of(given.mask, causal, x.shape[1], 0 if cache is None else cache.length)
    if not is_readable:
        return None
    view = None if cache is None else cache.view(x, projections.num_kv_heads, head_dim)
    if view is None and cache is not None:
        return None
    return LayerCall((x,), (mask,), causal, (view,), () if cache is None else (cache,), (rotary,))


def _mask_of(given: Any, causal: bool, length: int, before: int) -> tuple[bool, Mask | None]:
    """Whether the mask of ``length`` tokens after ``before`` cached ones can be read, and the mask."""
    if given is None:
        causal = causal and length > 1
        return not causal or before == 0, Causal() if causal else None
    if given.shape[2] not in (1, length) or given.shape[-1] != before + length:
        return False, None
    if type(given) is MaskTensor:
        return given.query_offset == before, given.meaning()
    return _mask_of_tensor(given, before)


def _mask_of_tensor(given: Any, before: int) -> tuple[bool, Mask | None]:
    if type(given) is not Tensor or not given.is_cpu:
        return False, None
    try:
        return True, mask_of_tensor(given, before)
    except ValueError:
        return False, None


def with_memory(call: LayerCall, core: Any, projections: Projections, given: Arguments) -> LayerCall | None:
    """The same with attention to a memory, whose keys and values the first call caches; None if the original code is to
    read it."""
    states, mask, view, batch = given.memory, given.memory_mask, None, len(call.tokens[0])
    if states is None or not is_plain(states) or len(states) != batch:
        return None
    if given.cache is not None:
        place = getattr(core, "layer_idx", None)
        view = of_memory(given.cache, place) or _cached_memory(given.cache, place, projections, states)
        if view is None or len(view.key) != batch:
            return None
    length, allowed = states.shape[1] if view is None else view.length, None
    if mask is not None:
        is_readable, allowed = (True, mask.meaning()) if type(mask) is MaskTensor else _mask_of_tensor(mask, 0)
        if not is_readable or mask.shape[-1] != length:
            return None
        if allowed is not None and not all(is_padding(part) or is_table(part) for part in conjuncts(allowed)):
            return None
    elif is_causal_alone(core):
        return None
    tokens = call.tokens if view is not None else (*call.tokens, states)
    return call._replace(tokens=tokens, masks=(*call.masks, allowed), caches=(*call.caches, view))


def _cached_memory(past: Any, place: Any, projections: Projections, states: Tensor) -> CacheView | None:
    """Keys and values of a memory, which a call without gradients caches; None if the original code is to do so."""
    if torch.is_grad_enabled() or len(projections.sources) < _SEPARATE or not may_cache_memory(past, place):
        return None
    heads = (project(states, *layer).unflatten(-1, (projections.num_kv_heads, -1)) for layer in projections.sources[1:])
    key, value = (each.transpose(1, 2) for each in heads)
    past.cross_attention_cache.update(key, value, place)
    past.is_updated[place] = True
    return of_memory(past, place)


# ---- calls --------------------------------------------------------------------------------------------------


def attention_output(
    row: AttentionRow, module: Any, given: Arguments, *, formulas: Formulas, interface: bool
) -> Tensor | None:
    """What an attention module returns for its own tokens; None if the original code is to compute it."""
    core = at(module, row.core)
    if given.memory is not None or not may_fuse(given) or (interface and not is_ours(core)) or is_relative(given):
        return None
    x, rotary = given.tokens, bool(given.rotary)
    reading = cached_reading(
        module,
        (x.shape[-1], x.dtype, rotary),
        lambda: attention_of(row, module, x, rotary, formulas),
        may_be_hooked=lambda: (module, core),
        views=len(row.projections) == 1,
    )
    call = None if reading is None else call_of(core, reading[0], given, interface)
    if reading is None or call is None:
        return None
    projections, dropout = reading
    if watched():
        if not is_fused_attention(call.tokens, projections, mask=call.masks[0], cache=call.caches[0]):
            return None
        output: Tensor | None = _observed_attention(core, projections, given, call, x)
    else:
        output = fused_attention(
            call.tokens, projections, mask=call.masks[0], cache=call.caches[0], angles=call.rotary[0]
        )
        if output is not None:
            count_tokens(call.growing, x)
    if output is None or dropout == 0.0:
        return output
    assert row.dropout is not None
    dropped: Tensor = at(module, row.dropout)(output)
    return dropped


def layer_output(
    match: LayerMatch, layer: Any, given: Arguments, *, formulas: Formulas, interface: bool
) -> Tensor | None:
    """What a layer returns; None if the original code is to compute it."""
    if not may_fuse(given) or (given.memory is not None) != (len(match.attentions) > 1):
        return None
    try:
        modules = [at(layer, path) for path in match.row.attentions]
        cores = [at(module, attention.core) for module, attention in zip(modules, match.attentions, strict=True)]
    except AttributeError:
        # An attention was replaced by another module.
        return None
    if any(map(hooked, {*modules, *cores})) or (interface and not all(map(is_ours, cores))):
        return None
    x, rotary = given.tokens, bool(given.rotary)

    stack = cached_reading(
        layer,
        (x.shape[-1], x.dtype, rotary),
        lambda: layer_of(match, layer, x, rotary, formulas),
        may_be_hooked=lambda: (layer, *modules, *cores),
        views=match.has_views,
    )
    if match.is_disentangled:
        given = _with_zeros_read(given)
    call = None if stack is None else call_of(cores[0], stack.attentions[0], given, interface)
    if call is not None and stack is not None and len(cores) > 1:
        call = with_memory(call, cores[1], stack.attentions[1], given)
    if stack is None or call is None:
        return None
    if is_relative(given) or (match.is_disentangled and cores[0].relative_attention):
        return _relative_layer(match, layer, stack, cores, given, call)
    # Padding has places in a cache.
    unpadded = unpadded_of(layer, given) if given.memory is None and given.cache is None else None
    if watched() or takes_parts():
        return _observed_layer(stack, cores, given, call, unpadded)
    return run_fused(stack, call.without_padding(unpadded))


def is_relative(given: Arguments) -> bool:
    return not given.bias is given.distances is given.embeddings is None


def _with_zeros_read(given: Arguments) -> Arguments:
    """A call whose mask has 0 where it forbids, which is not added to scores."""
    mask = given.mask
    if type(mask) is not Tensor or not mask.is_cpu or mask.shape[1] != 1:
        return given
    return replace(given, mask=symbolic_mask(mask, zero_forbids=True))


def _relative_layer(
    match: LayerMatch, layer: Any, stack: Stack, cores: Sequence[Any], given: Arguments, call: LayerCall
) -> Tensor | None:
    """A layer that adds to scores by relative positions: fused if it adds a bias that learns nothing, else op by op."""
    core, length = cores[0], given.tokens.shape[1]
    if given.cache is not None or given.memory is not None:
        return None
    if match.is_disentangled:
        if given.bias is not None or given.distances is None or given.embeddings is None or given.mask is None:
            return None
        if not core.relative_attention:
            return None
        buckets = buckets_of(given.distances, length)
        if buckets is None or not are_plain(given.tokens, given.embeddings):
            return None
        terms = partial(disentangled_bias, core, buckets=buckets, embeddings=given.embeddings)
        return _observed_layer(stack, cores, given, call, None, _Relative(terms=terms))
    bias = given.bias
    if bias is None or given.distances is not None or given.embeddings is not None:
        return None
    if not are_plain(given.tokens, bias) or bias.dim() != _AXES + 1 or bias.shape[2:] != (length, length):
        return None
    rule = bias_rule(bias)
    unpadded = None
    if rule.relative and type(given.mask) is Tensor:
        # Distances within a packed sequence are those in its row.
        unpadded = unpadded_of(layer, replace(given, mask=symbolic_mask(given.mask)))
    if watched() or takes_parts() or (torch.is_grad_enabled() and bias.requires_grad):
        return _observed_layer(stack, cores, given, call, unpadded, _Relative((rule,)))
    return run_fused(stack.with_rules((rule,)), call.without_padding(unpadded))


def run_fused(stack: Stack, call: LayerCall) -> Tensor | None:
    """The output of layers; None if the operator does not take them."""
    output = fused_layers(call.tokens, stack, call.masks, call.caches, call.rotary)
    if output is None:
        return None
    count_tokens(call.growing, call.tokens[0])
    return output if call.packed is None else call.packed.unpack(output[0])


def unpadded_of(layer: Any, given: Arguments) -> tuple[Packed, Mask] | None:
    """How to remove padding, and the mask of the packed tokens; None if this is not wanted or saves no time."""
    x, mask = given.tokens, given.mask
    if type(mask) is not MaskTensor or not getattr(layer, "leaves_padding_out", True):
        return None
    packing = mask.packed()
    if packing is None or packing[0].size != x.shape[:2]:
        return None
    padding = x.shape[0] * x.shape[1] - len(packing[0].places)
    # A sequence that is padded to the left has the bits that it has alone only without its padding.
    return packing if is_invariant() or padding * x.shape[2] ** 2 >= LEAST_UNPADDED else None


# ---- the same op by op, for observers, and for scores that learn --------------------------------------------


@dataclass(frozen=True)
class _Relative:
    """What is added to a call's scores by relative positions: rules, or a function of queries and keys."""

    rules: tuple[ScoreRule, ...] = ()
    terms: Callable[[Tensor, Tensor], Tensor | None] | None = None

    def of(self, query: Tensor, key: Tensor) -> tuple[ScoreRule, ...]:
        """The rules of a call."""
        bias = None if self.terms is None else self.terms(query, key)
        return self.rules if bias is None else (*self.rules, DenseBias(bias))


def _observed_layer(
    stack: Stack,
    cores: Sequence[Any],
    given: Arguments,
    call: LayerCall,
    unpadded: tuple[Packed, Mask] | None,
    relative: _Relative = _Relative(),
) -> Tensor | None:
    (parts,) = stack.layers
    sublayers: list[Callable[[Tensor], Tensor]] = [
        partial(_observed_attention, cores[0], parts.attentions[0], given, call, relative=relative)
    ]
    if given.memory is not None:
        sublayers.append(partial(_observed_memory, cores[1], parts.attentions[1], given, call.caches[1]))
    output = of_parts(call.tokens, stack, call.masks, [*sublayers, partial(_fed, parts)], call.caches)
    if output is None or unpadded is None:
        return output
    return unpadded[0].unpack(unpadded[0].pack(output))


def _observed_attention(
    core: Any,
    projections: Projections,
    given: Arguments,
    call: LayerCall,
    x: Tensor,
    relative: _Relative = _Relative(),
) -> Tensor:
    """Attention to a layer's own tokens ``x``, as an observer sees it."""
    counts = (projections.num_heads, projections.num_kv_heads, projections.num_kv_heads)
    projected = [project(x, *layer, path=NATIVE) for layer in projections.sources]
    for place, (kind, pair) in enumerate(projections.head_norms):
        heads = projected[place].unflatten(-1, (counts[place], -1))
        projected[place] = normed(heads, (kind, pair)).flatten(-2)
    if len(projected) == 1:
        projected = [*projected[0].split([count * projections.head_dim for count in counts], dim=-1)]
    query, key, value = (
        part.unflatten(-1, (count, -1)).transpose(1, 2) for part, count in zip(projected, counts, strict=True)
    )
    (angles,) = call.rotary
    if angles is not None:
        query, key = rotated_by_token(query, angles), rotated_by_token(key, angles)
    if given.cache is not None:
        key, value = of_own_tokens(given.cache).update(key, value, core.layer_idx)
    causal = call.causal and given.mask is None and x.shape[1] > 1
    output = planned(
        core,
        query,
        key,
        value,
        given.mask,
        rules=(*projections.rules(), *relative.of(query, key)),
        scale=projections.scale,
        causal=causal,
        dropout=projections.dropout,
    )
    return project(output.flatten(-2), *projections.last, path=NATIVE)


def _observed_memory(
    core: Any, projections: Projections, given: Arguments, view: CacheView | None, x: Tensor
) -> Tensor:
    """Attention to a memory, as an observer sees it."""

    def heads(rows: Tensor, layer: Layer, count: int) -> Tensor:
        by_head: Tensor = project(rows, *layer, path=NATIVE).unflatten(-1, (count, -1)).transpose(1, 2)
        return by_head

    query = heads(x, projections.sources[0], projections.num_heads)
    if view is None:
        assert given.memory is not None
        key, value = (heads(given.memory, layer, projections.num_kv_heads) for layer in projections.sources[1:])
    else:
        key, value = view.key, view.value
    output = planned(
        core,
        query,
        key,
        value,
        given.memory_mask,
        rules=(),
        scale=projections.scale,
        causal=False,
        dropout=projections.dropout,
    )
    return project(output.flatten(-2), *projections.last, path=NATIVE)


def _fed(parts: LayerParts, x: Tensor) -> Tensor:
    *gate, expand, contract = parts.feedforward
    output = project_activate_project(
        x, *expand, *contract, gate=gate[0] if gate else None, activation=parts.activation, dropout=parts.hidden
    )
    assert output is not None
    return output
