"""Under torch.compile and torch.export a call is one operator with equal results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import clearhead as ch


class Block(nn.Module):
    """A packed projection into attention, with learned bias."""

    def __init__(self, mask: ch.Mask | None = None) -> None:
        super().__init__()
        self.projection = nn.Linear(16, 48)
        self.table = nn.Parameter(torch.randn(4, 11))
        self.mask = mask

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.projection(x).chunk(3, -1))
        mask = ch.Padding(lengths) if self.mask is None else self.mask & ch.Padding(lengths)
        return ch.attention(query, key, value, mask=mask, scores=(ch.RelativeBias(self.table), ch.SoftCap(3.0)))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    "mask", [None, ch.Causal(), ~ch.Window(2), ch.MaskFunction(lambda b, h, i, j: (i + j) % 2 == 0)], ids=repr
)
def test_compiled_equals_eager(mask: ch.Mask | None) -> None:
    torch.manual_seed(0)
    block, x, lengths = Block(mask), torch.randn(2, 9, 16), torch.tensor([9, 4])
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    results = []
    for run in (block, compiled):
        output = run(x, lengths)
        results.append([output, *torch.autograd.grad(output.square().sum(), list(block.parameters()))])
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager)


@pytest.mark.slow
def test_compiled_with_inductor() -> None:
    block, x, lengths = Block(ch.Causal()), torch.randn(2, 9, 16), torch.tensor([9, 4])
    torch.testing.assert_close(torch.compile(block, fullgraph=True)(x, lengths), block(x, lengths))


def test_exported_equals_eager() -> None:
    block, x, lengths = Block(ch.Causal()), torch.randn(2, 9, 16), torch.tensor([9, 4])
    program = torch.export.export(block, (x, lengths))
    other = torch.tensor([2, 7])
    torch.testing.assert_close(program.module()(x, other), block(x, other))
    assert "clearhead.attention" in program.graph_module.code


def test_dynamic_lengths_compile_once() -> None:
    block = Block(ch.Causal())
    counter = CompileCounter()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for length in (9, 17, 30):
        x = torch.randn(2, length, 16)
        lengths = torch.tensor([length, 3])
        torch.testing.assert_close(compiled(x, lengths), block(x, lengths))
    assert counter.frame_count == 1


def test_seeded_dropout_is_the_same_compiled() -> None:
    x = torch.randn(1, 2, 30, 4, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return ch.attention(x, x, x, mask=ch.Causal(), dropout=0.4, seed=11)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for call in (run, compiled):
        assert torch.equal(call(x), run(x))
    grads = [torch.autograd.grad(call(x).sum(), x)[0] for call in (run, compiled)]
    torch.testing.assert_close(*grads)


def test_errors_of_compiled_calls_are_clearhead_errors() -> None:
    x = torch.randn(1, 2, 3, 4)
    compiled = torch.compile(lambda x: ch.attention(x, x, x, mask=ch.Documents(lengths=[9])), backend="aot_eager")
    with pytest.raises(ch.MaskError, match="cover the call's tokens"):
        compiled(x)


#: torch.compile of torch 2.11 takes constants as arguments of a function that it runs while it traces.
constants_of_any_class = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 does not compile a score function that reads tensors that learn"
)


class Learned(nn.Module):
    """Two rules that share a learned table, which they name by their module."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gain = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.zeros(4))
        self.unread = nn.Parameter(torch.ones(3))
        self.near = ch.ScoreFunction(lambda s, b, h, i, j: s + self.table[h, (i - j).clamp(-2, 2) + 2])
        self.loud = ch.ScoreFunction(lambda s, b, h, i, j: s * self.gain[h].exp() + self.table[h, 0])

    def forward(self, x: Tensor) -> Tensor:
        return ch.attention(x, x, x, scores=[self.near, self.loud, ch.SoftCap(5.0)], mask=ch.Causal())


@pytest.mark.covering(0)
@constants_of_any_class
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_functions_train_what_they_close_over(backend: str) -> None:
    torch.manual_seed(0)
    model, x = Learned(), torch.randn(1, 4, 9, 4, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(2):
        grads = []
        for run in (model, compiled):
            model.zero_grad()
            run(x).square().sum().backward()
            assert model.unread.grad is None
            grads.append([x.grad.clone(), model.table.grad, model.gain.grad])  # type: ignore[union-attr]
            x.grad = None
        torch.testing.assert_close(*grads)
        with torch.no_grad():
            model.table.add_(0.5)
    assert torch.equal(compiled(x), model(x))


@constants_of_any_class
def test_replaced_closed_over_tensor_raises() -> None:
    model, x = Learned(), torch.randn(1, 4, 9, 4)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    output = compiled(x)
    model.table = nn.Parameter(torch.ones(4, 5))
    with pytest.raises(ch.UnsupportedError, match="must close over the learned tensors that they had"):
        output.sum().backward()


@constants_of_any_class
def test_tensor_read_at_some_places_only_raises() -> None:
    learned = torch.ones(3, requires_grad=True)
    rule = ch.ScoreFunction(lambda s, b, h, i, j: s * learned.sum() if s.numel() > 1 else s + 0.0)
    x = torch.randn(1, 2, 3, 4, requires_grad=True)
    compiled = torch.compile(lambda x: ch.attention(x, x, x, scores=rule), fullgraph=True, backend="aot_eager")
    with pytest.raises(ch.UnsupportedError, match="must read the same learned tensors at every place"):
        compiled(x).sum().backward()


def test_the_operator_is_well_formed() -> None:
    query, key, value = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
    arguments = (query, key, value, [torch.tensor([3])], "0", "Padding(t0)", "()")
    rest = ([], None, 0.0, None, "auto")
    for inputs, asked in (
        (torch.ops.clearhead.attention, "None"),
        (torch.ops.clearhead.observe_attention, ch.Want(entropy=True, top_k=2, heatmap=2, rows=[1, 0]).encode([])),
        (torch.ops.clearhead.top_k_attention, "2"),
    ):
        torch.library.opcheck(
            inputs.default,
            (*arguments, asked, *rest),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


def _add(amount: float) -> ch.ScoreFunction:
    return ch.ScoreFunction(lambda s, b, h, i, j: s + amount * j)


def _near(width: int) -> ch.MaskFunction:
    return ch.MaskFunction(lambda b, h, i, j: (i - j).abs() <= width)


@constants_of_any_class
def test_functions_with_different_closures_are_distinguished() -> None:
    def run(x: Tensor, rule: ch.ScoreFunction, mask: ch.MaskFunction) -> Tensor:
        return ch.attention(x, x, x, mask=mask, scores=rule)

    compiled, x = torch.compile(run, fullgraph=True, backend="aot_eager"), torch.randn(1, 2, 12, 4)
    for amount, width in ((0.1, 1), (5.0, 3), (2.0, 0)):
        rule, mask = _add(amount), _near(width)
        torch.testing.assert_close(compiled(x, rule, mask), run(x, rule, mask))


class Ruled(torch.nn.Module):
    def __init__(self, amount: float) -> None:
        super().__init__()
        self.rule = _add(amount)

    def forward(self, x: Tensor) -> Tensor:
        return ch.attention(x, x, x, scores=self.rule)


@pytest.mark.slow
@constants_of_any_class
def test_a_rule_of_a_module_may_be_replaced() -> None:
    x, modules = torch.randn(1, 2, 12, 4), [Ruled(0.1), Ruled(5.0)]
    compiled = [torch.compile(module, fullgraph=True, backend="aot_eager") for module in modules]
    for one, module in zip(compiled, modules, strict=True):
        torch.testing.assert_close(one(x), module(x))
    modules[0].rule = _add(3.0)
    torch.testing.assert_close(compiled[0](x), modules[0](x))


def test_a_function_of_another_process_is_refused() -> None:
    x = torch.randn(1, 2, 5, 4)
    with pytest.raises(ch.UnsupportedError, match="must name functions of this process"):
        torch.ops.clearhead.attention(
            x, x, x, [], "", "None", "(ScoreFunction(f0_0),)", "None", [], None, 0.0, None, "auto"
        )


def test_class_named_like_a_built_in_mask_is_separate() -> None:
    class Window(ch.Mask):
        fields = ("before", "after")

        def __init__(self) -> None:
            vars(self).update(before=0, after=0)

        def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
            return k_pos < 2

    x = torch.randn(1, 2, 9, 4)
    for mask in (ch.Window(1), Window()):
        compiled = torch.compile(lambda x: ch.attention(x, x, x, mask=mask), fullgraph=True, backend="aot_eager")  # noqa: B023
        torch.testing.assert_close(compiled(x), ch.attention(x, x, x, mask=mask))
        torch._dynamo.reset()


def test_constants_of_rules_stay_constants() -> None:
    """Alibi's slopes want no gradient, and native has none for them."""
    x = torch.randn(1, 2, 9, 4, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return ch.attention(x, x, x, scores=ch.Alibi(2), backend="native")

    if ch.explain_dispatch(x, x, x, scores=ch.Alibi(2)).choice != "native":
        pytest.skip("needs the native backend")
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(call(x).square().sum(), x)[0] for call in (run, compiled)]
    torch.testing.assert_close(*grads)


def test_seeds_of_64_bits_are_preserved() -> None:
    x = torch.randn(1, 2, 30, 4)

    def run(x: Tensor) -> Tensor:
        return ch.attention(x, x, x, dropout=0.4, seed=2**64 - 3)

    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))
