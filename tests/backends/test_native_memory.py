"""The cache of freed memory for results: properties of tensors in it, and its size."""

from __future__ import annotations

import gc
import io
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.ops import library as native_library
from clearhead.ops.memory import kept_memory, limit
from tests.processes import reported
from tests.threads import on_threads

pytestmark = pytest.mark.skipif(native_library.library() is None, reason="the CPU kernels are not installed")

MIB = 2**20


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    gc.collect()
    ch.release_memory()
    yield
    ch.release_memory()


def result_of(x: Tensor) -> Tensor:
    """A result of an operator, with the elements of ``x``."""
    output: Tensor = torch.ops.clearhead.dropout_add(x, None, 0, 0)
    return output


def a_mib(count: int = 1) -> Tensor:
    return result_of(torch.zeros(count, 2**18))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 0, 5), (7,), (1024, 1024), (2, 3, 512, 512), (2, 2, 2, 512, 256)])
def test_a_result_is_a_plain_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    plain = torch.zeros(shape, dtype=dtype)
    result = result_of(plain)
    assert (result.shape, result.stride(), result.dtype) == (plain.shape, plain.stride(), dtype)
    assert type(result) is Tensor
    assert result.is_contiguous()
    assert not result._is_view()
    assert not result.requires_grad
    assert result.nbytes < MIB or result.data_ptr() % 64 == 0
    assert torch.equal(result.fill_(2.0), plain.fill_(2.0))


def test_freed_memory_is_reused() -> None:
    first = a_mib(6)
    place = first.data_ptr()
    assert kept_memory() == 0
    del first
    assert kept_memory() == 6 * MIB
    other = result_of(torch.zeros(12, 1024, 256, dtype=torch.bfloat16))
    assert other.data_ptr() == place
    assert kept_memory() == 0


def test_view_keeps_the_allocation_alive() -> None:
    whole = a_mib(4)
    part = whole.fill_(3.0)[1, :5]
    del whole
    assert kept_memory() == 0
    a_mib(4).fill_(0.0)
    assert part.tolist() == [3.0] * 5


def test_small_results_use_the_c_allocator() -> None:
    result_of(torch.zeros(1024))
    assert kept_memory() == 0


def test_release_returns_the_cached_bytes() -> None:
    a_mib(3)
    assert ch.release_memory() == 3 * MIB
    assert kept_memory() == ch.release_memory() == 0


def test_attention_and_its_gradients_use_the_cache() -> None:
    parts = [torch.randn(1, 8, 512, 64, requires_grad=True) for _ in range(3)]
    output = ch.attention(*parts, backend="native")
    first = torch.autograd.grad(output, parts, torch.ones_like(output))
    cached = kept_memory()
    # What the output leaves, here its gradients took.
    del output, first
    assert kept_memory() == cached + 4 * MIB
    with torch.no_grad():
        outputs = [ch.attention(*parts, backend="native") for _ in range(2)]
    assert kept_memory() == cached + 2 * MIB
    assert torch.equal(*outputs)


def test_a_tensor_can_be_saved_shared_changed_and_given_to_numpy() -> None:
    tensor = a_mib(2).fill_(5.0)
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=True), tensor)
    assert tensor.numpy().sum() == 5.0 * tensor.numel()
    assert tensor.add_(1.0)[0, 0] == 6.0
    assert tensor.clone().share_memory_()[0, 0] == 6.0
    assert torch.equal(tensor.share_memory_(), tensor)
    assert tensor.to(torch.float64)[0, 0] == 6.0


def test_parameter_may_use_cached_memory() -> None:
    weight = torch.nn.Parameter(a_mib().zero_())
    optimizer = torch.optim.AdamW([weight])
    weight.grad = a_mib().fill_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    assert bool((weight != 0).all())


def test_threads_do_not_share_a_block() -> None:
    wrong = []

    def work(number: int) -> None:
        for round in range(60):
            tensor = a_mib(1 + (number + round) % 3).fill_(float(number))
            if not bool((tensor == number).all()):
                wrong.append(number)

    on_threads(6, work)
    assert wrong == []
    assert kept_memory() <= limit()


def test_the_limit_is_a_part_of_the_machine() -> None:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert limit() == pytest.approx(machine / 8, abs=2**16)
    a_mib(2)
    assert limit() == limit()
    assert kept_memory() == 2 * MIB


#: The variable is read when memory is first asked for, so one process that has asked for none does for all values.
ASK = """
import os, sys
import torch, clearhead as ch
from clearhead.ops.memory import kept_memory, limit

def said():
    try:
        ch.attention(*[torch.zeros(1, 1, 81920, 64)] * 3, mask=ch.Window(0), backend="native")
        return f"{kept_memory() // 2**20} {limit() // 2**20}"
    except ch.UnsupportedError as problem:
        return str(problem)

for value in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        os.environ["CLEARHEAD_KEEP_MEMORY"] = value
        print(said(), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_the_variable_bounds_it() -> None:
    assert ask("0", "1000", "19", " 64 ") == ["0 0", "20 1000", "0 19", "20 64"]


def test_a_bad_variable_is_refused() -> None:
    said = ask("-1", "1.5", "much", "1e3", "²", "1" * 30)
    assert len(said) == 6
    must = "clearhead: CLEARHEAD_KEEP_MEMORY must be a whole number of MiB, 0 or more; got "
    assert [line for line in said if not line.startswith(must)] == []


def ask(*values: str) -> list[str]:
    done = reported(ASK, values)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
