"""A packed call: each group of its documents as a batch; where it is traced, as one operator.

How many documents there are, and so how many states come back, is told by numbers that a compiler does not know.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.backends.containment import without_autocast
from clearhead.backends.documents import Group
from clearhead.linear.check import check_state
from clearhead.linear.feature_maps import FEATURE_MAPS
from clearhead.linear.recurrence import Recurrence
from clearhead.linear.sequences import Sequences
from clearhead.linear.state import LinearState
from clearhead.linear.way import Way, zeros
from clearhead.masks import Documents
from clearhead.shapes import Int
from clearhead.torch_private import autograd_inside_operator

__all__ = ["documents_of", "traced_documents_of"]

#: What the operator takes, of a call and of the state before it.
_OF_CALL: Final = ("query", "key", "value", "log_decay", "rate")
_OF_STATE: Final = ("matrix", "normalizer")


def documents_of(
    way: Way, call: Recurrence, state: LinearState | None, sequences: Sequences
) -> tuple[Tensor, LinearState]:
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
    if not states:
        return zeros(call), call.start(None, way.features).mapped(lambda part: part[:0])
    heads, length, width = call.query.shape[1], call.query.shape[2], call.value.shape[-1]
    empty = call.value.new_zeros((heads, length, width))
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


def traced_documents_of(
    way: Way, call: Recurrence, state: LinearState | None, ids: Int[Tensor, "1 len"]
) -> tuple[Tensor, LinearState]:
    """As ``documents_of``, written down by a compiler."""
    call = call.featured()
    there = [(name, getattr(call, name)) for name in _OF_CALL]
    if state is not None:
        there += [(name, getattr(state, name)) for name in _OF_STATE]
    there = [(name, part) for name, part in there if part is not None]
    names, tensors = ",".join([name for name, _ in there]), [part for _, part in there]
    output, matrix, *sums = _own(
        tensors, names, ids, way.function, way.causal, way.form, way.chunk, call.normalized, call.faint, call.given
    )
    return output, LinearState(matrix=matrix, normalizer=sums[0] if sums else None)


def _forward(
    tensors: list[Tensor], names: str, ids: Tensor, function: str, causal: bool, form: str, chunk: int,
    normalized: bool, faint: bool, given: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    parts = dict(zip(names.split(","), tensors, strict=True))
    call = Recurrence(
        **{name: parts[name] for name in _OF_CALL if name in parts},  # type: ignore[arg-type]
        feature_map=FEATURE_MAPS["identity"],
        normalized=normalized,
        faint=faint,
        given=given,
    )
    state = LinearState(matrix=parts["matrix"], normalizer=parts.get("normalizer")) if "matrix" in parts else None
    heads, length, features = call.key.shape[1:]
    sequences = Sequences.of(function, Documents(ids=ids), 1, length, ids.device, causal=causal)
    if state is not None:
        shape = (sequences.documents, heads, features, call.value.shape[-1])
        check_state(function, state, shape, call.key, normalized=normalized)
    way = Way(function=function, causal=causal, form=form, chunk=chunk, features=features)
    with without_autocast(ids.device.type):
        output, after = documents_of(way, call, state, sequences)
    found = (output, after.matrix, after.normalizer)
    return [part.contiguous() for part in found if part is not None]


def _forward_like(tensors: list[Tensor], *others: Any) -> list[Tensor]:
    *_, normalized, _, _ = others
    query, key, value = tensors[:3]
    documents = torch.library.get_ctx().new_dynamic_size()
    states = [query.new_empty((documents, key.shape[1], key.shape[3], value.shape[3]))]
    if normalized:
        states.append(query.new_empty((documents, key.shape[1], key.shape[3])))
    return [query.new_empty((*query.shape[:3], value.shape[3])), *states]


def _backward(
    grads: list[Tensor], arrived: str, tensors: list[Tensor], names: str, ids: Tensor, function: str, causal: bool,
    form: str, chunk: int, normalized: bool, faint: bool, given: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """The call once more, with gradients of every tensor."""
    with autograd_inside_operator():
        own = [tensor.detach().requires_grad_() for tensor in tensors]
        results = _forward(own, names, ids, function, causal, form, chunk, normalized, faint, given)
        asked = [one for one, there in zip(results, arrived, strict=True) if there == "1"]
        pulled = [(one, grad) for one, grad in zip(asked, grads, strict=True) if one.requires_grad]
        ends, upstream = [one for one, _ in pulled], [grad for _, grad in pulled]
        found = torch.autograd.grad(ends, own, upstream, allow_unused=True) if ends else [None] * len(own)
    return [
        torch.zeros_like(tensor) if grad is None else grad.contiguous() for tensor, grad in zip(own, found, strict=True)
    ]


def _backward_like(grads: list[Tensor], arrived: str, tensors: list[Tensor], *others: Any) -> list[Tensor]:
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, names, ids, *ctx.rest = inputs
    ctx.names = names
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(ids, *tensors)


def _pull(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    ids, *tensors = ctx.saved_tensors
    arrived = "".join("0" if grad is None else "1" for grad in grads)
    upstream = [grad for grad in grads if grad is not None]
    found = torch.ops.clearhead.linear_documents_backward(upstream, arrived, tensors, ctx.names, ids, *ctx.rest)
    return (found, *[None] * (2 + len(ctx.rest)))


_AHEAD: Final = torch.library.custom_op("clearhead::linear_documents", _forward, mutates_args=())
_BACK: Final = torch.library.custom_op("clearhead::linear_documents_backward", _backward, mutates_args=())
_AHEAD.register_fake(_forward_like)
_BACK.register_fake(_backward_like)
_AHEAD.register_autograd(_pull, setup_context=_keep)
_own: Final = torch.ops.clearhead.linear_documents
