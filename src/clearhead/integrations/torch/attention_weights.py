"""Attention that returns its weights, as torch's and transformers' own modules do, with gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from clearhead.backends.containment import all_finite, clean_rows, without_autocast
from clearhead.functional.exact import observe_attention
from clearhead.integrations.torch.masks import may_look
from clearhead.masks import Causal, Dense, Mask, Padding, Window
from clearhead.masks.base import Both, conjuncts, does_as, index_tensors
from clearhead.scores import DenseBias, ScoreRule, Sink
from clearhead.shapes import Bool, Float
from clearhead.statistics import Want

__all__ = ["WeightedCall", "with_weights"]

#: Weights of a call up to which the formula costs less than choosing a backend.
_FEW_WEIGHTS: Final = 2**17
#: float32 weights that are computed at a time where the result is of 16 bits.
_STRIP: Final = 2**21
#: Masks that depend on absolute positions and keys alone, and so are the same for some of a call's queries.
_OF_POSITIONS: Final = (Causal, Window, Padding)

_Index = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightedCall:
    """A call of ``attention`` whose weights are returned.

    Attributes:
        query: ``[batch, heads, q_len, head_dim]``.
        key: ``[batch, kv_heads, k_len, head_dim]``.
        value: ``[batch, kv_heads, k_len, value_dim]``.
        mask: which keys a query may attend to; None allows all.
        scores: rules, applied to scaled scores in order.
        scale: factor on ``query @ key^T``; by default ``1 / sqrt(head_dim)``.
        query_offset: position of the first query; None where nothing depends on it.
        dropout: probability of dropping a weight, drawn from torch's generator as ``torch.nn.functional.dropout`` does.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None = None
    scores: Sequence[ScoreRule] = ()
    scale: float | None = None
    query_offset: int | None = None
    dropout: float = 0.0

    @property
    def is_recorded(self) -> bool:
        """Whether autograd records the call."""
        tensors = (self.query, self.key, self.value, *(part for rule in self.scores for part in rule.parameters()))
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

    @property
    def takes_formula(self) -> bool:
        """Whether the formula computes the call: it is small, autograd records it, it drops weights, or its elements
        cannot be read."""
        few = self.num_weights < _FEW_WEIGHTS
        return few or self.dropout > 0.0 or self.is_recorded or not may_look(self.query)

    @property
    def num_weights(self) -> int:
        return self.query.shape[:3].numel() * self.key.shape[2]

    def index(self) -> _Index:
        """The indices of batch, head and positions, shaped to broadcast."""
        batch, num_heads, q_len, _ = self.query.shape
        return index_tensors(batch, num_heads, q_len, self.key.shape[2], self.query_offset or 0, self.query.device)

    def strips(self, rows: int) -> Iterator[tuple[slice, WeightedCall]]:
        """Calls of ``rows`` queries each, and the queries' places."""
        offset = self.query_offset or 0
        parts = () if self.mask is None else conjuncts(self.mask.placed(offset))
        for start in range(0, self.query.shape[2], rows):
            place = slice(start, start + rows)
            strip = replace(self, query=self.query[:, :, place], query_offset=offset + start)
            masks = [_mask_of_strip(part, place, strip) for part in parts]
            rules = [_rule_of_strip(rule, place) for rule in self.scores]
            yield place, replace(strip, mask=reduce(and_, masks) if masks else None, scores=rules)


def with_weights(
    call: WeightedCall,
) -> tuple[Float[Tensor, "batch heads q_len value_dim"], Float[Tensor, "batch heads q_len k_len"]]:
    """Output and weights, in the query's dtype, both after dropout.

    Weights of an empty row are 0. The kernels compute large calls; the formula computes small ones, those that autograd
    records, and those with dropout, which takes torch's own random numbers.

    Cost: ``4 * batch * heads * q_len * k_len * head_dim`` operations. Memory of the kernels: the weights, and 8 MiB
    where they have 16 bits. Memory of the formula: about three times the weights, of which autograd keeps one.
    """
    device = call.query.device.type
    if torch.is_autocast_enabled(device):
        # Autocast would cast float32 scores to 16 bits.
        with without_autocast(device):
            return with_weights(call)
    if call.takes_formula:
        return _by_formula(call)
    if call.query.dtype in (torch.float32, torch.float64):
        return _by_kernel(call)
    output = call.query.new_empty(*call.query.shape[:3], call.value.shape[3])
    weights = call.query.new_empty(*call.query.shape[:3], call.key.shape[2])
    rows = max(1, _STRIP * call.query.shape[2] // call.num_weights)
    for place, strip in call.strips(rows):
        output[:, :, place], weights[:, :, place] = _by_kernel(strip)
    return output, weights


def _by_kernel(call: WeightedCall) -> tuple[Tensor, Tensor]:
    observed = observe_attention(
        call.query,
        call.key,
        call.value,
        want=Want(rows=torch.arange(call.query.shape[2])),
        mask=call.mask,
        scores=call.scores,
        scale=call.scale,
        query_offset=call.query_offset,
    )
    assert observed.rows is not None
    return observed.output, observed.rows


def _mask_of_strip(mask: Mask, rows: slice, strip: WeightedCall) -> Mask:
    if any(does_as(mask, kind) for kind in _OF_POSITIONS):
        return mask
    if does_as(mask, Dense):
        return Dense(_rows_of(mask.allowed, rows))  # type: ignore[attr-defined]
    return Dense(mask.allows(*strip.index()))


def _rule_of_strip(rule: ScoreRule, rows: slice) -> ScoreRule:
    return DenseBias(_rows_of(rule.bias, rows)) if isinstance(rule, DenseBias) else rule


def _rows_of(table: Tensor, rows: slice) -> Tensor:
    return table if table.shape[2] == 1 else table[:, :, rows]


# ---- the formula --------------------------------------------------------------------------------------------


def _by_formula(call: WeightedCall) -> tuple[Tensor, Tensor]:
    query, key, value = call.query, call.key, call.value
    index = call.index()
    allowed = None if call.mask is None else _table(call.mask.placed(call.query_offset or 0), index)
    # Every masked call contains NaN and infinity where the elements cannot be read.
    contain = allowed is not None and not (may_look(query) and all_finite(query, key, value))
    bad = None
    if contain:
        key, bad = clean_rows(key)
        bad = bad.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    scores = _by_key_head(query.to(dtype) * scale, key.to(dtype).mT)
    for rule in call.scores:
        scores = _ruled(rule, scores, index)
    sink = next((rule for rule in call.scores if isinstance(rule, Sink)), None)
    weights = _softmax(scores, allowed, bad, None if sink is None else sink.logits.to(dtype).view(1, -1, 1, 1))
    weights = functional.dropout(weights, call.dropout).to(query.dtype)
    if allowed is None or not contain:
        return _by_key_head(weights, value), weights
    finite = torch.isfinite(value)
    touched = _by_key_head(allowed.expand(weights.shape).to(value.dtype), (~finite).to(value.dtype)) > 0
    return _by_key_head(weights, value.masked_fill(~finite, 0.0)).masked_fill(touched, torch.nan), weights


def _by_key_head(
    rows: Float[Tensor, "batch heads q_len x"], columns: Float[Tensor, "batch kv_heads x y"]
) -> Float[Tensor, "batch heads q_len y"]:
    """``rows @ columns`` where several heads share the columns, which are not copied for each."""
    kv_heads, group = columns.shape[1], rows.shape[1] // columns.shape[1]
    if group == 1:
        return rows @ columns
    shared = rows.reshape(len(rows), kv_heads, -1, rows.shape[3]) @ columns
    return shared.reshape(*rows.shape[:3], columns.shape[3])


def _ruled(rule: ScoreRule, scores: Tensor, index: _Index) -> Tensor:
    if isinstance(rule, Sink):
        return scores
    # A table is not looked up element by element.
    return scores + rule.bias.to(scores.dtype) if isinstance(rule, DenseBias) else rule.apply(scores, *index)


def _table(mask: Mask, index: _Index) -> Bool[Tensor, "batch heads q_len k_len"]:
    """The mask as booleans that broadcast; what is a table already is not looked up element by element."""
    if isinstance(mask, Both):
        return _table(mask.left, index) & _table(mask.right, index)
    return mask.allowed if isinstance(mask, Dense) else mask.allows(*index)


def _softmax(scores: Tensor, allowed: Tensor | None, bad: Tensor | None, sink: Tensor | None) -> Tensor:
    """Weights where ``allowed``, NaN in rows that may attend to a key that is ``bad``; every pass is over a square."""
    if allowed is None:
        return _normalised(scores, sink)
    # A softmax over nothing is NaN and so is its gradient: an empty row is given all keys and then emptied.
    empty = ~allowed.any(dim=-1, keepdim=True)
    forbidden = ~(allowed | empty)
    if bad is not None:
        scores = scores.masked_fill(bad[..., None, :], torch.nan).masked_fill(empty, 0.0)
    scores = scores.masked_fill(forbidden, -torch.inf)
    weights = _normalised(scores, sink)
    if bad is not None:
        return weights.masked_fill(~allowed, 0.0)
    return weights.masked_fill(empty, 0.0) if not may_look(scores) or bool(empty.any()) else weights


def _normalised(scores: Tensor, sink: Tensor | None) -> Tensor:
    """The softmax, of which a sink takes its part."""
    weights = scores.softmax(dim=-1)
    return weights if sink is None else weights * torch.sigmoid(scores.logsumexp(dim=-1, keepdim=True) - sink)
