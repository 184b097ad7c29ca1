"""The same call again: a plain or causal call on tensors laid out as before skips everything but the kernel.

Checking a call, choosing a backend and writing its description takes some fifty microseconds, and three times as long
in training, which is nothing beside a long sequence and everything beside a short one. All of it depends on shapes,
strides, dtype, scale and dropout alone when there are no rules and no mask but ``Causal()``; so the description is kept
under these, and only its addresses and its seed change. A training step is played back where backward needs nothing of
the output: where one tile has all keys.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Hashable, Sequence
from ctypes import addressof
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, get_num_threads, is_grad_enabled
from torch._C import _is_tracing as tracing
from torch._C import _len_torch_dispatch_stack as modes
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad

from clearhead.backends.guards import alike
from clearhead.backends.native_header import Code, Description
from clearhead.backends.native_library import in_memory, library, message, quick
from clearhead.backends.native_memory import maker_like
from clearhead.problem import draw_seed

__all__ = ["FEW_NUMBERS", "Otherwise", "Played", "remember", "replay"]

#: Layouts kept; when there are more, all are forgotten.
_MOST: Final = 1024
#: Multiplications of a call that is over before another thread could have had Python's lock.
_BRIEF: Final = 2**18
#: Numbers of rows up to which a step of training has memory of its own in place of tensors, which take ten times as
#: long to make. A step that is written down saves as few: activation checkpoints count them each time.
FEW_NUMBERS: Final = 2**13
_OK: Final = int(Code.OK)
_WORDS: Final = ctypes.sizeof(Description) // 8


def _word(name: str) -> int:
    place: int = getattr(Description, name).offset
    return place // 8


_QUERY, _KEY, _VALUE, _OUTPUT, _SOFTMAX, _DELTA, _SEED = map(
    _word, ("query", "key", "value", "output", "softmax", "delta", "seed")
)  # fmt: skip
_GRAD_OUTPUT, _GRAD_QUERY, _GRAD_KEY, _GRAD_VALUE = map(
    _word, ("grad_output", "grad_query", "grad_key", "grad_value")
)  # fmt: skip

#: Gradients of query, key and value from these, the rows' statistics, the gradient that arrived and the seed, the long
#: way; and the description of the kernel's call and the rows' deltas that it writes, if that was all there was to it.
Otherwise: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, int], tuple[Sequence[Tensor], tuple[Description, Tensor] | None]
]


class _Plan:
    """A description that waits for addresses. One thread uses it at a time: taken from its list, and put back."""

    __slots__ = ("check", "description", "held", "kernel", "layout", "reference", "rooms", "words")

    def __init__(
        self, layout: _Layout, verb: str, description: Description, written: Sequence[Tensor], held: object = None
    ) -> None:
        """``written`` are the tensors that the call wrote."""
        self.layout, self.held = layout, held
        self.check: Callable[..., bool] | None = None
        self.description = Description.from_buffer_copy(description)
        self.reference = ctypes.byref(self.description)
        self.words = (ctypes.c_uint64 * _WORDS).from_buffer(self.description)
        self.rooms = [maker_like(one) for one in written]
        scores = description.batch * description.heads * description.q_len * description.k_len
        kernels = quick() if scores * (description.head_dim + description.value_dim) <= _BRIEF else library()
        assert kernels is not None
        self.kernel = getattr(kernels, verb)


class _Layout:
    """What calls of one layout share: plans that wait."""

    def __init__(self, training: bool, dropout: float) -> None:
        self.training, self.dropout = training, dropout
        self.forward: list[_Plan] = []
        self.backward: list[_Plan] = []
        self.known: _Known | None = None
        self.otherwise: Otherwise | None = None
        self.shape: tuple[int, ...] = ()
        self.few: type[ctypes.Array[ctypes.c_float]] | None = None

    def trains(self, softmax: Tensor, otherwise: Otherwise) -> None:
        """What a step of training has besides: rows' statistics, and another way back."""
        self.otherwise, self.shape = otherwise, tuple(softmax.shape)
        # Such memory stays as long as the graph; a tensor that is saved goes when backward is done.
        self.few = ctypes.c_float * softmax.numel() if softmax.numel() <= FEW_NUMBERS else None

    def know(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
    ) -> _Known:  # fmt: skip
        """What tells calls like this one."""
        known = self.known
        if known is None or known.scale != scale or not known.check(query, key, value):
            known = self.known = _Known(self, query, key, value, causal, scale)
        return known


class _Known:
    """What tells calls of a layout without looking them up. It is never changed, so that threads may share it."""

    __slots__ = ("causal", "check", "dropout", "layout", "learns", "scale", "threads", "training")

    def __init__(
        self, layout: _Layout, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
    ) -> None:  # fmt: skip
        self.layout, self.training, self.threads = layout, layout.training, get_num_threads()
        self.causal, self.scale, self.dropout = causal, scale, layout.dropout
        self.check: Callable[..., bool] = alike(query, key, value)
        self.learns = query.requires_grad or key.requires_grad or value.requires_grad


class Played:
    """Layouts that were remembered, and what tells calls like the last one."""

    def __init__(self) -> None:
        self.layouts: dict[Hashable, _Layout] = {}
        self.recent: _Known | None = None

    def find(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None, dropout: float
    ) -> _Layout | None:  # fmt: skip
        """The layout of a call, if there is one."""
        if not self.layouts or not _fits(query, key, value):
            return None
        training = is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        found = self.layouts.get(_layout(query, key, value, causal, _other_than_usual(query, scale), dropout, training))
        if found is not None:
            self.recent = found.know(query, key, value, causal, scale)
        return found

    def keep(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, dropout: float, training: bool
    ) -> _Layout:  # fmt: skip
        """The layout of a call, new if need be."""
        if len(self.layouts) >= _MOST:
            self.layouts.clear()
            self.recent = None
        layout = _layout(query, key, value, causal, _other_than_usual(query, scale), dropout, training)
        return self.layouts.setdefault(layout, _Layout(training, dropout))


_played = Played()


def _other_than_usual(query: Tensor, scale: float | None) -> float | None:
    """A scale; None for the one that a call has if none is given."""
    usual = scale is None or query.dim() == 0 or (query.shape[-1] > 0 and scale == 1.0 / math.sqrt(query.shape[-1]))
    return None if usual else scale


def _layout(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None, dropout: float, training: bool
) -> Hashable:  # fmt: skip
    return (
        query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(),
        query.dtype, key.dtype, value.dtype, causal, scale, dropout, training, get_num_threads(),
    )  # fmt: skip


def _fits(*tensors: Tensor) -> bool:
    """Whether nothing about the tensors but their layout matters: no subclass, no transformation."""
    plain = all(in_memory(tensor) and tensor.is_cpu and not tensor.is_neg() for tensor in tensors)
    alone = maybe_current_level() is None and forward_ad._current_level < 0 and not modes() and not tracing()
    return plain and alone


def _rows_lie(*tensors: Tensor) -> bool:
    """Whether the description points at the tensors: what has a last axis that is not contiguous was copied first."""
    return all(tensor.stride(-1) == 1 for tensor in tensors)


def replay(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None = None, dropout: float = 0.0
) -> Tensor | None:  # fmt: skip
    """The output of a call like one that was remembered, or None where there was none; its seed is drawn."""
    known = _played.recent
    try:
        layout = (
            known.layout
            if known is not None and known.causal is causal and known.scale == scale and known.dropout == dropout
            and not (query.is_nested or key.is_nested or value.is_nested)  # whose strides end the process
            and known.check(query, key, value) and known.training is (known.learns and is_grad_enabled())
            and known.threads == get_num_threads() and forward_ad._current_level < 0 and not modes()
            and not tracing()
            else _played.find(query, key, value, causal, scale, dropout)
        )  # fmt: skip
    except (TypeError, AttributeError):  # not a tensor
        return None
    if layout is None:
        return None
    try:
        plan = layout.forward.pop()
    except IndexError:  # another thread took it
        return None
    if dropout:
        plan.description.seed = draw_seed(dropout)
    if layout.training:
        output: Tensor = _again(plan, query, key, value)  # type: ignore[no-untyped-call]
        return output
    written = plan.rooms[0]()
    words = plan.words
    words[_QUERY] = query.data_ptr()
    words[_KEY] = key.data_ptr()
    words[_VALUE] = value.data_ptr()
    words[_OUTPUT] = written.data_ptr()
    code = plan.kernel(plan.reference)
    layout.forward.append(plan)
    return written if code == _OK else None


class _Again(torch.autograd.Function):
    """A step of training played back. Addresses are written out here as in ``replay``: a call for it would be felt."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layout = plan.layout
        output = plan.rooms[0]()
        words = plan.words
        words[_QUERY] = query.data_ptr()
        words[_KEY] = key.data_ptr()
        words[_VALUE] = value.data_ptr()
        words[_OUTPUT] = output.data_ptr()
        # A node's attributes are a dict each time: one is enough.
        if layout.few is not None:
            few = layout.few()
            words[_SOFTMAX] = addressof(few)
            ctx.step = layout, few, words[_SEED]
            ctx.save_for_backward(query, key, value)
        else:
            rows = torch.empty(layout.shape, dtype=torch.float32, device="cpu")
            words[_SOFTMAX] = rows.data_ptr()
            ctx.step = layout, None, words[_SEED]
            ctx.save_for_backward(query, key, value, rows)
        code = plan.kernel(plan.reference)
        layout.forward.append(plan)
        if code != _OK:
            raise MemoryError(f"ch_forward: {message(code)}")
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (layout, few, seed), (query, key, value, *rows) = ctx.step, ctx.saved_tensors
        waiting = layout.backward
        try:
            plan = waiting.pop()
        except IndexError:  # none yet, or all are taken by other threads
            return _long_way(ctx, query, key, value, rows, grad)
        # A sum's gradient is one number; hooks may hand out what was saved in another form.
        if is_grad_enabled() or modes() or not (
            plan.check(query, key, value, grad) or plan.check(query, key, value, grad := grad.contiguous())
        ):  # fmt: skip
            waiting.append(plan)
            return _long_way(ctx, query, key, value, rows, grad)
        room_query, room_key, room_value = plan.rooms
        grad_query, grad_key, grad_value = room_query(), room_key(), room_value()
        words = plan.words
        words[_QUERY] = query.data_ptr()
        words[_KEY] = key.data_ptr()
        words[_VALUE] = value.data_ptr()
        if few is not None:
            words[_SOFTMAX] = addressof(few)
        else:
            softmax = rows[0].contiguous()
            delta = softmax.new_empty(layout.shape[:-1])
            words[_SOFTMAX] = softmax.data_ptr()
            words[_DELTA] = delta.data_ptr()
        words[_GRAD_OUTPUT] = grad.data_ptr()
        words[_GRAD_QUERY] = grad_query.data_ptr()
        words[_GRAD_KEY] = grad_key.data_ptr()
        words[_GRAD_VALUE] = grad_value.data_ptr()
        words[_SEED] = seed
        code = plan.kernel(plan.reference)
        waiting.append(plan)
        if code != _OK:
            return _long_way(ctx, query, key, value, rows, grad)
        return None, grad_query, grad_key, grad_value


def _long_way(
    ctx: Any, query: Tensor, key: Tensor, value: Tensor, rows: Sequence[Tensor], grad: Tensor
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Backward that writes its call down, which is kept; or that is more than a call."""
    layout: _Layout
    layout, few, seed = ctx.step
    assert layout.otherwise is not None
    softmax = rows[0] if few is None else torch.frombuffer(few, dtype=torch.float32).view(layout.shape)
    grads, call = layout.otherwise(query, key, value, softmax, grad, seed)
    plain = _fits(query, key, value, grad) and _rows_lie(query, key, value, grad)
    if call is not None and plain and not layout.backward:
        description, delta = call
        plan = _Plan(layout, "ch_backward", description, grads, held=None if rows else delta)
        plan.check = alike(query, key, value, grad)
        layout.backward.append(plan)
    return None, *grads


def remember(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float, dropout: float,
    description: Description, output: Tensor, softmax: Tensor | None = None, otherwise: Otherwise | None = None,
) -> None:  # fmt: skip
    """Keep the description of a call that has just run, for ``replay``.

    Args:
        query: as it was, and so are the others.
        key: see there.
        value: see there.
        causal: whether the mask was ``Causal()``.
        scale: see ``attention``.
        dropout: see there.
        description: of the kernel's call.
        output: what it wrote.
        softmax: rows' statistics that it wrote for backward, if it was a step of training.
        otherwise: backward of such a step.
    """
    if not (_fits(query, key, value) and _rows_lie(query, key, value)):
        return
    if softmax is not None and softmax.numel() == 0:
        return
    layout = _played.keep(query, key, value, causal, scale, dropout, softmax is not None)
    if softmax is not None and otherwise is not None:
        layout.trains(softmax, otherwise)
    # There is one that waits where a call was written down for another reason.
    if not layout.forward:
        layout.forward.append(_Plan(layout, "ch_forward", description, [output]))


#: ``_Again.apply`` without its look at transformations, of which there are none here.
_again: Final = super(torch.autograd.Function, _Again).apply

# A node's ``apply`` asks each time by which of two names its class calls backward: a microsecond of a step of fifty.
if isinstance(_node := getattr(_Again, "_backward_cls", None), type):
    _node.apply = _Again.backward  # type: ignore[attr-defined]
