"""Chunks by the CPU kernels: features, decays, corrections, products and division in one pass, with their backward.

What is kept for backward is the inputs, the output, one state per chunk and one number per token.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from clearhead.backends.native_header import (
    LINEAR_PAD,
    MAX_CHUNK,
    MAX_HEAD_DIM,
    MAX_THREADS,
    Code,
    Feature,
    LinearDescription,
    TensorView,
)
from clearhead.backends.native_library import in_memory, library, message, new_description
from clearhead.backends.native_memory import new_tensor, room_like
from clearhead.linear.again import Parts, gradients_again, recorded
from clearhead.linear.feature_maps import FEATURE_MAPS, FeatureMap
from clearhead.linear.recurrence import Recurrence, transformed
from clearhead.linear.state import LinearState

__all__ = ["native_chunks", "native_whole", "takes"]

_FEATURES: Final = {"identity": Feature.IDENTITY, "elu": Feature.ELU, "relu": Feature.RELU}
#: Heads per thread from which each keeps its state to itself; with fewer, chunks are handed out one by one.
_ENOUGH: Final = 2
#: The same chunks by operations that autograd records.
Again: TypeAlias = Callable[[Recurrence, LinearState, int], tuple[Tensor, LinearState]]


def takes(call: Recurrence, chunk: int) -> bool:
    """Whether the kernels can compute a call: float32 in this machine's memory, sizes that fit, nobody watching."""
    # In this order: what is traced must not look for a library.
    if torch.compiler.is_compiling() or library() is None or transformed() or torch._C._len_torch_dispatch_stack():
        return False
    if call.faint or (call.normalized and (call.log_decay is not None or call.rate is not None)):
        return False
    features, value_dim = call.feature_map.features(call.key.shape[-1]), call.value.shape[-1]
    fits = chunk <= MAX_CHUNK and 0 < features <= MAX_HEAD_DIM and 0 < value_dim <= MAX_HEAD_DIM
    parts = (call.query, call.key, call.value, call.log_decay, call.rate)
    given = [part for part in parts if part is not None]
    return fits and all(part.is_cpu and part.dtype is torch.float32 and in_memory(part) for part in given)


def native_chunks(call: Recurrence, state: LinearState, chunk: int, again: Again) -> tuple[Tensor, LinearState]:
    """As ``chunked`` of the forms; ``again`` is that form without kernels, for second derivatives."""
    if not _in_kernels(call.feature_map):
        call = call.featured()
    setting = _Setting(call.feature_map, call.scale, call.normalized, chunk, again)
    inputs = (call.query, call.key, call.value, call.log_decay, call.rate, state.matrix, state.normalizer)
    output, matrix, normalizer = _Native.apply(setting, *inputs)  # type: ignore[no-untyped-call]
    return output, LinearState(matrix=matrix, normalizer=normalizer)


def native_whole(call: Recurrence, state: LinearState, chunk: int, again: Again) -> tuple[Tensor, LinearState]:
    """As ``whole`` of the forms: keys are summed up with no query to answer, then queries answered with no key behind
    the sum. A token that is not there has features of 0.

    Cost: the products within chunks are made for nothing, twice; torch's operations take longer still, for each of them
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
    after = native_chunks(summed, state, chunk, again)[1]
    answered = replace(call, key=nothing(call.key, q_len, absent), value=nothing(call.value, q_len, 0.0))
    return native_chunks(answered, after, chunk, again)[0], after


def _in_kernels(feature_map: FeatureMap) -> bool:
    """Whether the kernels take features themselves."""
    return FEATURE_MAPS.get(feature_map.name) is feature_map and feature_map.name in _FEATURES


@dataclass(frozen=True)
class _Setting:
    """What of a call is not a tensor."""

    feature_map: FeatureMap
    scale: float
    normalized: bool
    chunk: int
    again: Again


class _Work:
    """A description together with the tensors that it points into."""

    def __init__(self, setting: _Setting, inputs: tuple[Tensor | None, ...]) -> None:
        query, key, value, log_decay, rate, matrix, normalizer = inputs
        assert query is not None
        assert key is not None
        assert value is not None
        self.held: list[Tensor] = []
        self.query, self.value = query, value
        own = self.description = new_description(LinearDescription)
        own.threads = min(torch.get_num_threads(), MAX_THREADS)
        own.feature_map, own.scale, own.chunk = _FEATURES[setting.feature_map.name], setting.scale, setting.chunk
        own.batch, own.kv_heads, own.length, own.features = key.shape
        own.heads, own.value_dim = query.shape[1], value.shape[3]
        own.gates = 0 if log_decay is None else log_decay.shape[-1]
        for name, part in (("query", query), ("key", key), ("value", value)):
            self.rows(name, part)
        for name, plain in (
            ("log_decay", log_decay), ("rate", rate), ("state", matrix), ("normalizer", normalizer),
        ):  # fmt: skip
            self.read(name, plain)

    @property
    def chunks(self) -> int:
        return -(-int(self.description.length) // int(self.description.chunk))

    @property
    def few(self) -> bool:
        """Whether there are too few heads for each thread to have its own."""
        own = self.description
        return own.threads > 1 and not own.rate and own.batch * own.kv_heads < _ENOUGH * own.threads

    def rows(self, name: str, part: Tensor) -> Tensor:
        """Point a field at ``[batch, heads, len, dim]``, its last axis made contiguous where it is not."""
        part = part.detach().resolve_neg()
        if part.stride(3) != 1 and part.shape[3] > 1:
            part = part.contiguous()
        self.held.append(part)
        setattr(self.description, name, TensorView(part.data_ptr(), *part.stride()[:3]))
        return part

    def read(self, name: str, part: Tensor | None) -> None:
        """Point a field at a tensor without strides of its own."""
        if part is None:
            return
        self.held.append(part := part.detach().resolve_neg().contiguous())
        setattr(self.description, name, part.data_ptr())

    def written(self, name: str, *shape: int) -> Tensor:
        """A new tensor that the kernel writes."""
        found = new_tensor(self.value, shape)
        self.held.append(found)
        setattr(self.description, name, found.data_ptr())
        return found

    def between(self, states: str, sums: str, *, normalized: bool) -> tuple[Tensor, Tensor | None]:
        """Room for a state per chunk."""
        own = self.description
        leading = (own.batch, own.kv_heads, self.chunks)
        found = self.written(states, *leading, own.features, _padded(own.value_dim))
        return found, self.written(sums, *leading, _padded(own.features)) if normalized else None

    def run(self, name: str) -> None:
        kernels = library()
        assert kernels is not None
        code = int(getattr(kernels, name)(ctypes.byref(self.description)))
        if code == Code.NO_MEMORY:
            raise MemoryError(f"{name}: {message(code)}")
        # What the verbs let through, the kernels take: any other code is a mistake of ours.
        assert code == Code.OK, f"{name}: {message(code)}"


def _padded(count: int) -> int:
    return -(-count // LINEAR_PAD) * LINEAR_PAD


class _Native(torch.autograd.Function):
    """Queries, keys, values, decays, rates and the first state in; the output and the last state out."""

    @staticmethod
    def forward(ctx: Any, setting: _Setting, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        work = _Work(setting, inputs)
        own = work.description
        heads = (own.batch, own.kv_heads)
        output = work.rows("output", room_like(work.query, own.value_dim))
        last = work.written("last_state", *heads, own.features, own.value_dim)
        shares = normalizer = states = sums = None
        if setting.normalized:
            normalizer = work.written("last_normalizer", *heads, own.features)
            shares = work.written("shares", own.batch, own.heads, own.length)
        training = any(ctx.needs_input_grad)
        if training or work.few:
            states, sums = work.between("states", "sums", normalized=setting.normalized)
        work.run("ch_linear_forward")
        if training:
            ctx.setting = setting
            ctx.set_materialize_grads(False)
            # Where nothing is divided, backward does not read the output, which may be changed in place then.
            ctx.save_for_backward(*inputs, output if setting.normalized else None, shares, states, sums)
        return output, last, normalizer

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # Checkpoints hand out what was saved once.
        saved = ctx.saved_tensors
        if recorded(grads):
            return None, *gradients_again(lambda inputs: _computed(ctx.setting, inputs), saved[:7], grads)
        return None, *_gradients(ctx.setting, saved[:7], saved[7:], grads)


def _gradients(
    setting: _Setting, inputs: tuple[Tensor | None, ...], kept: tuple[Tensor | None, ...],
    grads: tuple[Tensor | None, ...],
) -> list[Tensor | None]:  # fmt: skip
    """Of every input, from those of the output and the last state."""
    query, key, value, log_decay, rate, matrix, normalizer = inputs
    output, shares, states, sums = kept
    assert query is not None
    assert key is not None
    assert value is not None
    assert matrix is not None
    work = _Work(setting, inputs)
    if output is not None:
        work.rows("output", output)
    for name, part in (("shares", shares), ("states", states), ("sums", sums)):
        work.read(name, part)
    work.rows("grad_output", _no_gradient(query, value) if grads[0] is None else grads[0])
    work.read("grad_last_state", grads[1])
    found = [
        work.rows(f"grad_{name}", room_like(part, part.shape[-1]))
        for name, part in (("query", query), ("key", key), ("value", value))
    ]
    decays = None if log_decay is None else work.written("grad_decay", *log_decay.shape)
    rates = None if rate is None else work.written("grad_rate", *rate.shape)
    first, first_sums = work.written("grad_state", *matrix.shape), None
    if setting.normalized:
        # Forward's own is written no more; that it is there tells the kernel what outputs were.
        work.description.last_normalizer = first.data_ptr()
        work.read("grad_last_normalizer", grads[2])
        assert normalizer is not None
        first_sums = work.written("grad_normalizer", *normalizer.shape)
    if work.few:
        work.between("later", "later_sums", normalized=setting.normalized)
    work.run("ch_linear_backward")
    return [*found, decays, rates, first, first_sums]


def _no_gradient(query: Tensor, value: Tensor) -> Tensor:
    return value.new_zeros((*query.shape[:3], value.shape[3]))


def _computed(setting: _Setting, inputs: Parts) -> Parts:
    """The same pass by operations that autograd records."""
    query, key, value, log_decay, rate, matrix, normalizer = inputs
    assert query is not None
    assert key is not None
    assert value is not None
    assert matrix is not None
    call = Recurrence(
        query=query, key=key, value=value, feature_map=setting.feature_map, scale=setting.scale,
        log_decay=log_decay, rate=rate, normalized=setting.normalized,
    )  # fmt: skip
    output, after = setting.again(call, LinearState(matrix=matrix, normalizer=normalizer), setting.chunk)
    return output, after.matrix, after.normalizer
