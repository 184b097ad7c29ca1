"""The GPU kernels on a CUDA device: agreement with the specification, and the cost of statistics.

    python benchmarks/triton_gpu.py                    every size, mask and dtype
    python benchmarks/triton_gpu.py --rounds 50        more rounds of each timing
    python benchmarks/triton_gpu.py --dtypes float16   one of float16, bfloat16, float32, or several

Each time is the median of interleaved rounds, taken with CUDA events. "sdpa" is torch's own forward in the same run,
"forward" these kernels without statistics; every other column is a ratio to "sdpa", and in brackets to "forward".
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

import clearhead as ch

SIZES = ((1, 12, 4096, 64), (8, 12, 512, 64))
MASKS: dict[str, ch.Mask | None] = {"full": None, "causal": ch.Causal()}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
#: How far a number may be from the specification in float64, as a part of its size: inputs' products are exact in
#: float32, so statistics are float32's; the output's weights are rounded to the inputs' dtype.
STATISTICS_ERROR = 1e-4


def wanted(length: int) -> dict[str, ch.Want]:
    """The requested statistics, by column name."""
    rows = {"lse": True, "max_score": True, "entropy": True, "distance": True, "sink": 4}
    mixing = torch.full((1, 1, 1, length), 1.0 / length, device="cuda")
    columns = {"received": True, "row_weights": mixing, "heatmap": 64, "rows": [0, length - 1]}
    return {
        "rows": ch.Want(**rows),
        "received": ch.Want(received=True),
        "heatmap": ch.Want(heatmap=64),
        "all but top-k": ch.Want(**rows, **columns),
        "top-k": ch.Want(top_k=8),
        "everything": ch.Want(**rows, **columns, top_k=8),
    }


def draw(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = (torch.randn(size, generator=generator, device="cuda").to(dtype) for _ in range(3))
    return query, key, value


def disagreements(size: tuple[int, ...], mask: ch.Mask | None, dtype: torch.dtype) -> list[str]:
    """Names of results that differ too much from the specification in float64, with their errors."""
    inputs = draw(size, dtype)
    want = wanted(size[2])["everything"]
    actual = ch.observe_attention(*inputs, want=want, mask=mask, backend="triton")
    right = ch.observe_attention(*(each.double() for each in inputs), want=want, mask=mask, backend="reference")
    failures = []
    for field in fields(ch.Observation):
        one, other = getattr(actual, field.name), getattr(right, field.name)
        if field.name == "top_indices":
            continue  # Near ties may be in another order; their weights are compared.
        rounding = torch.finfo(dtype).eps if field.name == "output" else 0.0
        scale = max(1e-3, other[torch.isfinite(other)].abs().max().item())
        error = (one.double() - other).abs().nan_to_num(0.0, 0.0).max().item() / scale
        if error > STATISTICS_ERROR + rounding or not torch.equal(one.isfinite(), other.isfinite()):
            failures.append(f"{field.name} ({error:.1e})")
    repeated = ch.observe_attention(*inputs, want=want, mask=mask, backend="triton")
    for field in fields(ch.Observation):
        if not torch.equal(getattr(actual, field.name), getattr(repeated, field.name)):
            failures.append(f"{field.name} (other bits the second time)")
    plain = ch.attention(*inputs, mask=mask, backend="triton")
    return failures + ([] if torch.equal(plain, actual.output) else ["output (other bits without statistics)"])


def medians(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of each call: the median of interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 3):
        for name, call in calls.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            if number >= 3:
                times[name].append(start.elapsed_time(stop))
    return {name: statistics.median(samples) for name, samples in times.items()}


def measure(size: tuple[int, ...], mask: ch.Mask | None, dtype: torch.dtype, rounds: int) -> str:
    inputs = draw(size, dtype)
    calls: dict[str, Callable[[], object]] = {
        "sdpa": lambda: ch.attention(*inputs, mask=mask, backend="sdpa"),
        "forward": lambda: ch.attention(*inputs, mask=mask, backend="triton"),
    }
    for name, want in wanted(size[2]).items():
        calls[name] = lambda want=want: ch.observe_attention(*inputs, want=want, mask=mask, backend="triton")  # type: ignore[misc]
    took = medians(calls, rounds)
    sdpa, forward = took.pop("sdpa"), took.pop("forward")
    ratios = "  ".join(f"{name} {each / sdpa:.2f} ({each / forward:.2f})" for name, each in took.items())
    return f"sdpa {sdpa:.3f} ms  forward {forward:.3f} ms ({forward / sdpa:.2f})  {ratios}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each timing (default 30)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="dtypes (default all)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("triton_gpu: needs a CUDA device, and torch sees none; nothing was measured.", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    wrong = 0
    with torch.no_grad():
        for size in SIZES:
            for name, mask in MASKS.items():
                for kind in options.dtypes:
                    # The specification holds T x T in float64: agreement is checked on fewer heads.
                    failures = disagreements((1, 2, *size[2:]), mask, DTYPES[kind])
                    wrong += bool(failures)
                    print(f"{size} {name} {kind}: {'disagrees in ' + ', '.join(failures) if failures else 'agrees'}")
                    print(f"  {measure(size, mask, DTYPES[kind], options.rounds)}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
