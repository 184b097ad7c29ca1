"""The peak throughput of the kernels' GEMM."""

from __future__ import annotations

import os

import pytest
import torch

from clearhead.ops.library import isa_names, library
from clearhead.ops.throughput import product_rate
from tests.instruction_sets import place_of

needs_library = pytest.mark.skipif(library() is None, reason="the CPU kernels are not built")
SETS = isa_names()


def _use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure another instruction set than the one in use."""
    monkeypatch.setattr("clearhead.ops.throughput.isa_index", lambda: place_of(name))


@needs_library
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_set_has_a_peak_throughput_in_every_dtype(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use(name, monkeypatch)
    rate = product_rate(dtype, threads=1)
    assert rate is not None
    assert 0.01 < rate < 1e4


@needs_library
@pytest.mark.skipif(SETS[:1] == ["baseline"], reason="this processor has no set that was written for it")
def test_newer_set_has_a_higher_peak_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {}
    for name in (SETS[0], "baseline"):
        _use(name, monkeypatch)
        rates[name] = product_rate(torch.float32, threads=1) or 0.0
    assert rates[SETS[0]] > 1.5 * rates["baseline"]


@needs_library
def test_no_gemm_exceeds_the_peak_throughput() -> None:
    """The highest of several, for other work on the machine may slow one down."""
    from clearhead.projection import NATIVE, project

    x, weight = torch.randn(512, 512), torch.randn(512, 512)
    limit = max(product_rate(torch.float32) or 0.0 for _ in range(5))
    from clearhead.benchmark.timing import interleaved

    seconds = min(interleaved({"it": lambda: project(x, weight, None, path=NATIVE)}, repeats=20)["it"].runs)
    assert 2.0 * 512**3 / seconds / 1e9 < 1.1 * limit


@needs_library
def test_default_threads_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Library:
        def ch_product_rate(self, dtype: int, isa: int, threads: int) -> float:
            asked.append(threads)
            return 1e9

    monkeypatch.setattr("clearhead.ops.throughput.library", Library)
    assert product_rate(torch.float32) == 1.0
    product_rate(torch.float32, threads=3)
    product_rate(torch.float32, threads=10**9)
    assert asked == [torch.get_num_threads(), 3, 4096]


def test_throughput_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert product_rate(torch.float64) is None
    monkeypatch.setattr("clearhead.ops.throughput.library", lambda: None)
    assert product_rate(torch.float32) is None


@needs_library
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_measures_on_its_own_thread() -> None:
    product_rate(torch.float32)
    child = os.fork()
    if child == 0:
        os._exit(0 if (product_rate(torch.float32, threads=2) or 0.0) > 0.0 else 1)
    assert os.waitpid(child, 0)[1] == 0
