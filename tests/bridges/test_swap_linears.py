"""Plain linear layers of any model: which are swapped, what they compute, and that nothing else notices."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import clearhead as ch
from clearhead.integrations.torch import parts
from clearhead.integrations.torch.parts import SwappedLinear, SwappedLinearOfFewRows
from clearhead.projection import Gain, choice, layer_gains
from clearhead.testing import choices, processor
from tests.budget import within_budget
from tests.gemms import name_gemm

WIDTH, HIDDEN = 128, 160


@pytest.fixture(autouse=True)
def native(_kernels: None) -> None:
    """Use the kernels, and seed the weights."""
    torch.manual_seed(0)


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH, bias=False))


def _kinds(model: nn.Module) -> list[type[nn.Module]]:
    return [type(module) for module in model.modules() if isinstance(module, nn.Linear)]


def _gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    x = x.detach().requires_grad_()
    output = model(x)
    arriving = torch.linspace(-1, 1, output.numel()).view_as(output).to(output.dtype)
    return output, *torch.autograd.grad(output, [x, *model.parameters()], arriving)


def test_a_model_without_attention_is_swapped_and_restored() -> None:
    model = _mlp()
    state = {name: value.data_ptr() for name, value in model.state_dict().items()}
    report = ch.swap(model)
    assert str(report) == "native  2 Linear"
    assert [row.path for row in report.replaced] == ["0", "2"]
    assert _kinds(model) == [SwappedLinear] * 2
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == state
    assert "Linear(in_features=128, out_features=160, bias=True)" in str(model)
    second = ch.swap(model)
    assert second.replaced == ()
    assert second.before == report.replaced
    assert ch.unswap(model[2]).replaced[0].path == ""
    assert [row.path for row in ch.unswap(model).replaced] == ["0"]
    assert _kinds(model) == [nn.Linear] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 70), (300,), (1,), (0,), (2, 1, 129)], ids=str)
def test_outputs_and_gradients_are_within_the_error_budget(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    theirs = _mlp().to(dtype)
    ours, exact = copy.deepcopy(theirs), copy.deepcopy(theirs).double()
    ch.swap(ours)
    x = torch.randn(*shape, WIDTH).to(dtype)
    names = ("output", "x", *dict(theirs.named_parameters()))
    textbook, truth, actual = _gradients(theirs, x), _gradients(exact, x.double()), _gradients(ours, x)
    for name, *three in zip(names, actual, textbook, truth, strict=True):
        within_budget(name, *three, terms=max(HIDDEN, x.numel() // WIDTH))
    with torch.no_grad():
        within_budget("eval", ours(x), textbook[0], truth[0], terms=HIDDEN)


def test_large_calls_take_the_kernels_and_small_ones_with_gradients_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = _mlp(), list[int]()
    ch.swap(model)
    project = parts.project

    def counted(x: Tensor, *layer: Tensor | None) -> Tensor:
        calls.append(len(x))
        return project(x, *layer)  # type: ignore[arg-type]

    monkeypatch.setattr(parts, "project", counted)
    model(torch.randn(8, WIDTH)).sum().backward()
    assert calls == []
    with torch.no_grad():
        model(torch.randn(8, WIDTH))
    model(torch.randn(300, WIDTH)).sum().backward()
    assert calls == [8, 8, 300, 300]


@pytest.mark.parametrize("rows", [1, 3, 4, 24, 25, 300])
def test_layers_that_gain_in_few_rows_alone_take_the_kernels_for_these(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    name_gemm(monkeypatch)
    theirs, calls = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 512)), list[int]()
    ours, x, project = copy.deepcopy(theirs), torch.randn(rows, 1, 1024), parts.project

    def counted(x: Tensor, *layer: Tensor | None) -> Tensor:
        calls.append(len(x))
        return project(x, *layer)  # type: ignore[arg-type]

    monkeypatch.setattr(parts, "project", counted)
    with processor("GenuineIntel", ["avx2"]):
        report = ch.swap(ours)
        assert _kinds(ours) == [SwappedLinearOfFewRows, nn.Linear]
        assert [(row.path, row.how) for row in report.rows] == [("0", "native"), ("1", "left")]
        assert report.rows[0].reason.startswith("calls of few rows")
        assert torch.equal(ours(x), theirs(x))
        assert calls == []
        with torch.no_grad():
            textbook, truth = theirs(x), copy.deepcopy(theirs).double()(x.double())
            within_budget("output", ours(x), textbook, truth, terms=1024)
        assert calls == [rows] * (4 <= rows <= 24)
        second = ch.swap(ours)
        assert [row.path for row in second.before] == ["0"]
        assert second.rows[0].reason.startswith("calls of few rows")
        assert _kinds(copy.deepcopy(ours)) == _kinds(ours)
        ch.unswap(ours)
    assert _kinds(ours) == [nn.Linear] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_layers_that_gain_in_few_rows_may_get_another_dtype(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    name_gemm(monkeypatch)
    model = nn.Sequential(nn.Linear(1024, 1024))
    with processor("GenuineIntel", ["avx2"]), torch.no_grad():
        ch.swap(model)
        assert _kinds(model) == [SwappedLinearOfFewRows]
        model.to(dtype)
        x = torch.randn(8, 1024).to(dtype)
        expected = nn.functional.linear(x, model[0].weight, model[0].bias)
        torch.testing.assert_close(model(x), expected, rtol=2e-2, atol=2e-2)


def test_layers_that_gain_in_few_rows_keep_the_promise_of_invariant_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    name_gemm(monkeypatch)
    model, x = nn.Sequential(nn.Linear(1024, 1024)), torch.randn(40, 1024)
    with processor("GenuineIntel", ["avx2"]):
        ch.swap(model)
        assert _kinds(model) == [SwappedLinearOfFewRows]
        with ch.invariant():
            whole = model(x)
            for rows in (1, 8, 30):
                assert torch.equal(model(x[:rows]), whole[:rows])


class _Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2.0


def _with_own_forward() -> nn.Module:
    module = nn.Linear(WIDTH, WIDTH)
    module.forward = lambda x: x  # type: ignore[method-assign]
    return module


_LEFT: dict[str, Callable[[], nn.Module]] = {
    "a subclass": lambda: _Doubled(WIDTH, WIDTH),
    "torch's subclass": lambda: nn.MultiheadAttention(WIDTH, 2).out_proj,
    "not initialised": lambda: nn.LazyLinear(WIDTH),
    "replaced forward": _with_own_forward,
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(WIDTH, WIDTH), "weight", 0.5),
    "small": lambda: nn.Linear(WIDTH, WIDTH - 1),
    "float64": lambda: nn.Linear(WIDTH, WIDTH).double(),
    "float16": lambda: nn.Linear(WIDTH, WIDTH).half(),
    "meta": lambda: nn.Linear(WIDTH, WIDTH, device="meta"),
}


@pytest.mark.parametrize("name", _LEFT)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_layers_that_are_no_plain_linear_layers_are_left(name: str) -> None:
    layer = _LEFT[name]()
    kind, expected = type(layer), layer(torch.ones(2, WIDTH)) if name in ("a subclass", "parametrized") else None
    report = ch.swap(nn.ModuleDict({"layer": layer}))
    assert type(layer) is kind
    assert report.rows == ()
    if expected is not None:
        assert torch.equal(layer(torch.ones(2, WIDTH)), expected)


def test_layers_parametrized_after_swap_compute_their_weight() -> None:
    model, x = _mlp(), torch.randn(300, WIDTH)
    ch.swap(model)
    parametrizations.weight_norm(model[0])
    theirs = copy.deepcopy(model)
    ch.unswap(theirs)
    torch.testing.assert_close(model(x), theirs(x), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        model[0].parametrizations.weight.original0.mul_(2.0)
        theirs[0].parametrizations.weight.original0.mul_(2.0)
    torch.testing.assert_close(model(x), theirs(x), rtol=1e-4, atol=1e-5)


def test_one_row_says_that_the_table_names_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    name_gemm(monkeypatch)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(9)))
    with choices(gemm="torch"):
        report = ch.swap(model)
        assert layer_gains(model[0].weight, alone=True) is Gain.NOTHING
        assert _kinds(model) == [nn.Linear] * 9
        assert [(row.path, row.how, row.reason) for row in report.rows] == [
            ("0", "left", f"torch's GEMM is as fast for 9 of them ({choice('forward').reason})")
        ]


def test_a_wrong_variable_raises_before_anything_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2), _mlp())
    kinds = [*map(type, model.modules())]
    name_gemm(monkeypatch, "mkl")
    with pytest.raises(ch.UnsupportedError, match="CLEARHEAD_PROJECTION must be one of"):
        ch.swap(model)
    assert [*map(type, model.modules())] == kinds


def test_linear_layers_of_replaced_layers_have_no_row() -> None:
    class Mine(nn.TransformerEncoderLayer):
        pass

    model = nn.ModuleList(kind(WIDTH, 2, WIDTH, batch_first=True) for kind in (nn.TransformerEncoderLayer, Mine))
    report = ch.swap(model)
    assert [row.path for row in report.replaced] == ["0", "0.self_attn", "1.self_attn", "1.linear1", "1.linear2"]
    assert [row.path for row in report.left] == ["1"]
    assert {row.path for row in ch.unswap(model).replaced} == {row.path for row in report.replaced}


def test_hooks_copies_pickles_and_checkpoints_work() -> None:
    model, x, hooked = _mlp(), torch.randn(300, WIDTH), list[str]()
    fresh = _mlp()
    expected = model(x)
    model[0].register_forward_hook(lambda *_: hooked.append("forward"))
    model[0].register_full_backward_hook(lambda *_: hooked.append("backward"))
    ch.swap(model)
    model(x).sum().backward()
    assert hooked == ["forward", "backward"]
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh(x), expected)
    plain = _mlp()
    plain.load_state_dict(fresh.state_dict())
    ch.swap(plain)
    file = io.BytesIO()
    torch.save(plain, file)
    file.seek(0)
    for copied in (copy.deepcopy(plain), torch.load(file, weights_only=False)):
        assert _kinds(copied) == [SwappedLinear] * 2
        torch.testing.assert_close(copied(x), expected)
        ch.unswap(copied)
        assert _kinds(copied) == [nn.Linear] * 2


def test_autocast_computes_as_torch() -> None:
    model, x = _mlp(), torch.randn(300, WIDTH)
    theirs = copy.deepcopy(model)
    ch.swap(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), theirs(x))


def test_graphs_have_no_sizes_of_a_call() -> None:
    theirs = _mlp()
    model, frames = copy.deepcopy(theirs), list[Any]()
    ch.swap(model)

    def backend(graph: Any, _inputs: Any) -> Any:
        frames.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    for rows in (3, 8, 33, 300):
        x = torch.randn(rows, WIDTH)
        torch.testing.assert_close(compiled(x), theirs(x))
    assert len(frames) == 1
    rows = torch.export.Dim("rows", min=2, max=4096)
    exported = torch.export.export(model, (torch.randn(7, WIDTH),), dynamic_shapes=({0: rows},)).module()
    for count in (2, 600):
        x = torch.randn(count, WIDTH)
        torch.testing.assert_close(exported(x), theirs(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_dynamic_quantisation_finds_the_layers_after_unswap() -> None:
    model = _mlp()
    ch.swap(model)
    with pytest.warns(UserWarning, match="swapped linear layers are not quantised"):
        torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    ch.unswap(model)
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    assert not isinstance(quantised[0], nn.Linear) or type(quantised[0]) is not nn.Linear


def test_transforms_and_second_derivatives_are_those_of_torch() -> None:
    theirs = _mlp().double()
    model = copy.deepcopy(theirs).float()
    ch.swap(model)
    x = torch.randn(300, WIDTH, dtype=torch.float64)

    def second(of: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(of(x).square().sum(), x, create_graph=True)
        (result,) = torch.autograd.grad(grad.square().sum(), x)
        return result

    torch.testing.assert_close(second(model, x.float()).double(), second(theirs, x), rtol=1e-3, atol=1e-3)
    mapped = torch.vmap(model)(x.float().view(3, 100, WIDTH))
    torch.testing.assert_close(mapped.view(300, WIDTH).double(), theirs(x), rtol=1e-4, atol=1e-4)
