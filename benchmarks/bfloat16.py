"""Linear layers and attention in bfloat16: the kernels against torch's, which use a matrix unit where there is one.

    python benchmarks/bfloat16.py                            one thread, processor time
    python benchmarks/bfloat16.py --threads 2                wall-clock time
    CLEARHEAD_ISA=avx512 python benchmarks/bfloat16.py       another instruction set of the kernels

Calls alternate; a figure is a median in µs, and the last column is the ratio of the kernels' time to the lower one of
torch's and oneDNN's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

import clearhead as ch
from clearhead.ops.library import isa_name
from clearhead.ops.throughput import product_rate
from clearhead.projection import project
from clearhead.testing import choices

Call = Callable[[], object]
Row = tuple[str, dict[str, Call]]
LINEAR = ((768, 768), (768, 3072), (3072, 768))
ROWS = (1, 4, 16, 64, 256, 2048)
#: Batch, heads, queries, keys, channels of a head, whether causal.
ATTENTION = (
    (1, 8, 2048, 2048, 128, False),
    (1, 8, 2048, 2048, 128, True),
    (1, 12, 512, 512, 64, False),
    (1, 12, 512, 512, 64, True),
    (8, 8, 64, 64, 64, False),
    (1, 8, 16, 4096, 128, False),
    (1, 8, 1, 2048, 128, False),
    (1, 32, 1, 8192, 128, False),
)


def named(path: str, call: Call) -> Call:
    """The call with every GEMM by one path."""

    def run() -> object:
        with choices(gemm=path):
            return call()

    return run


def gradients(output: Tensor, inputs: tuple[Tensor, ...]) -> Call:
    grad = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True)


def linear_rows() -> Iterator[Row]:
    for steps, columns in LINEAR:
        for rows in ROWS:
            x = torch.randn(rows, steps).bfloat16().requires_grad_()
            weight = (torch.randn(columns, steps) * steps**-0.5).bfloat16().requires_grad_()
            bias = torch.randn(columns).bfloat16().requires_grad_()
            tensors = (x, weight, bias)
            plain = [tensor.detach() for tensor in tensors]
            forward: dict[str, Call] = {"torch": lambda plain=plain: linear(*plain)}
            backward = {"torch": gradients(linear(*tensors), tensors)}
            for path in ("onednn", "native"):
                forward[path] = named(path, lambda plain=plain: project(*plain))
                with choices(gemm=path):
                    backward[path] = named(path, gradients(project(*tensors), tensors))
            yield f"linear {steps} to {columns}, {rows} rows, forward", forward
            yield f"linear {steps} to {columns}, {rows} rows, backward", backward


def attention_rows() -> Iterator[Row]:
    for batch, heads, queries, keys, width, causal in ATTENTION:
        mask = ch.Causal() if causal else None
        sizes = (queries, keys, keys)
        inputs = tuple(torch.randn(batch, heads, size, width).bfloat16().requires_grad_() for size in sizes)
        plain = [tensor.detach() for tensor in inputs]
        name = f"attention {batch}x{heads}x{queries}x{keys}x{width}{' causal' if causal else ''}"
        yield (
            f"{name}, forward",
            {
                "torch": lambda plain=plain, causal=causal: scaled_dot_product_attention(*plain, is_causal=causal),
                "native": lambda plain=plain, mask=mask: ch.attention(*plain, mask=mask, backend="native"),
            },
        )
        if queries == keys:
            outputs = {
                "torch": scaled_dot_product_attention(*inputs, is_causal=causal),
                "native": ch.attention(*inputs, mask=mask, backend="native"),
            }
            yield f"{name}, backward", {path: gradients(output, inputs) for path, output in outputs.items()}


def medians(calls: dict[str, Call], seconds: float, threads: int) -> dict[str, float]:
    """Median seconds of each call."""
    clock = time.process_time if threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {path: [] for path in calls}
    for call in calls.values():
        call()
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times["native"]) < 5:
        for path, call in calls.items():
            start = clock()
            call()
            times[path].append(clock() - start)
    return {path: statistics.median(each) for path, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each row of the table (default: 0.5)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rate = product_rate(torch.bfloat16, threads=1)
    if rate is None:
        parser.error("the CPU kernels are not installed; run make native")
    print(
        f"torch {torch.__version__}, {options.threads} threads, kernels {isa_name()} ({rate:.0f} GFLOP/s of one core)\n"
    )
    print("| call | torch | oneDNN | kernels | kernels / best other |")
    print("|---|---|---|---|---|")
    for rows in (linear_rows(), attention_rows()):
        for name, calls in rows:
            times = medians(calls, options.seconds, options.threads)
            other = min(each for path, each in times.items() if path != "native")
            cells = [f"{1e6 * times[path]:.0f}" if path in times else "" for path in ("torch", "onednn", "native")]
            print(f"| {name} | {' | '.join(cells)} | {times['native'] / other:.2f} |", flush=True)


if __name__ == "__main__":
    main()
