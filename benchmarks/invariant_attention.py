"""What one order of sums costs a decoded token's attention: `ch.set_invariant` on against off, in pairs, one thread.

python benchmarks/invariant_attention.py                      float32, where the two differ
python benchmarks/invariant_attention.py --dtype bfloat16     a dtype in which they are the same
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import product

import torch

import clearhead as ch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HEADS, GROUPS, DIMS, KEYS = (8, 32), (1, 4, 8), (64, 128), (128, 1000, 8000, 32000)
#: Bytes of keys and values that a case has at most.
LARGEST = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode attention with one order of sums against without.")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"clearhead {ch.__version__}, torch {torch.__version__}, 1 thread, {options.dtype}, medians of pairs")
    print("heads group dim  keys | off us | on us | on / off")
    for heads, group, dim, keys, call in cases(DTYPES[options.dtype]):
        pairs = [(timed(call, False), timed(call, True)) for _ in range(options.rounds)]
        off, on = (1e6 * statistics.median(each) for each in zip(*pairs, strict=True))
        ratio = statistics.median(with_order / without for without, with_order in pairs)
        print(f"{heads:5} {group:5} {dim:3} {keys:5} | {off:.1f} | {on:.1f} | {ratio:.2f}", flush=True)


def cases(dtype: torch.dtype) -> Iterator[tuple[int, int, int, int, Callable[[], object]]]:
    for heads, group, dim, keys in product(HEADS, GROUPS, DIMS, KEYS):
        if 2 * heads // group * keys * dim * dtype.itemsize > LARGEST:
            continue
        query = torch.randn(1, heads, 1, dim).to(dtype)
        key, value = (torch.randn(1, heads // group, keys, dim).to(dtype) for _ in range(2))
        yield heads, group, dim, keys, lambda call=(query, key, value): ch.attention(*call, backend="native")


def timed(call: Callable[[], object], invariant: bool) -> float:
    """Seconds of processor time of a call."""
    with ch.invariant(invariant):
        call()
        start, count = time.process_time(), 0
        while time.process_time() - start < 0.02:
            call()
            count += 1
        return (time.process_time() - start) / count


if __name__ == "__main__":
    main()
