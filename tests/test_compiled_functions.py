"""Every public function is one graph under torch.compile, with the outputs and gradients of eager calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import clearhead as ch
from clearhead.linear import delta_attention, gated_linear_attention, linear_attention, retention
from clearhead.sparse import dilated_attention, longformer, routed, top_k_attention
from clearhead.statistics import UNDIFFERENTIABLE

EVERYTHING = {
    "lse": True,
    "max_score": True,
    "entropy": True,
    "top_k": 3,
    "received": True,
    "heatmap": 8,
    "sink": 2,
    "distance": True,
    "rows": [3, 1, 3],
}
FAR = longformer(40, window=8, num_global=2)


def gates(key: Tensor) -> Tensor:
    return torch.nn.functional.logsigmoid(key)


VERBS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "attention": lambda q, k, v: ch.attention(q, k, v, mask=FAR & ch.Causal()),
    "top-k": lambda q, k, v: top_k_attention(q, k, v, k=4, mask=ch.Causal(), scores=ch.SoftCap(2.0)),
    "dilated": lambda q, k, v: dilated_attention(q, k, v, stride=3, before=3),
    "dilated and local": lambda q, k, v: dilated_attention(q, k, v, stride=3, local=2),
    "dilated, both ways": lambda q, k, v: dilated_attention(q, k, v, stride=3, before=1, after=None),
    "routed": lambda q, k, v: ch.attention(q, k, v, mask=routed(q, k, size=8, keep=2)),
    "linear": lambda q, k, v: linear_attention(q, k, v, causal=True)[0],
    "performer": lambda q, k, v: linear_attention(q, k, v, feature_map="performer")[0],
    "retention": lambda q, k, v: retention(q, k, v)[0],
    "retention with given decays": lambda q, k, v: retention(q, k, v, decay=[0.9, 0.8, 0.7, 0.6])[0],
    "gated": lambda q, k, v: gated_linear_attention(q, k, v, log_gate=gates(k))[0],
    "delta": lambda q, k, v: delta_attention(q, k, v, rate=torch.sigmoid(k[..., 0]))[0],
    "entropy": lambda q, k, v: ch.observe_attention(q, k, v, want=ch.Want(entropy=True)).entropy,  # type: ignore[dict-item, return-value]
}
#: One of each way in which a verb runs; the others are slow together.
QUICK = ("attention", "top-k", "delta", "entropy")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


def tensors(length: int = 40) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 4, length, 8, requires_grad=True) for _ in range(3)]


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    "verb",
    [pytest.param(verb, id=name, marks=[] if name in QUICK else [pytest.mark.slow]) for name, verb in VERBS.items()],
)
def test_each_function_is_one_graph(verb: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    given = tensors()
    results = []
    for run in (verb, torch.compile(verb, fullgraph=True, backend="aot_eager")):
        output = run(*given)
        results.append([output, *torch.autograd.grad(output.square().sum(), given, materialize_grads=True)])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-4)


def test_compiled_statistics_have_the_gradients_of_eager_ones() -> None:
    # In float64, for another backend may give forward where no gradient is recorded.
    given = [tensor.detach().double().requires_grad_() for tensor in tensors()]
    mixing = torch.rand(1, 1, 3, 40, requires_grad=True, dtype=torch.float64)

    def statistics(query: Tensor, key: Tensor, value: Tensor, mixing: Tensor) -> dict[str, Tensor]:
        want = ch.Want(row_weights=mixing, **EVERYTHING)  # type: ignore[arg-type]
        observation = ch.observe_attention(query, key, value, want=want, mask=ch.Causal())
        return {name: getattr(observation, name) for name in ("output", *want.shapes(0, 0))}

    every = (*given, mixing)
    eager, compiled = statistics(*every), torch.compile(statistics, fullgraph=True, backend="aot_eager")(*every)
    assert list(eager) == list(compiled)
    grads = []
    for results in (eager, compiled):
        learned = [name for name in results if results[name].requires_grad]
        assert learned == [name for name in results if name not in UNDIFFERENTIABLE]
        loss = sum(results[name].square().sum() for name in learned)
        assert isinstance(loss, Tensor)
        grads.append(torch.autograd.grad(loss, every))
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("axes", [2, 3, 4])
def test_statistics_have_the_axes_of_the_call(axes: int) -> None:
    query, key, value = (tensor.detach()[(0,) * (4 - axes)] for tensor in tensors(7))

    def rows(query: Tensor) -> Tensor:
        weights = ch.observe_attention(query, key, value, want=ch.Want(rows=[2, 0])).rows
        assert weights is not None
        return weights

    torch.testing.assert_close(torch.compile(rows, fullgraph=True, backend="aot_eager")(query), rows(query))


def test_observed_lengths_compile_once_and_export() -> None:
    class Entropy(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            entropy = ch.observe_attention(query, key, value, want=ch.Want(entropy=True), mask=ch.Causal()).entropy
            assert entropy is not None
            return entropy

    counter = CompileCounter()
    compiled = torch.compile(Entropy(), fullgraph=True, dynamic=True, backend=counter)
    for length in (9, 17, 30):
        given = tensors(length)
        torch.testing.assert_close(compiled(*given), Entropy()(*given))
    assert counter.frame_count == 1
    program = torch.export.export(Entropy(), tuple(tensors(9)))
    torch.testing.assert_close(program.module()(*tensors(9)), Entropy()(*tensors(9)))


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("want", "words"),
    [(ch.Want(top_k=41), "want.top_k must"), (ch.Want(rows=[40]), "want.rows must"), (ch.Want(sink=-1), "want.sink")],
)
def test_misfit_want_raises(want: ch.Want, words: str) -> None:
    given = tensors()
    with pytest.raises(ch.ShapeError, match=words):
        torch.compile(lambda q, k, v: ch.observe_attention(q, k, v, want=want).output, backend="aot_eager")(*given)
