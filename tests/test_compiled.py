"""Calls that the compiler lowers are one C++ operator, with the outputs and gradients of eager calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.flop_counter import FlopCounterMode

import clearhead as ch
from tests.agreement import needs_native

pytestmark = needs_native

OPERATOR = "clearhead.attention_compiled.default"


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


class Attention(nn.Module):
    """A call with options; ``rules`` makes its score rules of the module's parameters."""

    def __init__(self, rules: str = "", **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.logits = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(4))
        self.bias = nn.Parameter(torch.randn(1, 4, 9, 9))
        self.rules, self.options = rules, options

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ch.attention(query, key, value, scores=RULES[self.rules](self), **self.options)


FUNCTION = ch.ScoreFunction(lambda score, batch, head, q_pos, k_pos: score + 1.0)
RULES: dict[str, Callable[[Attention], Any]] = {
    "": lambda module: (),
    "alibi": lambda module: ch.Alibi(4),
    "relative bias and sink": lambda module: (ch.RelativeBias(module.table), ch.Sink(module.logits)),
    "soft-cap and biases": lambda module: [ch.SoftCap(3.0), ch.DenseBias(module.bias), ch.RelativeBias(module.table)],
    "fixed sink": lambda module: ch.Sink(module.logits.detach()),
    "learned slopes": lambda module: ch.Alibi(slopes=module.logits),
    "function": lambda module: FUNCTION,
}
BANDS = [None, ch.Causal(), ch.Window(2, after=1), ch.Causal() & ch.Window(3)]
CALLS: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    **{repr(mask): ("", {"mask": mask}, torch.float32) for mask in BANDS},
    "alibi": ("alibi", {"mask": ch.Causal()}, torch.bfloat16),
    "relative bias and sink": ("relative bias and sink", {"mask": ch.Window(2)}, torch.float32),
    "relative bias and sink, 16 bits": ("relative bias and sink", {}, torch.float16),
    "soft-cap and biases": ("soft-cap and biases", {"mask": ch.Causal()}, torch.float32),
    "fixed sink": ("fixed sink", {"scale": 0.5}, torch.float32),
    "offset": ("alibi", {"mask": ch.Causal(), "query_offset": 3, "backend": "auto"}, torch.float32),
}


def _inputs(dtype: torch.dtype = torch.float32, axes: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 6)]
    return [torch.randn(shape[4 - axes :]).to(dtype).requires_grad_() for shape in shapes]


def _graph(module: nn.Module, inputs: list[Tensor]) -> str:
    return str(torch.export.export(module, tuple(inputs)).graph)


#: No band, a band and an offset; of rules, none that is learned, one by slot, and dense ones.
QUICK = ("alibi", "relative bias and sink", "soft-cap and biases", "offset")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in CALLS])
def test_compiled_calls_equal_eager_ones_bit_for_bit(name: str) -> None:
    rules, options, dtype = CALLS[name]
    # "auto" may choose torch's attention for an eager call.
    module, inputs = Attention(rules, **{"backend": "native", **options}), _inputs(dtype)
    assert OPERATOR in _graph(module, inputs)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    results = []
    for run in (module, compiled):
        output = run(*inputs)
        learned = [*inputs, *module.parameters()]
        grads = torch.autograd.grad(output.float().square().sum(), learned, allow_unused=True)
        with torch.no_grad():
            results.append([output, run(*inputs), *grads])
    for eager, traced in zip(*results, strict=True):
        assert (eager is None) == (traced is None)
        assert eager is None or torch.equal(eager, traced)


@pytest.mark.parametrize("axes", [2, 3])
def test_calls_with_missing_axes_are_lowered(axes: int) -> None:
    module, inputs = Attention(mask=ch.Causal()), _inputs(axes=axes)
    inputs = [inputs[0], inputs[0], inputs[0]]
    assert OPERATOR in _graph(module, inputs)
    output = torch.compile(module, fullgraph=True, backend="aot_eager")(*inputs)
    assert output.shape == inputs[0].shape
    torch.testing.assert_close(output, module(*inputs))


def test_gradients_contain_nan_under_a_mask() -> None:
    module, (query, key, value) = Attention(mask=ch.Window(2, after=1), backend="native"), _inputs()
    with torch.no_grad():
        value[:, :, 8] = torch.nan
        key[0, 0, 7] = torch.inf
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    grads = [
        torch.autograd.grad(run(query, key, value)[:, :, :5].sum(), [query, key, value]) for run in (module, compiled)
    ]
    for eager, traced in zip(*grads, strict=True):
        torch.testing.assert_close(traced, eager, equal_nan=True)
    assert torch.isfinite(grads[1][0][:, :, :5]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "options", "dtype"),
    [
        ("", {"mask": ch.Padding([9, 4])}, torch.float32),
        ("", {"mask": ~ch.Causal()}, torch.float32),
        ("", {"dropout": 0.5, "seed": 3}, torch.float32),
        ("", {"backend": "tiled"}, torch.float32),
        ("", {}, torch.float64),
        ("function", {}, torch.float32),
        ("learned slopes", {}, torch.float32),
    ],
)
def test_other_calls_stay_operators_with_a_python_body(rules: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    module, inputs = Attention(rules, **options), _inputs(dtype)
    graph = _graph(module, inputs)
    assert OPERATOR not in graph
    assert "clearhead.attention.default" in graph
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), module(*inputs))


@pytest.mark.slow
def test_wrong_calls_raise_what_eager_ones_raise() -> None:
    query, key, value = _inputs()
    for module, inputs in (
        (Attention(mask=ch.Causal()), (query[:, :, :4], key, value)),
        (Attention(), (query, key[..., :5], value)),
        (Attention("alibi"), (query[:, :2], key, value)),
        (Attention(scale=float("inf")), (query, key, value)),
    ):
        with pytest.raises(ch.ClearheadError) as eager:
            module(*inputs)
        with pytest.raises(Exception, match="attention: ") as traced:
            torch.compile(module, backend="aot_eager")(*inputs)
        assert str(eager.value) in str(traced.value)


@pytest.mark.slow
def test_changing_position_compiles_at_most_twice() -> None:
    counter = CompileCounter()
    query, key, value = _inputs()

    def step(offset: int) -> Tensor:
        return ch.attention(query[:, :, :1], key, value, mask=ch.Causal(), query_offset=offset)

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for offset in range(2, 8):
        assert torch.equal(compiled(offset), step(offset))
    assert counter.frame_count <= 2


class DecodeStep(nn.Module):
    """New tokens after a cache that is an input."""

    def forward(self, query: Tensor, past_key: Tensor, past_value: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = torch.cat([past_key, key], dim=2), torch.cat([past_value, value], dim=2)
        return ch.attention(query, keys, values, mask=ch.Causal(), query_offset=past_key.shape[2])


@pytest.mark.parametrize(("most", "operator"), [(512, OPERATOR), (None, "clearhead.attention.default")])
def test_a_symbolic_position_is_lowered_if_its_bounds_fit(most: int | None, operator: str) -> None:
    """Without an upper bound the call keeps its Python body: a guard would refuse the export."""

    def inputs(past: int) -> list[Tensor]:
        return [torch.randn(1, 4, length, 8) for length in (1, past, past, 1, 1)]

    length = torch.export.Dim("past", min=2, max=most)
    shapes: list[Any] = [{}, {2: length}, {2: length}, {}, {}]
    program = torch.export.export(DecodeStep(), tuple(inputs(5)), dynamic_shapes=shapes)
    assert operator in {str(node.target) for node in program.graph.nodes}
    for past in (2, 9):
        given = inputs(past)
        torch.testing.assert_close(program.module()(*given), DecodeStep()(*given), rtol=1e-5, atol=1e-5)


class WithBand(nn.Module):
    """A module called with a mask that lowers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.module(x, mask=ch.Causal() & ch.Window(3))
        return output


@pytest.mark.slow
def test_exported_modules_have_no_operator_with_a_python_body() -> None:
    torch.manual_seed(0)
    x, ids = torch.randn(2, 7, 16), torch.randint(0, 20, (2, 7))
    modules: list[tuple[nn.Module, Tensor]] = [
        (WithBand(ch.nn.MultiHeadAttention(16, 4, num_kv_heads=2, rotary=True)), x),
        (WithBand(ch.nn.EncoderBlock(16, 4, scores=[ch.Alibi(4)])), x),
        (WithBand(ch.nn.Encoder(16, 4, 2)), x),
        (ch.nn.LanguageModel(20, 16, 4, 1, max_len=16), ids),
        (ch.nn.SequenceClassifier(20, 16, 4, 1, 3, max_len=16), ids),
    ]
    for module, tokens in modules:
        program = torch.export.export(module.eval(), (tokens,))
        ours = {str(node.target) for node in program.graph.nodes if "clearhead" in str(node.target)}
        assert ours == {OPERATOR}, module
        torch.testing.assert_close(program.module()(tokens), module(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiles", [False, True])
def test_flops_of_backward_are_counted_without_those_of_forward(compiles: bool) -> None:
    module, inputs = Attention(mask=ch.Causal(), backend="native"), _inputs()
    run = torch.compile(module, fullgraph=True, backend="aot_eager") if compiles else module
    loss = run(*inputs).sum()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    pairs = 2 * 4 * 9 * 10 // 2
    assert counter.get_total_flops() == 2 * pairs * (3 * 8 + 2 * 6)


def test_exported_programs_train() -> None:
    module, inputs = Attention("relative bias and sink", mask=ch.Causal()), _inputs()
    program = torch.export.export(module, tuple(inputs)).module()
    program(*inputs).square().sum().backward()
    module(*(part.detach() for part in inputs)).square().sum().backward()
    gradients = dict(program.named_parameters())
    for name in ("table", "logits"):
        torch.testing.assert_close(gradients[name].grad, dict(module.named_parameters())[name].grad)


@pytest.mark.slow
def test_the_operator_passes_opcheck_with_its_gradients() -> None:
    query, key, value = _inputs()
    table, sink = torch.randn(4, 5, requires_grad=True), torch.randn(4, requires_grad=True)
    operator = torch.ops.clearhead.attention_compiled.default
    torch.compile(Attention(), backend="eager")(query, key, value)
    rules = {"rule_kinds": [2], "rule_tables": [table], "sink": sink}
    torch.library.opcheck(operator, (query, key, value, 0.3, 7, 3, 0), rules)
    torch.library.opcheck(operator, (query, key, value, 0.3, 6), {})


def test_backward_of_a_call_under_no_grad_raises() -> None:
    query, key, value = _inputs()
    torch.compile(Attention(), backend="eager")(query, key, value)
    output, *_ = torch.ops.clearhead.attention_compiled(query, key, value, 0.3, 0)
    with pytest.raises(RuntimeError, match=r"^attention: a call under torch.no_grad must have no backward"):
        output.sum().backward()


def test_calls_under_vmap_are_lowered() -> None:
    many, module = torch.randn(3, 1, 2, 5, 4), Attention(mask=ch.Causal())
    mapped = torch.compile(lambda x: torch.vmap(lambda x: module(x, x, x))(x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(mapped(many), torch.stack([module(x, x, x) for x in many]))
