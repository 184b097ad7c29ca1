"""The law of memory: peak memory against length.

Forward is always measured. If the function claims linear memory, forward and backward must be linear.
"""

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

#: A limit between linear, 1, and quadratic, 2; scratch space of fixed size lowers the exponent over a factor of 4.
_LINEAR_UP_TO = 1.4
_LENGTHS = (512, 1024, 2048)
#: With this many heads a score matrix has at least 32 MiB, which glibc returns to the system when it is freed. glibc
#: caches smaller blocks, of which backward allocates many, so a short sequence would appear to need too much.
_LENGTHS_WITH_BACKWARD, _HEADS_WITH_BACKWARD = (1024, 2048), 8


class Growth(dict[int, int]):
    """A mapping from length to peak bytes, the shortest first."""

    @property
    def exponent(self) -> float:
        """The exponent of growth between the shortest and the longest: memory is about ``length ** exponent``."""
        (first, least), *_, (last, most) = self.items()
        return math.log(max(most, 1) / max(least, 1)) / math.log(last / first)

    def __str__(self) -> str:
        sizes = ", ".join(f"{size / 2**20:.1f} MiB at {length}" for length, size in self.items())
        return f"grows as length ** {self.exponent:.1f}: {sizes}"


def growth(subject: Subject, case: Case, *, backward: bool = False) -> Growth:
    """Additional peak memory of forward, or of forward and backward, including their results."""
    sizes = Growth()
    lengths, heads = (_LENGTHS_WITH_BACKWARD, _HEADS_WITH_BACKWARD) if backward else (_LENGTHS, case.kv_heads)
    with _only_new_garbage():
        for length in lengths:
            sized = replace(case, kv_heads=heads, q_len=length, k_len=length)
            size = _peak(subject, sized, subject.draw(sized), backward)
            if size is None:
                raise NotApplicable("this system does not report peak memory")
            sizes[length] = size
    return sizes


def _peak(subject: Subject, case: Case, tensors: Tensors, backward: bool) -> int | None:
    grad = slope(torch.empty_like(tensors[0]))

    def call() -> object:
        if backward:
            return subject.gradients(case, tensors, grad)
        with torch.no_grad():
            return subject.call(case, tensors)

    if subject.device.type != "cuda":
        # Imported here to keep ``import clearhead`` light.
        from clearhead.benchmark.memory import peak_extra_bytes

        return peak_extra_bytes(call)
    # The first call allocates a persistent GEMM workspace.
    call()
    torch.cuda.reset_peak_memory_stats(subject.device)
    before = torch.cuda.memory_allocated(subject.device)
    call()
    return torch.cuda.max_memory_allocated(subject.device) - before


@contextmanager
def _only_new_garbage() -> Iterator[None]:
    """Exclude existing objects from the garbage collections before each measurement, which would dominate its time."""
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
    """The growth; it is measured twice before it counts as more than linear.

    Pages that the allocator cached from earlier calls hide usage, so the larger of two measurements counts.
    """
    measured = growth(subject, case, backward=backward)
    if measured.exponent <= _LINEAR_UP_TO or not subject.linear_memory:
        return measured
    repeated = growth(subject, case, backward=backward)
    return Growth({length: max(size, repeated[length]) for length, size in measured.items()})


def _check_memory(subject: Subject, case: Case) -> None:
    measured = _confirmed(subject, case)
    if not subject.linear_memory:
        raise NotApplicable(f"measured: {measured}")
    if measured.exponent > _LINEAR_UP_TO:
        raise Broken(f"memory {measured}")
    try:
        both = _confirmed(subject, case, backward=True)
    except REFUSALS:
        return
    if both.exponent > _LINEAR_UP_TO:
        raise Broken(f"memory with backward {both}")


LAWS = (
    Law(
        name="memory",
        says="peak memory is linear in the length, not quadratic, in forward and backward",
        check=_check_memory,
        search=False,
        cases=(Case(kv_heads=2, q_len=_LENGTHS[-1], k_len=_LENGTHS[-1], head_dim=64, value_dim=64),),
    ),
)
"""The law of memory."""
