"""Models that torchao and torch.ao quantised, swapped: results, rows, state, and what is left."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.integrations.recast import class_of
from clearhead.integrations.torch.quantized import SwappedQuantizedLinear, described, quantized_weight
from clearhead.invariance import invariant
from clearhead.projection import stored
from tests.agreement import needs_native

pytestmark = [needs_native, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

torchao = pytest.importorskip("torchao.quantization", reason="the extra quantized (torchao) is not installed")
granularity = pytest.importorskip("torchao.quantization.granularity")
prototype = pytest.importorskip("torchao.prototype.quantization.int4")
ASYMMETRIC = torchao.MappingType.ASYMMETRIC
GROUPS = granularity.PerGroup(32)

#: A config of torchao, and what the report says of it.
CONFIGS: dict[str, tuple[Callable[[], Any], str]] = {
    "int8": (torchao.Int8WeightOnlyConfig, "int8 weight-only"),
    "int8, one scale": (lambda: torchao.Int8WeightOnlyConfig(granularity=granularity.PerTensor()), "int8 weight-only"),
    "int8, groups": (lambda: torchao.Int8WeightOnlyConfig(granularity=GROUPS), "int8 weight-only in groups of 32"),
    "int8, dynamic": (torchao.Int8DynamicActivationInt8WeightConfig, "int8 weight and dynamic activation"),
    "int8, dynamic with zeros": (
        lambda: torchao.Int8DynamicActivationInt8WeightConfig(act_mapping_type=ASYMMETRIC),
        "int8 weight and dynamic activation",
    ),
    "int8, dynamic, 7 bits": (
        lambda: torchao.Int8DynamicActivationInt8WeightConfig(reduce_range=True),
        "int8 weight and dynamic activation",
    ),
    "int4": (lambda: prototype.PrototypeInt4WeightOnlyConfig(group_size=32), "int4 weight-only in groups of 32"),
    "int4, symmetric": (
        lambda: torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=GROUPS),
        "int4 weight-only in groups of 32",
    ),
    "int4 with zeros": (
        lambda: torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=GROUPS, mapping_type=ASYMMETRIC),
        "int4 weight-only in groups of 32",
    ),
    "int3": (
        lambda: torchao.IntxWeightOnlyConfig(weight_dtype=torch.int3, granularity=GROUPS),
        "int8 weight-only in groups of 32",
    ),
}
UNREADABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "one scale for all rows": (
        lambda: torchao.Int8DynamicActivationInt8WeightConfig(granularity=granularity.PerTensor()),
        "its input is rounded PerTensor, not row by row",
    ),
    "dynamic int4": (
        lambda: torchao.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=GROUPS),
        "its input is rounded, and its weight has groups",
    ),
    "float8": (torchao.Float8WeightOnlyConfig, "the layout of Float8Tensor is not known"),
}
DTYPES = [torch.float32, torch.bfloat16]


def _model(config: Any, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32, bias=False)).to(dtype).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchao.quantize_(model, config)
    return model


def _difference(one: Tensor, other: Tensor) -> float:
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the kernels compute: the weight of each call, in words."""
    calls: list[str] = []
    whole = stored.multiply_stored

    def counted(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        calls.append(described(weight))
        return whole(x, weight, bias)

    monkeypatch.setattr(stored, "multiply_stored", counted)
    return calls


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_swapped_layers_agree_with_torchao(name: str, dtype: torch.dtype, computed: list[str]) -> None:
    config, words = CONFIGS[name]
    model, x = _model(config(), dtype), torch.randn(5, 3, 96).to(dtype)
    with torch.no_grad():
        theirs = model(x)
        report = ch.swap(model)
        computed.clear()
        ours = model(x)
    assert computed == [words, words]
    assert [(row.path, row.class_name, row.how, row.reason) for row in report.rows] == [
        ("0", "Linear", "native", words),
        ("2", "Linear", "native", words),
    ]
    assert all(row.difference is not None for row in report.rows)
    assert ours.dtype is dtype
    # Roundings of torchao in 16 bits, which move integers of the second layer's input; in float32 one at most.
    most = 2e-2 if dtype is torch.bfloat16 else 1e-5
    assert _difference(ours, theirs) < (max(most, 2e-3) if "dynamic" in name else most)


@pytest.mark.parametrize("name", UNREADABLE)
def test_unknown_layout_is_left_and_named(name: str, computed: list[str]) -> None:
    config, words = UNREADABLE[name]
    model, x = _model(config()), torch.randn(5, 96)
    theirs = model(x)
    report = ch.swap(model)
    assert [row.how for row in report.rows] == ["left", "left"]
    assert all(row.reason.startswith(words) for row in report.rows), report.rows
    assert torch.equal(model(x), theirs)
    assert computed == []


@pytest.mark.parametrize("name", ["int8", "int8, groups", "int4", "int4 with zeros"])
def test_error_is_at_most_that_of_torchao(name: str) -> None:
    for dtype in DTYPES:
        model, x = _model(CONFIGS[name][0](), dtype), torch.randn(64, 96).to(dtype)
        layer = model[0]
        with torch.no_grad():
            theirs = layer(x)
            ch.swap(model)
            weight = quantized_weight(layer).dequantized(torch.float64)
            exact = x.double() @ weight.t() + layer.bias.double()
            assert _difference(layer(x), exact) <= 1.5 * _difference(theirs, exact)


def test_swapped_layer_keeps_class_state_and_hooks() -> None:
    model = _model(torchao.Int8WeightOnlyConfig())
    before, calls = model.state_dict(), []
    weight = model[0].weight
    model[0].register_forward_hook(lambda *_: calls.append(1))
    ch.swap(model)
    assert type(model[0]).__name__ == "Linear"
    assert isinstance(model[0], nn.Linear)
    assert model[0].weight is weight
    assert class_of(model[0]) is SwappedQuantizedLinear
    after = model.state_dict()
    assert list(after) == list(before)
    assert torch.equal(after["0.weight"].qdata, before["0.weight"].qdata)
    x = torch.randn(2, 96)
    expected = model(x)
    assert calls == [1]
    other = copy.deepcopy(model)
    assert class_of(other[0]) is SwappedQuantizedLinear
    assert torch.equal(other(x), expected)
    assert ch.swap(model).before == tuple(ch.swap(model).rows)
    assert [row.path for row in ch.unswap(model).rows] == ["0", "2"]
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("name", ["int8", "int8, groups", "int4 with zeros"])
def test_changed_weight_is_read_again(name: str) -> None:
    model, x = _model(CONFIGS[name][0]()), torch.randn(4, 96)
    ch.swap(model)
    with torch.no_grad():
        before = model[0](x)
        model[0].weight.scale.mul_(2.0)
        bias = model[0].bias
        torch.testing.assert_close(model[0](x) - bias, 2.0 * (before - bias), rtol=1e-4, atol=1e-5)
        other = _model(CONFIGS[name][0]())
        model[0].weight = other[0].weight
        assert torch.equal(model[0](x), before)


def test_gradient_reaches_an_adapter_below() -> None:
    model = _model(torchao.Int8WeightOnlyConfig())
    x = torch.randn(4, 96, requires_grad=True)
    (theirs,) = torch.autograd.grad(model(x).sum(), x)
    ch.swap(model)
    (ours,) = torch.autograd.grad(model(x).sum(), x)
    assert _difference(ours, theirs) < 1e-5


def test_calls_that_the_kernels_cannot_read_are_torchaos(computed: list[str]) -> None:
    model, x = _model(torchao.Int8WeightOnlyConfig()), torch.randn(4, 96)
    theirs = model(x)
    ch.swap(model)
    computed.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x)
    assert computed == []
    assert _difference(model(x), theirs) < 1e-5
    assert len(computed) == 2


def test_layer_whose_forward_was_replaced_is_left() -> None:
    model = _model(torchao.Int8WeightOnlyConfig())
    model[0].forward = lambda x: x
    rows = ch.swap(model).rows
    assert (rows[0].how, rows[0].reason) == ("left", "its forward was replaced on the object")
    assert rows[1].how == "native"


@pytest.mark.parametrize("name", ["act_pre_scale", "act_quant_scale"])
def test_factor_of_the_input_is_left_and_named(name: str) -> None:
    model = _model(torchao.Int8WeightOnlyConfig())
    setattr(model[0].weight, name, torch.full((96,), 2.0))
    rows = ch.swap(model).rows
    assert rows[0].how == "left"
    assert f"Int8Tensor has {name}" in rows[0].reason
    assert rows[1].how == "native"


def test_wrong_integers_fail_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead.integrations.torch import quantized_weights

    whole = quantized_weights.per_group
    monkeypatch.setattr(quantized_weights, "per_group", lambda weight, values: 1.01 * whole(weight, values))
    model, x = _model(torchao.Int8WeightOnlyConfig()), torch.randn(4, 96)
    theirs = model(x)
    report = ch.swap(model)
    assert [row.how for row in report.rows] == ["left", "left"]
    assert "int8 weight-only, differs by" in report.rows[0].reason
    assert torch.equal(model(x), theirs)


# ---- within layers of models -----------------------------------------------------------------------------------------


def _llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model: nn.Module = transformers.LlamaForCausalLM(config).eval()
    return model


def _quantise(model: nn.Module, config: Any) -> None:
    torchao.quantize_(model, config, filter_fn=lambda part, name: isinstance(part, nn.Linear) and "lm_head" not in name)


def test_model_quantised_after_swap_computes_and_is_swapped_again() -> None:
    model, ids = _llama(), torch.randint(0, 99, (2, 11))
    exact = copy.deepcopy(model)
    _quantise(exact, torchao.Int8WeightOnlyConfig())
    with torch.no_grad():
        ch.swap(model)
        model(ids)
        _quantise(model, torchao.Int8WeightOnlyConfig())
        assert _difference(model(ids).logits, exact(ids).logits) < 1e-5
        report = ch.swap(model)
        linears = [row.how for row in report.rows if row.class_name == "Linear" and "lm_head" not in row.path]
        assert linears == ["native"] * 14
        assert {row.how for row in report.rows if row.class_name == "LlamaDecoderLayer"} == {"fused"}
        assert _difference(model(ids).logits, exact(ids).logits) < 1e-5


def test_frozen_model_that_is_quantised_says_what_to_do() -> None:
    model, ids = _llama(), torch.randint(0, 99, (2, 11))
    ch.swap(model)
    ch.freeze(model)
    with torch.no_grad():
        model(ids)
        _quantise(model, torchao.Int8WeightOnlyConfig())
        with pytest.raises(ch.UnsupportedError, match=r"must keep its parameters.*Call ch.unfreeze\(model\) first"):
            model(ids)
    with pytest.raises(ch.UnsupportedError, match=r"must not be frozen.*Call ch.unfreeze\(model\) first"):
        ch.swap(model)


def test_torchs_encoder_with_quantised_feedforward_agrees() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    plain = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    model, x = copy.deepcopy(plain), torch.randn(2, 7, 64)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    with torch.no_grad():
        report = ch.swap(model)
        assert [row.how for row in report.rows if row.class_name == "Linear"] == ["native"] * 4
        # Eval mode of torch's own layers looks at weights and fails on quantised ones, so it is the float model.
        assert _difference(model(x), plain(x)) < 2e-2


# ---- one order of sums -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "int8, dynamic", "int4"])
def test_row_has_the_same_bits_in_any_batch(name: str, computed: list[str]) -> None:
    model, x = _model(CONFIGS[name][0]()), torch.randn(40, 96)
    with torch.no_grad(), invariant():
        assert ch.swap(model).outside == ()
        computed.clear()
        together = model(x)
        assert torch.equal(model(x[7:8]), together[7:8])
    assert computed


# ---- torch.ao --------------------------------------------------------------------------------------------------------


def _dynamic(per_channel: bool = False, dtype: torch.dtype = torch.qint8) -> nn.Module:
    from torch.ao import quantization

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32, bias=False)).eval()
    which: Any = {nn.Linear: quantization.per_channel_dynamic_qconfig} if per_channel else {nn.Linear}
    made: nn.Module = quantization.quantize_dynamic(model, which, dtype)
    return made


@pytest.mark.parametrize("per_channel", [False, True])
def test_dynamic_linear_of_torch_agrees(per_channel: bool, computed: list[str]) -> None:
    model, x = _dynamic(per_channel), torch.randn(5, 3, 96) + 0.2
    theirs, before = model(x), model.state_dict()
    report = ch.swap(model)
    assert [(row.class_name, row.how) for row in report.rows] == [("Linear", "native")] * 2
    computed.clear()
    ours = model(x)
    assert computed == ["int8 weight and dynamic activation"] * 2
    assert _difference(ours, theirs) < 2e-3
    assert not ours.requires_grad
    assert list(model.state_dict()) == list(before)
    assert "DynamicQuantizedLinear" in repr(model)
    assert len(ch.unswap(model).rows) == 2
    assert torch.equal(model(x), theirs)


def test_dynamic_linear_reads_a_new_weight() -> None:
    model, other, x = _dynamic(), _dynamic(per_channel=True), torch.randn(5, 96)
    ch.swap(model)
    model(x)
    model[0].set_weight_bias(other[0].weight(), other[0].bias())  # type: ignore[index]
    expected = other[0](x)  # type: ignore[index]
    assert _difference(model[0](x), expected) < 2e-3  # type: ignore[index]


def test_frozen_dynamic_linear_is_packed_with_the_same_bits() -> None:
    model, x = _dynamic().eval(), torch.randn(7, 96)
    ch.swap(model)
    before = model(x)
    ch.freeze(model, pack=True)
    first = quantized_weight(model[0])
    assert first.panels is None or torch.equal(stored.project_stored(x, first, model[0].bias()), model[0](x))
    assert torch.equal(model(x), before)
    ch.unfreeze(model)
    assert quantized_weight(model[0]).panels is None


def test_dynamic_linear_of_half_precision_is_left() -> None:
    rows = ch.swap(_dynamic(dtype=torch.float16)).rows
    assert [(row.how, row.reason) for row in rows] == [("left", "its weight is float32")] * 2


def test_one_scale_for_all_rows_is_outside_of_one_order_of_sums() -> None:
    with invariant():
        model = _dynamic()
        assert len(ch.swap(model).outside) == 2
    model = _dynamic()
    ch.swap(model)
    with invariant(), pytest.raises(ch.UnsupportedError, match="one scale for all rows"):
        model(torch.randn(2, 96))
