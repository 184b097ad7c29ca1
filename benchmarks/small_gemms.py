"""GEMMs of 128 to 1,024 rows against oneDNN's on weights that it packed before, epilogues included.

    python benchmarks/small_gemms.py
    python benchmarks/small_gemms.py --dtype bfloat16 --threads 1
    python benchmarks/small_gemms.py --dtype int8

Calls alternate: the kernels on a weight that ``ch.freeze(model, pack=True)`` packed, the kernels on an ordinary weight,
which they pack in each call, and oneDNN's on a weight that it reordered before. With int8, weight and input are
integers: the kernels round the float32 input in the call, and oneDNN gets it rounded. A share is oneDNN's median time
by ours: above 1 ours is faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from clearhead.ops.kinds import Activation, Rounding
from clearhead.ops.library import library
from clearhead.ops.packed_weight import PackedWeight

#: Outputs, inputs and activation of BERT base's linear layers: projections, all three side by side, the feedforward.
LAYERS = ((768, 768, "none"), (2304, 768, "none"), (3072, 768, "gelu"), (768, 3072, "none"))
ACTIVATIONS = {"none": Activation.PLAIN, "gelu": Activation.GELU}
#: Relative to the largest output: the two add in different orders.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.int8: 2e-2}

Calls = dict[str, Callable[[], Tensor]]


def calls_of(rows: int, out: int, steps: int, activation: str, dtype: torch.dtype) -> Calls:
    """The same layer: packed before, packed in the call, and by oneDNN."""
    weight, bias = (torch.randn(out, steps) / steps**0.5).to(dtype), torch.randn(out, dtype=dtype)
    x, kind, packed = torch.randn(rows, steps, dtype=dtype), int(ACTIVATIONS[activation]), PackedWeight.of(weight)
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return {
        "packed": lambda: torch.ops.clearhead.linear_packed(x, packed.panels, out, bias, kind),
        "not packed": lambda: torch.ops.clearhead.linear(x, weight, bias, kind),
        "oneDNN": lambda: torch.ops.mkldnn._linear_pointwise(x, reordered, bias, activation, [], "none"),
    }


def integer_calls_of(rows: int, out: int, steps: int, activation: str) -> Calls:
    """The same layer on integers: inputs rounded in the call, and by oneDNN on rounded ones."""
    # Without VNNI oneDNN adds pairs of products in 16 bits: larger weights would saturate there.
    codes = (torch.randn(out, steps) * 12).round().clamp(-64, 64).to(torch.int8)
    scale, bias, kind = torch.full((out,), 1 / (12 * steps**0.5)), torch.randn(out), int(ACTIVATIONS[activation])
    x, no_zeros = torch.randn(rows, steps), torch.zeros(out, dtype=torch.int64)
    unit = x.abs().max().item() / 127
    rounded, packed = (x / unit + 128).round().to(torch.uint8), torch.ops.onednn.qlinear_prepack(codes, [rows, steps])
    of_weight, of_x = (scale[:, None], None, bias), (unit, 128, packed, scale, no_zeros, bias)
    dtype, rounding, panels = torch.float32, int(Rounding.SYMMETRIC), PackedWeight.of(codes).panels
    return {
        "packed": lambda: torch.ops.clearhead.linear_quantized(x, panels, *of_weight, rounding, -128, 127, kind),
        "not packed": lambda: torch.ops.clearhead.linear_quantized(x, codes, *of_weight, rounding, -128, 127, kind),
        "oneDNN": lambda: torch.ops.onednn.qlinear_pointwise(rounded, *of_x, 1.0, 0, dtype, activation, [], "none"),
    }


def check(calls: Calls, dtype: torch.dtype) -> None:
    """Raise unless all calls compute the same."""
    first, *others = [call().float() for call in calls.values()]
    for other in others:
        difference = (other - first).abs().max() / first.abs().max()
        if not difference <= TOLERANCE[dtype]:
            raise RuntimeError(f"the calls must agree to {TOLERANCE[dtype]}; got {difference:.1e}. Do not time them.")


def median_times(calls: Sequence[Callable[[], Tensor]], seconds: float) -> list[float]:
    """Median seconds of each call, which alternate."""
    times: list[list[float]] = [[] for _ in calls]
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times[0]) < 5:
        for call, samples in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
    return [statistics.median(samples) for samples in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch")
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 256, 512, 1024], help="rows of the input")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "int8"), default="float32", help="of the weight")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each row of the table (default: 1)")
    options = parser.parse_args()
    if library() is None:
        parser.error("the CPU kernels are not installed; run make native")
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        parser.error("this torch cannot reorder weights for oneDNN")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    print(f"torch {torch.__version__}, {options.dtype}, {options.threads} threads\n")
    names = ("packed", "not packed")
    columns = [*(f"{name}, ms" for name in (*names, "oneDNN")), *(f"share of {name}" for name in names)]
    print("| rows | out x in | activation |", " | ".join(columns), "| GFLOP/s |")
    print("|---|---|---|" + "---|" * len(columns) + "---|")
    for rows in options.rows:
        for out, steps, activation in LAYERS:
            layer = (rows, out, steps, activation)
            calls = integer_calls_of(*layer) if dtype is torch.int8 else calls_of(*layer, dtype)
            check(calls, dtype)
            *ours, onednn = median_times([*calls.values()], options.seconds)
            cells = [*(f"{1e3 * each:.2f}" for each in (*ours, onednn)), *(f"{onednn / each:.2f}" for each in ours)]
            rate = 2e-9 * rows * out * steps / ours[0]
            print(f"| {rows} | {out}x{steps} | {activation} | {' | '.join(cells)} | {rate:.0f} |")


if __name__ == "__main__":
    main()
