"""Linear is torch's layer: same parameters, same numbers, same place in other people's tools."""

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

OTHERS = [
    pytest.param(name, marks=pytest.mark.skipif(why is not None, reason=f"{why}"))
    for name in ("onednn", "native")
    for why in [PATHS[name].absent(torch.float32)]
]
#: Large enough for the faster product.
ROWS, WIDTH, OUT = 64, 256, 320


@pytest.fixture(autouse=True, params=OTHERS)
def forced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A path that is not torch's own."""
    monkeypatch.setenv("CLEARHEAD_PROJECTION", request.param)
    return str(request.param)


def _pair(bias: bool = True) -> tuple[nn.Linear, Linear]:
    torch.manual_seed(0)
    theirs = nn.Linear(WIDTH, OUT, bias=bias)
    torch.manual_seed(0)
    return theirs, Linear(WIDTH, OUT, bias=bias)


def _x() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def _assert_same(ours: nn.Module, theirs: nn.Module, x: Tensor) -> None:
    """Output and every parameter's gradient."""
    exact = copy.deepcopy(theirs).double()
    found = []
    for module, given in ((ours, x), (theirs, x), (exact, x.double())):
        output = module(given)
        output.square().mean().backward()
        found.append([output.detach(), *(own.grad for own in module.parameters())])
    for name, (result, textbook, reference) in enumerate(zip(*found, strict=True)):
        within_budget(str(name), result, textbook, reference, terms=OUT)


@pytest.mark.parametrize("bias", [True, False])
def test_it_is_torchs_layer(bias: bool) -> None:
    theirs, ours = _pair(bias)
    assert isinstance(ours, nn.Linear)
    assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, own in ours.state_dict().items():
        assert torch.equal(own, theirs.state_dict()[name])
    theirs.load_state_dict(ours.state_dict())
    _assert_same(ours, theirs, _x())


def test_device_and_dtype_as_in_torch() -> None:
    layer = Linear(3, 5, False, "meta", torch.bfloat16)
    assert layer.bias is None
    assert layer.weight.is_meta
    assert layer.weight.dtype == torch.bfloat16
    assert Linear(3, 5, dtype=torch.bfloat16)(torch.ones(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_hooks_fire_and_may_change_what_passes() -> None:
    _, layer = _pair()
    seen: list[str] = []
    layer.register_forward_pre_hook(lambda module, given: seen.append("before"))
    layer.register_forward_hook(lambda module, given, output: output * 0)
    layer.register_full_backward_hook(lambda module, given, grad: seen.append("backward"))
    output = layer(_x().requires_grad_())
    output.sum().backward()
    assert not output.any()
    assert seen == ["before", "backward"]


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


def test_a_weight_changed_between_forward_and_backward_is_noticed() -> None:
    _, layer = _pair()
    output = layer(_x().requires_grad_())
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_symbolic_tracing_and_compilation_see_one_linear() -> None:
    theirs, ours = _pair()
    graph = torch.fx.symbolic_trace(nn.Sequential(ours))
    torch.testing.assert_close(graph(_x()), theirs(_x()))
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    _assert_same(compiled, theirs, _x())


def test_our_models_are_built_of_it() -> None:
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
    found = []
    for path in ("torch", forced):
        monkeypatch.setenv("CLEARHEAD_PROJECTION", path)
        torch.manual_seed(0)
        model = ch.nn.Encoder(256, 4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            x = torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        found.append(model.state_dict())
        assert {choice(kind).path for kind in KINDS} == {path}
    for name, own in found[0].items():
        torch.testing.assert_close(found[1][name], own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arguments", [{}, {"bias": False}, {"num_kv_heads": 2}, {"rotary": True}], ids=str)
def test_attention_has_the_same_gradients_with_the_joint_product(
    arguments: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook that does nothing keeps the layers of queries, keys and values apart."""
    # Attention and all in one step is another road, which tests/nn/test_fused_attention.py holds against this one.
    monkeypatch.setattr("clearhead.nn.attention.fused_attention", lambda *args, **options: None)
    chosen: list[str] = []
    own = linear.path_of
    monkeypatch.setattr(linear, "path_of", lambda kind, *sizes: chosen.append(kind) or own(kind, *sizes))
    monkeypatch.setattr(sizes, "SMALL", 1)
    monkeypatch.setattr(sizes, "SMALL_UNPREPARED", 1)
    torch.manual_seed(0)
    together = ch.nn.MultiHeadAttention(32, 4, **arguments)  # type: ignore[arg-type]
    apart, exact = copy.deepcopy(together), copy.deepcopy(together).double()
    for layer in (apart.query_projection, apart.key_projection, apart.value_projection):
        layer.register_forward_hook(lambda module, given, output: None)
    found, counts = [], []
    for module in (together, apart, exact):
        chosen.clear()
        x = _x().view(-1)[: 2 * 9 * 32].view(2, 9, 32).to(next(module.parameters()).dtype).requires_grad_()
        output = module(x, mask=ch.Causal())
        output.square().sum().backward()
        found.append([output, x.grad, *(own.grad for own in module.parameters())])
        counts.append(chosen.count("input gradient"))
    # One more is that of the output's layer.
    assert counts == [2, 4, 0]
    for place, (result, textbook, reference) in enumerate(zip(*found, strict=True)):
        within_budget(str(place), result.detach(), textbook.detach(), reference.detach(), terms=32)
