"""Tensors whose elements share memory are read as the numbers that they hold, on every backend and in modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.tensors import without_overlap

BACKENDS = ("reference", "tiled", "native", "sdpa", "auto")
BATCH, HEADS, LENGTH, DIM = 2, 2, 20, 16
#: The strides that random layouts draw from, smaller and larger than either extent.
STEPS = (0, 1, 2, 3, DIM - 1, DIM, DIM + 1, LENGTH, 2 * DIM, LENGTH * DIM - 1, LENGTH * DIM)

Layout = Callable[[Tensor], Tensor]


def strided(strides: tuple[int, ...], offset: int = 0) -> Layout:
    return lambda memory: memory.as_strided((BATCH, HEADS, LENGTH, DIM), strides, offset)


NAMED: dict[str, Layout] = {
    "windows": lambda memory: memory[: LENGTH + DIM - 1].unfold(0, DIM, 1).expand(BATCH, HEADS, LENGTH, DIM),
    "windows two apart": strided((90, 90, 2, 1)),
    "windows one less than a row apart": strided((2000, 700, DIM - 1, 1), 3),
    "one row": strided((DIM, 0, 0, 1)),
    "one column": strided((LENGTH, 0, 1, 0)),
    "one number": strided((0, 0, 0, 0)),
    "columns of windows": strided((700, 300, 1, 3)),
    "transposed": strided((2 * LENGTH * DIM, LENGTH * DIM, 1, LENGTH)),
    "heads last": strided((LENGTH * HEADS * DIM, DIM, HEADS * DIM, 1), 5),
    "overlapping heads": strided((5, 7, DIM, 1)),
    "flipped": lambda memory: strided((2 * LENGTH * DIM, LENGTH * DIM, DIM, 1))(memory).flip(2, 3),
}


def memory(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(20_000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def results(
    layouts: list[Layout], mask: ch.Mask | None, backend: str, dtype: torch.dtype, *, copied: bool
) -> list[Tensor]:
    """The output without gradients and with them, and the gradients of the memory that the tensors are views of."""
    leaves = [memory(seed, dtype).requires_grad_() for seed in range(3)]
    views = [layout(leaf) for layout, leaf in zip(layouts, leaves, strict=False)]
    inputs = [view.contiguous().clone() if copied else view for view in views]
    output = ch.attention(inputs[0], inputs[1], inputs[2], mask=mask, backend=backend)
    grad = layouts[3](memory(3, dtype))
    grads = torch.autograd.grad(output, leaves, grad.contiguous().clone() if copied else grad)
    plain = ch.attention(*(each.detach() for each in inputs[:3]), mask=mask, backend=backend)
    return [plain, output.detach(), *grads]


def compare(layouts: list[Layout], mask: ch.Mask | None, backend: str, dtype: torch.dtype) -> None:
    outcomes = results(layouts, mask, backend, dtype, copied=False)
    exact = results(layouts, mask, "reference", torch.float64, copied=True)
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 0.06}[dtype]
    # A gradient of the memory is a sum over the places that share an element.
    places = torch.arange(20_000)
    shared = max(BATCH * HEADS * LENGTH * DIM / layout(places).unique().numel() for layout in layouts)
    for name, one, other in zip(("plain", "output", "query", "key", "value"), outcomes, exact, strict=True):
        size = max(1.0, float(other.abs().max())) * shared**0.5
        torch.testing.assert_close(
            one.double() / size, other / size, rtol=0.0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def dtypes_of(backend: str) -> list[torch.dtype]:
    half = [torch.float32, torch.bfloat16]
    return half if backend == "native" else [torch.float64, *half]


@pytest.mark.covering(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("mask", [None, ch.Causal()], ids=repr)
def test_layout_holds_the_same_numbers(name: str, backend: str, mask: ch.Mask | None) -> None:
    for dtype in dtypes_of(backend):
        compare([NAMED[name]] * 4, mask, backend, dtype)


def drawn(seed: int) -> list[Layout]:
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(len(STEPS), (4, 4), generator=generator).tolist()
    return [strided(tuple(STEPS[place] for place in row), seed % 7) for row in places]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 150), marks=pytest.mark.slow)], ids=["few", "many"])
def test_random_strides_hold_the_same_numbers(backend: str, seeds: range) -> None:
    masks = (None, ch.Causal(), ch.Padding([11, 20]))
    for seed in seeds:
        dtypes = dtypes_of(backend)
        compare(drawn(seed), masks[seed % 3], backend, dtypes[seed % len(dtypes)])


def tokens() -> Iterator[Tensor]:
    """Sequences ``[batch, len, width]`` of overlapping rows."""
    base = memory(7)
    yield base.as_strided((2, 12, 16), (40, 1, 1))
    yield base.as_strided((2, 12, 16), (40, 3, 1))
    yield base.as_strided((2, 12, 16), (0, 0, 1))
    yield base.as_strided((2, 12, 16), (100, 1, 5))
    yield base.as_strided((1, 12, 16), (100, 1, 1)).expand(2, 12, 16)


def check_module(module: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
    for x in tokens():
        outcomes = []
        for given in (x, x.clone(memory_format=torch.contiguous_format)):
            with torch.no_grad():
                plain = call(module, given)
            leaf = given.detach().requires_grad_()
            output = call(module, leaf)
            module.zero_grad()
            output.square().sum().backward()
            outcomes.append([plain, output.detach(), leaf.grad, *(each.grad for each in module.parameters())])
        for one, other in zip(*outcomes, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "MultiHeadAttention": (lambda: ch.nn.MultiHeadAttention(16, num_heads=2), lambda module, x: module(x)),
    "Encoder": (lambda: ch.nn.Encoder(16, num_heads=2, num_layers=1), lambda module, x: module(x)),
    "swapped nn.MultiheadAttention": (
        lambda: nn.MultiheadAttention(16, 2, batch_first=True),
        lambda module, x: module(x, x, x, need_weights=False)[0],
    ),
    "swapped nn.MultiheadAttention with weights": (
        lambda: nn.MultiheadAttention(16, 2, batch_first=True),
        lambda module, x: module(x, x, x)[0],
    ),
    "swapped nn.TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
        lambda module, x: module(x),
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_read_overlapping_tokens(name: str) -> None:
    make, call = MODULES[name]
    torch.manual_seed(0)
    module = make().eval()
    if name.startswith("swapped"):
        ch.swap(module)
    check_module(module, call)


@pytest.mark.parametrize("backend", ["reference", "tiled", "native"])
def test_statistics_of_overlapping_rows(backend: str) -> None:
    want = ch.Want(lse=True, entropy=True, received=True, top_k=3)
    views = [NAMED["windows"](memory(seed)) for seed in range(3)]
    outcomes = ch.observe_attention(*views, want=want, mask=ch.Causal(), backend=backend)
    exact = ch.observe_attention(
        *(view.clone(memory_format=torch.contiguous_format) for view in views),
        want=want,
        mask=ch.Causal(),
        backend="reference",
    )
    for name in ("output", "lse", "entropy", "received", "top_weights"):
        torch.testing.assert_close(getattr(outcomes, name), getattr(exact, name), rtol=1e-4, atol=1e-5)


def test_only_overlapping_tensors_are_copied() -> None:
    repeated = memory(0)[:320].view(1, 1, LENGTH, DIM).expand(BATCH, HEADS, LENGTH, DIM)
    for view in (repeated, *(NAMED[name](memory(0)) for name in ("heads last", "flipped", "transposed"))):
        assert without_overlap(view) is view, view.stride()
    for name in NAMED.keys() - {"heads last", "flipped", "transposed"}:
        view = NAMED[name](memory(0))
        copy = without_overlap(view)
        assert copy.is_contiguous(), name
        assert torch.equal(copy, view), name
    for sizes in ((0, 4), (4, 0), (1, 4), (4, 1), (5,)):
        empty = torch.zeros(sizes)
        assert without_overlap(empty) is empty
