"""Linear matches torch's layer: parameters, values, hooks and transforms."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import clearhead as ch
from clearhead import choices as sizes
from clearhead.nn.linear import Linear
from clearhead.projection import KINDS, choice, linear
from clearhead.projection.paths import PATHS
from tests.budget import within_budget
from tests.gemms import name_gemm

OTHERS = [
    pytest.param(name, marks=pytest.mark.skipif(why is not None, reason=f"{why}"))
    for name in ("onednn", "native")
    for why in [PATHS[name].absent(torch.float32)]
]
#: Large enough for the faster GEMM.
ROWS, WIDTH, OUT = 64, 256, 320


@pytest.fixture(autouse=True, params=OTHERS)
def forced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force a path other than torch."""
    name_gemm(monkeypatch, request.param)
    return str(request.param)


def _pair(bias: bool = True) -> tuple[nn.Linear, Linear]:
    torch.manual_seed(0)
    theirs = nn.Linear(WIDTH, OUT, bias=bias)
    torch.manual_seed(0)
    return theirs, Linear(WIDTH, OUT, bias=bias)


def _x() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def _assert_same(ours: nn.Module, theirs: nn.Module, x: Tensor) -> None:
    """Assert that output and parameter gradients match."""
    exact = copy.deepcopy(theirs).double()
    results = []
    for module, given in ((ours, x), (theirs, x), (exact, x.double())):
        output = module(given)
        output.square().mean().backward()
        results.append([output.detach(), *(parameter.grad for parameter in module.parameters())])
    for name, (result, textbook, reference) in enumerate(zip(*results, strict=True)):
        within_budget(str(name), result, textbook, reference, terms=OUT)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_matches_torchs_layer(bias: bool) -> None:
    theirs, ours = _pair(bias)
    assert isinstance(ours, nn.Linear)
    assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name])
    theirs.load_state_dict(ours.state_dict())
    _assert_same(ours, theirs, _x())


def test_device_and_dtype_arguments_match_torch() -> None:
    layer = Linear(3, 5, False, "meta", torch.bfloat16)
    assert layer.bias is None
    assert layer.weight.is_meta
    assert layer.weight.dtype == torch.bfloat16
    assert Linear(3, 5, dtype=torch.bfloat16)(torch.ones(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_hooks_fire_and_may_replace_the_output() -> None:
    _, layer = _pair()
    fired: list[str] = []
    layer.register_forward_pre_hook(lambda module, given: fired.append("before"))
    layer.register_forward_hook(lambda module, given, output: output * 0)
    layer.register_full_backward_hook(lambda module, given, grad: fired.append("backward"))
    output = layer(_x().requires_grad_())
    output.sum().backward()
    assert not output.any()
    assert fired == ["before", "backward"]


def test_parametrized_weights_train() -> None:
    theirs, ours = (parametrizations.weight_norm(layer) for layer in _pair())
    assert parametrize.is_parametrized(ours)
    _assert_same(ours, theirs, _x())


def test_weights_shared_with_another_module_get_both_gradients() -> None:
    _, layer = _pair(bias=False)
    other = nn.Embedding(OUT, WIDTH)
    layer.weight = other.weight
    (layer(_x()).sum() + other(torch.tensor([3])).sum()).backward()
    expected = _x().sum(0).expand(OUT, WIDTH).clone()
    expected[3] += 1
    torch.testing.assert_close(layer.weight.grad, expected)


def test_modifying_a_weight_before_backward_raises() -> None:
    _, layer = _pair()
    output = layer(_x().requires_grad_())
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_symbolic_tracing_and_compilation_match_torch() -> None:
    theirs, ours = _pair()
    graph = torch.fx.symbolic_trace(nn.Sequential(ours))
    torch.testing.assert_close(graph(_x()), theirs(_x()))
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    _assert_same(compiled, theirs, _x())


def test_models_use_this_linear() -> None:
    models = [
        ch.nn.SequenceClassifier(10, 8, 2, 1, 3),
        ch.nn.LanguageModel(10, 8, 2, 1),
        ch.nn.EncoderDecoder(10, 10, 8, 2, 1),
    ]
    for model in models:
        layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        assert layers
        assert all(type(layer) is Linear for layer in layers)


def test_a_model_trains_to_the_same_weights_on_either_path(forced: str, monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    for path in ("torch", forced):
        name_gemm(monkeypatch, path)
        torch.manual_seed(0)
        model = ch.nn.Encoder(256, 4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            x = torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        states.append(model.state_dict())
        assert {choice(kind).path for kind in KINDS} == {path}
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arguments", [{}, {"bias": False}, {"num_kv_heads": 2}, {"rotary": True}], ids=str)
def test_joint_input_gradients_match_separate_layers(
    arguments: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook keeps the projections of queries, keys and values separate."""
    # tests/nn/test_fused_attention.py compares the fully fused attention with this path.
    monkeypatch.setattr("clearhead.nn.attention.fused_attention", lambda *args, **options: None)
    chosen: list[str] = []
    each = linear.path_of
    monkeypatch.setattr(linear, "path_of", lambda kind, *sizes: chosen.append(kind) or each(kind, *sizes))
    monkeypatch.setattr(sizes, "SMALL", 1)
    monkeypatch.setattr(sizes, "SMALL_UNPREPARED", 1)
    torch.manual_seed(0)
    together = ch.nn.MultiHeadAttention(32, 4, **arguments)  # type: ignore[arg-type]
    separate, exact = copy.deepcopy(together), copy.deepcopy(together).double()
    for layer in (separate.query_projection, separate.key_projection, separate.value_projection):
        layer.register_forward_hook(lambda module, given, output: None)
    results, counts = [], []
    for module in (together, separate, exact):
        chosen.clear()
        x = _x().view(-1)[: 2 * 9 * 32].view(2, 9, 32).to(next(module.parameters()).dtype).requires_grad_()
        output = module(x, mask=ch.Causal())
        output.square().sum().backward()
        results.append([output, x.grad, *(each.grad for each in module.parameters())])
        counts.append(chosen.count("input gradient"))
    # The output projection adds one.
    assert counts == [2, 4, 0]
    for place, (result, textbook, reference) in enumerate(zip(*results, strict=True)):
        within_budget(str(place), result.detach(), textbook.detach(), reference.detach(), terms=32)
