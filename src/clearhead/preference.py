"""Whether torch's attention is faster than the CPU kernels here: measured once in a process, where nobody knows.

The kernels are ahead of torch's function on the processors on which they were timed. Where torch multiplies with units
that they do not use (Intel's AMX), or they run on a set whose processors were not at hand, that is not known before it
was tried.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from clearhead.backends import native, native_library, sdpa
from clearhead.backends.containment import without_autocast
from clearhead.locks import lock_for_process
from clearhead.problem import DTYPES, Problem
from clearhead.statistics import Want

__all__ = ["Pace", "measured", "torch_leads", "unknown"]

#: What is timed, (batch, heads, length, head_dim), and how often: some 20 milliseconds in all.
_SHAPE, _ROUNDS = (1, 8, 256, 64), 5
#: How much faster torch must be: a tie stays with the kernels, which give the same bits at any number of threads.
_LEAD: Final = 1.1
#: Queries and keys below which the kernels are taken anyway: there reading keys is the work, and not multiplying.
_FEW: Final = 64


@dataclass(frozen=True)
class Pace:
    """What one attention took by the CPU kernels and by torch's function.

    Attributes:
        dtype: of query, key and value.
        native: seconds of the best round by the kernels.
        sdpa: the same by ``scaled_dot_product_attention``.
    """

    dtype: str
    native: float
    sdpa: float

    @property
    def torch_leads(self) -> bool:
        """Whether torch's function is faster by more than chance."""
        return self.sdpa * _LEAD < self.native


_LOCK: Final = lock_for_process()
_PACES: Final[dict[torch.dtype, Pace]] = {}


def torch_leads(problem: Problem, want: Want) -> bool:
    """Whether ``"auto"`` asks torch's function before the kernels.

    It does so for large calls without rules and masks that would have to be written out, of a dtype whose pace is
    ``unknown`` and turned out so; with gradients in float32 alone, for in 16 bits torch rounds sums that the kernels do
    not.
    """
    if problem.query.dtype not in unknown() or problem.query.device.type != "cpu":
        return False
    if want.names or problem.dropout > 0.0 or min(problem.q_len, problem.k_len) < _FEW:
        return False
    if problem.needs_gradient and problem.query.dtype != problem.work_dtype:
        return False
    if not sdpa.asks_flags(problem) or native.BACKEND.capability.reasons_against(problem, want):
        return False
    return measured(problem.query.dtype).torch_leads


@cache
def unknown() -> frozenset[torch.dtype]:
    """The dtypes in which the kernels might be slower than torch's function on this processor.

    >>> torch.float64 in unknown()
    False
    """
    # Who names a set wants to run it.
    if native_library.reason() is not None or os.environ.get("CLEARHEAD_ISA", "").strip():
        return frozenset()
    if native_library.isa_name() in _UNTRIED:
        return frozenset(DTYPES) & native.BACKEND.capability.dtypes
    return frozenset(dtype for dtype, has in _MATRIX_UNITS.items() if has())


#: Sets of processors on which nothing was timed: any one's, and ARM's, which an emulator ran.
_UNTRIED: Final = frozenset({"baseline", "neon", "neonbf16"})
#: Dtypes that torch multiplies with matrix units where the processor has some, and the question whether it does.
_MATRIX_UNITS: Final = {
    torch.bfloat16: torch.cpu._is_amx_tile_supported,
    torch.float16: torch.cpu._is_amx_fp16_supported,
}


def measured(dtype: torch.dtype) -> Pace:
    """The pace of a dtype, measured at the first call and then kept, so that same inputs give same bits.

    >>> all(measured(dtype).native > 0 for dtype in unknown())
    True
    """
    found = _PACES.get(dtype)
    if found is None:
        with _LOCK:
            found = _PACES.get(dtype) or _measure(dtype)
            _PACES[dtype] = found
    return found


@torch.no_grad()
def _measure(dtype: torch.dtype) -> Pace:
    # A generator of its own: measuring must not move the user's random numbers.
    generator = torch.Generator("cpu").manual_seed(0)
    query = torch.rand(_SHAPE, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
    problem = Problem.of("attention", query, query, query)
    best = dict.fromkeys((native.BACKEND.name, sdpa.BACKEND.name), float("inf"))
    with without_autocast("cpu"):
        for backend in (native.BACKEND, sdpa.BACKEND) * (_ROUNDS + 1):
            started = time.perf_counter()
            backend.run(problem, Want())
            # Others on the machine can only slow a call down, and so can being the first.
            best[backend.name] = min(best[backend.name], time.perf_counter() - started)
    return Pace(str(dtype)[6:], best[native.BACKEND.name], best[sdpa.BACKEND.name])
