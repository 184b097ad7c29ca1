"""Peak memory against length: forward's is measured always; where the function claims that it is linear, that is a law,
for backward too."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from clearhead.verify.case import Case
from clearhead.verify.law import REFUSALS, Broken, Law, NotApplicable
from clearhead.verify.oracle import slope
from clearhead.verify.subject import Subject, Tensors

__all__ = ["LAWS", "Growth", "growth"]

#: Between linear, 1, and square, 2; a log-linear fit over a factor of 4 reads scratch space of fixed size as less.
_LINEAR_UP_TO = 1.4
_LENGTHS = (512, 1024, 2048)
#: With so many heads a table of scores takes at least 32 MiB, which glibc gives back as soon as it is freed. Of smaller
#: ones, and backward makes many, it keeps some, so that a short sequence would read as if it needed more than it does.
_LENGTHS_WITH_BACKWARD, _HEADS_WITH_BACKWARD = (1024, 2048), 8


class Growth(dict[int, int]):
    """Peak bytes by length, the shortest first."""

    @property
    def exponent(self) -> float:
        """How memory grows: as ``length ** exponent`` between the shortest and the longest."""
        (first, least), *_, (last, most) = self.items()
        return math.log(max(most, 1) / max(least, 1)) / math.log(last / first)

    def __str__(self) -> str:
        sizes = ", ".join(f"{size / 2**20:.1f} MiB at {length}" for length, size in self.items())
        return f"grows as length ** {self.exponent:.1f}: {sizes}"


def growth(subject: Subject, case: Case, *, backward: bool = False) -> Growth:
    """Peak memory of forward, or of forward and backward, beyond what is held before it, its results included."""
    found = Growth()
    lengths, heads = (_LENGTHS_WITH_BACKWARD, _HEADS_WITH_BACKWARD) if backward else (_LENGTHS, case.kv_heads)
    with _only_new_garbage():
        for length in lengths:
            own = replace(case, kv_heads=heads, q_len=length, k_len=length)
            size = _peak(subject, own, subject.draw(own), backward)
            if size is None:
                raise NotApplicable("this system does not tell peak memory")
            found[length] = size
    return found


def _peak(subject: Subject, case: Case, tensors: Tensors, backward: bool) -> int | None:
    grad = slope(torch.empty_like(tensors[0]))

    def call() -> object:
        if backward:
            return subject.gradients(case, tensors, grad)
        with torch.no_grad():
            return subject.call(case, tensors)

    if subject.device.type != "cuda":
        # The benchmark's room brings more than a light import of clearhead may.
        from clearhead.benchmark.memory import peak_extra_bytes

        return peak_extra_bytes(call)
    # The first call takes room that stays, for the products of matrices.
    call()
    torch.cuda.reset_peak_memory_stats(subject.device)
    before = torch.cuda.memory_allocated(subject.device)
    call()
    return torch.cuda.max_memory_allocated(subject.device) - before


@contextmanager
def _only_new_garbage() -> Iterator[None]:
    """What lives already is left out of the collections before each measurement, which take longer than the calls."""
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _confirmed(subject: Subject, case: Case, *, backward: bool = False) -> Growth:
    """The growth, measured twice before it counts as more than linear.

    Pages that the allocator kept from earlier calls hide need, so of two readings the larger is the truer.
    """
    found = growth(subject, case, backward=backward)
    if found.exponent <= _LINEAR_UP_TO or not subject.linear_memory:
        return found
    again = growth(subject, case, backward=backward)
    return Growth({length: max(size, again[length]) for length, size in found.items()})


def _check_memory(subject: Subject, case: Case) -> None:
    found = _confirmed(subject, case)
    if not subject.linear_memory:
        raise NotApplicable(f"measured: {found}")
    if found.exponent > _LINEAR_UP_TO:
        raise Broken(f"memory {found}")
    try:
        both = _confirmed(subject, case, backward=True)
    except REFUSALS:
        return
    if both.exponent > _LINEAR_UP_TO:
        raise Broken(f"memory with backward {both}")


LAWS = (
    Law(
        name="memory",
        says="peak memory grows with the length, not with its square, and so it does with backward",
        check=_check_memory,
        search=False,
        cases=(Case(kv_heads=2, q_len=_LENGTHS[-1], k_len=_LENGTHS[-1], head_dim=64, value_dim=64),),
    ),
)
"""The law of memory."""
