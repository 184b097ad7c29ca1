"""Linear attention by the CPU kernels: which calls they take, the chunked form, and calls that are not causal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from clearhead.linear.feature_maps import FEATURE_MAPS, FeatureMap
from clearhead.linear.recurrence import Recurrence, transformed
from clearhead.linear.state import LinearState
from clearhead.ops import linear_attention as ops
from clearhead.ops.kinds import MAX_CHUNK, MAX_HEAD_DIM
from clearhead.ops.library import in_memory, library

__all__ = ["native_chunks", "native_whole", "takes"]

#: The chunked form by torch's operations.
Plain: TypeAlias = Callable[[Recurrence, LinearState, int], tuple[Tensor, LinearState]]


def takes(call: Recurrence, chunk: int) -> bool:
    """Whether the kernels can compute a call: float32 in this machine's memory, sizes that fit, no transforms."""
    # In this order: a trace must not load the library.
    if torch.compiler.is_compiling() or library() is None or transformed():
        return False
    if call.faint or (call.normalized and (call.log_decay is not None or call.rate is not None)):
        return False
    features, value_dim = call.feature_map.features(call.key.shape[-1]), call.value.shape[-1]
    fits = chunk <= MAX_CHUNK and 0 < features <= MAX_HEAD_DIM and 0 < value_dim <= MAX_HEAD_DIM
    parts = (call.query, call.key, call.value, call.log_decay, call.rate)
    given = [part for part in parts if part is not None]
    return fits and all(part.is_cpu and part.dtype is torch.float32 and in_memory(part) for part in given)


def native_chunks(call: Recurrence, state: LinearState, chunk: int, plain: Plain) -> tuple[Tensor, LinearState]:
    """The chunked form by the kernels; ``plain`` is that form by torch's operations, for higher derivatives."""
    if not _in_kernels(call.feature_map):
        call = call.featured()
    feature_map, scale, normalized = call.feature_map, call.scale, call.normalized

    def compute(inputs: list[Tensor | None]) -> list[Tensor]:
        query, key, value, log_decay, rate, matrix, normalizer = inputs
        assert query is not None
        assert key is not None
        assert value is not None
        assert matrix is not None
        copied = Recurrence(
            query=query,
            key=key,
            value=value,
            feature_map=feature_map,
            scale=scale,
            log_decay=log_decay,
            rate=rate,
            normalized=normalized,
        )
        output, last = plain(copied, LinearState(matrix=matrix, normalizer=normalizer), chunk)
        return [output, last.matrix] if last.normalizer is None else [output, last.matrix, last.normalizer]

    output, matrix, normalizer = ops.linear_attention_chunks(
        ops.LinearOptions(feature_map.name, scale, chunk, normalized, compute),
        *(call.query, call.key, call.value, call.log_decay, call.rate, state.matrix, state.normalizer),
    )
    return output, LinearState(matrix=matrix, normalizer=normalizer)


def native_whole(call: Recurrence, state: LinearState, chunk: int, plain: Plain) -> tuple[Tensor, LinearState]:
    """A call that is not causal by two calls of the kernels: one sums the keys with absent queries, the other computes
    the outputs with absent keys. Absent tokens have features of 0.

    Cost: the GEMMs within chunks are computed twice without use; torch's operations would still take longer, since each
    writes every feature to memory.
    """
    if not _in_kernels(call.feature_map):
        call = call.featured()
    absent = call.feature_map.absent
    assert absent is not None

    def nothing(like: Tensor, length: int, number: float) -> Tensor:
        batch, heads, _, dim = like.shape
        return like.new_full((1, 1, 1, dim), number).expand(batch, heads, length, dim)

    q_len, k_len = call.query.shape[2], call.key.shape[2]
    summed = replace(call, query=nothing(call.query, k_len, absent))
    last = native_chunks(summed, state, chunk, plain)[1]
    answered = replace(call, key=nothing(call.key, q_len, absent), value=nothing(call.value, q_len, 0.0))
    return native_chunks(answered, last, chunk, plain)[0], last


def _in_kernels(feature_map: FeatureMap) -> bool:
    """Whether the kernels apply the feature map themselves."""
    return FEATURE_MAPS.get(feature_map.name) is feature_map and feature_map.name in ops.FEATURE_MAPS
