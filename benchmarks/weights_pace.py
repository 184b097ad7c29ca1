"""How near decoding comes to the memory's pace: linear layers of few rows against a plain read of the same bytes.

    python benchmarks/weights_pace.py
    python benchmarks/weights_pace.py --threads 1 --rows 1 8

A layer has several weights that are used in turn, together larger than every cache, as the layers of a model are. A
plain read is the fastest of torch's sums and largest element of as many bytes, with as many threads: those of the
weight itself, or for integers a copy of them with their scales and offsets. Layer and read alternate; a share is the
read's median time by the layer's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import cycle

import torch
from torch import Tensor

from clearhead.ops.library import library
from clearhead.ops.packed_weight import PackedWeight, Weight
from clearhead.ops.quantized_weight import QuantizedWeight
from clearhead.projection.stored import multiply_stored

#: Outputs and inputs: projections and feedforwards of models 1,024 and 4,096 wide.
SHAPES = ((1024, 1024), (2816, 1024), (4096, 4096), (11008, 4096))
KINDS = ("float32", "float32 packed", "bfloat16", "bfloat16 packed", "int8", "int4")
#: Bytes of all weights of a layer: more than the third cache of a server, which several guests share.
TOTAL = 2**30
#: A weight, and what a plain read of it reads.
Pair = tuple[Weight, Tensor]


def weights(kind: str, out: int, steps: int) -> list[Weight]:
    """As many weights as fill ``TOTAL``."""
    size = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5}[kind.split()[0]]
    count = max(2, round(TOTAL / (out * steps * size)))
    return [weight(kind, out, steps) for _ in range(count)]


def weight(kind: str, out: int, steps: int) -> Weight:
    """A weight with random elements."""
    dtype, *packed = kind.split()
    if dtype in ("float32", "bfloat16"):
        floats = torch.randn(out, steps).to(getattr(torch, dtype))
        return PackedWeight.of(floats) if packed else floats
    if kind == "int8":
        return QuantizedWeight(torch.randint(-128, 128, (out, steps), dtype=torch.int8), torch.rand(out, 1))
    codes = torch.randint(0, 256, (out, steps // 2), dtype=torch.uint8)
    return QuantizedWeight(codes, torch.rand(out, steps // 32), torch.rand(out, steps // 32))


def bytes_of(one: Weight) -> Tensor:
    """All that a layer reads as float32, whatever it is."""
    if isinstance(one, PackedWeight):
        return one.panels.view(torch.float32)
    if isinstance(one, QuantizedWeight):
        parts = [part for part in (one.codes, one.scale, one.offset) if part is not None]
        return torch.cat([part.view(torch.uint8).flatten() for part in parts]).view(torch.float32)
    return one.view(torch.float32)


def multiply(x: Tensor, one: Weight) -> Tensor:
    """The layer, by the kernels."""
    if not isinstance(one, Tensor):
        return multiply_stored(x, one, None)
    output: Tensor = torch.ops.clearhead.linear.default(x, one)
    return output


def median_times(calls: Sequence[Callable[[Pair], object]], over: Sequence[Pair], seconds: float) -> list[float]:
    """Median seconds of each call, which alternate over the same weights."""
    times: list[list[float]] = [[] for _ in calls]
    end, turn = time.monotonic() + seconds, cycle(over)
    while time.monotonic() < end or len(times[0]) < 3 * len(over):
        for place, call in enumerate(calls):
            one = next(turn)
            start = time.perf_counter()
            call(one)
            times[place].append(time.perf_counter() - start)
    return [statistics.median(each) for each in times]


#: Reads of every byte: as integers, so that no element is a NaN that takes longer.
READS: dict[str, Callable[[Pair], object]] = {
    "sum": lambda pair: pair[1].view(torch.int32).sum(),
    "amax": lambda pair: pair[1].view(torch.int32).amax(),
    "float sum": lambda pair: pair[1].sum(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="rows of the layers' input (default: 1 8)")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each row of the table (default: 1)")
    parser.add_argument(
        "--kinds", nargs="+", default=KINDS, choices=KINDS, help="how weights are stored (default: all)"
    )
    parser.add_argument(
        "--integers-by",
        default="float32",
        choices=("float32", "bfloat16"),
        help="dtype of what integers are multiplied by (default: float32)",
    )
    options = parser.parse_args()
    if library() is None:
        parser.error("the CPU kernels are not installed; run make native")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {options.threads} threads\n")
    print("| weight | out x in | rows | layer, GB/s | plain read, GB/s | share |")
    print("|---|---|---|---|---|---|")
    for kind in options.kinds:
        for out, steps in SHAPES:
            some = [(one, bytes_of(one)) for one in weights(kind, out, steps)]
            dtype = getattr(torch, options.integers_by if kind.startswith("int") else kind.split()[0])
            for rows in options.rows:
                x = torch.randn(rows, steps).to(dtype)
                calls = [lambda pair, x=x: multiply(x, pair[0]), *READS.values()]
                layer, *reads = median_times(calls, some, options.seconds)
                size = some[0][1].nbytes / 1e9
                read = min(reads)
                print(
                    f"| {kind} | {out}x{steps} | {rows} | {size / layer:.1f} | {size / read:.1f} | {read / layer:.2f} |"
                )


if __name__ == "__main__":
    main()
