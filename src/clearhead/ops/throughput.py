"""How fast the CPU kernels' product runs at its best: the limit that this machine sets them."""

from __future__ import annotations

import torch

from clearhead.ops.kinds import DTYPES
from clearhead.ops.library import isa_index, library

__all__ = ["product_rate"]

_MAX_THREADS = 4096


def product_rate(dtype: torch.dtype, threads: int | None = None) -> float | None:
    """The GFLOP/s of the product that every kernel is made of, where all it reads and writes lies in the first caches.

    ``2 * rows * steps * columns / time`` over 64 steps, as many as a head has channels; the best of 20 rounds of a
    millisecond, each by its slowest thread. Attention and linear layers fetch what they multiply, take exponentials and
    round besides. Sums of more steps are written less often: on Zen 4 a loop that writes none is 1 % faster in float32
    and 3 % in bfloat16, and nothing exceeds that.

    Args:
        dtype: what is multiplied; 16 bits as pairs where the instruction set has them, else widened.
        threads: how many at once; torch's own number when left out.

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
