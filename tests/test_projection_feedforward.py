"""project_activate_project() against the unfused formula in float64, and the calls that it leaves unfused."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from clearhead import choices as sizes
from clearhead.nn.feedforward import FeedForward
from clearhead.ops.dropout import LEVELS
from clearhead.problem import draw_seed
from clearhead.projection import choice, linear, paths, project_activate_project
from clearhead.testing import processor
from tests.agreement import needs_native
from tests.budget import within_budget
from tests.dropped import keep_mask
from tests.gemms import name_gemm

pytestmark = needs_native

FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
NAMES = ("output", "dx", "dexpand", "dexpand_bias", "dcontract", "dcontract_bias")
#: Leading axes of x, width in, hidden, out.
SHAPES = [((1,), 8, 16, 4), ((67,), 33, 70, 17), ((3, 5), 40, 24, 40), ((1300,), 24, 129, 8), ((2, 1, 7), 65, 64, 1)]


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels, for every size."""
    name_gemm(monkeypatch, "native")
    monkeypatch.setattr(sizes, "SMALL", 1)


def _steps(
    x: Tensor,
    expand: Tensor,
    expand_bias: Tensor | None,
    contract: Tensor,
    contract_bias: Tensor | None,
    *,
    activation: str = "relu",
    factor: Tensor | None = None,
) -> Tensor:
    """One after the other; ``factor`` is what dropout multiplies by."""
    hidden = FORMULAS[activation](F.linear(x, expand, expand_bias))
    return F.linear(hidden if factor is None else hidden * factor.to(hidden.dtype), contract, contract_bias)


def _fused(*parts: Tensor | None, **options: Any) -> Tensor:
    output = project_activate_project(*parts, **options)  # type: ignore[arg-type]
    assert output is not None
    return output


def _parts(
    leading: tuple[int, ...],
    width: int,
    hidden: int,
    out: int,
    *,
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((*leading, width), (hidden, width), (hidden,), (out, hidden), (out,))
    drawn = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    return [None if place in (2, 4) and not bias else part for place, part in enumerate(drawn)]


def _with_gradients(
    function: Callable[..., Tensor],
    parts: list[Tensor | None],
    dtype: torch.dtype | None = None,
    *,
    create_graph: bool = False,
) -> list[Tensor]:
    leaves = [None if part is None else part.to(dtype or part.dtype).detach().requires_grad_() for part in parts]
    output = function(*leaves)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    given = [leaf for leaf in leaves if leaf is not None]
    return [output.detach(), *torch.autograd.grad(output, given, upstream, create_graph=create_graph)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("leading", "width", "hidden", "out"), SHAPES, ids=str)
def test_fused_outputs_and_gradients_equal_unfused_ones(
    leading: tuple[int, ...], width: int, hidden: int, out: int, bias: bool, dtype: torch.dtype
) -> None:
    parts = _parts(leading, width, hidden, out, bias=bias, dtype=dtype)
    fused, unfused = _with_gradients(_fused, parts), _with_gradients(_steps, parts)
    exact = _with_gradients(_steps, parts, torch.float64)
    names = [name for name in NAMES if bias or not name.endswith("bias")]
    terms = max(hidden, width, fused[0].numel() // out)
    for name, *three in zip(names, fused, unfused, exact, strict=True):
        within_budget(name, *three, terms=terms)


def _factor(size: tuple[tuple[int, ...], int, int, int], dropout: float) -> Tensor | None:
    """The factor of dropout on hidden elements in a call after ``torch.manual_seed(7)``."""
    if dropout == 0.0:
        return None
    torch.manual_seed(7)
    seed, levels = draw_seed(dropout), round(dropout * LEVELS)
    mask = keep_mask(math.prod(size[0]), size[2], levels, seed).double().view(*size[0], size[2])
    return mask * (LEVELS / (LEVELS - levels))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("activation", FORMULAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [((3, 5), 40, 24, 40), ((150,), 24, 129, 8), ((77,), 33, 300, 17)], ids=str)
def test_every_activation_with_dropout(
    size: tuple[tuple[int, ...], int, int, int], dtype: torch.dtype, activation: str, dropout: float
) -> None:
    """Forward, backward, and differentiable gradients, each against the definition."""
    parts = _parts(*size, dtype=dtype)
    steps, rows = partial(_steps, activation=activation, factor=_factor(size, dropout)), math.prod(size[0])

    def fused(*leaves: Tensor | None) -> Tensor:
        torch.manual_seed(7)
        return _fused(*leaves, activation=activation, dropout=dropout)

    unfused, exact = _with_gradients(steps, parts), _with_gradients(steps, parts, torch.float64)
    terms = max(*size[1:3], rows)
    for create_graph in (False, True):
        for name, *three in zip(
            NAMES, _with_gradients(fused, parts, create_graph=create_graph), unfused, exact, strict=True
        ):
            within_budget(f"{name}, create_graph={create_graph}", *three, terms=terms, dtype=dtype)
    torch.testing.assert_close(fused(*parts), _with_gradients(fused, parts)[0], rtol=0, atol=0)


def _gated(*parts: Tensor | None, factor: Tensor | None = None, activation: str = "silu") -> Tensor:
    """One step after the other, of ``x``, gate, what expands and what contracts."""
    x, gate, gate_bias, expand, expand_bias, contract, contract_bias = parts
    assert x is not None
    assert gate is not None
    assert expand is not None
    assert contract is not None
    hidden = FORMULAS[activation](F.linear(x, gate, gate_bias)) * F.linear(x, expand, expand_bias)
    return F.linear(hidden if factor is None else hidden * factor.to(hidden.dtype), contract, contract_bias)


def _fused_gated(*parts: Tensor | None, **options: Any) -> Tensor:
    x, gate, gate_bias, *layers = parts
    return _fused(x, *layers, gate=(gate, gate_bias), **options)


def _gated_parts(
    size: tuple[tuple[int, ...], int, int, int], *, bias: bool = True, dtype: torch.dtype = torch.float32
) -> list[Tensor | None]:
    x, *layers = _parts(*size, bias=bias, dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    gate, gate_bias = (torch.randn(axes, generator=generator).to(dtype) for axes in ((size[2], size[1]), size[2]))
    return [x, gate, gate_bias if bias else None, *layers]


GATED_NAMES = ("output", "dx", "dgate", "dgate_bias", *NAMES[2:])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("activation", FORMULAS)
@pytest.mark.parametrize(("bias", "dtype"), [(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)])
@pytest.mark.parametrize("size", [((3, 5), 40, 24, 40), ((150,), 24, 129, 8), ((1,), 64, 70, 17)], ids=str)
def test_every_activation_with_a_gate(
    size: tuple[tuple[int, ...], int, int, int], bias: bool, dtype: torch.dtype, activation: str, dropout: float
) -> None:
    parts = _gated_parts(size, bias=bias, dtype=dtype)
    steps, rows = partial(_gated, activation=activation, factor=_factor(size, dropout)), math.prod(size[0])

    def fused(*leaves: Tensor | None) -> Tensor:
        torch.manual_seed(7)
        return _fused_gated(*leaves, activation=activation, dropout=dropout)

    unfused, exact = _with_gradients(steps, parts), _with_gradients(steps, parts, torch.float64)
    names, terms = [name for name in GATED_NAMES if bias or "bias" not in name], max(*size[1:3], rows)
    if activation == "relu" and dtype is torch.bfloat16:
        # Its gradient is discontinuous at 0, where the rounding of the textbook formula decides.
        names = names[:1]
    for create_graph in (False, True):
        for name, *three in zip(
            names, _with_gradients(fused, parts, create_graph=create_graph), unfused, exact, strict=False
        ):
            within_budget(f"{name}, create_graph={create_graph}", *three, terms=terms, dtype=dtype)
    torch.testing.assert_close(fused(*parts), _with_gradients(fused, parts)[0], rtol=0, atol=0)


@pytest.mark.parametrize("wanted", range(7))
def test_each_gradient_of_a_gated_layer_alone(wanted: int) -> None:
    parts = _gated_parts(((6,), 8, 12, 4))
    leaves = [part.requires_grad_(place == wanted) for place, part in enumerate(parts) if part is not None]
    (unfused,) = torch.autograd.grad(_gated(*leaves).square().sum(), leaves[wanted])
    for _ in range(3):
        (fused,) = torch.autograd.grad(_fused_gated(*leaves, activation="silu").square().sum(), leaves[wanted])
        torch.testing.assert_close(fused, unfused, rtol=1e-5, atol=1e-4)


def test_second_derivatives_of_a_gated_layer() -> None:
    """Backward does not modify the tensors that forward saved."""
    leaves = [part.requires_grad_() for part in _gated_parts(((6,), 8, 12, 4)) if part is not None]
    output = _fused_gated(*leaves, activation="silu")
    first = torch.autograd.grad(output.sum(), leaves, retain_graph=True)
    for one, two in zip(first, torch.autograd.grad(output.sum(), leaves), strict=True):
        assert torch.equal(one, two)


def test_misfit_gate_runs_unfused() -> None:
    x, gate, _, expand, _, contract, _ = _gated_parts(((5,), 4, 9, 3))
    assert gate is not None
    for other in (gate[:8], gate[:, :3], gate.double()):
        assert project_activate_project(x, expand, None, contract, None, gate=(other, None)) is None  # type: ignore[arg-type]
    assert project_activate_project(x, expand, None, contract, None, gate=(gate, torch.zeros(8))) is None  # type: ignore[arg-type]


def test_dropout_of_all_or_nothing() -> None:
    parts = _parts((5,), 4, 9, 3)
    assert project_activate_project(*parts, dropout=1.0) is None  # type: ignore[arg-type]
    state = torch.random.get_rng_state()
    torch.testing.assert_close(_fused(*parts, dropout=1e-6), _steps(*parts))  # type: ignore[arg-type]
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("wanted", range(5))
def test_each_gradient_alone(wanted: int) -> None:
    parts = _parts((6,), 8, 12, 4)
    leaves = [part.requires_grad_(place == wanted) for place, part in enumerate(parts) if part is not None]
    (fused,) = torch.autograd.grad(_fused(*leaves).square().sum(), leaves[wanted])
    (unfused,) = torch.autograd.grad(_steps(*leaves).square().sum(), leaves[wanted])
    torch.testing.assert_close(fused, unfused)


def test_relu_treats_0_and_nan_like_torch() -> None:
    """0 for what is not above 0, NaN for NaN, both ways."""
    x = torch.tensor([[1.0], [-1.0], [0.0], [torch.nan], [torch.inf]]).requires_grad_()
    weights = torch.ones(1, 1), None, torch.ones(1, 1), None
    fused, unfused = _fused(x, *weights), _steps(x, *weights)
    torch.testing.assert_close(fused, unfused, equal_nan=True)
    torch.testing.assert_close(
        torch.autograd.grad(fused.sum(), x)[0], torch.autograd.grad(unfused.sum(), x)[0], equal_nan=True
    )


def _in_rows_apart(tensor: Tensor) -> Tensor:
    """The same elements, as a slice of a tensor of twice the width."""
    return torch.cat([tensor, torch.full_like(tensor, torch.nan)], -1)[..., : tensor.shape[-1]]


def _as_the_second_half(tensor: Tensor) -> Tensor:
    return torch.cat([torch.full_like(tensor, torch.nan), tensor], -1).chunk(2, -1)[1]


def _every_second_row(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, -2)[..., ::2, :]


@pytest.mark.parametrize("dense_first", [True, False])
@pytest.mark.parametrize("lay", [_in_rows_apart, _as_the_second_half, _every_second_row])
@pytest.mark.parametrize("which", [0, 1, 3], ids=["x", "expand", "contract"])
@pytest.mark.parametrize("leading", [(6,), (1, 6)], ids=str)
def test_strided_inputs_after_contiguous_ones(
    leading: tuple[int, ...], which: int, lay: Callable[[Tensor], Tensor], dense_first: bool
) -> None:
    """Contiguous and strided inputs in turn give the same results."""
    dense = _parts(leading, 8, 12, 4)
    part = dense[which]
    assert part is not None
    strided = [*dense[:which], lay(part), *dense[which + 1 :]]
    assert torch.equal(strided[which], part)  # type: ignore[arg-type]
    unfused = _with_gradients(_steps, dense)
    for parts in (dense, strided) if dense_first else (strided, dense):
        for _ in range(3):
            leaves = [None if part is None else part.detach().requires_grad_() for part in parts]
            output = _fused(*leaves)
            upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
            given = [leaf for leaf in leaves if leaf is not None]
            torch.testing.assert_close([output.detach(), *torch.autograd.grad(output, given, upstream)], unfused)


def test_strided_gradients_after_contiguous_ones() -> None:
    """Where the output was joined with others, what comes back is a slice."""
    parts = _parts((2, 3), 8, 12, 4)
    leaves = [part.requires_grad_() for part in parts if part is not None]
    upstream = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    unfused = torch.autograd.grad(_steps(*leaves), leaves, upstream)
    for lay in (torch.Tensor.clone, _in_rows_apart, _as_the_second_half, torch.Tensor.clone) * 3:
        torch.testing.assert_close(torch.autograd.grad(_fused(*leaves), leaves, lay(upstream)), unfused)


@pytest.mark.parametrize("activation", FORMULAS)
def test_second_derivatives(activation: str) -> None:
    parts = [part.requires_grad_() for part in _parts((5,), 4, 9, 3) if part is not None]
    for function in (_fused, _steps):
        first = torch.autograd.grad(function(*parts, activation=activation).square().sum(), parts, create_graph=True)
        seconds = torch.autograd.grad(sum(one.square().sum() for one in first), parts)
        if function is _fused:
            fused = seconds
    for one, other in zip(fused, seconds, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_batched_gradients() -> None:
    parts = [part.requires_grad_() for part in _parts((5,), 4, 9, 3) if part is not None]
    fused, unfused = (
        torch.autograd.grad(function(*parts)[0], parts, torch.eye(3), is_grads_batched=True)
        for function in (_fused, _steps)
    )
    torch.testing.assert_close(fused, unfused)


def test_an_output_may_be_changed_in_place() -> None:
    parts = [part.requires_grad_() for part in _parts((2, 5), 4, 9, 3) if part is not None]
    _fused(*parts).relu_().sum().backward()
    assert parts[0].grad is not None


def test_a_weight_changed_before_backward_raises() -> None:
    parts = [part.requires_grad_() for part in _parts((5,), 4, 9, 3) if part is not None]
    output = _fused(*parts)
    with torch.no_grad():
        parts[3].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_flop_counter_around_a_training_step_counts_every_gemm() -> None:
    module, x = FeedForward(4, 9), torch.randn(5, 4, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        module(x).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 5 * (4 * 9 + 9 * 4)


@pytest.mark.parametrize("path", ["torch", "onednn"])
def test_other_paths_run_unfused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name_gemm(monkeypatch, path)
    if path == "onednn" and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no oneDNN product")
    assert project_activate_project(*_parts((5,), 4, 9, 3)) is None  # type: ignore[arg-type]


def test_misfit_layers_run_unfused() -> None:
    x, expand, _, contract, _ = _parts((5,), 4, 9, 3)
    assert x is not None
    assert expand is not None
    assert contract is not None
    assert project_activate_project(x, expand, None, contract[:, :8], None) is None
    assert project_activate_project(x, expand, None, contract.double(), None) is None
    assert project_activate_project(x, expand, None, contract, torch.zeros(4)) is None
    assert project_activate_project(x[:, :3], expand, None, contract, None) is None
    assert project_activate_project(x.double(), expand.double(), None, contract.double(), None) is None


class TestFeedForward:
    """``FeedForward`` runs fused where its results are the same."""

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
        inputs: list[Tensor] = []
        module = importlib.import_module("clearhead.nn.feedforward")

        def spy(x: Tensor, *layers: Tensor, **options: Any) -> Tensor | None:
            inputs.append(x)
            return project_activate_project(x, *layers, **options)

        monkeypatch.setattr(module, "project_activate_project", spy)
        return inputs

    @pytest.mark.parametrize("name", ["relu", "gelu", "silu"])
    def test_supported_activations_are_fused(self, name: str, calls: list[Tensor]) -> None:
        module, x = FeedForward(4, activation=name), torch.randn(2, 3, 4)
        torch.testing.assert_close(module(x), module.contract(module.activation(module.expand(x))))
        assert len(calls) == 1
        module.activation = nn.Tanh()
        module(x)
        assert len(calls) == 1

    def test_gated_layer_is_fused(self, calls: list[Tensor]) -> None:
        module, x = FeedForward(4, activation="silu", gated=True, dropout=0.5), torch.randn(2, 3, 4)
        assert module.gate is not None
        module.eval()
        unfused = module.contract(F.silu(module.gate(x)) * module.expand(x))
        torch.testing.assert_close(module(x), unfused)
        assert len(calls) == 1
        handle = module.gate.register_forward_hook(lambda *given: given[2] * 0.0)
        torch.testing.assert_close(module(x), module.contract(torch.zeros(2, 3, 16)))
        assert len(calls) == 1
        handle.remove()
        assert module.train()(x).shape == x.shape
        assert len(calls) == 2
        module.gate = nn.Linear(4, 16)  # type: ignore[assignment]
        module(x)
        assert len(calls) == 2

    def test_dropout_is_fused(self, calls: list[Tensor]) -> None:
        module, x = FeedForward(4, activation="relu", dropout=0.5), torch.randn(2, 3, 4)
        dropped = module(x)
        assert len(calls) == 1
        module.eval()
        assert not torch.allclose(module(x), dropped)
        assert len(calls) == 2

    def test_torchs_own_dropout_draws_its_own_numbers(self, calls: list[Tensor]) -> None:
        module, x = FeedForward(4, activation="relu", dropout=0.5), torch.randn(2, 3, 4)
        module.dropout = nn.Dropout(0.5)
        module(x)
        assert not calls
        module.eval()(x)
        assert len(calls) == 1

    @pytest.mark.parametrize("part", ["expand", "activation", "dropout", "contract"])
    def test_hooked_layers_run_unfused(self, part: str, calls: list[Tensor]) -> None:
        module, observed = FeedForward(4, activation="relu"), []
        handle = module.get_submodule(part).register_forward_hook(lambda *given: observed.append(given[2]))
        module(torch.randn(2, 3, 4))
        assert len(observed) == 1
        assert not calls
        handle.remove()
        module(torch.randn(2, 3, 4))
        assert len(calls) == 1

    def test_replaced_layer_is_called(self, calls: list[Tensor]) -> None:
        class Loud(nn.Linear):
            def forward(self, input: Tensor) -> Tensor:
                return super().forward(input) + 1.0

        module, x = FeedForward(4, activation="relu"), torch.randn(2, 3, 4)
        module.contract = Loud(16, 4)
        torch.testing.assert_close(module(x), module.contract(torch.relu(module.expand(x))))
        assert not calls

    @pytest.mark.parametrize("decoder", [False, True])
    def test_swapped_torch_layers_are_fused(self, decoder: bool, calls: list[Tensor]) -> None:
        from clearhead import swap

        kind = nn.TransformerDecoderLayer if decoder else nn.TransformerEncoderLayer
        layer = kind(8, 2, 16, dropout=0.0, batch_first=True)
        x = torch.randn(2, 5, 8)
        given = (x, x) if decoder else (x,)
        unfused = layer(*given)
        swap(layer)
        # Without observers a whole encoder layer is one fused operator.
        layer.norm1.register_forward_hook(lambda *_: None)
        torch.testing.assert_close(layer(*given), unfused, rtol=1e-4, atol=1e-5)
        assert len(calls) == 1


def test_small_layers_use_the_kernels_on_every_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    name_gemm(monkeypatch)
    monkeypatch.setattr(sizes, "SMALL", 2**22)
    with processor("", []):
        assert choice("forward").path == "torch"
        assert project_activate_project(*_parts((4,), 8, 16, 8)) is not None  # type: ignore[arg-type]
        assert project_activate_project(*_parts((64,), 256, 256, 256)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("small", ["expand", "contract"])
def test_narrow_weight_is_fused(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GEMM alone takes the faster path; fusion saves more than that gains."""
    name_gemm(monkeypatch)
    width, out = (8, 256) if small == "expand" else (256, 8)
    parts = _parts((4096,), width, 256, out)
    with processor("GenuineIntel", ["avx2"]):
        assert linear.path_of("forward", parts[0], 8 * 256) is paths.TORCH  # type: ignore[arg-type]
        assert project_activate_project(*parts) is not None  # type: ignore[arg-type]
