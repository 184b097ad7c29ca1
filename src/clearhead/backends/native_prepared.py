"""Calls written down once and made again on tensors that lie elsewhere: of a description only its addresses change.

Between two large products Python finds nothing of itself in the caches, and writing a call down takes several times as
long as elsewhere. What depends on shapes, strides and dtypes alone need not be written twice.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Generic, TypeVar

from torch import Tensor

from clearhead.backends.native_header import Call, Verb
from clearhead.backends.native_library import library, run
from clearhead.backends.native_memory import maker_like

__all__ = ["Counter", "Kept", "Prepared", "Stretch", "Stretches", "Strides", "Written", "put_elsewhere", "strides_of"]

_Step = TypeVar("_Step")
#: A description, its field, and how far that is beyond a position.
Counter = tuple[ctypes.Structure, str, int]
#: Of several tensors.
Strides = tuple[tuple[int, ...], ...]

_WORD = ctypes.sizeof(ctypes.c_uint64)
#: Ways in which one stretch's tensors may lie, kept at a time.
_MOST_STRIDES: Final = 8
#: Bytes that calls of one layout keep to write to again: what is larger costs less than the work on it.
_MOST_KEPT: Final = 2**18


class Prepared:
    """Calls of one layout, one after the other; one thread makes them at a time.

    Args:
        calls: as ``native_library.run`` takes them.
        reads: tensors that the descriptions point into and that lie elsewhere each time, with the same sizes and
            strides; no two share memory.
        writes: the same for those that are written.
        stays: tensors that are pointed into and stay where they are; those that lie in others are passed over.
        seeds: those that the descriptions hold and that are others each time; whatever has none of them keeps its own.
        counters: fields that hold the position of a call's first token, and so many more; it is another each time.
        inner: of ``writes`` so many from the front hold nothing that is read after the calls. Small ones are kept, and
            are written by the next calls again.

    Attributes:
        kept: those of them that are.
        complete: whether every address lies in one of these tensors; if not, the calls must not be made again.
    """

    def __init__(
        self, calls: Sequence[tuple[Verb, ctypes.Structure]], reads: Sequence[Tensor], writes: Sequence[Tensor],
        stays: Sequence[Tensor] = (), seeds: Sequence[int] = (), counters: Sequence[Counter] = (),
        inner: int = 0,
    ) -> None:  # fmt: skip
        self._counters = tuple(counters)
        self.kept = list(writes[:inner]) if sum(map(_bytes, writes[:inner])) <= _MOST_KEPT else []
        writes, stays = writes[len(self.kept) :], [*stays, *self.kept]
        self._listed = (Call * len(calls))(*[Call(verb, 0, ctypes.addressof(own)) for verb, own in calls])
        # Drawn numbers of 64 bits: none is another's. What drops nothing may have any.
        held = [(own, getattr(own, "seed", None)) for _, own in calls]
        self._seeds = [(own, seeds.index(seed)) for own, seed in held if seed in seeds]
        self._makers = [maker_like(own) for own in writes]
        moving = [*reads, *writes]
        #: Where each of them began at the last calls.
        self._addresses = [own.data_ptr() for own in moving]
        self._moves: list[list[tuple[ctypes.Array[ctypes.c_uint64], int, int]]] = [[] for _ in moving]
        places = _places(moving)
        fixed = [own for own in stays if _find(places, own.data_ptr()) is None]
        fixed_places = _places(fixed)
        self.complete = True
        for _, description in calls:
            words = _words(description)
            for word in _pointers(type(description)):
                if (found := _find(places, words[word])) is not None:
                    self._moves[found[0]].append((words, word, found[1]))
                elif words[word] and _find(fixed_places, words[word]) is None:
                    self.complete = False
        self._held = ([description for _, description in calls], fixed)

    def rooms(self) -> list[Tensor]:
        """New tensors for what is written, but for what is kept."""
        return [make() for make in self._makers]

    def run(self, tensors: Sequence[Tensor], seeds: Sequence[int] = (), position: int = 0) -> tuple[int, int]:
        """Make the calls on these reads and writes, in their order, under these seeds: as ``native_library.run``."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        # Weights mostly lie where they lay.
        for moves, address, before in zip(self._moves, addresses, self._addresses, strict=True):
            if address != before:
                for words, word, offset in moves:
                    words[word] = address + offset
        self._addresses = addresses
        for description, place in self._seeds:
            description.seed = seeds[place]
        _place(self._counters, position)
        found = library()
        assert found is not None
        done = ctypes.c_int32()
        return int(found.ch_run(self._listed, len(self._listed), ctypes.byref(done))), done.value


@dataclass
class Written:
    """Calls in order, the tensors that they write, those that they point into and that stay where they are, what else
    must live until they have run, which of their fields count from the position of the call's first token, and how many
    of ``writes``, from the front, hold nothing that is read later."""

    calls: list[tuple[Verb, ctypes.Structure]]
    writes: list[Tensor]
    stays: list[Tensor]
    alive: object
    counters: Sequence[Counter] = ()
    inner: int = 0


class Stretch:
    """Kernels that run one after the other: written down until it is known that they recur, and then made again.

    What is read has the same shapes and dtypes each time. Its strides may be others, as those of a slice or of a
    gradient that arrives: a description has them too, so what is made again was written down for the same ones.
    """

    def __init__(self, may_recur: bool) -> None:
        self._may_recur = may_recur
        # By the strides of what is read; an empty list where they were met once.
        self._waiting = Kept[list[Prepared]](_MOST_STRIDES)
        self._last: tuple[Strides, list[Prepared]] | None = None

    def run(
        self, reads: Sequence[Tensor], write_down: Callable[[], Written], seeds: Sequence[int] = (), position: int = 0,
        strides: Strides | None = None,
    ) -> tuple[list[Tensor], int, int]:  # fmt: skip
        """What is written; the last code, and how many calls came to their end. ``seeds`` and ``position`` are those of
        what is written down, as many seeds each time; ``strides`` are what is known of ``reads``."""
        if not self._may_recur:
            return _run_written(write_down(), position)
        strides = strides_of(reads) if strides is None else strides
        waiting = self._waiting_for(strides)
        if waiting is None:
            self._waiting.put(strides, [])
            return _run_written(write_down(), position)
        try:
            prepared = waiting.pop()
        except IndexError:  # none yet, or all at work in other threads
            return self._write_and_run(reads, write_down(), seeds, position, waiting)
        writes = prepared.rooms()
        code, done = prepared.run([*reads, *writes], seeds, position)
        waiting.append(prepared)
        return [*prepared.kept, *writes], code, done

    def _waiting_for(self, strides: Strides) -> list[Prepared] | None:
        # To hash those of a hundred tensors takes as long as a small product.
        last = self._last
        if last is not None and last[0] is strides:
            return last[1]
        waiting = self._waiting.get(strides)
        self._last = None if waiting is None else (strides, waiting)
        return waiting

    def _write_and_run(
        self, reads: Sequence[Tensor], written: Written, seeds: Sequence[int], position: int, waiting: list[Prepared]
    ) -> tuple[list[Tensor], int, int]:
        found = _run_written(written, position)
        # Tensors that are one now need not be the next time.
        if len({tensor.data_ptr() for tensor in reads}) == len(reads):
            prepared = Prepared(
                written.calls, reads, written.writes, written.stays, seeds, written.counters, written.inner
            )
            waiting += [prepared] if prepared.complete else []
        return found


class Stretches:
    """The kernels of one layout: forward, and backward by what is needed of it.

    Args:
        may_recur: as for each ``Stretch``.
    """

    def __init__(self, may_recur: bool) -> None:
        self._may_recur, self.forward = may_recur, Stretch(may_recur)
        self._backward: dict[tuple[bool, ...], Stretch] = {}

    def backward(self, needs: tuple[bool, ...], inputs: int = 1) -> Stretch:
        """Those of the gradients that are needed: of so many inputs, then of the weight and the bias of each layer."""
        # Sums for a bias alone are not the kernels'.
        recurs = self._may_recur and all(
            weight or not bias for weight, bias in zip(needs[inputs::2], needs[inputs + 1 :: 2], strict=True)
        )
        return self._backward.setdefault(needs, Stretch(True)) if recurs else Stretch(False)


class Kept(Generic[_Step]):
    """What is kept by layout, ``most`` of them: the one that was used longest ago goes first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.steps: dict[Hashable, _Step] = {}

    def get(self, layout: Hashable) -> _Step | None:
        step = self.steps.pop(layout, None)
        if step is not None:
            self.steps[layout] = step
        return step

    def put(self, layout: Hashable, step: _Step) -> None:
        for oldest in list(self.steps)[: max(0, len(self.steps) + 1 - self.most)]:
            self.steps.pop(oldest, None)
        self.steps[layout] = step


def put_elsewhere(
    calls: Sequence[tuple[Verb, ctypes.Structure]], tensors: Sequence[Tensor], rooms: Sequence[Tensor]
) -> None:
    """Let calls that point into tensors point into rooms instead, each of its tensor's sizes and strides."""
    places = _places(tensors)
    for _, description in calls:
        words = _words(description)
        for word in _pointers(type(description)):
            if (found := _find(places, words[word])) is not None:
                words[word] = rooms[found[0]].data_ptr() + found[1]


def strides_of(tensors: Sequence[Tensor]) -> Strides:
    """What tells tensors of the same sizes apart: how they lie."""
    return tuple([tensor.stride() for tensor in tensors])


def _run_written(written: Written, position: int) -> tuple[list[Tensor], int, int]:
    _place(written.counters, position)
    return written.writes, *run(written.calls)


def _place(counters: Sequence[Counter], position: int) -> None:
    """Let these fields count from a position."""
    for description, field, more in counters:
        setattr(description, field, position + more)


def _words(description: ctypes.Structure) -> ctypes.Array[ctypes.c_uint64]:
    """The memory of a description."""
    return (ctypes.c_uint64 * (ctypes.sizeof(description) // _WORD)).from_buffer(description)


def _places(tensors: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """Where tensors begin, which they are, and their bytes, in order."""
    return sorted((own.data_ptr(), place, _bytes(own)) for place, own in enumerate(tensors) if own.numel() > 0)


def _find(places: list[tuple[int, int, int]], address: int) -> tuple[int, int] | None:
    """The tensor that an address lies in, and how far from its start."""
    before = bisect_right(places, (address, len(places), 0)) - 1
    start, place, size = places[before] if before >= 0 else (0, 0, 0)
    return (place, address - start) if address < start + size else None


def _bytes(tensor: Tensor) -> int:
    """From the first element to behind the last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


@cache
def _pointers(kind: Any, first: int = 0) -> tuple[int, ...]:
    """Words of a structure, or of an array of them, that are addresses."""
    if issubclass(kind, ctypes.Array):
        size = ctypes.sizeof(kind._type_)
        parts = [(kind._type_, first + place * size) for place in range(kind._length_)]
    elif issubclass(kind, ctypes.Structure):
        parts = [(own, first + getattr(kind, name).offset) for name, own, *_ in kind._fields_]
    else:
        return (first // _WORD,) if kind is ctypes.c_void_p else ()
    return tuple(word for own, at in parts for word in _pointers(own, at))
