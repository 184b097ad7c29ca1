"""Two checkouts, call by call: whether a change costs time.

python benchmarks/checkouts.py ../before .                          kernels, which each folder has built (make native)
python benchmarks/checkouts.py ../before . --isa avx2               on another instruction set
python benchmarks/checkouts.py ../before . --only decoding          calls whose name contains a text
python benchmarks/checkouts.py ../before . --rounds 3               fewer pairs
python benchmarks/checkouts.py ../before . --suite forward,module   rows of `clearhead bench` instead, without the peers

Each checkout runs in a process of its own. A round times a call in both, one after the other, and the next round the
other way around. Times are medians in milliseconds; the ratio is the median over rounds. Kernels run on one thread and
their process time counts. Rows of suites run on as many threads as torch takes, and the clock on the wall counts; those
that only one checkout has are left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Call = Callable[[], object]
#: Seconds of a sample.
SAMPLE = 0.05
#: Answers with the clearhead of a checkout, even if another one is installed as editable.
PROGRAM = """
import runpy, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "clearhead" not in type(finder).__module__]
folder, program, suites = sys.argv[1:]
sys.path.insert(0, folder)
runpy.run_path(program)["answer"](suites.split(",") if suites else [])
"""


def kernel_calls() -> dict[str, Callable[[], Call]]:
    """What makes each call of the kernels, by name, of the clearhead that this process imports."""
    import torch

    import clearhead as ch
    from clearhead.nn.norm import normed
    from clearhead.ops.kinds import NormKind
    from clearhead.projection import project, project_activate_project

    torch.set_num_threads(1)

    def attention(batch: int, heads: int, kv_heads: int, q_len: int, k_len: int, dim: int, kind: str) -> Call:
        dtype = torch.bfloat16 if "bfloat16" in kind else torch.float32
        sizes = ((heads, q_len), (kv_heads, k_len), (kv_heads, k_len))
        query, key, value = (torch.randn(batch, *size, dim, dtype=dtype) for size in sizes)
        mask = ch.Causal() if "causal" in kind else None
        if "backward" not in kind:
            return lambda: ch.attention(query, key, value, mask=mask, backend="native")
        leaves = [part.requires_grad_() for part in (query, key, value)]
        upstream = torch.randn_like(query)
        return lambda: torch.autograd.grad(ch.attention(*leaves, mask=mask, backend="native"), leaves, upstream)

    x, weight = torch.randn(2048, 768), torch.randn(768)
    rows, expand, contract = torch.randn(512, 768), torch.randn(3072, 768), torch.randn(768, 3072)
    norm = ((NormKind.LAYER, 1e-5), (weight, None))
    made = {
        "attention 4x64, 2048, full": attention(1, 4, 4, 2048, 2048, 64, ""),
        "attention 2x64, 8192, causal": attention(1, 2, 2, 8192, 8192, 64, "causal"),
        "attention 8 of 12x64, 128, full": attention(8, 12, 12, 128, 128, 64, ""),
        "attention 2 of 12x64, 512, causal": attention(2, 12, 12, 512, 512, 64, "causal"),
        "attention 4x64, 2048, causal, bfloat16": attention(1, 4, 4, 2048, 2048, 64, "causal bfloat16"),
        "both passes 2 of 12x64, 512, causal": attention(2, 12, 12, 512, 512, 64, "causal backward"),
        "both passes 1 of 2x64, 4096, causal": attention(1, 2, 2, 4096, 4096, 64, "causal backward"),
        "decoding 32/8x128, 2048 keys": attention(1, 32, 8, 1, 2048, 128, ""),
        "decoding 32/8x128, 2048 keys, bfloat16": attention(1, 32, 8, 1, 2048, 128, "bfloat16"),
        "decoding 12x64, 512 keys": attention(1, 12, 12, 1, 512, 64, ""),
        "linear layer, 1 row, 768 to 3072": lambda: project(rows[:1], expand, None),
        "linear layer, 512 rows, 768 to 3072": lambda: project(rows, expand, None),
        "feedforward, 512 rows, 768 over 3072, gelu": lambda: project_activate_project(
            rows, expand, None, contract, None, activation="gelu"
        ),
        "layer norm, 2048 rows of 768": lambda: normed(x, norm),
    }
    return {name: lambda call=call: call for name, call in made.items()}


def suite_calls(suites: list[str]) -> dict[str, Callable[[], Call]]:
    """What makes clearhead's own call of each row of the suites, by suite, title and contender."""
    from clearhead.benchmark.peers import OURS
    from clearhead.benchmark.suites import SUITES

    def call_of(row: Any, contender: str) -> Call:
        # The first edition says case.
        calls: dict[str, Call] = (row.comparison if hasattr(row, "comparison") else row.case)().calls
        return calls[contender]

    return {
        f"{suite}: {row.title}" + (f", {ours}" if ours != OURS else ""): partial(call_of, row, ours)
        for suite in suites
        for row in SUITES[suite].rows()
        for ours in sorted({floor.ours for floor in SUITES[suite].floors if floor.group == row.group} or {OURS})
    }


def answer(suites: list[str]) -> None:
    """Time the calls that the standard input names, one sample a line."""
    clock = time.perf_counter if suites else time.process_time
    makers = suite_calls(suites) if suites else kernel_calls()
    print("\t".join(makers), flush=True)
    current, call, times = "", None, 1
    for line in sys.stdin:
        name = line.rstrip("\n")
        if name != current:
            call = None  # frees the tensors of the last one first
            current, call = name, makers[name]()
            call()
            started = time.perf_counter()
            call()
            times = max(1, round(SAMPLE / max(1e-6, time.perf_counter() - started)))
        started = clock()
        for _ in range(times):
            call()
        print((clock() - started) / times, flush=True)


class Checkout:
    """A process that runs the calls of a checkout."""

    def __init__(self, folder: Path, isa: str, suites: str) -> None:
        chosen = {} if suites else {"CLEARHEAD_PROJECTION": "native", "OMP_NUM_THREADS": "1"}
        if isa:
            chosen["CLEARHEAD_ISA"] = isa
        pipe, command = subprocess.PIPE, [sys.executable, "-c", PROGRAM, str(folder / "src"), __file__, suites]
        self._folder = folder
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **chosen})
        self.names = self._read().rstrip("\n").split("\t")

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"checkouts: {self._folder} must be a checkout that runs these calls; its error is above")
        return line

    def seconds(self, name: str) -> float:
        """Process time of one call, from a sample."""
        assert self._process.stdin is not None
        print(name, file=self._process.stdin, flush=True)
        return float(self._read())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="folder of a checkout")
    parser.add_argument("after", type=Path, help="folder of another one")
    parser.add_argument("--isa", default="", help="instruction set of both, as in CLEARHEAD_ISA")
    parser.add_argument("--only", default="", help="a text that the names of calls contain")
    parser.add_argument("--rounds", type=int, default=11, help="pairs of each call")
    parser.add_argument("--suite", default="", help="suites of clearhead bench, separated by commas")
    options = parser.parse_args()
    folders = [options.before.resolve(), options.after.resolve()]
    for folder in folders:
        if not (folder / "src" / "clearhead").is_dir():
            parser.error(f"before and after must be checkouts of clearhead; got {folder}")
    checkouts = [Checkout(folder, options.isa, options.suite) for folder in folders]
    print("| call | before | after | ratio |\n|---|---|---|---|")
    for name in (each for each in checkouts[0].names if options.only in each and each in checkouts[1].names):
        seconds: list[list[float]] = [[], []]
        for turn in range(options.rounds):
            for place in (0, 1) if turn % 2 else (1, 0):
                seconds[place].append(checkouts[place].seconds(name))
        ratio = statistics.median(after / before for before, after in zip(*seconds, strict=True))
        before, after = (statistics.median(each) * 1e3 for each in seconds)
        print(f"| {name} | {before:.3f} | {after:.3f} | {ratio:.2f} |", flush=True)
    for checkout in checkouts:
        checkout.close()


if __name__ == "__main__":
    main()
