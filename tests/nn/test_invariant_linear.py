"""In invariant mode, a token's row of a linear layer has the same bits alone and among any other rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.errors import UnsupportedError
from clearhead.integrations.torch.parts import SwappedLinear
from clearhead.nn.feedforward import FeedForward
from clearhead.nn.linear import Linear, linear_each
from clearhead.ops.library import library
from clearhead.projection import ACTIVATIONS, project, project_activate, project_activate_project
from tests.gemms import name_gemm

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels are not installed")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def invariant(_threads_as_before: None) -> Iterator[None]:
    with ch.invariant():
        yield


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits: 0 and -0 differ, NaN equals itself."""
    return tensor.detach().contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def assert_rows_alike(run: Callable[[Tensor], Tensor], x: Tensor, chosen: random.Random, what: str) -> None:
    """Assert that rows of ``run(x)`` do not depend on the rows beside them, nor on the threads."""
    torch.set_num_threads(2)
    whole = bits(run(x))
    rows = len(x)
    counts = [1, min(rows, 3), min(rows, 8), min(rows, 24), chosen.randint(1, rows), rows]
    for place, count in enumerate(counts):
        torch.set_num_threads(1 + place % 2)
        first = chosen.randint(0, rows - count)
        part = bits(run(x[first : first + count]))
        assert torch.equal(part, whole[first : first + count]), f"{what}: rows {first} to {first + count} of {rows}"


def tensor(chosen: random.Random, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """A random matrix; at times rows with a gap, or every second column."""
    generator = torch.Generator().manual_seed(chosen.randrange(2**31))
    gap = chosen.choice((0, 0, 3, columns))
    return torch.randn(rows, columns + gap, generator=generator).to(dtype)[:, :columns]


def weight_of(chosen: random.Random, dtype: torch.dtype, out: int, steps: int) -> Tensor:
    """A weight ``[out, in]``, or the transpose of one ``[in, out]`` as Conv1D has it."""
    return (
        tensor(chosen, dtype, out, steps)
        if chosen.random() < 0.5
        else tensor(chosen, dtype, steps, out).contiguous().t()
    )


def sizes(chosen: random.Random) -> tuple[int, int, int]:
    """Rows, outputs and inputs: around vectors, panels, stretches of 512 and groups of 4096 steps."""
    rows = chosen.choice((2, 5, 9, 17, 25, 33, 80))
    out = chosen.choice((1, 7, 16, 33, 64, 100, 192))
    steps = chosen.choice((1, 15, 32, 96, 250, 256, 512, 544, 1030, 1536, 4128))
    return rows, out, steps


@pytest.mark.parametrize("seed", range(60))
def test_row_of_linear_layer_has_same_bits_among_any_rows(seed: int) -> None:
    chosen = random.Random(seed)
    dtype = DTYPES[seed % 3]
    rows, out, steps = sizes(chosen)
    weight = weight_of(chosen, dtype, out, steps)
    bias = tensor(chosen, dtype, 1, out)[0] if chosen.random() < 0.5 else None
    what = f"{dtype}, {out} of {steps}, {weight.stride()}"
    assert_rows_alike(lambda x: project(x, weight, bias), tensor(chosen, dtype, rows, steps), chosen, what)


def test_row_has_same_bits_among_thousands() -> None:
    chosen = random.Random(0)
    for dtype in DTYPES:
        weight = weight_of(chosen, dtype, 96, 544)
        assert_rows_alike(lambda x, w=weight: project(x, w), tensor(chosen, dtype, 3000, 544), chosen, str(dtype))  # type: ignore[misc]


@pytest.mark.parametrize("seed", range(20))
def test_row_of_input_gradient_has_same_bits_among_any_rows(seed: int) -> None:
    chosen = random.Random(seed)
    dtype = DTYPES[seed % 3]
    rows, out, steps = sizes(chosen)
    weights = [weight_of(chosen, dtype, out, steps) for _ in range(chosen.choice((1, 1, 3)))]
    grads = [tensor(chosen, dtype, rows, out) for _ in weights]
    together = torch.cat(grads, 1)

    def run(grad: Tensor) -> Tensor:
        x = torch.zeros(len(grad), steps, dtype=dtype, requires_grad=True)
        outputs = [project(x, weight) for weight in weights]
        return torch.autograd.grad(outputs, x, [*grad.split(out, 1)])[0]

    assert_rows_alike(run, together, chosen, f"{dtype}, {len(weights)} of {out} by {steps}")


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_activation_has_same_bits_in_every_row_and_column(activation: str) -> None:
    chosen = random.Random(0)
    for dtype in DTYPES[:2]:
        weight, bias = weight_of(chosen, dtype, 83, 96), tensor(chosen, dtype, 1, 83)[0]

        def run(x: Tensor, weight: Tensor = weight, bias: Tensor = bias) -> Tensor:
            output = project_activate(x, weight, bias, activation=activation)
            assert output is not None
            return output

        x = tensor(chosen, dtype, 40, 96)
        assert_rows_alike(run, x, chosen, f"{activation}, {dtype}")
        # The last columns, fewer than a vector, and one alone.
        for columns in (3, 1):
            last = run(x, weight[-columns:], bias[-columns:])
            assert torch.equal(bits(last), bits(run(x)[:, -columns:])), f"{activation}, last {columns}"


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_feedforward_has_same_bits_among_any_rows(gated: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = FeedForward(96, 200, activation="silu", gated=gated).to(dtype).eval()
    chosen = random.Random(0)
    x = tensor(chosen, dtype, 60, 96)
    with torch.no_grad():
        assert_rows_alike(layer, x, chosen, "alone")
    assert_rows_alike(layer, x, chosen, "with a graph")

    def gradient(x: Tensor) -> Tensor:
        x = x.detach().clone().requires_grad_()
        layer(x).sum().backward()
        assert x.grad is not None
        return x.grad

    assert_rows_alike(gradient, x, chosen, "gradient")


def test_relu_feedforward_has_same_bits_fused_and_op_by_op() -> None:
    torch.manual_seed(0)
    for dtype in DTYPES[:2]:
        expand, contract = Linear(96, 160).to(dtype), Linear(160, 48).to(dtype)
        chosen = random.Random(0)
        for rows in (1, 4, 30):
            x = tensor(chosen, dtype, rows, 96)
            with torch.no_grad():
                fused = project_activate_project(x, expand.weight, expand.bias, contract.weight, contract.bias)
                assert fused is not None
                assert torch.equal(bits(fused), bits(contract(expand(x).relu())))


def test_projections_of_attention_have_same_bits_fused_and_separate() -> None:
    torch.manual_seed(0)
    chosen = random.Random(0)
    for dtype in DTYPES:
        layers = [Linear(96, out).to(dtype) for out in (96, 24, 24)]
        weight = torch.cat([layer.weight for layer in layers])
        bias = torch.cat([layer.bias for layer in layers])
        x = tensor(chosen, dtype, 40, 96)
        with torch.no_grad():
            whole = project(x, weight, bias)
            for rows in (1, 7, 40):
                separate = torch.cat(linear_each(layers, x[:rows]), 1)
                assert torch.equal(bits(separate), bits(whole[:rows])), f"{dtype}, {rows} rows"


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norm_has_same_bits_among_any_rows(kind: str, dtype: torch.dtype) -> None:
    from clearhead.nn.norm import normed, takes_norm
    from clearhead.ops.kinds import NormKind

    chosen = random.Random(0)
    for width in (5, 64, 100, 1100):
        weight = tensor(chosen, dtype, 1, width)[0].contiguous()
        norm = (NormKind.LAYER if kind == "layer" else NormKind.RMS, 1e-5), (weight, None)
        x = tensor(chosen, dtype, 50, width)
        assert takes_norm(x, norm)
        assert_rows_alike(lambda x, norm=norm: normed(x, norm), x, chosen, f"{kind}, {width}")  # type: ignore[misc]


def test_swapped_linear_layer_takes_the_kernels_at_every_size() -> None:
    torch.manual_seed(0)
    layer = SwappedLinear(32, 48)
    chosen = random.Random(0)
    assert_rows_alike(layer, tensor(chosen, torch.float32, 30, 32), chosen, "swapped")
    with torch.no_grad():
        assert_rows_alike(layer, tensor(chosen, torch.float32, 30, 32), chosen, "swapped, no graph")


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (8,), (2, 0, 8)])
def test_empty_inputs_and_single_rows_are_computed(shape: tuple[int, ...]) -> None:
    weight, bias = torch.ones(4, shape[-1]), torch.arange(4.0)
    expected = nn.functional.linear(torch.ones(shape), weight, bias)
    assert torch.equal(project(torch.ones(shape), weight, bias), expected)
    x = torch.ones(shape, requires_grad=True)
    project(x, weight, bias).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full(shape, 4.0))


def test_transforms_raise_where_the_bits_would_be_torchs() -> None:
    x, weight = torch.ones(3, 8), torch.ones(4, 8)
    with pytest.raises(UnsupportedError, match=r"one order of sums under ch\.set_invariant\(True\); got a transform"):
        torch.func.vmap(lambda row: project(x, weight) + row)(torch.ones(2, 4))


def test_another_named_path_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    name_gemm(monkeypatch, "torch")
    with pytest.raises(UnsupportedError, match="be native in invariant mode"):
        project(torch.ones(3, 8), torch.ones(4, 8))


@pytest.mark.slow
def test_compiled_layers_have_the_same_bits() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(Linear(32, 48), FeedForward(48, 64)).eval()
    compiled = torch.compile(layer, backend="aot_eager")
    x = torch.randn(9, 32)
    with ch.invariant(False), torch.no_grad():
        compiled(x)
    with torch.no_grad():
        whole = bits(layer(x))
        for rows in (1, 9):
            assert torch.equal(bits(compiled(x[:rows])), whole[:rows]), f"{rows} rows"
