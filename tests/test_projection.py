"""project() against torch's linear in float64, on every path, and the choice of the path."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from clearhead import choices as sizes
from clearhead.cli.app import app
from clearhead.errors import UnsupportedError
from clearhead.nn.linear import Linear
from clearhead.projection import KINDS, choice, linear, paths, project
from tests.budget import within_budget
from tests.gemms import name_gemm
from tests.processes import reported

ABSENT = {name: path.absent(torch.float32) for name, path in paths.PATHS.items()}
PATHS = [pytest.param(name, marks=pytest.mark.skipif(why is not None, reason=f"{why}")) for name, why in ABSENT.items()]
#: What other than torch there is here: needed wherever something is measured.
OTHERS = [name for name, why in ABSENT.items() if why is None and name != "torch"]
needs_onednn = pytest.mark.skipif(ABSENT["onednn"] is not None, reason=f"{ABSENT['onednn']}")

#: Leading axes of x, width in, width out.
SHAPES = [
    ((1,), 96, 64), ((67,), 96, 1), ((67,), 1, 96), ((), 96, 64), ((3, 5), 33, 17), ((2, 1, 7), 64, 48),
    ((0,), 8, 8), ((4, 0), 8, 8), ((5,), 0, 3), ((5,), 3, 0), ((513,), 40, 24), ((767,), 24, 40), ((1300,), 24, 24),
]  # fmt: skip


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No path is forced, and the smallest GEMM has a choice."""
    name_gemm(monkeypatch)
    monkeypatch.setattr(sizes, "SMALL", 1)
    monkeypatch.setattr(sizes, "SMALL_UNPREPARED", 1)


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name_gemm(monkeypatch, request.param)
    return str(request.param)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of GEMM for which a path was chosen, in order; empty if ``F.linear`` ran."""
    kinds: list[str] = []
    chosen = linear.path_of
    monkeypatch.setattr(linear, "path_of", lambda kind, *sizes: kinds.append(kind) or chosen(kind, *sizes))
    return kinds


def _with_gradients(function: object, inputs: list[Tensor | None], grad: Tensor) -> list[Tensor]:
    leaves = [None if each is None else each.clone().requires_grad_() for each in inputs]
    output = function(*leaves)  # type: ignore[operator]
    output.backward(grad.to(output.dtype))
    return [output.detach(), *(each.grad for each in leaves if each is not None and each.grad is not None)]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("leading", "inputs", "outputs"), SHAPES, ids=str)
def test_numbers_and_gradients_are_those_of_linear(
    path: str, leading: tuple[int, ...], inputs: int, outputs: int, bias: bool
) -> None:
    x, weight = _numbers(*leading, inputs), _numbers(outputs, inputs, seed=1)
    offset = _numbers(outputs, seed=2) if bias else None
    grad = _numbers(*leading, outputs, seed=3)
    results = _with_gradients(project, [x, weight, offset], grad)
    textbook = _with_gradients(F.linear, [x, weight, offset], grad)
    doubles = [None if each is None else each.double() for each in (x, weight, offset)]
    exact = _with_gradients(F.linear, doubles, grad)
    assert len(results) == 3 + bias
    names = ("output", "input gradient", "weight gradient", "bias gradient")
    for name, result, baseline, reference in zip(names, results, textbook, exact, strict=False):
        assert result.dtype == torch.float32
        within_budget(name, result, baseline, reference, terms=max(inputs, outputs, grad.numel() // max(outputs, 1), 1))


@needs_onednn
def test_budget_fails_for_a_gemm_in_16_bits() -> None:
    x, weight = _numbers(64, 96), _numbers(64, 96, seed=1)
    exact = F.linear(x.double(), weight.double())
    with pytest.raises(AssertionError, match="above its budget"):
        within_budget("16 bits", F.linear(x.bfloat16(), weight.bfloat16()), F.linear(x, weight), exact, terms=96)


STRIDES = {
    "every second channel": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "columns of a wider tensor": lambda x: F.pad(x, (3, 5))[..., 3:-5],
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "one row for all": lambda x: x[:1].expand_as(x),
    "one column for all": lambda x: x[..., :1].expand_as(x),
    "an odd address": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}


@pytest.mark.parametrize("where", ["x", "weight", "grad"])
@pytest.mark.parametrize("stride", STRIDES)
def test_strides_do_not_matter(path: str, stride: str, where: str) -> None:
    tensors = {"x": _numbers(70, 40), "weight": _numbers(24, 40, seed=1), "grad": _numbers(70, 24, seed=2)}
    tensors[where] = STRIDES[stride](tensors[where])
    bias = _numbers(48, seed=3)[::2]
    leaves = [tensors["x"].detach().requires_grad_(), tensors["weight"].detach().requires_grad_(), bias]
    results = [project(*leaves)]
    results += torch.autograd.grad(results[0], leaves[:2], tensors["grad"])
    x, weight, grad = (tensors[name].double() for name in ("x", "weight", "grad"))
    exact = [F.linear(x, weight, bias.double()), grad @ weight, grad.t() @ x]
    baseline = [F.linear(*leaves), tensors["grad"] @ tensors["weight"], tensors["grad"].t() @ tensors["x"]]
    for name, result, textbook, reference in zip(KINDS, results, baseline, exact, strict=True):
        within_budget(name, result, textbook.detach(), reference, terms=70)


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)], ids=str)
def test_only_the_gradients_asked_for_are_computed(path: str, chosen: list[str], wanted: tuple[bool, bool]) -> None:
    x, weight = (_numbers(8, 8).requires_grad_(needed) for needed in wanted)
    bias = _numbers(8).requires_grad_()
    project(x, weight, bias).sum().backward()
    assert (x.grad is not None, weight.grad is not None) == wanted
    assert torch.equal(bias.grad, torch.full((8,), 8.0))  # type: ignore[arg-type]
    assert chosen == ["forward", *(kind for kind, needed in zip(KINDS[1:], wanted, strict=True) if needed)]


def test_second_derivatives(path: str) -> None:
    x, weight = _numbers(5, 4).requires_grad_(), _numbers(3, 4, seed=1).requires_grad_()
    (first,) = torch.autograd.grad(project(x, weight).pow(2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), weight)
    (expected,) = torch.autograd.grad(F.linear(x, weight).pow(2).sum(), x, create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(expected.sum(), weight)[0])


def test_batched_gradients_as_vectorised_jacobians_take_them(path: str) -> None:
    leaves = [_numbers(5, 4).requires_grad_(), _numbers(3, 4, seed=1).requires_grad_()]
    actual, expected = (
        torch.autograd.grad(function(*leaves)[0], leaves, torch.eye(3), is_grads_batched=True)
        for function in (project, F.linear)
    )
    torch.testing.assert_close(actual, expected)


def test_backward_under_a_mode_runs_torch_operators(path: str, chosen: list[str]) -> None:
    x, weight = _numbers(4, 8).requires_grad_(), _numbers(6, 8, seed=1).requires_grad_()
    output = project(x, weight)
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    assert counter.get_total_flops() == 2 * (2 * 4 * 6 * 8)
    assert chosen == ["forward"]


def test_same_inputs_same_bits(path: str) -> None:
    x, weight, grad = _numbers(600, 96), _numbers(64, 96, seed=1), _numbers(600, 64, seed=2)
    first = _with_gradients(project, [x, weight], grad)
    assert all(map(torch.equal, first, _with_gradients(project, [x, weight], grad)))


@pytest.mark.parametrize(("rows", "expected"), [(64, True), (63, False), (320, True), (255, True)], ids=str)
def test_small_gemms_use_linear(monkeypatch: pytest.MonkeyPatch, rows: int, expected: bool) -> None:
    monkeypatch.undo()
    assert linear.has_choice(torch.zeros(rows, 256), torch.zeros(256, 256), None) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "returns"), [(7, True), (64, True), (320, True), (255, False), (65, False), (257, True)], ids=str
)
def test_unprepared_row_counts_use_torch(
    monkeypatch: pytest.MonkeyPatch, path: str, kind: str, rows: int, returns: bool
) -> None:
    monkeypatch.setattr(sizes, "SMALL_UNPREPARED", 2**24)
    assert linear.path_of(kind, torch.zeros(rows, 256), 2**16).name == (
        path if returns or path != "onednn" else "torch"
    )


class _Subclass(Tensor):
    pass


class _Watcher(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.observed = function
        return function(*args, **(kwargs or {}))


def test_other_tensors_use_linear(path: str, monkeypatch: pytest.MonkeyPatch, chosen: list[str]) -> None:
    x, weight, bias = _numbers(4, 8), _numbers(6, 8, seed=1), _numbers(6, seed=2)
    for dtype in (torch.float16, torch.float64):
        tensors = [each.to(dtype) for each in (x, weight, bias)]
        assert torch.equal(project(*tensors), F.linear(*tensors))
    assert isinstance(project(x.as_subclass(_Subclass), weight), _Subclass)
    assert isinstance(project(x, weight.as_subclass(_Subclass)), _Subclass)
    assert project(x.to("meta"), weight.to("meta")).shape == (4, 6)
    with torch.autocast("cpu"):
        assert project(x, weight, bias).dtype == torch.bfloat16
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        assert torch.equal(project(x, weight, bias), F.linear(x, weight, bias))
    with _Watcher() as watcher:
        project(x, weight)
        assert watcher.observed is F.linear
    with FlopCounterMode(display=False) as counter:
        project(x, weight)
    assert counter.get_total_flops() == 2 * 4 * 6 * 8
    traced = torch.jit.trace(project, (x, weight, bias), check_trace=False)
    assert "mkldnn" not in str(traced.graph)
    assert chosen == []
    with torch.device("cpu"):
        project(x, weight)
    assert chosen == ["forward"]


def test_transforms_of_functions_are_not_silently_wrong(path: str) -> None:
    x, weight = _numbers(3, 4, 8), _numbers(6, 8, seed=1)
    torch.testing.assert_close(torch.func.vmap(project, (0, None))(x, weight), F.linear(x, weight))
    for actual, expected in zip(
        *(torch.func.jacrev(f, (0, 1))(x[0], weight) for f in (project, F.linear)), strict=True
    ):
        torch.testing.assert_close(actual, expected)
    with forward_ad.dual_level():
        dual = project(forward_ad.make_dual(x[0], torch.ones(4, 8)), weight)
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, torch.ones(4, 8) @ weight.t())


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [((4, 7), (6, 8), None), ((), (6, 8), None), ((4, 8), (6, 8), (5,)), ((4, 8), (2, 6, 8), None)],
    ids=str,
)
def test_misfits_raise_the_errors_of_linear(
    path: str, x: tuple[int, ...], weight: tuple[int, ...], bias: tuple[int, ...] | None
) -> None:
    tensors = [torch.zeros(x), torch.zeros(weight), None if bias is None else torch.zeros(bias)]
    with pytest.raises((RuntimeError, IndexError)) as expected:
        F.linear(*tensors)
    with pytest.raises(type(expected.value)) as actual:
        project(*tensors)
    assert str(actual.value) == str(expected.value)


def test_compiled_and_exported_calls_use_linear(path: str, chosen: list[str]) -> None:
    x, weight = _numbers(4, 8), _numbers(6, 8, seed=1).requires_grad_()
    compiled = torch.compile(project, fullgraph=True, backend="aot_eager")
    compiled(x, weight).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(6, 8))
    module = torch.nn.Module()
    module.forward = lambda x, weight: project(x, weight)
    exported = torch.export.export(module, (x, weight))
    assert "aten.linear" in str(exported.graph)
    assert chosen == []


PROGRAM = """
import json, torch
from clearhead.nn.linear import Linear
from clearhead.projection import KINDS, choice
layer = Linear(512, 512)
layer(torch.ones(64, 512)).sum().backward()
print(json.dumps([[choice(kind).path, choice(kind).reason] for kind in KINDS]))
"""


@pytest.mark.parametrize("value", PATHS)
def test_the_variable_forces_a_path(value: str) -> None:
    done = reported(PROGRAM, environment={"CLEARHEAD_PROJECTION": value})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[value, f"CLEARHEAD_PROJECTION={value}"]] * 3


def test_a_bad_variable_is_one_line_where_the_layer_is_built_or_used(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Linear(8, 8)
    name_gemm(monkeypatch, "fast")
    for use in (lambda: Linear(8, 8), lambda: layer(torch.zeros(4, 8)), lambda: choice("forward")):
        with pytest.raises(UnsupportedError) as refused:
            use()
        assert str(refused.value) == (
            "project: CLEARHEAD_PROJECTION must be one of torch, onednn, native; got 'fast'. "
            "Unset it for the choice of the table of processors."
        )


def test_the_variable_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    name_gemm(monkeypatch, "torch")
    assert choice("forward").path == "torch"
    monkeypatch.setenv("CLEARHEAD_PROJECTION", "native")
    assert choice("forward").path == "torch"


@pytest.mark.parametrize("leading", [(10,), (2, 5)], ids=str)
def test_output_may_be_changed_in_place(path: str, leading: tuple[int, ...]) -> None:
    x, weight, bias = _numbers(*leading, 8).requires_grad_(), _numbers(6, 8, seed=1), _numbers(6, seed=2)
    actual, expected = (
        torch.autograd.grad(function(x, weight, bias).relu_().sum(), x)[0] for function in (project, F.linear)
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("rows", [1, 300, 1300])
def test_bfloat16_is_as_exact_as_linear(path: str, rows: int) -> None:
    """The bias is added before the one rounding, and no sum of blocks is rounded in between."""
    if (why := paths.PATHS[path].absent(torch.bfloat16)) is not None:
        pytest.skip(why)
    results = []
    for product in (project, F.linear):
        tensors = [_numbers(*size, seed=seed).bfloat16() for seed, size in enumerate(((rows, 96), (64, 96), (64,)))]
        inputs = [tensor.detach().requires_grad_() for tensor in tensors]
        output = product(*inputs)
        results.append([output, *torch.autograd.grad(output.float().square().sum(), inputs)])
        assert all(tensor.dtype == torch.bfloat16 for tensor in results[-1])
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    output = F.linear(*exact)
    wanted = [output, *torch.autograd.grad(output.square().sum(), exact)]
    for name, result, baseline, right in zip(("output", "dx", "dweight", "dbias"), *results, wanted, strict=True):
        within_budget(name, result, baseline, right, terms=rows * 96)


def test_doctor_shows_choice_and_table(monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead import doctor

    monkeypatch.setattr(doctor, "MATRIX", 64)
    monkeypatch.setattr(doctor, "ATTENTION", (1, 2, 32, 8))
    monkeypatch.setattr(doctor, "SECONDS_EACH", 0.0)
    name_gemm(monkeypatch, "torch")
    shown = CliRunner().invoke(app, ["doctor"]).stdout
    for kind in KINDS:
        line = next(line for line in shown.splitlines() if line.strip().startswith(kind))
        assert line.split(kind)[1].split()[:2] == ["float32", "torch"]
        assert "(CLEARHEAD_PROJECTION=torch)" in line
    read = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert [each["kind"] for each in read["projections"]] == 2 * list(KINDS)
    assert {each["dtype"] for each in read["projections"]} == {"float32", "bfloat16"}
    assert {each["path"] for each in read["projections"]} == {"torch"}
    assert [each["basis"] for each in read["table"]] == [row.basis for row in sizes.TABLE]
    assert {each["dtype"] for each in read["attentions"]} == {"float32", "bfloat16", "float16"}
    name_gemm(monkeypatch, "fast")
    refused = CliRunner().invoke(app, ["doctor"])
    assert refused.exit_code == 2
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("forced", ["", *OTHERS, "torch"])
def test_few_tokens_through_a_large_weight(dtype: torch.dtype, forced: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the weight takes the time, so the kernels are worth their call, of 16 bits sooner; not with gradients,
    which cost more."""
    if forced == "onednn" and paths.ONEDNN.absent(dtype) is not None:
        pytest.skip(f"{paths.ONEDNN.absent(dtype)}")
    name_gemm(monkeypatch, forced)
    monkeypatch.setattr(sizes, "SMALL", 2**22)
    names: list[str] = []
    original = linear.path_of

    def path_of(kind: str, x: Tensor, numbers: int) -> paths.Path:
        names.append(original(kind, x, numbers).name)
        return paths.PATHS[names[-1]]

    monkeypatch.setattr(linear, "path_of", path_of)
    kernels = forced in ("", "native") and ABSENT["native"] is None
    weights, biases = _numbers(1024, 1024, seed=1).to(dtype), _numbers(1024, seed=2).to(dtype)
    cases = ((1, 1024, False), (3, 128, False), (1, 1024, True), (17, 64, False), (1, 16, False), (24, 15, False))
    for rows, out, recorded in cases:
        names.clear()
        x, weight, bias = _numbers(rows, 1024).to(dtype), weights[:out], biases[:out]
        output = project(x.requires_grad_(recorded), weight, bias)
        least = 16 if dtype is torch.bfloat16 and rows <= 16 else 128
        large = out >= least and not recorded
        assert names == (["native" if kernels else "torch"] if large else [])
        exact = F.linear(x.double(), weight.double(), bias.double())
        within_budget("few tokens", output.detach(), F.linear(x, weight, bias).detach(), exact.detach(), terms=1024)
