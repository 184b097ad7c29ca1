"""Several threads give the numbers of one thread, and many shapes do not grow memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra 'hf'")

import clearhead as ch
from tests.net.calls import distance, results
from tests.net.families import FAMILIES, TOKENS
from tests.net.modules import MODULES, modules, tokens
from tests.processes import reported

THREADS, ROUNDS = 8, 3
FAR = {torch.float32: 1e-5, torch.bfloat16: 0.05}
Work = Callable[[], dict[str, Tensor]]


def _attention(place: int) -> dict[str, Tensor]:
    """A call whose sizes, dtype, mask, rules and dropout depend on its index."""
    draw = random.Random(place)
    heads, groups, dim = draw.choice((1, 2, 4)), draw.choice((1, 2)), draw.choice((4, 8, 16))
    length = draw.choice((1, 2, 7, 17, 33, 65))
    dtype = draw.choice((torch.float32, torch.bfloat16))
    shapes = ((2, heads * groups, length, dim), (2, heads, length, dim), (2, heads, length, dim))
    leaves = [tokens(*shape, seed=place + seed).to(dtype).requires_grad_() for seed, shape in enumerate(shapes)]
    mask = draw.choice((None, ch.Causal(), ch.Window(3, 2), ch.Padding([length, (length + 1) // 2])))
    scores = draw.choice(((), ch.SoftCap(2.0), ch.Alibi(heads * groups)))
    dropout = draw.choice((0.0, 0.3))
    output = ch.attention(*leaves, mask=mask, scores=scores, dropout=dropout, seed=place)
    grads = torch.autograd.grad(output, leaves, torch.linspace(-1, 1, output.numel()).view_as(output).to(dtype))
    return dict(zip(("output", "dquery", "dkey", "dvalue"), (output.detach(), *grads), strict=True))


def _work() -> list[tuple[Work, torch.dtype]]:
    """Calls of the function, of modules of every class and of swapped models; all threads share the modules."""
    actual: list[tuple[Work, torch.dtype]] = [(partial(_attention, place), torch.bfloat16) for place in range(40)]
    for kind in MODULES:
        for row in [row for row in modules(kind) if not row.drops][:4]:
            actual.append((partial(results, row.make(), row.call(), seed=0), row.dtype))
    for name in ("torch encoder", "torch decoder", "llama", "gpt2", "bert", "t5"):
        model, call = FAMILIES[name].swapped(), FAMILIES[name].call(TOKENS, "none")
        actual.append((partial(results, model, call), torch.float32))
    return actual


def test_eight_threads_give_the_numbers_of_one() -> None:
    work = _work()
    right = [each() for each, _ in work]
    barrier = Barrier(THREADS)

    def run(thread: int) -> list[str]:
        draw, wrong = random.Random(thread), []
        barrier.wait()
        for _ in range(ROUNDS):
            for place in draw.sample(range(len(work)), len(work) // 3):
                each, dtype = work[place]
                actual = each()
                if distance(actual, right[place]) > FAR[dtype]:
                    wrong.append(f"call {place}")
        return wrong

    with ThreadPoolExecutor(THREADS) as pool:
        assert [line for lines in pool.map(run, range(THREADS)) for line in lines] == []


def test_thread_observes_only_its_calls() -> None:
    module, x = ch.nn.Encoder(32, 4, 2).eval(), tokens(2, 9, 32)
    right, barrier = module(x), Barrier(THREADS)

    def run(thread: int) -> tuple[int, bool]:
        barrier.wait()
        if thread % 2:
            outputs = [module(x) for _ in range(20)]
            return 20, all(torch.allclose(output, right, atol=1e-5) for output in outputs)
        with ch.observe(module, ch.Want(lse=True), keep="all") as records:
            outputs = [module(x) for _ in range(thread + 1)]
        calls = len(records.calls("blocks.0.attention"))
        return 20 + calls - (thread + 1), all(torch.allclose(output, right, atol=1e-5) for output in outputs)

    with ThreadPoolExecutor(THREADS) as pool:
        assert set(pool.map(run, range(THREADS))) == {(20, True)}


_MEMORY = """
import gc, os, torch, clearhead as ch
from pathlib import Path

torch.set_num_threads(1)
blocks = [ch.nn.EncoderBlock(width, 2, dropout=0.0) for width in (8, 16)]
rotary = ch.nn.MultiHeadAttention(16, 4, num_kv_heads=2, rotary=True)
model = torch.nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
ch.swap(model)

def call(place):
    batch, length, which = 1 + place % 5, 1 + place // 5 % 80, place // 400 % 5
    if which == 0:
        x = torch.zeros(batch, 2, length, 8)
        ch.attention(x, x, x, mask=ch.Causal())
    elif which < 3:
        block = blocks[which - 1]
        block(torch.zeros(batch, length, 8 * which)).sum().backward()
        block.zero_grad()
    else:
        with torch.no_grad():
            (model if which == 3 else rotary)(torch.zeros(batch, length, 16))

def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

sizes = []
for lap in range(10):
    for place in range(2000):
        call(place)
    sizes.append(resident())
print(sizes[0], max(sizes))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory in use from /proc")
def test_20_000_calls_of_2_000_shapes_do_not_grow_memory() -> None:
    done = reported(_MEMORY, timeout=300)
    assert done.returncode == 0, done.stderr
    first, most = map(int, done.stdout.split())
    assert most < 1.05 * first
