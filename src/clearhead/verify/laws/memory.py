"""Peak memory against length: measured always, a law where the function claims that it is linear."""

from __future__ import annotations

import math

import torch

from clearhead.verify.case import Case
from clearhead.verify.law import Broken, Law, NotApplicable
from clearhead.verify.subject import Subject

__all__ = ["LAWS", "Growth", "growth"]

#: Between linear, 1, and square, 2; a log-linear fit over a factor of 4 reads scratch space of fixed size as less.
_LINEAR_UP_TO = 1.4
_LENGTHS = (512, 1024, 2048)


class Growth(tuple[int, ...]):
    """Peak bytes at ``_LENGTHS``."""

    @property
    def exponent(self) -> float:
        """How memory grows: as ``length ** exponent`` between the shortest and the longest."""
        return math.log(max(self[-1], 1) / max(self[0], 1)) / math.log(_LENGTHS[-1] / _LENGTHS[0])

    def __str__(self) -> str:
        sizes = ", ".join(f"{size / 2**20:.1f} MiB at {length}" for length, size in zip(_LENGTHS, self, strict=True))
        return f"grows as length ** {self.exponent:.1f}: {sizes}"


def growth(subject: Subject, case: Case) -> Growth:
    """Peak memory of forward beyond what is held before it, its result included."""
    found = []
    for length in _LENGTHS:
        own = Case(batch=1, kv_heads=case.kv_heads, q_len=length, k_len=length, head_dim=64, value_dim=64)
        tensors = subject.draw(own)
        with torch.no_grad():
            size = _peak(subject, own, tensors)
        if size is None:
            raise NotApplicable("this system does not tell peak memory")
        found.append(size)
    return Growth(found)


def _peak(subject: Subject, case: Case, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> int | None:
    if subject.device.type != "cuda":
        # The benchmark's room brings more than a light import of clearhead may.
        from clearhead.benchmark.memory import peak_extra_bytes

        return peak_extra_bytes(lambda: subject.call(case, tensors))
    torch.cuda.reset_peak_memory_stats(subject.device)
    before = torch.cuda.memory_allocated(subject.device)
    subject.call(case, tensors)
    return torch.cuda.max_memory_allocated(subject.device) - before


def _check_memory(subject: Subject, case: Case) -> None:
    found = growth(subject, case)
    if not subject.linear_memory:
        raise NotApplicable(f"measured: {found}")
    if found.exponent > _LINEAR_UP_TO:
        raise Broken(f"memory {found}")


LAWS = (
    Law(
        name="memory",
        says="peak memory grows with the length, not with its square",
        check=_check_memory,
        search=False,
        cases=(Case(kv_heads=2, q_len=_LENGTHS[-1], k_len=_LENGTHS[-1], head_dim=64, value_dim=64),),
    ),
)
"""The law of memory."""
