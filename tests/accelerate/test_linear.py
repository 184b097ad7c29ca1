"""``ch.accelerate`` and linear layers: ``mm`` and ``addmm``, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead import testing
from clearhead.integrations.aten import linear as ours
from clearhead.ops import library
from clearhead.projection import NATIVE
from tests.budget import within_budget

pytestmark = pytest.mark.skipif(library.reason() is not None, reason="the CPU kernels are not available")

ROWS, STEPS, COLUMNS = 130, 190, 210


@pytest.mark.parametrize(
    ("rows", "steps", "gains"),
    [(3, 1024, False), (4, 1024, True), (24, 1024, True), (25, 1024, False), (8, 1023, False)],
)
def test_calls_of_few_rows_gain_where_others_do_not(rows: int, steps: int, gains: bool) -> None:
    """By the table of processors, of a forward; a weight's gradient has the same shapes."""
    x, weight = torch.randn(rows, steps), torch.randn(1024, steps)
    with testing.processor("GenuineIntel", ["avx2"]), torch.no_grad():
        chosen = ours.choose_path(x, weight.t())
        assert chosen == (("forward", NATIVE) if gains else None)
        assert ours.choose_path(weight.t(), torch.randn(1024, rows)) is None


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kinds of GEMM that clearhead's path computed; every processor takes the kernels."""
    made: list[str] = []
    real = ours.choose_path

    def noted(left: Tensor, right: Tensor) -> object:
        chosen = real(left, right)
        made.extend([] if chosen is None else [chosen[0]])
        return chosen

    monkeypatch.setattr(ours, "choose_path", noted)
    with testing.choices(gemm="native"):
        yield made


def results(layer: nn.Module, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    output = layer(x)
    output.square().sum().backward()
    assert x.grad is not None
    return [output.detach(), x.grad, *(each.grad for each in layer.parameters() if each.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(ROWS,), (2, ROWS // 2)])
def test_a_linear_layer(kinds: list[str], dtype: torch.dtype, bias: bool, leading: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(STEPS, COLUMNS, bias=bias), torch.randn(*leading, STEPS)
    layer, x = layer.to(dtype), x.to(dtype)
    plain = results(layer, x)
    exact = results(nn.Linear(STEPS, COLUMNS, bias=bias, dtype=torch.float64), x.double())
    double = nn.Linear(STEPS, COLUMNS, bias=bias, dtype=torch.float64)
    double.load_state_dict(layer.state_dict())
    exact = results(double, x.double())
    with ch.accelerate():
        fast = results(layer, x)
    assert sorted(kinds) == ["forward", "input gradient", "weight gradient"]
    for place, (one, textbook, right) in enumerate(zip(fast, plain, exact, strict=True)):
        size = float(right.abs().max())
        within_budget(str(place), one, textbook, right, terms=COLUMNS, size=size, dtype=dtype)


LAYOUTS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "weight as stored": lambda: (torch.randn(ROWS, STEPS), torch.randn(COLUMNS, STEPS).t()),
    "weight transposed": lambda: (torch.randn(ROWS, STEPS), torch.randn(STEPS, COLUMNS)),
    "left transposed": lambda: (torch.randn(STEPS, ROWS).t(), torch.randn(STEPS, COLUMNS)),
    "both transposed": lambda: (torch.randn(STEPS, ROWS).t(), torch.randn(COLUMNS, STEPS).t()),
    "strided rows": lambda: (torch.randn(2 * ROWS, STEPS)[::2], torch.randn(COLUMNS, 2 * STEPS).t()[:STEPS]),
    "columns apart": lambda: (torch.randn(ROWS, 2 * STEPS)[:, ::2], torch.randn(STEPS, 2 * COLUMNS)[:, ::2]),
    "row expanded": lambda: (torch.randn(1, STEPS).expand(ROWS, STEPS), torch.randn(STEPS, COLUMNS)),
    "column expanded": lambda: (torch.randn(ROWS, 1).expand(ROWS, STEPS), torch.randn(STEPS, COLUMNS)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(kinds: list[str], layout: str) -> None:
    left, right = LAYOUTS[layout]()
    bias, out = torch.randn(COLUMNS), torch.empty(ROWS, COLUMNS)
    calls: list[Callable[[], Tensor]] = [
        lambda: torch.mm(left, right),
        lambda: torch.addmm(bias, left, right),
        lambda: torch.mm(left, right, out=out).clone(),
        lambda: torch.addmm(bias, left, right, out=out).clone(),
        lambda: torch.addmm(bias, left, right, beta=0.5, alpha=2.0),
        lambda: torch.addmm(torch.ones(ROWS, COLUMNS), left, right),
        lambda: torch.addmm(torch.ones(1), left, right),
    ]
    plain = [call() for call in calls]
    with ch.accelerate():
        fast = [call() for call in calls]
    for one, other in zip(fast, plain, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-5)


def test_an_output_in_memory_of_its_own(kinds: list[str]) -> None:
    """A result is written through the strides of ``out``; one of another shape is resized with torch's warning."""
    left, right = torch.randn(ROWS, STEPS), torch.randn(STEPS, COLUMNS)
    with ch.accelerate():
        transposed = torch.empty(COLUMNS, ROWS).t()
        assert torch.mm(left, right, out=transposed) is transposed
        torch.testing.assert_close(transposed, left @ right)
        empty = torch.empty(0)
        torch.testing.assert_close(torch.mm(left, right, out=empty), left @ right)
        assert empty.shape == (ROWS, COLUMNS)


def test_nan_and_infinity_pass_as_in_torch(kinds: list[str]) -> None:
    left, right = torch.randn(ROWS, STEPS), torch.randn(STEPS, COLUMNS)
    left[3, 5], left[4, 6], right[7, 8] = torch.nan, torch.inf, -torch.inf
    plain = left @ right
    with ch.accelerate():
        fast = left @ right
    torch.testing.assert_close(fast, plain, equal_nan=True, atol=2e-4, rtol=1e-5)


def test_leaving_restores_torchs_bits(kinds: list[str]) -> None:
    layer, x = nn.Linear(STEPS, COLUMNS), torch.randn(ROWS, STEPS)
    before = results(layer, x)
    with ch.accelerate():
        results(layer, x)
    made = list(kinds)
    after = results(layer, x)
    assert len(made) == 3
    assert kinds == made
    assert all(map(torch.equal, before, after))


def test_linear_layers_can_be_left_out(kinds: list[str]) -> None:
    layer, x = nn.Linear(STEPS, COLUMNS), torch.randn(ROWS, STEPS)
    plain = results(layer, x)
    with ch.accelerate(linear=False):
        assert all(map(torch.equal, plain, results(layer, x)))
    assert not kinds


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.randn(ROWS, STEPS), torch.randn(STEPS + 1, COLUMNS)),
        (torch.randn(ROWS, STEPS), torch.randn(STEPS, COLUMNS, dtype=torch.float64)),
        (torch.randn(2, ROWS, STEPS), torch.randn(STEPS, COLUMNS)),
        (torch.randn(STEPS), torch.randn(STEPS, COLUMNS)),
        (torch.randn(ROWS, STEPS), torch.randn(STEPS, COLUMNS, device="meta")),
    ],
    ids=range(5),
)
def test_errors_are_torchs(left: Tensor, right: Tensor) -> None:
    def outcome(call: Callable[[], Tensor]) -> object:
        try:
            return call().shape
        except Exception as error:
            return type(error), str(error)

    calls = (lambda: torch.mm(left, right), lambda: torch.addmm(torch.zeros(COLUMNS), left, right))
    plain = [outcome(call) for call in calls]
    with ch.accelerate():
        assert [outcome(call) for call in calls] == plain


def test_in_compiled_graphs(kinds: list[str]) -> None:
    layer, x = nn.Linear(STEPS, COLUMNS), torch.randn(ROWS, STEPS)
    plain = results(layer, x)
    with ch.accelerate():
        fast = results(torch.compile(layer, backend="aot_eager", fullgraph=True), x)
    assert len(kinds) == 3
    for one, other in zip(fast, plain, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=1e-4)


@pytest.mark.slow
def test_in_graphs_of_inductor(kinds: list[str]) -> None:
    """Inductor calls ``mm.out`` and ``addmm.out``, and asserts the strides of attention's results."""
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    x = torch.randn(8, 128, 64)
    plain = results(layer, x)
    with ch.accelerate():
        fast = results(torch.compile(layer, fullgraph=True), x)
    assert kinds
    for one, other in zip(fast, plain, strict=True):
        torch.testing.assert_close(one, other, atol=5e-2, rtol=1e-3)
