"""Linear layers of integers against the dequantised weight in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.invariance import invariant
from clearhead.nn.fused import fused_attention
from clearhead.nn.spec import Projections
from clearhead.ops.kinds import Activation, Rounding
from clearhead.ops.library import isa_names
from clearhead.ops.quantized_weight import QuantizedWeight
from clearhead.projection import ACTIVATIONS, project_activate, project_activate_project
from clearhead.projection.stored import multiply_stored, project_stored
from tests.agreement import needs_native
from tests.instruction_sets import use_set

pytestmark = needs_native

#: Inputs, outputs and size of a group.
SIZES = [
    *((64, 5, 64), (70, 33, 70), (96, 1, 32), (256, 40, 64)),
    *((1030, 37, 1030), (1024, 19, 256), (60, 7, 20), (2, 3, 1), (2240, 7, 32), (2240, 6, 448)),
]
ROWS = [0, 1, 3, 7, 17, 200]
#: Relative errors that rounding the output, and weights of groups, may cause.
BUDGETS = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 7e-4}
ROUNDED = [Rounding.SYMMETRIC, Rounding.ASYMMETRIC, Rounding.TENSOR]


@pytest.fixture(params=isa_names() or ["none"])
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction set of the kernels that this processor runs."""
    use_set(request.param)
    return str(request.param)


def _weight(inputs: int, outputs: int, group: int, bits: int = 8, *, offset: bool = False) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(inputs + outputs)
    low, high = (-128, 128) if bits == 8 else (0, 256)
    width, dtype = (inputs, torch.int8) if bits == 8 else (inputs // 2, torch.uint8)
    codes = torch.randint(low, high, (outputs, width), generator=generator).to(dtype)
    scale = torch.rand(outputs, inputs // group, generator=generator) * 0.01 + 0.001
    shift = torch.randn(outputs, inputs // group, generator=generator) * 0.05
    return QuantizedWeight(codes, scale, shift if offset else None)


def _exact(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    output = x.double() @ weight.dequantized(torch.float64).t()
    return output if bias is None else output + bias.double()


def _error(result: Tensor, exact: Tensor) -> float:
    return ((result.double() - exact).norm() / exact.norm().clamp_min(1e-300)).item()


@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
@pytest.mark.parametrize(("bits", "offset"), [(8, False), (8, True), (4, True), (4, False)])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_output_is_that_of_the_dequantised_weight(
    isa: str, sizes: tuple[int, int, int], bits: int, offset: bool, dtype: torch.dtype
) -> None:
    weight = _weight(*sizes, bits, offset=offset)
    x = torch.randn(max(ROWS), sizes[0], generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.randn(sizes[1], generator=torch.Generator().manual_seed(2)).to(dtype)
    for rows in ROWS:
        output = project_stored(x[:rows], weight, bias)
        assert output.shape == (rows, sizes[1])
        assert output.dtype is dtype
        assert rows == 0 or _error(output, _exact(x[:rows], weight, bias)) < BUDGETS[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("bits", "group"), [(8, 1024), (4, 32), (4, 64), (4, 128), (4, 256), (4, 1024)])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8])
def test_large_elements_take_no_digits_of_small_ones(
    isa: str, rows: int, bits: int, group: int, dtype: torch.dtype
) -> None:
    """Rows that become integers have a scale for each block of steps."""
    weight = _weight(1024, 21, group, bits)
    weight.codes[:, : weight.codes.shape[1] // 2] = 0
    x = torch.randn(rows, 1024, generator=torch.Generator().manual_seed(3))
    x[:, :256] *= 300
    x[:, 512:] *= 0.01
    x = x.to(dtype)
    assert _error(project_stored(x, weight), _exact(x, weight)) < BUDGETS[dtype]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [2, 3, 4, 5, 8])
def test_rows_of_small_integers_are_exact(isa: str, rows: int, bits: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    plain = _weight(192, 13, 192 if bits == 8 else 32, bits)
    weight = QuantizedWeight(plain.codes, torch.full_like(plain.scale, 0.25), None)
    x = torch.randint(-9, 99, (rows, 192), generator=generator).to(torch.bfloat16)
    x[:, 128:] = (x[:, 128:] / 16).round()
    assert torch.equal(project_stored(x, weight), _exact(x, weight).float().to(torch.bfloat16))
    assert not project_stored(0 * x, weight).any()


@pytest.mark.parametrize(("bits", "dtype"), [(8, torch.float32), (8, torch.bfloat16), (4, torch.float32)])
def test_row_has_the_same_bits_alone_in_invariant_mode(isa: str, bits: int, dtype: torch.dtype) -> None:
    weight = _weight(1030, 70, 1030) if bits == 8 else _weight(1024, 70, 128, bits, offset=True)
    x = torch.randn(300, weight.shape[1]).to(dtype)
    few = project_stored(x[5:6], weight)
    with invariant():
        together = project_stored(x, weight)
        for rows in (1, 2, 7, 8, 9, 17):
            assert torch.equal(project_stored(x[5 : 5 + rows], weight), together[5 : 5 + rows])
    # Outside of it few rows are added in another order, or this test would compare one order with itself.
    assert dtype is not torch.float32 or not torch.equal(few, together[5:6])


@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.parametrize(("bits", "rounding"), [(8, 0), (4, 0), (8, 1)])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_number_of_threads_changes_no_bit(isa: str, rows: int, bits: int, rounding: int) -> None:
    plain = _weight(1024, 300, 1024 if rounding else 128, bits)
    weight = QuantizedWeight(plain.codes, plain.scale, None, Rounding(rounding))
    x, results = torch.randn(rows, 1024), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(project_stored(x, weight))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
@pytest.mark.parametrize("rounding", ROUNDED)
def test_panels_have_the_bits_of_the_integers(isa: str, rounding: Rounding, dtype: torch.dtype) -> None:
    for inputs, outputs in [(64, 5), (1, 1), (131, 67), (4097, 66), (2050, 130), (8, 0)]:
        plain = _weight(inputs, outputs, inputs)
        bounds = (0, 127) if rounding is Rounding.TENSOR else (-128, 127)
        weight = QuantizedWeight(plain.codes, plain.scale, None, rounding, bounds)
        packed = weight.packed()
        assert packed.panels is not None
        assert packed.shape == weight.shape
        bias = torch.randn(outputs).to(dtype)
        for rows in (0, 1, 4, 5, 17):
            x = torch.randn(rows, inputs).to(dtype)
            for activation in (Activation.PLAIN, Activation.GELU):
                results = [multiply_stored(x, each, bias, activation) for each in (weight, packed)]
                assert torch.equal(*results)


def test_rows_of_a_packed_weight_keep_whole_panels_alone(isa: str) -> None:
    plain = _weight(70, 3 * 64 + 5, 70)
    weight = QuantizedWeight(plain.codes, plain.scale, None, Rounding.SYMMETRIC).packed()
    x = torch.randn(9, 70)
    for first, last, whole in [(64, 128, True), (128, 197, True), (0, 197, True), (1, 128, False), (64, 127, False)]:
        part = weight.rows(first, last)
        assert (part.panels is not None) is whole
        assert torch.equal(project_stored(x, part), project_stored(x, weight)[:, first:last])


@pytest.mark.parametrize("rounding", ROUNDED)
def test_sums_of_rounded_rows_have_the_same_bits_on_every_set(rounding: Rounding) -> None:
    for inputs, outputs, rows in [(64, 5, 3), (1, 1, 1), (131, 67, 17), (4097, 66, 9), (2050, 130, 40)]:
        plain = _weight(inputs, outputs, inputs)
        bounds = (0, 127) if rounding is Rounding.TENSOR else (-128, 127)
        weight = QuantizedWeight(plain.codes, plain.scale, None, rounding, bounds)
        x, bias = torch.randn(rows, inputs) + 0.3, torch.randn(outputs)
        results = []
        for name in isa_names():
            use_set(name)
            results.append(project_stored(x, weight, bias))
        # The set without a fused multiply-add adds the bias in two steps.
        assert all(torch.equal(result, results[0]) for result in results[:-1])
        torch.testing.assert_close(results[-1], results[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
@pytest.mark.parametrize("rounding", ROUNDED)
def test_rounded_rows_agree_with_their_formula(isa: str, rounding: Rounding, dtype: torch.dtype) -> None:
    bounds = (0, 127) if rounding is Rounding.TENSOR else (-128, 127)
    for inputs, outputs, rows in [(64, 5, 3), (131, 67, 17), (2050, 70, 40)]:
        plain = _weight(inputs, outputs, inputs)
        weight = QuantizedWeight(plain.codes, plain.scale, None, rounding, bounds)
        # Rows of different sizes: a neighbour's scale would be wrong by far.
        x = (torch.randn(rows, inputs) * torch.logspace(-2, 2, rows)[:, None] + 0.1).to(dtype)
        rounded = _rounded(x, rounding, *bounds)
        output = project_stored(x, weight)
        for row in range(rows) if rounding is not Rounding.TENSOR else [rows - 1]:
            assert _error(output[row], _exact(rounded[row], weight)) < BUDGETS[dtype]


def _rounded(x: Tensor, rounding: Rounding, low: int, high: int) -> Tensor:
    """The values that rounded rows stand for."""
    axes = (0, 1) if rounding is Rounding.TENSOR else (1,)
    # torch.ao computes the one scale of all rows in higher precision, torchao each row's in the dtype.
    x = x.float() if rounding is Rounding.TENSOR else x
    least, most = (x.amin(axes, keepdim=True).clamp_max(0), x.amax(axes, keepdim=True).clamp_min(0))
    if rounding is Rounding.SYMMETRIC:
        scale, zero = torch.maximum(-least, most) / ((high - low) / 2), torch.zeros_like(least)
    else:
        scale = (most - least) / (high - low)
        zero = (low - (least / scale).round()).clamp(low, high)
    codes = ((x.float() * (1.0 / scale.float())).round() + zero.float()).clamp(low, high)
    return (codes.double() - zero.double()) * scale.double()


@pytest.mark.parametrize(("bits", "rounding"), [(8, 0), (4, 0), (8, 1), (8, 2)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_and_infinity_stay_in_their_row(
    isa: str, dtype: torch.dtype, value: float, bits: int, rounding: int
) -> None:
    plain = _weight(128, 9, 128 if rounding else 32, bits, offset=not rounding)
    weight = QuantizedWeight(plain.codes, plain.scale, plain.offset, Rounding(rounding))
    for rows, row in product((3, 17), (0, 2)):
        x = torch.randn(rows, 128).to(dtype)
        clean = project_stored(x, weight)
        x[row, 5] = value
        output = project_stored(x, weight)
        others = [each for each in range(rows) if each != row]
        assert torch.equal(output[others], clean[others])
        assert not output[row].isfinite().any() or not rounding
        assert not output[row].isfinite().all()


def test_layouts_are_read_as_they_lie(isa: str) -> None:
    weight, x = _weight(96, 11, 32, offset=True), torch.randn(4, 3, 96)
    expected = project_stored(x, weight)
    wide = torch.zeros(11, 128, dtype=torch.int8)
    wide[:, :96] = weight.codes
    assert torch.equal(project_stored(x, QuantizedWeight(wide[:, :96], weight.scale, weight.offset)), expected)
    transposed = weight.codes.t().contiguous().t()
    assert torch.equal(project_stored(x, QuantizedWeight(transposed, weight.scale, weight.offset)), expected)
    every_other = torch.stack((x, x + 1), dim=-1)[..., 0]
    assert not every_other.is_contiguous()
    assert torch.equal(project_stored(every_other, weight), expected)
    assert torch.equal(project_stored(x[1, 2], weight), project_stored(x[1, 2:3], weight)[0])


@pytest.mark.parametrize("rounding", [Rounding.NONE, Rounding.SYMMETRIC])
def test_input_has_the_gradient_of_the_dequantised_weight(rounding: Rounding) -> None:
    plain = _weight(64, 7, 64)
    weight = QuantizedWeight(plain.codes, plain.scale, None, rounding)
    x, bias = torch.randn(2, 3, 64, requires_grad=True), torch.randn(7, requires_grad=True)
    slope = torch.randn(2, 3, 7)
    of_x, of_bias = torch.autograd.grad(project_stored(x, weight, bias), (x, bias), slope)
    torch.testing.assert_close(of_x.double(), slope.double() @ weight.dequantized(torch.float64), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(of_bias, slope.sum((0, 1)))


def test_second_derivatives_are_those_of_torch() -> None:
    weight = _weight(6, 5, 3, offset=True)
    slope = torch.randn(2, 5, requires_grad=True)
    (of_x,) = torch.autograd.grad(
        project_stored(x := torch.randn(2, 6, requires_grad=True), weight), x, slope, create_graph=True
    )
    (of_slope,) = torch.autograd.grad(of_x.sum(), slope)
    torch.testing.assert_close(of_slope, weight.dequantized().sum(1).expand(2, 5), rtol=1e-5, atol=1e-6)


# ---- within fused operators ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize(("activation", "gated"), [("gelu", False), ("silu", True), ("relu", False)])
@pytest.mark.parametrize("bits", [8, 4])
def test_feedforward_agrees_with_its_formula(
    isa: str, bits: int, activation: str, gated: bool, rows: int, dtype: torch.dtype
) -> None:
    x = torch.randn(rows, 64).to(dtype)
    expand, contract = _weight(64, 70, 64, bits, offset=bits == 4), _weight(70, 33, 70, bits)
    gate = _weight(64, 70, 32, bits) if gated else None
    with torch.no_grad():
        output = project_activate_project(
            x, expand, None, contract, None, gate=None if gate is None else (gate, None), activation=activation
        )
    assert output is not None
    formula = ACTIVATIONS[activation].formula
    # The hidden elements are rounded to the dtype, as an operator between two would return them.
    hidden = formula(_exact(x, expand if gate is None else gate)).to(dtype).double()
    if gate is not None:
        hidden = (hidden * _exact(x, expand)).to(dtype).double()
    assert _error(output, _exact(hidden, contract)) < 2 * BUDGETS[dtype]


@pytest.mark.parametrize("bits", [8, 4])
def test_queries_keys_and_values_of_one_weight_read_a_memory(bits: int) -> None:
    x, memory = torch.randn(2, 5, 64), torch.randn(2, 7, 64)
    joined, last, bias = _weight(64, 64, 32, bits, offset=True), _weight(32, 64, 32, bits), torch.randn(64)
    parts = [(joined.rows(*rows), bias[slice(*rows)]) for rows in ((0, 32), (32, 48), (48, 64))]
    with torch.no_grad():
        one = fused_attention((x, memory), Projections([(joined, bias)], (last, None), 4, 2))
        three = fused_attention((x, memory), Projections(parts, (last, None), 4, 2))
    assert one is not None
    assert three is not None
    assert torch.equal(one, three)


def _rounding(outputs: int, rounding: Rounding, *, packed: bool) -> QuantizedWeight:
    """A weight of 64 inputs that rounds them."""
    plain = _weight(64, outputs, 64)
    bounds = (0, 127) if rounding is Rounding.TENSOR else (-128, 127)
    weight = QuantizedWeight(plain.codes, plain.scale, None, rounding, bounds)
    return weight.packed() if packed else weight


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("rounding", ROUNDED)
def test_layers_of_one_input_round_it_as_each_does_alone(
    isa: str, rounding: Rounding, same: bool, packed: bool, rows: int
) -> None:
    others = [each for each in ROUNDED if each is not rounding]
    query, key, value = (
        _rounding(outputs, each, packed=packed)
        for outputs, each in zip((64, 32, 32), [rounding] * 3 if same else (rounding, rounding, others[0]), strict=True)
    )
    last, other = _rounding(64, rounding, packed=packed), _rounding(64, rounding if same else others[1], packed=packed)
    x = torch.randn(2, rows, 64) * torch.logspace(-1, 1, rows)[:, None] + 0.3
    with torch.no_grad():
        output = fused_attention((x,), Projections([(each, None) for each in (query, key, value)], (last, None), 4, 2))
        heads = [project_stored(x, each).unflatten(-1, (-1, 16)).transpose(1, 2) for each in (query, key, value)]
        attended = ch.attention(*heads, backend="native").transpose(1, 2).flatten(2)
        gated = project_activate_project(x, query, None, last, None, gate=(other, None), activation="silu")
        hidden = project_stored(x, query) * multiply_stored(x, other, None, Activation.SILU)
    assert output is not None
    assert torch.equal(output, project_stored(attended, last))
    assert gated is not None
    torch.testing.assert_close(gated, project_stored(hidden, last), rtol=1e-5, atol=1e-4)


def test_layer_with_integers_leaves_calls_with_gradients() -> None:
    x, weight = torch.randn(2, 5, 64, requires_grad=True), _weight(64, 64, 64)
    assert fused_attention((x,), Projections([(weight, None)] * 3, (weight, None), 4, 4)) is None
    assert project_activate_project(x, weight, None, weight, None) is None
    assert project_activate(x, weight, None, activation="relu") is None
