"""``verify_model(model, reference)``: the error of each quantised layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.verify import LayerErrors
from tests.agreement import needs_native

pytestmark = [needs_native, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")]


def _models(config: Any = None) -> tuple[nn.Module, nn.Module]:
    """A quantised model and its reference; by torch.ao, or by a config of torchao."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, 8)).eval()
    if config is None:
        return torch.ao.quantization.quantize_dynamic(reference, {nn.Linear}), reference
    model = copy.deepcopy(reference)
    pytest.importorskip("torchao.quantization").quantize_(model, config)
    return model, reference


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_each_layer_has_the_error_of_its_rounding(given: bool, swapped: bool) -> None:
    model, reference = _models()
    if swapped:
        ch.swap(model)
    errors = ch.verify_model(model, reference, inputs=torch.randn(20, 96) if given else None)
    assert isinstance(errors, LayerErrors)
    assert [layer.path for layer in errors.layers] == ["0", "2", "3"]
    # 7 bits of input and 8 of weight.
    assert all(2e-3 < layer.error < 4e-2 for layer in errors.layers)
    assert {layer.kind for layer in errors.layers} == {"int8 weight and dynamic activation"}
    assert (errors.output is None) == (not given)
    assert errors.output is None or 2e-3 < errors.output < 6e-2
    assert str(errors).splitlines()[0].startswith(f"{errors.worst.error:.1e}  {errors.worst.path}")


def test_layer_with_a_wrong_scale_is_the_worst() -> None:
    torchao = pytest.importorskip("torchao.quantization", reason="the extra quantized (torchao) is not installed")
    model, reference = _models(torchao.Int8WeightOnlyConfig())
    ch.swap(model)
    good = ch.verify_model(model, reference)
    assert all(layer.error < 1e-2 for layer in good.layers)
    with torch.no_grad():
        model.get_submodule("2").weight.scale[0] *= 3.0  # type: ignore[union-attr, operator]
    bad = ch.verify_model(model, reference, inputs=[torch.randn(7, 96)])
    assert bad.worst.path == "2"
    assert bad.worst.error > 5 * max(layer.error for layer in good.layers)
    others = [layer.error for layer in bad.layers if layer.path != "2"]
    assert len(others) == 2
    assert max(others) < 1e-2


def test_each_layer_gets_the_inputs_of_the_reference() -> None:
    """An error of the first layer must not be one of the second."""
    torchao = pytest.importorskip("torchao.quantization", reason="the extra quantized (torchao) is not installed")
    model, reference = _models(torchao.Int8WeightOnlyConfig())
    with torch.no_grad():
        model.get_submodule("0").weight.scale.mul_(2.0)  # type: ignore[union-attr, operator]
    errors = ch.verify_model(model, reference, inputs={"input": torch.randn(7, 96)})
    first, *others = (layer.error for layer in errors.layers)
    assert first > 0.5
    assert max(others) < 1e-2


def test_layer_that_is_not_called_has_no_row_and_one_whose_output_was_0_has() -> None:
    model, reference = _models()
    with torch.no_grad():
        reference.get_submodule("3").weight.zero_()  # type: ignore[union-attr, operator]
        reference.get_submodule("3").bias.zero_()  # type: ignore[union-attr, operator]
    assert ch.verify_model(model, reference, inputs=torch.randn(5, 96)).worst.path == "3"
    for each in (model, reference):
        each.forward = lambda x, each=each: each[1](each[0](x))  # type: ignore[method-assign, misc, index]
    assert [layer.path for layer in ch.verify_model(model, reference, inputs=torch.randn(5, 96)).layers] == ["0"]
    for each in (model, reference):
        each.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ch.UnsupportedError, match=r"inputs must reach a quantised layer; got .* none\. "):
        ch.verify_model(model, reference, inputs=torch.randn(5, 96))


def test_bad_arguments_say_what_to_do() -> None:
    model, reference = _models()
    with pytest.raises(ch.UnsupportedError, match=r"model must have quantised linear layers.*torchao.quantize_"):
        ch.verify_model(reference, model)
    with pytest.raises(ch.UnsupportedError, match=r"reference must have a float linear layer.*nothing at '3'"):
        ch.verify_model(model, reference[:3])  # type: ignore[index]
    with pytest.raises(ch.UnsupportedError, match=r"reference must have a float linear layer.*before it was quantised"):
        ch.verify_model(model, model)
    with pytest.raises(ch.UnsupportedError, match="must be left out with a reference"):
        ch.verify_model(model, reference, laws=["batch"])  # type: ignore[call-overload]
    with pytest.raises(ch.UnsupportedError, match="inputs must come with a reference"):
        ch.verify_model(model, inputs=torch.randn(2, 96))  # type: ignore[call-overload]
