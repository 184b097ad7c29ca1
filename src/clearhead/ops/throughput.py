"""Peak throughput of the CPU kernels' GEMM on this machine."""

from __future__ import annotations

import torch

from clearhead.ops.kinds import DTYPES
from clearhead.ops.library import isa_index, library

__all__ = ["product_rate"]

_MAX_THREADS = 4096


def product_rate(dtype: torch.dtype, threads: int | None = None) -> float | None:
    """GFLOP/s of the inner GEMM of every kernel, with all operands in the first-level caches.

    ``2 * rows * steps * columns / time`` over 64 steps, as many as a head has channels; the best of 20 rounds of a
    millisecond, each by its slowest thread. Attention and linear layers also load operands, compute exponentials and
    round. On Zen 4 a loop that stores no sums is 1 % faster in float32 and 3 % in bfloat16.

    Args:
        dtype: of the operands; bfloat16 uses dot-product instructions where the instruction set has them, else it is
            widened.
        threads: number of threads; by default torch's.

    Returns:
        The rate, or None where there are no kernels or they do not know the dtype.

    Cost: some 20 ms, no memory.

    >>> rate = product_rate(torch.float32, threads=1)
    >>> rate is None or rate > 0
    True
    """
    loaded = library()
    if loaded is None or dtype not in DTYPES:
        return None
    count = min(torch.get_num_threads() if threads is None else threads, _MAX_THREADS)
    return float(loaded.ch_product_rate(DTYPES.index(dtype), isa_index(), count)) / 1e9 or None
