"""Attention that returns its weights, as torch's and transformers' own modules do, with gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from clearhead.backends.containment import matmul, scores_of, without_autocast
from clearhead.choices import is_invariant, refuse_if_invariant
from clearhead.functional.exact import observe_attention
from clearhead.integrations.torch.masks import may_look
from clearhead.masks import Causal, Dense, Mask, Padding, Window
from clearhead.masks.base import Both, conjuncts, does_as, index_tensors
from clearhead.scores import DenseBias, ScoreRule, Sink
from clearhead.shapes import Bool, Float
from clearhead.statistics import Want

__all__ = ["FEW_WEIGHTS", "STRIP", "MaskTable", "WeightedCall", "by_kernels", "with_weights"]

#: Weights of a call up to which the formula costs less than choosing a backend.
FEW_WEIGHTS: Final = 2**17
#: float32 weights that are computed at a time where the result is of 16 bits.
STRIP: Final = 2**21
#: Masks that depend on absolute positions and keys alone, and so are the same for some of a call's queries.
_OF_POSITIONS: Final = (Causal, Window, Padding)

_Index = tuple[Tensor, Tensor, Tensor, Tensor]


class MaskTable(NamedTuple):
    """A mask as the formula reads it: an addition is several times as fast as a fill by booleans.

    A softmax over nothing is NaN and so is its gradient: an empty row is given all keys, and its weights become 0.

    Attributes:
        added: float32, -inf for keys that a query may not attend to, else 0, also in empty rows.
        factor: float32 ``[batch | 1, heads | 1, q_len, 1]``, 0 for empty rows, else 1; None without empty rows.
    """

    added: Float[Tensor, "batch heads q_len k_len"]
    factor: Float[Tensor, "batch heads q_len one"] | None

    @classmethod
    def of(cls, allowed: Bool[Tensor, "batch heads q_len k_len"]) -> MaskTable:
        """The table of a mask's booleans, which may broadcast."""
        attending = allowed.any(dim=-1, keepdim=True)
        has_empty = not may_look(allowed) or not bool(attending.all())
        opened = allowed | ~attending if has_empty else allowed
        added = torch.zeros(opened.shape, device=opened.device).masked_fill_(~opened, -torch.inf)
        return cls(added, attending.to(added.dtype) if has_empty else None)

    @property
    def allowed(self) -> Bool[Tensor, "batch heads q_len k_len"]:
        """Keys that a query may attend to."""
        opened = self.added == 0.0
        return opened if self.factor is None else opened & (self.factor != 0.0)


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
        table: the mask as the formula reads it, if that is known.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None = None
    scores: Sequence[ScoreRule] = ()
    scale: float | None = None
    query_offset: int | None = None
    dropout: float = 0.0
    table: MaskTable | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether autograd records the call."""
        if not torch.is_grad_enabled():
            return False
        tensors = (self.query, self.key, self.value, *(part for rule in self.scores for part in rule.parameters()))
        return any(tensor.requires_grad for tensor in tensors)

    @property
    def takes_formula(self) -> bool:
        """Whether the formula computes the call: it is small, autograd records it, it drops weights, or its elements
        cannot be read."""
        few = self.num_weights < FEW_WEIGHTS
        return few or self.dropout > 0.0 or self.is_recorded or not may_look(self.query)

    @property
    def scale_factor(self) -> float:
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def num_weights(self) -> int:
        batch, heads, q_len, _ = self.query.shape
        return batch * heads * q_len * self.key.shape[2]

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
    if call.takes_formula and not is_invariant():
        return _by_formula(call)
    if call.dropout > 0.0 or call.is_recorded or not may_look(call.query):
        refuse_if_invariant(
            "attention",
            "weights",
            got="weights with a gradient or dropout, which torch computes",
            then="Pass need_weights=False or output_attentions=False.",
        )
    if call.query.dtype in (torch.float32, torch.float64):
        return by_kernels(call)
    output = call.query.new_empty(*call.query.shape[:3], call.value.shape[3])
    weights = call.query.new_empty(*call.query.shape[:3], call.key.shape[2])
    rows = max(1, STRIP * call.query.shape[2] // call.num_weights)
    for place, strip in call.strips(rows):
        output[:, :, place], weights[:, :, place] = by_kernels(strip)
    return output, weights


def by_kernels(call: WeightedCall) -> tuple[Tensor, Tensor]:
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
    table = call.table
    if table is None and call.mask is not None:
        table = MaskTable.of(_table(call.mask.placed(call.query_offset or 0), call.index()))
    if table is None:
        return _attend(call, None)
    if not may_look(call.query):
        # Where the elements cannot be read, every masked call contains NaN and infinity.
        return _attend_contained(call, table)
    output, weights = _attend(call, table)
    return (output, weights) if _are_finite(output, call.key) else _attend_contained(call, table)


def _are_finite(output: Tensor, key: Tensor) -> bool:
    """Whether NaN or infinity reached no row; an infinite key may give a weight of 0."""
    return math.isfinite(float(output.detach().sum() + key.detach().sum()))


def _attend(call: WeightedCall, table: MaskTable | None) -> tuple[Tensor, Tensor]:
    scores = _scores(call)
    weights = _normalised(scores if table is None else scores + table.added.to(scores.dtype), call)
    if table is not None and table.factor is not None:
        weights = weights * table.factor.to(weights.dtype)
    weights = _dropped(weights, call)
    return _by_key_head(weights, call.value), weights


def _attend_contained(call: WeightedCall, table: MaskTable) -> tuple[Tensor, Tensor]:
    """The same where NaN and infinity at masked places affect nothing, and reach rows that may attend to them."""
    group = call.query.shape[1] // call.key.shape[1]
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (call.key, call.value))
    allowed = table.allowed.expand(*call.query.shape[:3], key.shape[2])
    query, key = _in_work_dtype(call.query), _in_work_dtype(key)
    scores = _ruled(call, scores_of(query * call.scale_factor, key, allowed)).masked_fill(~allowed, -torch.inf)
    # An empty row has finite scores, whose gradient is finite.
    empty = (scores == -torch.inf).all(dim=-1, keepdim=True)
    weights = _normalised(scores.masked_fill(empty, 0.0), call).masked_fill(~allowed | empty, 0.0)
    weights = _dropped(weights, call)
    return matmul(weights, value, allowed), weights


def _scores(call: WeightedCall) -> Tensor:
    """Scaled scores after the rules, in float32 at least."""
    return _ruled(call, _by_key_head(_in_work_dtype(call.query), _in_work_dtype(call.key).mT) * call.scale_factor)


def _in_work_dtype(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.to(torch.float32)


def _ruled(call: WeightedCall, scores: Tensor) -> Tensor:
    for rule in call.scores:
        # A table is not looked up element by element; a sink is part of the softmax.
        if isinstance(rule, DenseBias):
            scores = scores + rule.bias.to(scores.dtype)
        elif not isinstance(rule, Sink):
            scores = rule.apply(scores, *call.index())
    return scores


def _normalised(scores: Tensor, call: WeightedCall) -> Tensor:
    """The softmax, of which a sink takes its part."""
    weights = scores.softmax(dim=-1)
    for rule in call.scores:
        if isinstance(rule, Sink):
            logits = rule.logits.to(scores.dtype).view(1, -1, 1, 1)
            weights = weights * torch.sigmoid(scores.logsumexp(dim=-1, keepdim=True) - logits)
    return weights


def _dropped(weights: Tensor, call: WeightedCall) -> Tensor:
    weights = functional.dropout(weights, call.dropout) if call.dropout > 0.0 else weights
    return weights if weights.dtype == call.query.dtype else weights.to(call.query.dtype)


def _by_key_head(
    rows: Float[Tensor, "batch heads q_len x"], columns: Float[Tensor, "batch kv_heads x y"]
) -> Float[Tensor, "batch heads q_len y"]:
    """``rows @ columns`` where several heads share the columns, which are not copied for each."""
    kv_heads, group = columns.shape[1], rows.shape[1] // columns.shape[1]
    if group == 1:
        return rows @ columns
    shared = rows.reshape(len(rows), kv_heads, -1, rows.shape[3]) @ columns
    return shared.reshape(*rows.shape[:3], columns.shape[3])


def _table(mask: Mask, index: _Index) -> Bool[Tensor, "batch heads q_len k_len"]:
    """The mask as booleans that broadcast; what is a table already is not looked up element by element."""
    if isinstance(mask, Both):
        return _table(mask.left, index) & _table(mask.right, index)
    return mask.allowed if isinstance(mask, Dense) else mask.allows(*index)
