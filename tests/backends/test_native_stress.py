"""The CPU kernels with threads and processes: bitwise equal results at any thread count, concurrent callers, forks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from tests.agreement import draw, needs_native, results

pytestmark = [needs_native, pytest.mark.usefixtures("_threads_as_before")]


def _shape(batch: int, heads: int, kv_heads: int, q_len: int, k_len: int, dim: int) -> tuple[Tensor, ...]:
    return (
        draw(batch, heads, q_len, dim),
        draw(batch, kv_heads, k_len, dim, seed=1),
        draw(batch, kv_heads, k_len, dim, seed=2),
    )


#: Each way that the kernels divide work: by heads, by blocks of queries, by keys; and backward by chunks of keys.
DIVIDED: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "whole heads": ((4, 8, 8, 70, 70, 32), {}),
    "shared keys": ((1, 2, 1, 500, 500, 32), {"mask": ch.Causal()}),
    "a few heads, one block": ((1, 5, 5, 4, 300, 64), {}),
    "a few heads, one block, causal": ((1, 3, 3, 12, 512, 64), {"mask": ch.Causal(), "query_offset": 500}),
    "grouped heads, one block": ((1, 10, 5, 2, 300, 64), {}),
    **{f"decode {n}": ((1, 8, 2, n, 3000, 64), {"mask": ch.Causal(), "query_offset": 3000 - n}) for n in (1, 2, 7, 16)},
    "chunks": ((1, 1, 1, 300, 2000, 32), {}),
    "documents": ((1, 3, 3, 900, 900, 16), {"mask": ch.Causal() & ch.Documents(lengths=[500, 1, 99, 300])}),
    "dropout": ((2, 3, 3, 200, 700, 16), {"dropout": 0.2, "seed": 7}),
    "a table": ((1, 3, 3, 200, 700, 16), {"mask": ch.Dense(draw(1, 3, 200, 700, grad=False) > 0)}),
    "sink and cap": ((1, 3, 3, 300, 700, 16), {"scores": (ch.SoftCap(2.0), ch.Sink(draw(3)))}),
    "relative": ((2, 3, 3, 300, 700, 16), {"scores": (ch.RelativeBias(draw(3, 21)),), "query_offset": 400}),
    "one bias for all heads": ((2, 4, 2, 150, 1100, 16), {"scores": (ch.DenseBias(draw(1, 1, 150, 1100)),)}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DIVIDED)
def test_any_number_of_threads_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    shape, options = DIVIDED[name]
    inputs = tuple(tensor.detach().to(dtype).requires_grad_() for tensor in _shape(*shape))
    plain = tuple(tensor.detach() for tensor in inputs)
    runs = []
    for threads in (1, 2, 3, 5, 1):
        torch.set_num_threads(threads)
        assert torch.get_num_threads() == threads
        run = results(inputs, **options)
        runs.append([*run, ch.attention(*plain, backend="native", **options)])
    names = ("output", "lse", "dquery", "dkey", "dvalue")
    for threads, run in zip((2, 3, 5, 1), runs[1:], strict=True):
        for place, (one, other) in enumerate(zip(runs[0], run, strict=True)):
            what = names[place] if place < len(names) else "inference, or a rule's gradient"
            assert torch.equal(one, other), f"{what} with {threads} threads is not that with 1"


def test_forward_and_backward_need_not_have_the_same_threads() -> None:
    inputs = _shape(1, 3, 3, 500, 1100, 32)
    slope = draw(1, 3, 500, 32, seed=4, grad=False)
    grads = []
    for forward, backward in ((1, 1), (5, 2), (2, 5)):
        torch.set_num_threads(forward)
        output = ch.attention(*inputs, mask=ch.Window(700, 100), query_offset=600, backend="native")
        torch.set_num_threads(backward)
        grads.append([output, *torch.autograd.grad(output, inputs, slope)])
    for others in grads[1:]:
        assert all(torch.equal(one, other) for one, other in zip(grads[0], others, strict=True))


class TestCallers:
    """Python threads that call concurrently, each with different inputs."""

    SECONDS = 1.0

    def work(self) -> list[tuple[tuple[Tensor, ...], dict[str, Any]]]:
        names = ("whole heads", "shared keys", "decode 1", "decode 7", "chunks", "dropout", "documents", "relative")
        return [(_shape(*DIVIDED[name][0]), DIVIDED[name][1]) for name in names]

    @pytest.mark.slow
    @pytest.mark.parametrize("threads", [1, 2])
    def test_eight_at_once(self, threads: int) -> None:
        torch.set_num_threads(threads)
        work = self.work()
        alone = [self.run_call(inputs, options) for inputs, options in work]
        barrier, wrong, counts = threading.Barrier(len(work)), [], [0] * len(work)

        def call(caller: int) -> None:
            barrier.wait()
            stop = time.monotonic() + self.SECONDS
            while time.monotonic() < stop:
                place = (caller + counts[caller]) % len(work)
                results = self.run_call(*work[place])
                if not all(torch.equal(one, right) for one, right in zip(results, alone[place], strict=True)):
                    wrong.append(place)
                counts[caller] += 1

        callers = [threading.Thread(target=call, args=(caller,)) for caller in range(len(work))]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(timeout=60.0)
            assert not caller.is_alive()
        assert not wrong
        assert all(counts)

    @staticmethod
    def run_call(inputs: tuple[Tensor, ...], options: dict[str, Any]) -> list[Tensor]:
        plain = tuple(tensor.detach() for tensor in inputs)
        return [ch.attention(*plain, backend="native", **options), *results(inputs, **options)]

    def test_the_number_of_threads_may_change_meanwhile(self) -> None:
        """Another thread's set_num_threads moves nothing but the speed."""
        inputs, options = _shape(1, 3, 3, 300, 600, 32), {"mask": ch.Causal(), "query_offset": 300}
        right, stop = self.run_call(inputs, options), threading.Event()

        def change() -> None:
            while not stop.is_set():
                for count in (1, 3, 2):
                    torch.set_num_threads(count)

        changer = threading.Thread(target=change)
        changer.start()
        try:
            for count in (2, 1, 5, 3) * 3:
                torch.set_num_threads(count)
                results = self.run_call(inputs, options)
                assert all(torch.equal(one, other) for one, other in zip(results, right, strict=True))
        finally:
            stop.set()
            changer.join()


FORK = """
import os, signal, torch
import clearhead as ch
torch.set_num_threads(2)
inputs = [torch.randn(1, 4, 100, 64, requires_grad=True) for _ in range(3)]
slope = torch.randn(1, 4, 100, 64)
def call(**options):
    output = ch.attention(*inputs, mask=ch.Causal(), backend="native", **options)
    with torch.no_grad():
        plain = ch.attention(*inputs, mask=ch.Causal(), backend="native", **options)
    return [output, plain, *torch.autograd.grad(output, inputs, slope)]
right, dropped = call(), call(dropout=0.3, seed=1)
def child():
    signal.alarm(60)
    again = [*call(), *call(dropout=0.3, seed=1)]
    same = all(torch.equal(one, other) for one, other in zip(again, [*right, *dropped], strict=True))
    os._exit(0 if same else 3)
for _ in range(3):
    number = os.fork()
    if number == 0:
        child()
    print(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]))
assert all(torch.equal(one, other) for one, other in zip(call(), right, strict=True))
print("parent")
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_children_forked_after_use_compute_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "0", "0", "parent"]


STATM = Path("/proc/self/statm")


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not STATM.exists(), reason="this system does not say how much memory is in use")
@pytest.mark.parametrize("threads", [1, 2])
def test_thread_frees_its_workspace_at_its_end(threads: int) -> None:
    """A thread's workspace is reused between its calls, and freed with the thread."""
    torch.set_num_threads(threads)
    inputs = _shape(1, 4, 4, 97, 8000, 64)

    def call() -> None:
        results(inputs, mask=ch.Causal(), query_offset=7903)

    def one_after_another(count: int) -> None:
        for _ in range(count):
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()

    one_after_another(5)
    before = resident()
    one_after_another(50)
    grown = resident() - before
    # One thread's packed keys of all four heads are 16 MB: kept alive by all, 800. The allocator caches some memory.
    assert grown < 50 * 2**24 / 10, f"50 threads left {grown / 2**20:.0f} MiB behind"
