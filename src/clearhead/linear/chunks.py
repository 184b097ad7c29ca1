"""The chunked form without decay and delta rule: features, GEMMs and normalisation in one pass, with its backward.

It saves the inputs, the output, one state per chunk and one value per token for backward, which recomputes the scores
and features of each chunk. Chunks are computed in groups whose tensors fit the CPU's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.backends.containment import without_autocast
from clearhead.backends.recorded import is_recorded, recorded_gradients
from clearhead.linear.feature_maps import FeatureMap
from clearhead.linear.recurrence import Recurrence, quotient, transformed, weightless
from clearhead.linear.state import LinearState

__all__ = ["GROUP", "in_chunks", "plain_chunks", "takes"]

#: Elements of one tensor of a group, for each thread: 512 KiB in float32, so that several fit the L2 cache.
GROUP: Final = 2**17
#: Number of axes if there is a matrix per chunk. torch sums matrices faster in a loop, and vectors by ``cumsum``.
_MATRICES: Final = 4


def takes(call: Recurrence) -> bool:
    """Whether a call has neither decay nor delta rule, and a feature map with a ``slope``."""
    plain = call.log_decay is None and call.rate is None and call.scale == 1.0
    return plain and call.feature_map.slope is not None and not (torch.compiler.is_compiling() or transformed())


def in_chunks(part: Tensor, chunk: int, fill: float = 0.0) -> Tensor:
    """``[batch, heads, chunks, chunk, dim]``; the last chunk is padded with ``fill``, which does not change sums."""
    missing = -part.shape[2] % chunk
    filled = F.pad(part, (0, 0, 0, missing), value=fill) if missing else part
    chunks: Tensor = filled.unflatten(2, (-1, chunk))
    return chunks


def plain_chunks(call: Recurrence, state: LinearState, chunk: int) -> tuple[Tensor, LinearState]:
    """The chunked form of a call for which ``takes`` is true: the output, and the state after it."""
    length, leading = call.key.shape[2], call.key.shape[:2]
    fill = call.feature_map.absent
    assert fill is not None
    query, key = (in_chunks(part, chunk, fill) for part in (call.query, call.key))
    parts = [part.flatten(0, 2).contiguous() for part in (query, key, in_chunks(call.value, chunk))]
    start = [part.flatten(0, 1) for part in (state.matrix, state.normalizer) if part is not None]
    output, *ends = _PlainChunks.apply(call.feature_map, *parts, *start)  # type: ignore[no-untyped-call]
    last = [part.unflatten(0, leading) for part in ends]
    output = output.reshape(*leading, -1, output.shape[-1])[:, :, :length]
    return output, LinearState(matrix=last[0], normalizer=last[1] if len(last) > 1 else None)


class _Groups:
    """Groups of chunks of ``[rows * count, chunk, dim]`` that are computed together: whole rows, or a part of one."""

    def __init__(self, value: Tensor, rows: int, features: int) -> None:
        self.rows, self.count = rows, value.shape[0] // rows
        elements = value.shape[1] * max(features, value.shape[2], value.shape[1])
        self.most = max(1, GROUP * torch.get_num_threads() // elements)

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        """Slices of rows and of chunks, in the order of the recurrence."""
        together = max(1, self.most // self.count)
        size = min(self.most, self.count)
        for first in range(0, self.rows, together):
            rows = slice(first, min(first + together, self.rows))
            if together > 1 or size == self.count:
                yield rows, slice(rows.start * self.count, rows.stop * self.count)
                continue
            for begin in range(0, self.count, size):
                stop = min(begin + size, self.count)
                yield rows, slice(first * self.count + begin, first * self.count + stop)


def _accumulate(increments: Tensor, state: Tensor, before: Tensor) -> None:
    """Write the state before each chunk to ``before``, and add all increments to ``state``, in place."""
    rows = state.shape[0]
    increments, before = increments.unflatten(0, (rows, -1)), before.unflatten(0, (rows, -1))
    if increments.ndim < _MATRICES:
        total = torch.cat([state[:, None], increments], dim=1).cumsum(dim=1)
        before.copy_(total[:, :-1])
        state.copy_(total[:, -1])
        return
    before[:, 0] = state
    for place in range(1, increments.shape[1]):
        torch.add(before[:, place - 1], increments[:, place - 1], out=before[:, place])
    torch.add(before[:, -1], increments[:, -1], out=state)


def _accumulate_backward(increments: Tensor, state: Tensor) -> Tensor:
    """The sum of the increments after each chunk, from the end; adds all of them to ``state`` in place."""
    rows = state.shape[0]
    increments = increments.unflatten(0, (rows, -1))
    if increments.ndim < _MATRICES:
        total = torch.cat([increments, state[:, None]], dim=1).flip(1).cumsum(dim=1).flip(1)
        state.copy_(total[:, 0])
        return total[:, 1:].flatten(0, 1)
    later = torch.empty_like(increments)
    later[:, -1] = state
    for place in range(increments.shape[1] - 1, 0, -1):
        torch.add(later[:, place], increments[:, place], out=later[:, place - 1])
    torch.add(later[:, 0], increments[:, 0], out=state)
    return later.flatten(0, 1)


class _PlainChunks(torch.autograd.Function):
    """From queries, keys and values ``[rows * chunks, chunk, dim]`` to the output and the last state."""

    @staticmethod
    def forward(
        ctx: Any,
        phi: FeatureMap,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        matrix: Tensor,
        normalizer: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        output = torch.empty_like(value)
        states = value.new_empty((value.shape[0], *matrix.shape[1:]))
        last = matrix.clone()
        sums = None if normalizer is None else normalizer.clone()
        earlier = None if sums is None else value.new_empty((value.shape[0], sums.shape[1]))
        shares = None if sums is None else value.new_empty((*value.shape[:2], 1))
        for rows, group in _Groups(value, matrix.shape[0], matrix.shape[1]):
            queries, keys, values = phi.query(query[group]), phi.key(key[group]), value[group]
            _accumulate(torch.bmm(keys.mT, values), last[rows], states[group])
            scores = torch.bmm(queries, keys.mT).tril_()
            outputs = torch.bmm(queries, states[group], out=output[group]).baddbmm_(scores, values)
            if sums is not None and earlier is not None and shares is not None:
                _accumulate(keys.sum(dim=1), sums[rows], earlier[group])
                below = (queries * earlier[group][:, None]).sum(dim=-1, keepdim=True)
                below += scores.sum(dim=-1, keepdim=True)
                torch.reciprocal(below, out=shares[group]).masked_fill_(weightless(below), 0.0)
                outputs *= shares[group]
        ctx.phi = phi
        ctx.save_for_backward(query, key, value, matrix, normalizer, output, states, earlier, shares)
        return (output, last) if sums is None else (output, last, sums)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        phi: FeatureMap = ctx.phi
        # Activation checkpoints allow one access to saved tensors.
        saved = ctx.saved_tensors
        with without_autocast(saved[2].device.type):
            if is_recorded(*grads) or transformed():
                needs = ctx.needs_input_grad[1:]
                return None, *recorded_gradients(partial(_computed, phi), saved[: len(needs)], grads, needs)
            return None, *_gradients(phi, saved, grads)


def _gradients(phi: FeatureMap, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value and the first state, from those of the output and the last state."""
    query, key, value, matrix, normalizer, output, states, earlier, shares = saved
    assert phi.slope is not None
    upstream = grads[0].contiguous()
    state_grad = grads[1].clone(memory_format=torch.contiguous_format)
    sums = None if normalizer is None else grads[2].clone(memory_format=torch.contiguous_format)
    results = [torch.empty_like(part) for part in (query, key, value)]
    for rows, group in reversed(list(_Groups(value, matrix.shape[0], matrix.shape[1]))):
        queries, keys, values, upper = phi.query(query[group]), phi.key(key[group]), value[group], upstream[group]
        d_query, d_key, d_value = (part[group] for part in results)
        lower = None
        if shares is not None:
            upper = upper * shares[group]
            lower = (upper * output[group]).sum(dim=-1, keepdim=True).neg_()
        d_scores = torch.bmm(upper, values.mT)
        d_scores = (d_scores if lower is None else d_scores.add_(lower)).tril_()
        torch.bmm(upper, states[group].mT, out=d_query).baddbmm_(d_scores, keys)
        later = _accumulate_backward(torch.bmm(queries.mT, upper), state_grad[rows])
        scores = torch.bmm(queries, keys.mT).tril_()
        torch.bmm(keys, later, out=d_value).baddbmm_(scores.mT, upper)
        torch.bmm(values, later.mT, out=d_key).baddbmm_(d_scores.mT, queries)
        if lower is not None and sums is not None:
            d_query.addcmul_(lower, earlier[group][:, None])
            d_key += _accumulate_backward((queries * lower).sum(dim=1), sums[rows])[:, None]
        d_query *= phi.slope(queries)
        d_key *= phi.slope(keys)
    return *results, state_grad, sums


def _computed(phi: FeatureMap, inputs: list[Tensor | None]) -> list[Tensor]:
    """Forward by operations that autograd records."""
    query, key, value, matrix, *rest = inputs
    assert query is not None
    assert key is not None
    assert value is not None
    assert matrix is not None
    normalizer = rest[0] if rest else None
    queries, keys = phi.query(query), phi.key(key)
    scores = (queries @ keys.mT).tril()
    before, last = _added(keys.mT @ value, matrix)
    output = queries @ before + scores @ value
    if normalizer is None:
        return [output, last]
    earlier, end = _added(keys.sum(dim=1), normalizer)
    return [quotient(output, (queries @ earlier[..., None])[..., 0] + scores.sum(dim=-1)), last, end]


def _added(increments: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    states = start[:, None] + increments.unflatten(0, (start.shape[0], -1)).cumsum(dim=1)
    return torch.cat([start[:, None], states[:, :-1]], dim=1).flatten(0, 1), states[:, -1]
