"""Runs a call of linear attention: checks it, converts it to a ``Recurrence`` and computes that by one of the forms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.backends.containment import without_autocast
from clearhead.choices import refuse_if_invariant
from clearhead.linear.check import (
    check_chunk,
    check_features,
    check_form,
    check_gate_values,
    check_lengths,
    check_state,
)
from clearhead.linear.execution import Execution
from clearhead.linear.feature_maps import FeatureMap
from clearhead.linear.forms import FORMS
from clearhead.linear.packed import documents_of, traced_documents_of
from clearhead.linear.recurrence import Recurrence
from clearhead.linear.sequences import SequenceLayout
from clearhead.linear.state import LinearState
from clearhead.masks import Mask

__all__ = ["Member", "run"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Member:
    """The arguments of a function's recurrence besides queries, keys and values.

    ``gated`` says that ``log_decay`` is an argument of the caller, whose values are checked at the keys that are
    present. ``faint`` says that exact gradients of small decays are needed.
    """

    function: str
    feature_map: FeatureMap
    normalized: bool
    scale: float
    log_decay: Tensor | None = None
    rate: Tensor | None = None
    gated: bool = False
    faint: bool = False


def run(
    member: Member,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    state: LinearState | None,
    mask: Mask | None,
    form: str,
    chunk_size: int,
) -> tuple[Tensor, LinearState]:
    """Compute a member's call; the public function has checked the tensors."""
    given = query
    query, key, value = (_four_axes(part) for part in (query, key, value))
    batch, length = key.shape[0], key.shape[2]
    form, chunk_size = check_form(member.function, form, ("auto", *FORMS)), check_chunk(member.function, chunk_size)
    sequences = SequenceLayout.of(member.function, mask, batch, length, key.device, causal=causal)
    if sequences.causal or sequences.packed:
        check_lengths(member.function, query, key)
    if member.gated and member.log_decay is not None:
        gate = _four_axes(member.log_decay)
        check_gate_values(member.function, gate, lambda: sequences.present(length, key.device))
    # Autocast would round the operands of float32 sums to 16 bits.
    with without_autocast(key.device.type):
        call = _recurrence(member, query, key, value, sequences.real)
    features = member.feature_map.features(key.shape[-1])
    if state is not None:
        shape = (_entries(sequences, batch, state), key.shape[1], features, value.shape[-1])
        check_state(member.function, state, shape, call.key, normalized=member.normalized)
    execution = Execution(
        function=member.function, causal=sequences.causal, form=form, chunk=chunk_size, features=features
    )
    refuse_if_invariant(
        member.function,
        "query",
        got="a state that chunks update, whose boundaries depend on the call",
        then="Use softmax attention, or ch.invariant(False) for this call.",
    )
    with without_autocast(key.device.type):
        if sequences.ids is not None:
            output, last = traced_documents_of(execution, call, state, sequences.ids)
        elif sequences.packed:
            output, last = documents_of(execution, call, state, sequences)
        else:
            output, last = execution.run(call, state)
    if member.feature_map.only_normalized:
        check_features(member.function, last, lambda: sequences.inhabited(batch, length, key.device))
    return output.to(given.dtype).reshape(*given.shape[:-1], value.shape[-1]), last


def _entries(sequences: SequenceLayout, batch: int, state: LinearState) -> int:
    """The number of sequences in a state; of traced documents the operator counts them."""
    if not sequences.packed:
        return batch
    traced = sequences.ids is not None and isinstance(state, LinearState)
    return state.matrix.shape[0] if traced else sequences.documents


def _four_axes(part: Tensor) -> Tensor:
    return part.reshape(*(1 for _ in range(4 - part.ndim)), *part.shape)


def _recurrence(member: Member, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None) -> Recurrence:
    """The call as a ``Recurrence``, in the precision of its sums."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    log_decay, rate = (
        None if part is None else _four_axes(part).to(dtype).expand(*key.shape[:3], -1)
        for part in (member.log_decay, member.rate)
    )
    call = Recurrence(
        query=query.to(dtype),
        key=key.to(dtype),
        value=value.to(dtype),
        feature_map=member.feature_map,
        scale=member.scale,
        log_decay=log_decay,
        rate=rate,
        normalized=member.normalized,
        given=query.dtype,
        faint=member.faint,
    )
    return call if real is None else call.without(~real[:, None, :, None])
