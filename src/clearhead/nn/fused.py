"""Attention with its projections, and whole layers, as one operator: which calls it takes, and its arguments.

``fused_attention`` and ``fused_layers`` return None if a part would not use the CPU kernels by itself, or if a part is
observed, hooked or edited: the caller then runs op by op, with bitwise identical results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from types import NoneType
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.backends import native
from clearhead.batch_part import origin_of, row_numbers
from clearhead.choices import SMALL, attention_path, covers, is_invariant, overrides
from clearhead.dispatch import choose
from clearhead.errors import UnsupportedError
from clearhead.int8_rows import is_quantized
from clearhead.masks import Mask
from clearhead.masks.base import conjuncts
from clearhead.masks.parts import band_of, is_padding, is_table, parts_of
from clearhead.nn.cache_view import CacheView
from clearhead.nn.dropout import drop
from clearhead.nn.norm import normed, normed_by_torch
from clearhead.nn.packed_rows import by_sequence
from clearhead.nn.spec import NormLike, Projections, Stack
from clearhead.nn.unfused import Attended, run_attention, run_layer
from clearhead.ops.attention import mask_options, options_of
from clearhead.ops.block import MALFORMED, PLAIN, Recompute, Tape, run_blocks
from clearhead.ops.dropout import LEVELS
from clearhead.ops.library import library
from clearhead.paged_step import PagedStep
from clearhead.positions import MOST_POSITIONS, Rotary, table_of
from clearhead.problem import Problem, draw_seed
from clearhead.projection import DTYPES, NATIVE, are_plain, choices, takes_small, unrecorded
from clearhead.shapes import Float
from clearhead.statistics import Want
from clearhead.torch_private import modules_are_hooked
from clearhead.watch import watched

__all__ = ["fused_attention", "fused_layers", "is_fused_attention", "of_parts", "takes_parts"]

_FUNCTION: Final = "attention"
_NOTHING: Final = Want()
#: Of scales that need no check.
_SCALES: Final = (float, NoneType)

Tokens: TypeAlias = Sequence[Float[Tensor, "*batch _len _width"]]
#: Where a call's dropout begins: the first batch entry, head and key of attention; the numbers of activations' rows.
_Places: TypeAlias = tuple[tuple[int, int, int], Tensor | int]
_WHOLE: Final[_Places] = (0, 0, 0), 0


class _AttentionCall(NamedTuple):
    """What one attention reads besides tokens and weights, as ``fused_attention`` takes it."""

    mask: Mask | None = None
    query_offset: int | None = None
    cache: CacheView | None = None

    @property
    def grows(self) -> bool:
        """Whether the call's own tokens are appended to a cache first."""
        return self.cache is not None and self.cache.grows

    @property
    def cache_traits(self) -> tuple[object, ...] | None:
        """What the call says of its cache, besides tensors."""
        return None if self.cache is None else self.cache.traits

    @property
    def cached(self) -> int:
        """Tokens before the first query in a growing cache."""
        return self.cache.length if self.cache is not None and self.cache.grows else 0

    def keys(self, tokens: Tokens) -> int:
        """How many keys the queries may attend to."""
        if self.cache is None:
            return tokens[-1].shape[1]
        return self.cache.length + (tokens[0].shape[1] if self.cache.grows else 0)


def fused_attention(
    tokens: Tokens,
    projections: Projections,
    *,
    mask: Mask | None = None,
    query_offset: int | None = None,
    cache: CacheView | None = None,
    angles: Float[Tensor, "_rows head_dim"] | None = None,
) -> Float[Tensor, "*batch _len _out"] | None:
    """Project to heads, attend, and project back, in one operator.

    ``concat_h(attention(x Wq_h, y Wk_h, y Wv_h)) Wo``, where ``y`` is ``x`` itself or a memory.

    Args:
        tokens: ``[batch, len, in]`` of those that attend, and of the memory where they read one.
        projections: the attention layer.
        mask: which keys a query may attend to.
        query_offset: position of the first query.
        cache: cached keys and values; where the cache grows, those of ``tokens`` are appended, and the first query
            follows the cached tokens. ``tokens`` are those that attend alone.
        angles: RoPE cos and sin of the call's tokens, where ``projections.rotary`` is ``"angles"``.

    Returns:
        ``[batch, len, out]``, or None (see the module's first lines).

    Raises:
        ShapeError, MaskError, UnsupportedError: as ``attention``.

    Cost: that of the parts. Saved for backward are ``tokens``, queries, keys, values, the heads' output, in 16 bits
    beyond 256 tokens in float32 too, and two numbers for each row of scores.
    """
    if watched() or not _may_fuse(tokens):
        return None
    training, call = _learns(tokens, projections), _AttentionCall(mask, query_offset, cache)
    attended = _attended(tokens, projections, training, call) if _takes(tokens, projections, training) else None
    if attended is None:
        return None
    tape, seed = projections.tape.copy(), draw_seed(projections.dropout)
    origin = origin_of(tokens[0].shape) if projections.dropout else _WHOLE[0]
    _write_call(tape, projections, attended, seed, cache, angles, origin)
    return _run(tokens, tape, _recomputing(projections, attended, seed, angles) if training else None)


def _recomputing(projections: Projections, attended: Attended, seed: int, angles: Tensor | None) -> Recompute:
    def recompute(places: Mapping[int, Tensor], copies: Sequence[Tensor]) -> Tensor:
        return run_attention(projections.mapped(_change(places)), attended, copies, seed, angles)

    return recompute


def is_fused_attention(tokens: Tokens, projections: Projections, **options: Any) -> bool:
    """Whether ``fused_attention`` would take the call if it were not observed.

    Args:
        tokens: as ``fused_attention`` takes them.
        projections: the attention layer.
        options: ``mask``, ``query_offset`` and ``cache``, as ``fused_attention`` takes them.
    """
    if not _may_fuse(tokens):
        return False
    training, call = _learns(tokens, projections), _AttentionCall(**options)
    return _takes(tokens, projections, training) and _attended(tokens, projections, training, call) is not None


def fused_layers(
    tokens: Tokens,
    stack: Stack,
    masks: Sequence[Mask | None],
    caches: Sequence[CacheView | None] = (),
    angles: Sequence[Float[Tensor, "_rows head_dim"] | None] = (None,),
) -> Float[Tensor, "*batch _len _width"] | None:
    """The output of a stack of layers, in one operator.

    Args:
        tokens: ``[batch, len, width]`` of the layers' own and, where they attend to one, of the memory.
        stack: the layers, a single one where a gradient is wanted.
        masks: of each attention of each layer; or of one layer, the same for all.
        caches: what each attention of each layer reads from a cache, where one does; a cached memory is not among
            ``tokens``. Without caches those of one layer are enough.
        angles: RoPE cos and sin of the call's tokens, where attentions are rotated by ``"angles"``: of each layer, or
            one for all.

    Returns:
        ``[batch, len, width]``, or None (see the module's first lines).

    Raises:
        MaskError: a mask does not fit.

    Cost: that of the parts. Saved for backward are ``tokens``, the sums and what is normed, queries, keys, values, the
    heads' output, the feedforward's activations and, but for a ReLU, their slopes.
    """
    if watched() or not _may_fuse(tokens):
        return None
    training = _learns(tokens, stack)
    if training and len(stack.layers) > 1:
        return None
    calls = _calls_of(stack, masks, caches)
    attended = _attended_by_layers(tokens, stack, training, calls)
    if attended is None:
        return None
    places = _places_of(tokens[0], masks[0]) if stack.drops_any else _WHOLE
    tape = stack.tape.copy()
    seeds = _write_calls(tape, stack, attended, calls, caches, angles, places)

    def recompute(changed: Mapping[int, Tensor], copies: Sequence[Tensor]) -> Tensor:
        return run_layer(stack.layers[0].mapped(_change(changed)), attended[0], copies, seeds, angles[0], places[1])

    return _run(tokens, tape, recompute if training else None)


def of_parts(
    tokens: Tokens,
    stack: Stack,
    masks: Sequence[Mask | None],
    sublayers: Sequence[Callable[[Tensor], Tensor]],
    caches: Sequence[CacheView | None] = (),
) -> Float[Tensor, "*batch _len _width"] | None:
    """A layer's output op by op, with the bits of ``fused_layers``, for observers and hooks.

    Args:
        tokens: as ``fused_layers`` takes them.
        stack: one layer.
        masks: of each attention.
        sublayers: the layer's attentions and its feedforward.
        caches: what each attention reads from a cache.

    Returns:
        ``[batch, len, width]``; None where ``fused_layers`` would not take the layer.
    """
    if not (_is_batch(tokens) and (overrides().fused is not False or is_invariant())):
        return None
    if _attended_by_layers(tokens, stack, _learns(tokens, stack), _calls_of(stack, masks, caches)) is None:
        return None
    (parts,) = stack.layers
    x = like = tokens[0]

    def norm(x: Tensor, norm_like: NormLike) -> Tensor:
        return normed(x, norm_like) if _are_alike(x, like) else normed_by_torch(x, norm_like)

    def plus(x: Tensor, levels: int, y: Tensor) -> Tensor:
        # A hook may return any tensor.
        if _are_alike(x, like) and _are_alike(y, like):
            return drop(y, levels, x)
        return x + F.dropout(y, levels / LEVELS)

    results: Sequence[NormLike | None] = parts.result_norms or [None] * len(sublayers)
    for sublayer, norm_like, last, levels in zip(sublayers, parts.norms, results, parts.drop_levels, strict=True):
        with by_sequence(masks[0]):
            given = sublayer(norm(x, norm_like) if parts.norm_first else x)
            x = plus(x, levels, given if last is None else norm(given, last))
        x = x if parts.norm_first else norm(x, norm_like)
    return x


# ---- which calls are taken -------------------------------------------------------------------------------------------


def _may_fuse(tokens: Tokens) -> bool:
    """Whether layers may be fused, and the tokens are a batch."""
    return overrides().fused is not False and _is_batch(tokens)


def takes_parts() -> bool:
    """Whether layers run op by op with the bits of fused ones, without an observer.

    The test helper ``forbid_fused`` asks for that under ``set_invariant(True)``; else torch's norms are part of it.
    """
    return overrides().fused is False and is_invariant()


def _is_batch(tokens: Tokens) -> bool:
    """Whether no compiler runs, no global module hook is set, and the tokens are a batch."""
    if torch.compiler.is_compiling() or modules_are_hooked():
        return False
    shapes = [each.shape for each in tokens]
    return all(len(shape) == 3 and 0 not in shape and shape[0] == shapes[0][0] for shape in shapes)


def _learns(tokens: Tokens, spec: Projections | Stack) -> bool:
    """Whether a gradient may be wanted."""
    return torch.is_grad_enabled() and any(part.requires_grad for part in (*tokens, *spec.tape.tensors))


def _are_alike(x: Tensor, like: Tensor) -> bool:
    return are_plain(x, like) and x.shape == like.shape


def _run(tokens: Tokens, tape: Tape, recompute: Recompute | None) -> Tensor | None:
    """The operator's output; None if it refuses the tensors: op by op, the part that they do not fit raises."""
    try:
        return run_blocks(tokens, tape, recompute)
    except RuntimeError as error:
        if MALFORMED in str(error):
            raise
        UnsupportedError.from_operator(error)
        return None


def _is_plain(tokens: Tokens, spec: Projections | Stack) -> bool:
    """Whether the operator may read the tensors; it checks dtypes, sizes and strides itself."""
    dtype = tokens[0].dtype
    if dtype not in DTYPES or not covers(dtype) or not unrecorded() or library() is None:
        return False
    return spec.tape.is_plain and all(type(each) in PLAIN and each.is_cpu for each in tokens)


def _takes_gemms(tokens: Tokens, spec: Projections | Stack, training: bool) -> bool:
    """Whether the table names the kernels for every layer's GEMM. Small GEMMs always are the kernels': within a block
    their calls cost nothing."""
    dtype = tokens[0].dtype
    chosen = choices(dtype) if training else choices(dtype)[:1]
    if all(choice.path == NATIVE.name for choice in chosen):
        return True
    rows = max(each.shape[0] * each.shape[1] for each in tokens)
    floats = [weight for weight, _ in spec.linears if isinstance(weight, Tensor)]
    return not floats or (takes_small(dtype) and all(rows * weight.numel() < SMALL for weight in floats))


def _takes(tokens: Tokens, spec: Projections | Stack, training: bool) -> bool:
    """Whether every part but attention would use the kernels. Weights of integers and packed ones have no way back."""
    if training and not all(isinstance(weight, Tensor) for weight, _ in spec.linears):
        return False
    return _is_plain(tokens, spec) and _takes_gemms(tokens, spec, training)


def _calls_of(
    stack: Stack, masks: Sequence[Mask | None], caches: Sequence[CacheView | None]
) -> list[list[_AttentionCall]]:
    """What the attentions of each layer read; of the first layer alone if it is the same for all, besides tensors of
    caches."""
    count, views = len(stack.layers[0].attentions), [*caches] or [None] * len(masks)
    traits = [None if view is None else view.traits for view in views]
    if stack.repeats and len(masks) == count and traits == traits[:count] * (len(views) // count):
        views = views[:count]
    elif len(views) == count:
        views *= len(stack.layers)
    calls = [_AttentionCall(mask, None, view) for mask, view in zip(cycle(masks), views, strict=False)]
    return [calls[start : start + count] for start in range(0, len(calls), count)]


def _attended_by_layers(
    tokens: Tokens, stack: Stack, training: bool, calls: Sequence[Sequence[_AttentionCall]]
) -> list[list[Attended]] | None:
    """The operator's arguments for the attentions of each layer of ``calls``; None if a part would not use the
    kernels."""
    if stack.drops_all or (training and stack.norms_results) or not _takes(tokens, stack, training):
        return None
    attended = list[list[Attended]]()
    for index, (parts, calls_of_layer) in enumerate(zip(stack.layers, calls, strict=False)):
        same = next((place for place in range(index) if _says_the_same(stack, calls, place, index)), None)
        if same is not None:
            attended.append(attended[same])
            continue
        of_layer = [
            _attended(tokens if place else tokens[:1], attention, training, call)
            for place, (attention, call) in enumerate(zip(parts.attentions, calls_of_layer, strict=True))
        ]
        if None in of_layer:
            return None
        attended.append([each for each in of_layer if each is not None])
    return attended


def _says_the_same(stack: Stack, calls: Sequence[Sequence[_AttentionCall]], place: int, other: int) -> bool:
    """Whether the calls of two layers are the same but for their tensors."""
    if stack.same_as[place] != stack.same_as[other]:
        return False
    pairs = zip(calls[place], calls[other], strict=True)
    return all(one.mask is two.mask and one.cache_traits == two.cache_traits for one, two in pairs)


def _attended(tokens: Tokens, projections: Projections, training: bool, call: _AttentionCall) -> Attended | None:
    """The operator's arguments for an attention besides its tensors; None if it would not use the kernels."""
    cache = call.cache
    if cache is not None and not _reads_cache(cache, tokens[0], training):
        return None
    if projections.head_norms and (training or len(projections.sources) < 3):
        return None
    if cache is not None and cache.step is not None:
        return _over_pages(cache.step, projections, call)
    attended = _in_a_band(tokens, projections, training, call)
    if attended is None:
        attended = _validated(tokens, projections, call)
    if attended is None or not isinstance(projections.rotary, Rotary):
        return attended
    length, keys = tokens[0].shape[1], call.keys(tokens)
    if attended.query_offset < 0 or (call.query_offset is None and not call.grows and length != keys):
        return None
    # A table is made for as many positions as the cache has capacity for, so that it serves later tokens too.
    capacity = cache.key.shape[2] if cache is not None and cache.grows else keys
    positions = max(attended.query_offset + length, capacity)
    return attended._replace(positions=positions) if positions <= MOST_POSITIONS else None


def _over_pages(step: PagedStep, projections: Projections, call: _AttentionCall) -> Attended | None:
    """The arguments of a call that reads pages: a causal band, without rules, which the op-by-op road has."""
    band = None if call.mask is None else band_of(call.mask)
    plain = type(projections.scale) in _SCALES and projections.backend in ("auto", native.BACKEND.name)
    if band is None or band[1] != 0 or not plain or projections.rules() or call.query_offset is not None:
        return None
    if projections.dropout or step.longest > MOST_POSITIONS:
        return None
    scale = projections.head_dim**-0.5 if projections.scale is None else projections.scale
    options = {name: bound for name, bound in zip(("before", "after"), band, strict=True) if bound is not None}
    return Attended(call.mask, (), scale, 0.0, 0, options, step.longest)


def _in_a_band(tokens: Tokens, projections: Projections, training: bool, call: _AttentionCall) -> Attended | None:
    """The arguments of most calls: no rules, a mask of bands, padding and tables, unambiguous positions. None for
    others."""
    if projections.rules() or call.query_offset is not None or type(projections.scale) not in _SCALES:
        return None
    mask, (batch, q_len, _), k_len = call.mask, tokens[0].shape, call.keys(tokens)
    if mask is not None and q_len != k_len and not call.grows:
        return None
    if projections.backend != native.BACKEND.name:
        path = attention_path(tokens[0].dtype, q_len, k_len, causal=mask is not None, gradient=training)
        if projections.backend != "auto" or path != native.BACKEND.name:
            return None
    options: dict[str, Any] | None = {}
    if mask is not None:
        options = _mask_options(mask, (batch, projections.num_heads, q_len, k_len), call.cached)
    if options is None:
        return None
    scale = projections.head_dim**-0.5 if projections.scale is None else projections.scale
    return Attended(mask, (), scale, projections.dropout, call.cached, options)


def _mask_options(mask: Mask, size: tuple[int, int, int, int], offset: int) -> dict[str, Any] | None:
    """The operator's arguments for bands, padding, tables and their ``&``; None for other masks."""
    band = band_of(mask)
    if band is not None:
        return {name: bound for name, bound in zip(("before", "after"), band, strict=True) if bound is not None}
    if not all(band_of(part) is not None or is_padding(part) or is_table(part) for part in conjuncts(mask)):
        return None
    mask.check(_FUNCTION, *size[:2], range(offset, offset + size[2]), size[3])
    parts = parts_of(mask, size, offset)
    return None if parts.rest else mask_options(parts)


def _validated(tokens: Tokens, projections: Projections, call: _AttentionCall) -> Attended | None:
    """The arguments of any other call, validated and lowered as ``attention`` does; None if another backend is
    chosen."""
    problem = Problem.of(
        _FUNCTION,
        *_hollow(tokens, projections, call),
        mask=call.mask,
        scores=projections.rules(),
        scale=projections.scale,
        dropout=projections.dropout,
        seed=0,
        query_offset=call.cached if call.grows else call.query_offset,
    )
    learned = torch.is_grad_enabled() and problem.rule_parameters
    if learned or choose(_FUNCTION, problem, _NOTHING, projections.backend) is not native.BACKEND:
        return None
    # A score function becomes the kernels' rules where tracing finds some.
    problem = problem.with_traced_rules
    options, _ = options_of(problem)
    return Attended(problem.mask, problem.scores, problem.scale, problem.dropout, problem.query_offset, options)


def _reads_cache(cache: CacheView, x: Tensor, training: bool) -> bool:
    """Whether the operator reads a cache."""
    same = cache.key.dtype is x.dtype or is_quantized(cache.key)
    return not training and {type(cache.key), type(cache.value)} <= PLAIN and same


def _hollow(tokens: Tokens, projections: Projections, call: _AttentionCall) -> tuple[Tensor, ...]:
    """Queries, keys and values of the right shapes, without storage."""
    x, cache = tokens[0], call.cache
    nothing, batch, dim = x.new_empty(1), x.shape[0], projections.head_dim
    query = nothing.expand(batch, x.shape[1], projections.num_heads, dim).transpose(1, 2)
    if cache is None:
        keys = nothing.expand(batch, tokens[-1].shape[1], projections.num_kv_heads, dim).transpose(1, 2)
        return query, keys, keys
    length, empty = call.keys(tokens), nothing.to(cache.key.dtype)
    return query, *(empty.expand(*part.shape[:2], length, part.shape[3]) for part in (cache.key, cache.value))


# ---- the operator's arguments ----------------------------------------------------------------------------------------


def _write_call(
    tape: Tape, projections: Projections, attended: Attended, seed: int, cache: CacheView | None,
    angles: Tensor | None, origin: tuple[int, int, int],
) -> None:  # fmt: skip
    """Append an attention's arguments that differ from call to call."""
    if projections.rotary is not None:
        table = (
            table_of(projections.rotary, projections.head_dim, attended.positions)
            if isinstance(projections.rotary, Rotary)
            else angles
        )
        assert table is not None
        tape.tensors.append(table)
    if cache is None:
        tape.integers.append(0)
    elif cache.step is not None:
        tape.integers.append(3)
        tape.tensors += [part for part in cache.step.table if part is not None]
        tape.caches += (cache.key, cache.value)
    else:
        tape.integer(1 if cache.grows else 2, cache.length)
        tape.caches += (cache.key, cache.value)
    tape.numbers += (attended.scale, attended.dropout)
    tape.integers += (seed, attended.query_offset, *origin, 0 if cache is None else cache.dropped)
    tape.optional(attended.options.get("token_numbers"))
    tape.mask(attended.options)
    tape.rules(attended.options)


def _write_calls(
    tape: Tape, stack: Stack, attended: Sequence[Sequence[Attended]], calls: Sequence[Sequence[_AttentionCall]],
    caches: Sequence[CacheView | None], angles: Sequence[Tensor | None], places: _Places,
) -> list[int]:  # fmt: skip
    """Append what differs from call to call, for each layer, or for all where ``calls`` are the first one's; the last
    one's seeds of dropout."""
    (origin, rows), seeds = places, list[int]()
    tape.integer(len(calls) < len(stack.layers))
    for parts, of_layer, calls_of_layer, table in zip(stack.layers, attended, calls, cycle(angles), strict=False):
        seeds = [*map(draw_seed, parts.drops)]
        for place, attention in enumerate(parts.attentions):
            cache, seed = calls_of_layer[place].cache, seeds[2 * place]
            _write_call(tape, attention, of_layer[place], seed, cache, table, origin)
        tape.seeds((seeds[-2], *seeds[1::2]), rows)
    written = sum(map(len, calls))
    tape.caches += [part for view in caches[written:] if view is not None for part in (view.key, view.value)]
    return seeds


def _places_of(x: Tensor, mask: Mask | None) -> _Places:
    """Where dropout begins in a layer of tokens ``x``, which ``mask`` may pack."""
    with by_sequence(mask):
        return origin_of(x.shape), row_numbers(x.shape)


def _change(places: Mapping[int, Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: places.get(id(tensor), tensor)
