"""torch's ``scaled_dot_product_attention``, for calls on which it agrees with the specification."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from clearhead.backends import tiled
from clearhead.backends.capability import Backend, Capability
from clearhead.backends.containment import Contained, all_finite, is_readable, matmul
from clearhead.choices import padded_keys
from clearhead.masks import Causal
from clearhead.masks.base import carried_sizes, does_as
from clearhead.masks.segments import Order, Segment, Segments
from clearhead.ops.kinds import DTYPES
from clearhead.problem import Problem
from clearhead.scores import Alibi, DenseBias, RelativeBias
from clearhead.statistics import Observation, Want
from clearhead.tensors import is_hollow, traces, without_overlap
from clearhead.torch_private import differentiates_forward, transforms

__all__ = ["BACKEND", "asks_flags", "unfused_attention"]

#: The largest mask, in entries, that is computed for torch; above it the tiles are faster.
_MAX_MASK_ENTRIES: Final = 2**24
#: The largest score matrix where torch has no fused path.
_MAX_UNFUSED_SCORES: Final = 2**24
#: With fewer keys (a register of floats) torch's CPU kernel may treat a row of NaN as an empty row.
_FEW_KEYS: Final = 16

_Bounds = tuple[Tensor | None, bool, Tensor | None]


def _also(problem: Problem) -> list[str]:
    """Reasons that depend on sizes, and at last on elements, since reading them takes a pass."""
    if differentiates_forward():
        return ["does not support forward-mode differentiation"]
    unasked = _sees_all(problem) or (_plain_causal(problem) and is_hollow(problem.key))
    if not unasked and not (is_readable(problem.key) and is_readable(problem.value)):
        return ["spreads NaN from masked keys, and the elements cannot be checked"]
    entries = _mask_entries(problem)
    if entries > _MAX_MASK_ENTRIES:
        return [f"would need a mask of {entries:,} entries (limit {_MAX_MASK_ENTRIES:,})"]
    pairs = problem.q_len * problem.k_len if problem.segments is None else problem.segments.scores
    scores = problem.batch * problem.num_heads * pairs
    uneven = problem.value_dim != problem.head_dim and (problem.needs_gradient or problem.query.device.type != "cpu")
    unfused = uneven or any(rule.requires_grad for rule in problem.rule_parameters)
    if unfused and scores > _MAX_UNFUSED_SCORES:
        return [f"has no fused path here and would need memory for {scores:,} scores (limit {_MAX_UNFUSED_SCORES:,})"]
    # On an accelerator this check would synchronise, so there a mask means another backend.
    if problem.mask is not None and not _sees_all(problem):
        if problem.query.device.type != "cpu" or is_hollow(problem.key):
            return (
                []
                if _plain_causal(problem)
                else ["spreads NaN from masked keys, and a check for it would synchronise the device"]
            )
        if not all_finite(problem.key, problem.value):
            return ["spreads NaN and inf from masked keys, and key or value contains some"]
        if problem.needs_gradient and not all_finite(problem.query):
            return ["spreads NaN and inf of a query to masked keys in backward, and query contains some"]
    return []


def _mask_entries(problem: Problem) -> int:
    """Entries of the mask or bias that torch would need."""
    if asks_flags(problem):
        return 0
    if problem.segments is not None:
        return problem.segments.scores * (problem.num_heads if problem.scores else 1)
    batch, heads = carried_sizes(problem.mask) if problem.mask is not None else (1, 1)
    heads = max([heads, *(problem.num_heads for _ in problem.scores)])
    return batch * heads * problem.q_len * problem.k_len


def _sees_all(problem: Problem) -> bool:
    """Whether no key of a call to torch is masked: there is no mask, it is causal and all queries follow the last key,
    or it only separates packed sequences, each of which is a call."""
    if problem.mask is None:
        return True
    if problem.segments is not None:
        return problem.segments.sees_all
    return does_as(problem.mask, Causal) and problem.query_offset >= problem.k_len - 1


def _plain_causal(problem: Problem) -> bool:
    return does_as(problem.mask, Causal) and problem.query_offset == 0


def asks_flags(problem: Problem) -> bool:
    """Whether torch needs no mask: without rules, and either all keys are allowed or its causal flag suffices."""
    if problem.scores:
        return False
    if problem.segments is not None:
        return problem.segments.asks_flags
    return _sees_all(problem) or _plain_causal(problem)


def run(problem: Problem, want: Want) -> Observation:
    """Output through ``scaled_dot_product_attention``."""
    if not _contains_arrivals(problem):
        output = _run(problem)
        return tiled.run(problem, want) if _is_undefined(problem, output) else Observation(output=output)
    arrival = _Arrival(problem.without_elements())
    output = _run(problem.with_tensors(*arrival.watched(problem)))
    if _is_undefined(problem, output):
        return tiled.run(problem, want)
    output.register_hook(arrival.arrive)
    return Observation(output=output)


def _is_undefined(problem: Problem, output: Tensor) -> bool:
    """Whether the output has NaN or infinity, which torch's kernels spread in backward under a mask, or which may be a
    row whose every score is minus infinity. On an accelerator the check would synchronise."""
    plain = problem.query.device.type == "cpu" and not (traces() or transforms() or differentiates_forward())
    if not plain or not is_readable(output) or all_finite(output):
        return False
    return not bool(torch.isfinite(output).all())


def _contains_arrivals(problem: Problem) -> bool:
    """Whether the output's gradient must be checked for NaN, and can be: on a CPU, without a trace or transform."""
    masked = problem.mask is not None and not _sees_all(problem)
    # A trace records no hooks.
    plain = problem.query.device.type == "cpu" and not (traces() or transforms())
    return masked and plain and problem.needs_gradient and not problem.rule_parameters and is_readable(problem.query)


class _Arrival:
    """Hooks of a masked call's gradients: torch's kernels, which spread NaN and infinity, get 0 in their place."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.spoiled_grads: list[Tensor] | None = None

    def watched(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
        """Views of query, key and value, with hooks on their gradients."""
        views = [tensor.view_as(tensor) for tensor in (problem.query, problem.key, problem.value)]
        for place, tensor in enumerate(views):
            if tensor.requires_grad:
                tensor.register_hook(partial(self.leave, place))
        return views[0], views[1], views[2]

    def arrive(self, grad: Tensor | None) -> Tensor | None:
        """The output's gradient with 0 for NaN and infinity; None if it is unmodified."""
        self.spoiled_grads = None
        if grad is None or not is_readable(grad) or all_finite(grad):
            return None
        clean = Contained.of_arrived(self.problem, grad)
        nothing = [
            grad.new_zeros(()).expand(tensor.shape)
            for tensor in (self.problem.query, self.problem.key, self.problem.value)
        ]
        self.spoiled_grads = clean.spoil(nothing)
        return grad.masked_fill(clean.channels, 0.0)

    def leave(self, place: int, grad: Tensor | None) -> Tensor | None:
        """An input's gradient with NaN at the places that a row with NaN affects; None if it is unmodified."""
        return None if self.spoiled_grads is None or grad is None else grad + self.spoiled_grads[place]


def _run(problem: Problem) -> Tensor:
    if problem.segments is not None:
        return _by_segments(problem, problem.segments)
    if asks_flags(problem):
        bounds: _Bounds = (None, not _sees_all(problem), None)
    else:
        indices = problem.indices()
        allowed = None if problem.mask is None or _sees_all(problem) else problem.mask.allows(*indices)
        bounds = _bounds(problem, allowed, indices)
    return _attend(problem, problem.query, problem.key, problem.value, bounds)


def _by_segments(problem: Problem, segments: Segments) -> Tensor:
    """Packed sequences, one call for those of equal lengths."""
    q_spans = [(segment.q_start, segment.q_len) for segment in segments.segments]
    k_spans = [(segment.k_start, segment.k_len) for segment in segments.segments]
    queries, keys, values = _cut(problem.query, q_spans), _cut(problem.key, k_spans), _cut(problem.value, k_spans)
    outputs: dict[int, Tensor] = {}
    for places in segments.equal():
        query, key, value = (_stacked([parts[place] for place in places]) for parts in (queries, keys, values))
        order = segments.orders[places[0]]
        bounds = _segment_bounds(problem, segments, [segments.segments[place] for place in places], order)
        outputs |= zip(places, _attend(problem, query, key, value, bounds).split(1), strict=True)
    if not outputs:
        return _nothing(problem)
    joined, stop = [], 0
    for place, (start, length) in enumerate([*q_spans, (problem.q_len, 0)]):
        if start > stop:
            joined.append(outputs[0].new_zeros(1, problem.num_heads, start - stop, problem.value_dim))
        joined += [outputs[place]] if length else []
        stop = start + length
    # torch's output has a token's heads side by side, so this is the order in which they are copied fastest.
    return torch.cat([part.transpose(1, 2) for part in joined], dim=1).transpose(1, 2)


def _cut(packed: Tensor, spans: list[tuple[int, int]]) -> list[Tensor]:
    """Views of the packed tokens in each ``(start, length)``, of one operation: backward joins their gradients once."""
    sizes, places, stop = [], [], 0
    for start, length in spans:
        sizes += [start - stop, length]
        places.append(len(sizes) - 1)
        stop = start + length
    parts = packed.split([*sizes, packed.shape[2] - stop], dim=2)
    return [parts[place] for place in places]


def _stacked(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _nothing(problem: Problem) -> Tensor:
    """The output if no query may attend to a key: 0, with gradients of 0."""
    place = problem.query[..., :1] + (problem.key[..., :1].sum() + problem.value[..., :1].sum())
    everywhere = torch.ones((), dtype=torch.bool, device=place.device)
    return place.expand(*place.shape[:-1], problem.value_dim).masked_fill(everywhere, 0.0)


def _segment_bounds(problem: Problem, segments: Segments, equal: list[Segment], order: Order) -> _Bounds:
    """torch's mask arguments for segments of equal lengths."""
    if order != "masked" and not problem.scores:
        return None, order == "causal", None
    device = problem.query.device
    starts = torch.tensor([(segment.q_start, segment.k_start) for segment in equal], device=device)
    q_pos, k_pos = (
        starts[:, place, None] + torch.arange(length, device=device)
        for place, length in enumerate((equal[0].q_len, equal[0].k_len))
    )
    _, head, _, _ = problem.indices()
    indices = (torch.zeros_like(head[:, :1]), head, q_pos[:, None, :, None], k_pos[:, None, None, :])
    allowed = None
    for part in segments.rest:
        one = part.allows(*indices)
        allowed = one if allowed is None else allowed & one
    return _bounds(problem, allowed, indices)


def _bounds(problem: Problem, allowed: Tensor | None, indices: tuple[Tensor, Tensor, Tensor, Tensor]) -> _Bounds:
    """torch's mask argument, is_causal, and the empty rows.

    torch's kernels divide by a row's sum, so an empty row attends to all keys, and its output is set to 0 afterwards.
    """
    if not problem.scores:
        assert allowed is not None
        nothing = ~allowed.any(dim=-1, keepdim=True)
        return allowed | nothing, False, nothing
    shape = torch.broadcast_shapes(*(index.shape for index in indices))
    bias = torch.zeros(shape, dtype=problem.work_dtype, device=problem.query.device)
    for rule in problem.scores:
        bias = rule.apply(bias, *indices)
    if allowed is not None:
        bias = bias.masked_fill(~allowed, -torch.inf)
    nothing = (bias == -torch.inf).all(dim=-1, keepdim=True)
    return bias.masked_fill(nothing, 0.0), False, nothing


def _loses_digits(problem: Problem, mask: Tensor | None) -> bool:
    """Whether torch's CPU kernel accumulates sums of 16-bit inputs in 16 bits: for gradients and biases."""
    biased = mask is not None and mask.dtype != torch.bool
    return problem.needs_gradient or biased


def _is_fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, needs_gradient: bool) -> bool:
    """Whether torch's CPU kernel runs the call, with a correct treatment of NaN."""
    uneven = query.shape[-1] != value.shape[-1]
    contiguous = all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    # Its backward is inaccurate for huge scores, so these calls take the unfused formula.
    if not contiguous or (mask is not None and mask.requires_grad) or (uneven and needs_gradient):
        return False
    return key.shape[-2] >= _FEW_KEYS or (is_readable(query) and is_readable(key) and all_finite(query, key))


def _equally_wide(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The narrower heads zero-padded, which changes no score: torch's CPU kernel needs head_dim == value_dim."""
    more = query.shape[-1] - value.shape[-1]
    if more > 0:
        return query, key, pad(value, (0, more))
    return (pad(query, (0, -more)), pad(key, (0, -more)), value) if more else (query, key, value)


def _filled_up(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values zero-padded to the number that the table names, and a mask of the padding."""
    q_len, k_len = query.shape[2], key.shape[2]
    # torch takes no mask beside its causal flag, which hides the padding from queries that are no later than a key.
    if mask is not None or query.dtype not in DTYPES or (is_causal and q_len > k_len):
        return key, value, mask
    more = padded_keys(query.dtype, k_len) - k_len
    if more == 0:
        return key, value, mask
    if not is_causal:
        mask = query.new_zeros(1, 1, 1, k_len + more)
        mask[..., k_len:] = -torch.inf
    return _longer(key, more), _longer(value, more), mask


def _longer(tensor: Tensor, more: int) -> Tensor:
    """The tensor with so many more rows of 0, in its own memory order, in which it is copied fastest."""
    batch, heads, length, dim = tensor.shape
    longer = tensor.new_empty(batch, length + more, heads, dim).transpose(1, 2)
    longer[:, :, :length] = tensor
    longer[:, :, length:] = 0.0
    return longer


def unfused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """The unfused formula, by matrix multiplications that backward does not round under autocast."""
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in (key, value))
    scores = matmul(query * scale, key.mT)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return matmul(scores.softmax(dim=-1), value)


def _attend(problem: Problem, query: Tensor, key: Tensor, value: Tensor, bounds: _Bounds) -> Tensor:
    mask, is_causal, empty = bounds
    query, key, value = without_overlap(query), without_overlap(key), without_overlap(value)
    dtype = problem.query.dtype
    on_cpu = query.device.type == "cpu"
    unfused = on_cpu and not _is_fused(query, key, value, mask, problem.needs_gradient)
    # Convert only if the dtype differs: a trace would contain the operation, and differ with and without gradients.
    if dtype != problem.work_dtype and (unfused or (on_cpu and _loses_digits(problem, mask))):
        query, key, value = (tensor.to(problem.work_dtype) for tensor in (query, key, value))
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    scale = problem.scale
    if is_causal and scale <= 0.0:
        # torch's CPU kernel scales after masking, and -inf times a scale that is not positive is no mask.
        query, scale = query * scale, 1.0
    if unfused:
        output = unfused_attention(query, key, value, mask, is_causal, scale)
    else:
        if on_cpu:
            query, key, value = _equally_wide(query, key, value)
            key, value, mask = _filled_up(query, key, value, mask, is_causal)
        output = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=bool(problem.num_heads != problem.num_kv_heads),
        )[..., : problem.value_dim]
    if empty is not None:
        output = output.masked_fill(empty, 0.0)
    return output.to(dtype)


BACKEND = Backend(
    name="sdpa",
    summary="torch's fused scaled_dot_product_attention",
    capability=Capability(
        rules=(Alibi, RelativeBias, DenseBias),
        statistics=frozenset(),
        dropout=False,
        also=_also,
    ),
    run=run,
)
