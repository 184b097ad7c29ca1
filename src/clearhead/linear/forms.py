"""The forms of the recurrence, which give equal results: token by token, chunk by chunk, and all tokens at once.

With ``G`` the running sum of log decays since the start of the chunk, and ``S0`` the state before it, a chunk
computes::

    V'  = V, or under the delta rule the solution of  (I + rate * tril(K K^T decayed, -1)) V' = rate (V - e^G K S0)
    num = e^G Q S0 + tril(Q K^T decayed) V'
    S1  = e^G_end S0 + (e^(G_end - G) K)^T V'

``decayed`` multiplies entry ``i, j`` by ``e^(G_i - G_j)``, within the sum over channels if decays differ by channel.
All exponents are at most 0. The parallel form computes the sequence as one chunk.

Papers: Yang et al. 2024, "Gated linear attention transformers", section 4 (chunks); Yang et al. 2024, "Parallelizing
linear transformers with the delta rule", section 3 (the triangular system).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Final, TypeAlias

import torch
from torch import Tensor

from clearhead.linear import fla, native
from clearhead.linear.chunks import in_chunks, plain_chunks, takes
from clearhead.linear.linalg import matmul, solve_unitriangular
from clearhead.linear.recurrence import Recurrence, bounded, least, quotient
from clearhead.linear.state import LinearState

__all__ = ["FORMS", "WORTH_KERNELS", "Decays", "Form", "whole"]

#: Elements of a tensor from which two calls of the kernels are faster than a dozen of torch's operations.
WORTH_KERNELS: Final = 2**15
#: A function from a call, the state before it and the chunk size to the output and the state after it.
Form: TypeAlias = Callable[[Recurrence, LinearState, int], tuple[Tensor, LinearState]]


def _ungrouped(form: Form) -> Form:
    """Extend a form to grouped heads: each head of queries gets a copy of its keys and state."""

    @wraps(form)
    def run(call: Recurrence, state: LinearState, chunk: int) -> tuple[Tensor, LinearState]:
        group = call.group
        if group == 1:
            return form(call, state, chunk)
        output, last = form(call.ungrouped(), state.mapped(lambda part: part.repeat_interleave(group, dim=1)), chunk)
        return output, last.mapped(lambda part: part[:, ::group])

    return run


@_ungrouped
def recurrent(call: Recurrence, state: LinearState, chunk: int) -> tuple[Tensor, LinearState]:
    """Token by token, the form for decoding; memory besides the outputs is constant."""
    call = call.featured()
    matrix, normalizer = state.matrix, state.normalizer
    numerators, denominators = [], []
    for place in range(call.key.shape[2]):
        query, key, value = call.query[:, :, place], call.key[:, :, place], call.value[:, :, place]
        if call.log_decay is not None:
            decay = call.log_decay[:, :, place].exp()
            matrix = matrix * decay[..., None]
            normalizer = None if normalizer is None else normalizer * decay
        if call.rate is not None:
            value = call.rate[:, :, place] * (value - _row(key, matrix))
        matrix = matrix + key[..., None] * value[..., None, :]
        numerators.append(_row(query, matrix))
        if normalizer is not None:
            normalizer = normalizer + key
            denominators.append((query * normalizer).sum(dim=-1))
    output = torch.stack(numerators, dim=2)
    if denominators:
        output = quotient(output, torch.stack(denominators, dim=2))
    return output, LinearState(matrix=matrix, normalizer=normalizer)


def chunked(call: Recurrence, state: LinearState, chunk: int) -> tuple[Tensor, LinearState]:
    """Chunk by chunk: GEMMs within chunks of ``chunk`` tokens, and a state from each chunk to the next."""
    if native.takes(call, chunk):
        return native.native_chunks(call, state, chunk, _chunked)
    return (_by_fla if fla.takes(call) else _chunked)(call, state, chunk)


@_ungrouped
def _by_fla(call: Recurrence, state: LinearState, chunk: int) -> tuple[Tensor, LinearState]:
    return fla.fla_chunks(call, state)


@_ungrouped
def _chunked(call: Recurrence, state: LinearState, chunk: int) -> tuple[Tensor, LinearState]:
    """``chunked`` by torch's operations: on any device, in float64 too, with chunks of any length."""
    call = call if takes(call) else call.featured()
    if takes(call):
        return plain_chunks(call, state, chunk)
    length = call.key.shape[2]
    query, key, value = (in_chunks(part, chunk) for part in (call.query, call.key, call.value))
    decays = None if call.log_decay is None else Decays.of(bounded(in_chunks(call.log_decay, chunk)), faint=call.faint)
    faded_query, faded_key, remaining = _faded(query, key, decays)
    scores = _decayed_products(query, key, decays).tril()
    transition: Tensor | None = remaining
    if call.rate is not None:
        value, pull = _corrections(key, value, in_chunks(call.rate, chunk), decays)
        inputs = matmul(faded_key.mT, value)
        carried = (
            torch.diag_embed(remaining.expand(*inputs.shape[:3], inputs.shape[-2], 1)[..., 0])
            if remaining is not None
            else (torch.eye(inputs.shape[-2], dtype=inputs.dtype, device=inputs.device))
        )
        before, matrix = _scan(inputs, carried - matmul(faded_key.mT, pull), state.matrix, matmul)
        value = value - matmul(pull, before)
    else:
        before, matrix = _scan(matmul(faded_key.mT, value), transition, state.matrix, torch.mul)
    output = matmul(faded_query, before) + matmul(scores, value)
    normalizer = state.normalizer
    if normalizer is not None:
        earlier, last = _scan(faded_key.sum(dim=-2)[..., None], transition, normalizer[..., None], torch.mul)
        output = quotient(output, matmul(faded_query, earlier)[..., 0] + scores.sum(dim=-1))
        normalizer = last[..., 0]
    return output.flatten(2, 3)[:, :, :length], LinearState(matrix=matrix, normalizer=normalizer)


def parallel(call: Recurrence, state: LinearState, chunk: int) -> tuple[Tensor, LinearState]:
    """All pairs of tokens at once, with a matrix of scores."""
    return _chunked(call, state, _next_power(call.key.shape[2]))


FORMS: Final[dict[str, Form]] = {"recurrent": recurrent, "chunked": chunked, "parallel": parallel}
"""Every form by its name."""


def whole(call: Recurrence, state: LinearState, form: str, chunk: int) -> tuple[Tensor, LinearState]:
    """A call that is not causal: every query attends to every key and the state, so all queries share one sum."""
    elements = min(call.query.numel(), call.key.numel(), call.value.numel())
    if form in ("auto", "chunked") and elements >= WORTH_KERNELS and native.takes(call, chunk):
        return native.native_whole(call, state, chunk, _chunked)
    call = call.featured()
    # Query heads that share a key head become one axis.
    query = call.query.unflatten(1, (-1, call.group)).flatten(2, 3)
    normalizer = None if state.normalizer is None else state.normalizer + call.key.sum(dim=2)
    matrix = state.matrix
    if form == "recurrent":
        for place in range(call.key.shape[2]):
            matrix = matrix + call.key[:, :, place, :, None] * call.value[:, :, place, None, :]
    else:
        matrix = matrix + matmul(call.key.mT, call.value)
    # The parallel form computes all pairs of tokens, the others the sum over keys once.
    pairs = form == "parallel"
    output = matmul(query, state.matrix if pairs else matrix)
    if pairs:
        output = output + matmul(matmul(query, call.key.mT), call.value)
    if normalizer is not None:
        output = quotient(output, matmul(query, normalizer[..., None])[..., 0])
    output = output.unflatten(2, (call.group, -1)).flatten(1, 2)
    return output, LinearState(matrix=matrix, normalizer=normalizer)


def _row(vector: Tensor, matrix: Tensor) -> Tensor:
    return matmul(vector[..., None, :], matrix)[..., 0, :]


def _next_power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


@dataclass(frozen=True)
class Decays:
    """Running sums of log decays, each as a value and its rounding error.

    The decay between two tokens is a difference of sums. A sum over thousands of tokens, or one that includes a gate of
    nearly 0, is so large that the difference would lose digits.

    Attributes:
        high: the sums, through which gradients flow.
        low: their rounding errors; None in float64.
        pair_gradients: zeros ``[..., i, j]`` whose gradient goes to each token after ``j`` up to ``i``; None where
            gradients may be differences of those of ``high``.
    """

    high: Tensor
    low: Tensor | None
    pair_gradients: Tensor | None = None

    @classmethod
    def of(cls, log_decay: Tensor, *, faint: bool) -> Decays:
        """The sums along the tokens of each chunk; ``faint`` says that exact gradients of small decays are needed."""
        high = log_decay.cumsum(dim=-2)
        low = None if log_decay.dtype is torch.float64 else _lacking(log_decay.detach(), high.detach())
        return cls(high, low, _pair_zeros(log_decay) if faint else None)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Decays:
        return Decays(change(self.high), None if self.low is None else change(self.low))

    def pairs(self) -> Tensor:
        """Log decays of token ``j`` up to token ``i``, ``[..., i, j]``, if all channels have one decay."""
        # Above the diagonal the difference is positive and could overflow.
        logs = self.since(self.mapped(lambda part: part.mT)).clamp_max(0.0)
        return logs if self.pair_gradients is None else logs.detach() + self.pair_gradients

    def to_end(self) -> Tensor:
        """Log decays of each token up to the end of the chunk."""
        logs = self.mapped(lambda part: part[..., -1:, :]).since(self)
        return logs if self.pair_gradients is None else logs.detach() + self.pair_gradients[..., -1:, :].mT

    def since(self, other: Decays) -> Tensor:
        """Log decays from ``other`` to here."""
        logs = self.high - other.high
        return logs if self.low is None or other.low is None else logs + (self.low - other.low)


def _lacking(log_decay: Tensor, high: Tensor) -> Tensor:
    """The rounding errors of ``high``, the running sums of ``log_decay``, without float64, which some devices lack.

    Each logarithm is split into parts that are multiples of a small unit, whose sums are exact.
    """
    bits, largest, rest = _next_power(log_decay.shape[-2]).bit_length() - 1, -least(log_decay.dtype), log_decay
    lacking = -high
    for _ in range(2):
        # Sums of up to 2**bits parts are at most 2**24 units, which float32 represents exactly.
        unit = largest * 2.0 ** (bits - 24)
        part = (rest / unit).round() * unit
        rest, largest = rest - part, unit / 2
        lacking = lacking + part.cumsum(dim=-2)
    return lacking + rest.cumsum(dim=-2)


def _pair_zeros(log_decay: Tensor) -> Tensor:
    """``Decays.pair_gradients``: each token gets the gradients of pairs on its two sides, without cancellation."""
    size = log_decay.shape[-2]
    sums = log_decay.expand(*log_decay.shape[:-1], size).tril(-1).cumsum(dim=-2)
    return sums - sums.detach()


def _faded(query: Tensor, key: Tensor, decays: Decays | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries decayed from the chunk's start, keys decayed to its end, and the state's decay over the chunk."""
    if decays is None:
        return query, key, None
    return query * decays.high.exp(), key * decays.to_end().exp(), decays.high[..., -1:, :].exp().mT


def _decayed_products(left: Tensor, right: Tensor, decays: Decays | None) -> Tensor:
    """``left_i . right_j`` with ``right_j`` decayed up to ``i``, for ``j <= i``; entries above are undefined."""
    if decays is None:
        return matmul(left, right.mT)
    if decays.high.shape[-1] > 1:
        return _split_products(left, right, decays)
    return matmul(left, right.mT) * decays.pairs().exp()


def _split_products(left: Tensor, right: Tensor, decays: Decays) -> Tensor:
    """The same with decays by channel, by recursive halving of the chunk.

    The later half of a block decays from the token in the middle, the earlier half up to it, so both exponents are at
    most 0 and no large number is multiplied by a small one.
    """
    size, half = left.shape[-2], 1
    products = (left * right).sum(dim=-1)[..., None, None]
    while half < size:
        first, second = (_half(place, half) for place in (0, 1))
        middle = decays.mapped(lambda part, first=first: first(part)[..., -1:, :])  # type: ignore[misc]
        later = second(left) * decays.mapped(second).since(middle).exp()
        earlier = first(right) * middle.since(decays.mapped(first)).exp()
        below = matmul(later, earlier.mT)
        earlier_block, later_block = products.unflatten(-3, (-1, 2)).unbind(-3)
        upper = torch.cat([earlier_block, torch.zeros_like(below)], dim=-1)
        products = torch.cat([upper, torch.cat([below, later_block], dim=-1)], dim=-2)
        half *= 2
    return products[..., 0, :, :]


def _half(place: int, size: int) -> Callable[[Tensor], Tensor]:
    """A function that selects one half of each block of ``2 * size`` tokens."""
    return lambda part: part.unflatten(-2, (-1, 2, size))[..., place, :, :]


def _corrections(key: Tensor, value: Tensor, rate: Tensor, decays: Decays | None) -> tuple[Tensor, Tensor]:
    """``U`` and ``W`` of the delta rule: the values that tokens add are ``U - W S0``."""
    system = rate * _decayed_products(key, key, decays).tril(-1)
    faded = key if decays is None else key * decays.high.exp()
    both = solve_unitriangular(system, rate * torch.cat([value, faded], dim=-1))
    return both[..., : value.shape[-1]], both[..., value.shape[-1] :]


def _scan(
    inputs: Tensor, transition: Tensor | None, start: Tensor, apply: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The state before each chunk, ``[batch, heads, chunks, ...]``, and the state after the last one."""
    states = [start]
    steps = [None] * inputs.shape[2] if transition is None else transition.unbind(2)
    for step, added in zip(steps, inputs.unbind(2), strict=True):
        states.append((states[-1] if step is None else apply(step, states[-1])) + added)
    return torch.stack(states[:-1], dim=2), states[-1]
