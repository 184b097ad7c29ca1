"""The operators of linear layers against float64: ``linear`` and its gradients, over sizes, dtypes and strides."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.ops.kinds import Activation
from clearhead.ops.library import isa_names
from tests.agreement import needs_native
from tests.budget import within_budget
from tests.processes import reported

pytestmark = needs_native

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
#: Rows, inputs and outputs: single ones, odd ones, long sums, wide outputs, and none.
SIZES = [
    (1, 1, 1), (67, 41, 35), (5, 33, 130), (130, 7, 3), (12, 513, 64), (2, 8300, 5), (17, 3, 4100),
    (3, 0, 17), (0, 8, 8), (8, 8, 0), (0, 0, 0),
]  # fmt: skip
EACH_SIZE = pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES, ids=str)
TRANSPOSED = pytest.mark.parametrize("transposed", [False, True], ids=["weight", "weight as [in, out]"])
STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "every second column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "columns of a wider tensor": lambda x: F.pad(x, (3, 6))[:, 3:-6],
    "columns of a tensor that is wider by one": lambda x: F.pad(x, (1, 0))[:, 1:],
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
    "transposed": lambda x: x.t().contiguous().t(),
    "one row for all": lambda x: x[:1].expand_as(x),
    "one column for all": lambda x: x[:, :1].expand_as(x),
    "one element for all": lambda x: x[:1, :1].expand_as(x),
    "an odd address": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "lazily negated": lambda x: torch._neg_view(x),
}
#: Activations in torch.
FORMULAS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.PLAIN: lambda x: x,
    Activation.RELU: torch.relu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.SILU: F.silu,
    Activation.QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def draw_integers(*shape: int, seed: int = 0) -> Tensor:
    """Small integers, whose float32 sums are exact in any order."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: int = 0) -> Tensor:
    output: Tensor = torch.ops.clearhead.linear.default(x, weight, bias, activation)
    return output


def input_gradient(grads: list[Tensor], weights: list[Tensor]) -> Tensor:
    output: Tensor = torch.ops.clearhead.linear_input_gradient.default(grads, weights)
    return output


def weight_gradient(grad: Tensor, x: Tensor, bias: bool = True) -> tuple[Tensor, Tensor]:
    output: tuple[Tensor, Tensor] = torch.ops.clearhead.linear_weight_gradient.default(grad, x, bias)
    return output


def laid(weight: Tensor, transposed: bool) -> Tensor:
    """The same elements; GPT-2's layers store their weights as ``[in, out]``."""
    return weight.t().contiguous().t() if transposed else weight


def check(name: str, actual: Tensor, formula: Callable[..., Tensor], *given: Tensor | None, terms: int) -> None:
    """Assert that the result is within the budget of the float32 formula, rounded once."""
    textbook, exact = (
        formula(*(None if part is None else part.to(dtype) for part in given))
        for dtype in (torch.float32, torch.float64)
    )
    assert actual.shape == exact.shape
    within_budget(name, actual, textbook.to(actual.dtype), exact, terms=max(terms, 1), dtype=actual.dtype)


def check_all(x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor) -> None:
    """Forward and both gradients of a layer."""
    rows, outputs = len(x), len(weight)
    check("output", linear(x, weight, bias), F.linear, x, weight, bias, terms=x.shape[1])
    check("dx", input_gradient([grad], [weight]), torch.matmul, grad, weight, terms=outputs)
    of_weight, of_bias = weight_gradient(grad, x)
    check("dweight", of_weight, lambda grad, x: grad.t() @ x, grad, x, terms=rows)
    check("dbias", of_bias, lambda grad: grad.sum(0), grad, terms=rows)


@DTYPES
@TRANSPOSED
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@EACH_SIZE
def test_any_size_is_within_the_error_budget(
    rows: int, inputs: int, outputs: int, biased: bool, transposed: bool, dtype: torch.dtype
) -> None:
    weight = laid(draw(outputs, inputs, seed=1, dtype=dtype), transposed)
    bias = draw(outputs, seed=2, dtype=dtype) if biased else None
    check_all(draw(rows, inputs, dtype=dtype), weight, bias, draw(rows, outputs, seed=3, dtype=dtype))


@pytest.mark.parametrize("inputs", [0, 5])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3), (2, 0), (0, 3)], ids=str)
def test_any_leading_axes_are_accepted(leading: tuple[int, ...], inputs: int) -> None:
    x, weight, bias = draw(*leading, inputs), draw(4, inputs, seed=1), draw(4, seed=2)
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))
    grad = draw(*leading, 4, seed=3)
    torch.testing.assert_close(input_gradient([grad], [weight]), grad @ weight)
    of_weight, of_bias = weight_gradient(grad, x)
    torch.testing.assert_close(of_weight, grad.reshape(-1, 4).t() @ x.reshape(grad.numel() // 4, inputs))
    torch.testing.assert_close(of_bias, grad.reshape(-1, 4).sum(0))


@DTYPES
@EACH_SIZE
def test_sums_are_rounded_once(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """Sums are not rounded between blocks of a long sum or before the bias."""
    x, weight, grad = (
        draw_integers(rows, inputs),
        draw_integers(outputs, inputs, seed=1),
        draw_integers(rows, outputs, seed=2),
    )
    # Finer than bfloat16 can represent next to the sums.
    bias = draw_integers(outputs, seed=3) / 64
    x_, weight_, grad_, bias_ = (part.to(dtype) for part in (x, weight, grad, bias))
    assert torch.equal(linear(x_, weight_, bias_), F.linear(x, weight, bias).to(dtype))
    assert torch.equal(input_gradient([grad_], [weight_]), (grad @ weight).to(dtype))
    of_weight, of_bias = weight_gradient(grad_, x_)
    assert torch.equal(of_weight, (grad.t() @ x).to(dtype))
    assert torch.equal(of_bias, grad.sum(0).to(dtype))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_input_gradients_of_several_layers_are_one_sum(dtype: torch.dtype, count: int) -> None:
    """Rounded once, whether or not some of the weights are transposed."""
    for transposed in range(2**count):
        grads = [draw_integers(9, 5 + 7 * place, seed=place) for place in range(count)]
        weights = [draw_integers(5 + 7 * place, 33, seed=9 + place) for place in range(count)]
        given = [laid(one.to(dtype), bool(transposed >> place & 1)) for place, one in enumerate(weights)]
        exact = sum((grad @ weight for grad, weight in zip(grads, weights, strict=True)), torch.zeros(9, 33))
        assert torch.equal(input_gradient([grad.to(dtype) for grad in grads], given), exact.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inputs", [40, 41])
@pytest.mark.parametrize("which", ["x", "weight", "grad"])
@pytest.mark.parametrize("stride", STRIDES)
def test_any_strides_are_within_the_error_budget(stride: str, which: str, inputs: int, dtype: torch.dtype) -> None:
    given = {
        "x": draw(37, inputs, dtype=dtype),
        "weight": draw(50, inputs, seed=1, dtype=dtype),
        "grad": draw(37, 50, seed=2, dtype=dtype),
    }
    given[which] = STRIDES[stride](given[which])
    check_all(given["x"], given["weight"], draw(50, seed=3, dtype=dtype), given["grad"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "bias",
    [lambda x: x[::2], lambda x: x[:1].expand(50), lambda x: x[1:51], lambda x: torch._neg_view(x[:50])],
    ids=["every second", "one for all", "an odd address", "lazily negated"],
)
def test_any_strides_of_a_bias_are_within_the_error_budget(
    bias: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    x, weight, given = draw(7, 9, dtype=dtype), draw(50, 9, seed=1, dtype=dtype), bias(draw(100, seed=2, dtype=dtype))
    check("output", linear(x, weight, given), F.linear, x, weight, given, terms=9)


@pytest.mark.parametrize("which", ["x", "weight"])
def test_a_single_row_may_have_any_stride(which: str) -> None:
    x, weight = draw(1, 8), draw(1, 8, seed=1)
    right = x @ weight.t()
    if which == "x":
        x = x.as_strided((1, 8), (2**40, 1))
    else:
        weight = weight.as_strided((1, 8), (2**40, 1))
    torch.testing.assert_close(linear(x, weight), right)


@DTYPES
@pytest.mark.parametrize("activation", FORMULAS, ids=lambda activation: activation.name)
def test_activations_are_within_the_error_budget(activation: Activation, dtype: torch.dtype) -> None:
    x, weight, bias = draw(23, 40, dtype=dtype), draw(37, 40, seed=1, dtype=dtype), draw(37, seed=2, dtype=dtype)

    def formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return FORMULAS[activation](F.linear(x, weight, bias))

    check(activation.name, linear(x, weight, bias, activation), formula, x, weight, bias, terms=40)


@TRANSPOSED
def test_nan_and_infinity_stay_in_their_rows(transposed: bool) -> None:
    """Values outside the tensors, read when packing whole vectors, do not reach a sum."""
    x, weight = torch.full((40, 24), torch.nan)[3:36, 2:21], torch.full((70, 24), torch.inf)[5:42, 1:20]
    x.copy_(draw(33, 19))
    weight.copy_(draw(37, 19, seed=1))
    x[4, 7], weight[30, 2] = torch.nan, torch.inf
    assert torch.equal(linear(x, laid(weight, transposed)).isfinite(), (x @ weight.t()).isfinite())
    grad = draw(33, 37, seed=2)
    grad[6, 3] = torch.nan
    assert torch.equal(input_gradient([grad], [laid(weight, transposed)]).isfinite(), (grad @ weight).isfinite())
    of_weight, of_bias = weight_gradient(grad, x)
    assert torch.equal(of_weight.isfinite(), (grad.t() @ x).isfinite())
    assert torch.equal(of_bias.isfinite(), grad.sum(0).isfinite())


@DTYPES
@TRANSPOSED
@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(301, 520, 130), (70, 1100, 700), (40, 9000, 33)], ids=str)
def test_any_number_of_threads_gives_the_same_bits(
    rows: int, inputs: int, outputs: int, transposed: bool, dtype: torch.dtype
) -> None:
    x, weight = draw(rows, inputs, dtype=dtype), laid(draw(outputs, inputs, seed=1, dtype=dtype), transposed)
    grad, results = draw(rows, outputs, seed=2, dtype=dtype), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append([linear(x, weight), input_gradient([grad], [weight]), *weight_gradient(grad, x)])
    assert all(all(map(torch.equal, results[0], other)) for other in results[1:])


#: Compares each operator with float64, in a process that is restricted to one instruction set.
ON_A_SET = """
import torch
from clearhead.ops.library import isa_name
from tests.ops import test_linear as tests
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for size in tests.SIZES:
        for transposed in (False, True):
            tests.test_any_size_is_within_the_error_budget(*size, True, transposed, dtype)
print(isa_name())
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", isa_names())
def test_every_instruction_set_is_within_the_error_budget(name: str) -> None:
    done = reported(ON_A_SET, environment={"CLEARHEAD_ISA": name, "CLEARHEAD_NATIVE": ""})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [name]


@pytest.mark.slow
def test_another_process_gives_the_same_bits() -> None:
    code = "from tests.ops.test_linear import digest\nprint(digest())"
    done = reported(code, environment={"CLEARHEAD_NATIVE": ""})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [digest()]


def digest() -> str:
    """Hash of the results of every operator."""
    sha256 = hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = draw(100, 700, dtype=dtype), draw(90, 700, seed=1, dtype=dtype)
        grad = draw(100, 90, seed=2, dtype=dtype)
        for result in (linear(x, weight), input_gradient([grad], [weight]), *weight_gradient(grad, x)):
            sha256.update(result.float().numpy().tobytes())
    return sha256.hexdigest()
