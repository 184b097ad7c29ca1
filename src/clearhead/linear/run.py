"""The way of one call: a member's recurrence, sequence by sequence, by one of the forms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from clearhead.backends.containment import without_autocast
from clearhead.backends.documents import Group
from clearhead.linear import native
from clearhead.linear.check import (
    check_chunk,
    check_features,
    check_form,
    check_gate_numbers,
    check_lengths,
    check_state,
)
from clearhead.linear.feature_maps import FeatureMap
from clearhead.linear.forms import FORMS, whole
from clearhead.linear.recurrence import Recurrence
from clearhead.linear.sequences import Sequences
from clearhead.linear.state import LinearState
from clearhead.masks import Mask

__all__ = ["Member", "run"]

#: Tokens up to which one after the other is faster than a chunk of torch's operations.
_ONE_BY_ONE: Final = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Member:
    """What a verb puts into the recurrence besides queries, keys and values.

    ``gated`` says that ``log_decay`` is a caller's, whose numbers are looked at when it is known which keys there are.
    """

    function: str
    feature_map: FeatureMap
    normalized: bool
    scale: float
    log_decay: Tensor | None = None
    rate: Tensor | None = None
    gated: bool = False


@dataclass(frozen=True, kw_only=True)
class _Way:
    """How sequences are computed."""

    causal: bool
    form: str
    chunk: int
    features: int

    def take(self, call: Recurrence, state: LinearState | None) -> tuple[Tensor, LinearState]:
        """The output of one batch of sequences and the state after it."""
        start, length = call.start(state, self.features), call.key.shape[2]
        form = self.form
        if not self.causal:
            return whole(call, start, form, self.chunk)
        if 0 in call.key.shape[:3]:
            # Sums over nothing, so that a loss has a gradient here too.
            parts = (call.query, call.key, call.value, call.log_decay, call.rate)
            nothing = torch.stack([part.sum() for part in parts if part is not None]).sum()
            return nothing.expand(*call.query.shape[:3], call.value.shape[-1]), start
        # A chunk longer than the sequence would be padding.
        chunk = min(self.chunk, 1 << (length - 1).bit_length())
        if form == "auto":
            form = "recurrent" if length <= _ONE_BY_ONE and not native.takes(call, chunk) else "chunked"
        return FORMS[form](call, start, chunk)


def run(
    member: Member, query: Tensor, key: Tensor, value: Tensor, causal: bool, state: LinearState | None,
    mask: Mask | None, form: str, chunk_size: int,
) -> tuple[Tensor, LinearState]:  # fmt: skip
    """Compute a member's call, its tensors checked by the verb."""
    given = query
    query, key, value = (_four_axes(part) for part in (query, key, value))
    batch, length = key.shape[0], key.shape[2]
    form, chunk_size = check_form(member.function, form, ("auto", *FORMS)), check_chunk(member.function, chunk_size)
    sequences = Sequences.of(member.function, mask, batch, length, key.device, causal=causal)
    if sequences.causal or sequences.groups is not None:
        check_lengths(member.function, query, key)
    if member.gated and member.log_decay is not None:
        gate = _four_axes(member.log_decay)
        check_gate_numbers(member.function, gate, lambda: sequences.present(length, key.device))
    # Autocast would multiply in 16 bits what is summed up in 32.
    with without_autocast(key.device.type):
        call = _recurrence(member, query, key, value, sequences.real)
    features = member.feature_map.features(key.shape[-1])
    if state is not None:
        documents = batch if sequences.groups is None else sequences.documents
        shape = (documents, key.shape[1], features, value.shape[-1])
        check_state(member.function, state, shape, call.key, normalized=member.normalized)
    way = _Way(causal=sequences.causal, form=form, chunk=chunk_size, features=features)
    with without_autocast(key.device.type):
        output, after = way.take(call, state) if sequences.groups is None else _documents(way, call, state, sequences)
    if member.feature_map.only_normalized:
        check_features(member.function, after, lambda: sequences.inhabited(batch, length, key.device))
    return output.to(given.dtype).reshape(*given.shape[:-1], value.shape[-1]), after


def _four_axes(part: Tensor) -> Tensor:
    return part.reshape(*(1 for _ in range(4 - part.ndim)), *part.shape)


def _recurrence(member: Member, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None) -> Recurrence:
    """The call in the precision of its sums."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    log_decay, rate = (
        None if part is None else _four_axes(part).to(dtype).expand(*key.shape[:3], -1)
        for part in (member.log_decay, member.rate)
    )
    call = Recurrence(
        query=query.to(dtype), key=key.to(dtype), value=value.to(dtype), feature_map=member.feature_map,
        scale=member.scale, log_decay=log_decay, rate=rate, normalized=member.normalized,
        given=query.dtype,
    )  # fmt: skip
    return call if real is None else call.without(~real[:, None, :, None])


def _documents(
    way: _Way, call: Recurrence, state: LinearState | None, sequences: Sequences
) -> tuple[Tensor, LinearState]:  # fmt: skip
    """Each group of documents as a batch; states come back in the order of the documents."""
    assert sequences.groups is not None
    assert sequences.order is not None
    outputs, places, states, first = [], [], [], 0
    for group in sequences.groups:
        own = sequences.order[first : first + len(group.slots)]
        begin = None if state is None else state.mapped(lambda part, own=own: part[own])  # type: ignore[misc]
        output, after = way.take(_taken(call, group), begin)
        outputs.append(output.transpose(0, 1)[:, group.valid])
        places.append(group.slots[group.valid])
        states.append(after)
        first += len(group.slots)
    heads, length, width = call.query.shape[1], call.query.shape[2], call.value.shape[-1]
    empty = call.value.new_zeros((heads, length, width))
    if not states:
        return empty[None], call.start(None, way.features).mapped(lambda part: part[:0])
    back = sequences.order.argsort()
    normalizers = [part.normalizer for part in states if part.normalizer is not None]
    after = LinearState(
        matrix=torch.cat([part.matrix for part in states])[back],
        normalizer=torch.cat(normalizers)[back] if normalizers else None,
    )
    return empty.index_copy(1, torch.cat(places), torch.cat(outputs, dim=1))[None], after


def _taken(call: Recurrence, group: Group) -> Recurrence:
    """A group's documents as sequences; places behind a document hold nothing."""

    def taken(part: Tensor | None) -> Tensor | None:
        return None if part is None else group.take(part)

    query, key, value = (group.take(part) for part in (call.query, call.key, call.value))
    own = replace(call, query=query, key=key, value=value, log_decay=taken(call.log_decay), rate=taken(call.rate))
    absent = ~group.valid[:, None, :, None]
    own = own.without(absent)
    # Queries too: nobody reads what they give, but 0 times what is not finite would come back from there.
    fill = own.feature_map.absent
    assert fill is not None
    return replace(own, query=own.query.masked_fill(absent, fill))
