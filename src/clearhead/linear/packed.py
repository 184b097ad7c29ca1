"""Packed calls of linear attention: each group of documents is a batch; under the compiler, one operator.

The number of documents, and so of states, depends on elements that the compiler does not know.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.backends.containment import without_autocast
from clearhead.backends.documents import Group
from clearhead.linear.check import check_state
from clearhead.linear.execution import Execution, zeros
from clearhead.linear.feature_maps import FEATURE_MAPS
from clearhead.linear.recurrence import Recurrence
from clearhead.linear.sequences import SequenceLayout
from clearhead.linear.state import LinearState
from clearhead.masks import Documents
from clearhead.shapes import Int
from clearhead.torch_private import autograd_inside_operator

__all__ = ["documents_of", "traced_documents_of"]

#: The tensors of a call, and of the state before it, that the operator takes.
_OF_CALL: Final = ("query", "key", "value", "log_decay", "rate")
_OF_STATE: Final = ("matrix", "normalizer")


def documents_of(
    execution: Execution, call: Recurrence, state: LinearState | None, sequences: SequenceLayout
) -> tuple[Tensor, LinearState]:
    """Compute each group of documents as a batch; the states are in the order of the documents."""
    assert sequences.groups is not None
    assert sequences.order is not None
    outputs, places, states, first = [], [], [], 0
    for group in sequences.groups:
        documents = sequences.order[first : first + len(group.slots)]
        begin = None if state is None else state.mapped(lambda part, documents=documents: part[documents])  # type: ignore[misc]
        output, last = execution.run(_gathered(call, group), begin)
        outputs.append(output.transpose(0, 1)[:, group.valid])
        places.append(group.slots[group.valid])
        states.append(last)
        first += len(group.slots)
    if not states:
        return zeros(call), call.start(None, execution.features).mapped(lambda part: part[:0])
    heads, length, width = call.query.shape[1], call.query.shape[2], call.value.shape[-1]
    empty = call.value.new_zeros((heads, length, width))
    back = sequences.order.argsort()
    normalizers = [part.normalizer for part in states if part.normalizer is not None]
    last = LinearState(
        matrix=torch.cat([part.matrix for part in states])[back],
        normalizer=torch.cat(normalizers)[back] if normalizers else None,
    )
    return empty.index_copy(1, torch.cat(places), torch.cat(outputs, dim=1))[None], last


def _gathered(call: Recurrence, group: Group) -> Recurrence:
    """A group's documents as sequences; places after the end of a document are absent."""

    def gather(part: Tensor | None) -> Tensor | None:
        return None if part is None else group.take(part)

    query, key, value = (group.take(part) for part in (call.query, call.key, call.value))
    gathered = replace(
        call, query=query, key=key, value=value, log_decay=gather(call.log_decay), rate=gather(call.rate)
    )
    absent = ~group.valid[:, None, :, None]
    gathered = gathered.without(absent)
    # Queries too: their outputs are not read, but backward would compute 0 times NaN or infinity.
    fill = gathered.feature_map.absent
    assert fill is not None
    return replace(gathered, query=gathered.query.masked_fill(absent, fill))


def traced_documents_of(
    execution: Execution, call: Recurrence, state: LinearState | None, ids: Int[Tensor, "1 len"]
) -> tuple[Tensor, LinearState]:
    """``documents_of`` as one operator, under the compiler."""
    call = call.featured()
    there = [(name, getattr(call, name)) for name in _OF_CALL]
    if state is not None:
        there += [(name, getattr(state, name)) for name in _OF_STATE]
    there = [(name, part) for name, part in there if part is not None]
    names, tensors = ",".join([name for name, _ in there]), [part for _, part in there]
    output, matrix, *sums = _operator(
        tensors,
        names,
        ids,
        execution.function,
        execution.causal,
        execution.form,
        execution.chunk,
        call.normalized,
        call.faint,
        call.given,
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
    sequences = SequenceLayout.of(function, Documents(ids=ids), 1, length, ids.device, causal=causal)
    if state is not None:
        shape = (sequences.documents, heads, features, call.value.shape[-1])
        check_state(function, state, shape, call.key, normalized=normalized)
    execution = Execution(function=function, causal=causal, form=form, chunk=chunk, features=features)
    with without_autocast(ids.device.type):
        output, last = documents_of(execution, call, state, sequences)
    results = (output, last.matrix, last.normalizer)
    return [part.contiguous() for part in results if part is not None]


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
    """Recompute the call, and return the gradients of every tensor."""
    with autograd_inside_operator():
        inputs = [tensor.detach().requires_grad_() for tensor in tensors]
        results = _forward(inputs, names, ids, function, causal, form, chunk, normalized, faint, given)
        asked = [one for one, there in zip(results, arrived, strict=True) if there == "1"]
        pulled = [(one, grad) for one, grad in zip(asked, grads, strict=True) if one.requires_grad]
        ends, upstream = [one for one, _ in pulled], [grad for _, grad in pulled]
        gradients = torch.autograd.grad(ends, inputs, upstream, allow_unused=True) if ends else [None] * len(inputs)
    return [
        torch.zeros_like(tensor) if grad is None else grad.contiguous()
        for tensor, grad in zip(inputs, gradients, strict=True)
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
    pulled = torch.ops.clearhead.linear_documents_backward(upstream, arrived, tensors, ctx.names, ids, *ctx.rest)
    return (pulled, *[None] * (2 + len(ctx.rest)))


_FORWARD_OPERATOR: Final = torch.library.custom_op("clearhead::linear_documents", _forward, mutates_args=())
_BACKWARD_OPERATOR: Final = torch.library.custom_op("clearhead::linear_documents_backward", _backward, mutates_args=())
_FORWARD_OPERATOR.register_fake(_forward_like)
_BACKWARD_OPERATOR.register_fake(_backward_like)
_FORWARD_OPERATOR.register_autograd(_pull, setup_context=_keep)
_operator: Final = torch.ops.clearhead.linear_documents
