"""Time of linear layers with few rows in invariant mode, as a share of the time outside it.

    python benchmarks/few_rows.py                      one thread, processor time
    python benchmarks/few_rows.py --threads 2          wall-clock time
    python benchmarks/few_rows.py --conv1d             weights [in, out]

The two modes alternate call by call; a figure is the ratio of medians. GB/s is the weight's size by the time outside
invariant mode. Both modes give the same bits where they take one kernel, which the last column says.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor

import clearhead as ch
from clearhead.ops.library import library

SHAPES = ((1024, 1024), (4096, 1024), (1024, 4096), (50000, 768))
ROWS = (1, 2, 4, 8, 16, 24)


def medians(x: Tensor, weight: Tensor, seconds: float, threads: int) -> tuple[float, float, bool]:
    """Median seconds of a call outside and in invariant mode, and whether the bits are the same."""
    clock = time.process_time if threads == 1 else time.perf_counter
    times: tuple[list[float], list[float]] = ([], [])
    outputs: list[Tensor] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times[0]) < 5:
        for invariant in (False, True):
            with ch.invariant(invariant):
                start = clock()
                output = torch.ops.clearhead.linear.default(x, weight)
                times[invariant].append(clock() - start)
            if len(outputs) < 2:
                outputs.append(output)
    return statistics.median(times[0]), statistics.median(times[1]), torch.equal(*outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each row of the table (default: 0.3)")
    parser.add_argument("--conv1d", action="store_true", help="weights [in, out]")
    options = parser.parse_args()
    if library() is None:
        parser.error("the CPU kernels are not installed; run make native")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {options.threads} threads\n")
    print("| dtype | out x in | rows | GB/s | invariant / not | same bits |")
    print("|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for out, steps in SHAPES:
            weight = torch.randn(out, steps).to(dtype)
            if options.conv1d:
                weight = weight.t().contiguous().t()
            for rows in ROWS:
                x = torch.randn(rows, steps).to(dtype)
                outside, inside, same = medians(x, weight, options.seconds, options.threads)
                rate = weight.numel() * weight.element_size() / outside / 1e9
                name = f"{str(dtype)[6:]} | {out} x {steps} | {rows}"
                print(f"| {name} | {rate:.1f} | {inside / outside:.2f} | {'yes' if same else 'no'} |", flush=True)


if __name__ == "__main__":
    main()
