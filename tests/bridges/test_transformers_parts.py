"""Fused feedforwards of transformers' models match the original and call hooks."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs the extra 'hf'")

import transformers
from transformers.activations import ACT2FN
from transformers.models.bert.modeling_bert import BertIntermediate
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.modernbert.modeling_modernbert import ModernBertMLP
from transformers.models.t5.modeling_t5 import T5DenseActDense, T5DenseGatedActDense

import clearhead as ch
from clearhead.integrations.transformers import replace
from clearhead.integrations.transformers.parts import FusedFeedForward
from tests.agreement import needs_native
from tests.bridges.hf_models import TRANSFORMERS_4
from tests.budget import within_budget

pytestmark = [needs_native, pytest.mark.covering(0)]

SIZES = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
IDS = torch.arange(12).view(2, 6)


def _bert(activation: str = "gelu") -> Any:
    model = transformers.BertModel(transformers.BertConfig(vocab_size=20, hidden_act=activation, **SIZES))
    # The hook keeps the whole layer from being fused.
    model.encoder.layer[0].output.LayerNorm.register_forward_hook(_look)
    return model


def _gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    model = transformers.GPT2Model(config)
    model.h[0].ln_1.register_forward_hook(_look)
    return model


def _look(*_: object) -> None:
    pass


def _clip() -> Any:
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.CLIPTextConfig(vocab_size=20, hidden_act="gelu", **SIZES, **tokens)
    model = transformers.CLIPTextModel(config)
    getattr(model, "text_model", model).encoder.layers[0].layer_norm1.register_forward_hook(_look)
    return model


def _modernbert() -> Any:
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
    # The first layer has no attention norm and is not fused.
    return transformers.ModernBertModel(transformers.ModernBertConfig(vocab_size=20, **SIZES, **tokens))


def _t5(form: str = "relu") -> Any:
    config = transformers.T5Config(
        vocab_size=20, d_model=16, d_kv=8, d_ff=40, num_layers=1, num_heads=2, feed_forward_proj=form
    )
    return transformers.T5EncoderModel(config)


#: A model, the class of its feedforward or its first half, and the parts of that class.
MODELS: dict[str, tuple[Callable[[], Any], type[nn.Module], tuple[str, ...]]] = {
    "bert": (_bert, BertIntermediate, ("dense", "intermediate_act_fn")),
    "gpt2": (_gpt2, GPT2MLP, ("c_fc", "act", "c_proj", "dropout")),
    "clip": (_clip, CLIPMLP, ("fc1", "activation_fn", "fc2")),
    "modernbert": (_modernbert, ModernBertMLP, ("Wi", "act", "drop", "Wo")),
    "t5": (_t5, T5DenseActDense, ("wi", "act", "dropout", "wo")),
    "t5, gated": (lambda: _t5("gated-gelu"), T5DenseGatedActDense, ("wi_1", "wi_0", "act", "dropout", "wo")),
}


@pytest.fixture(autouse=True)
def native(_kernels: None) -> None:
    """Use the kernels, and seed the weights."""
    torch.manual_seed(0)


@pytest.fixture
def fused_steps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of a feedforward, whether it was fused."""
    steps: list[bool] = []
    take = FusedFeedForward.__call__

    def spy(*given: Any) -> Tensor | None:
        output = take(*given)
        steps.append(output is not None)
        return output

    monkeypatch.setattr(FusedFeedForward, "__call__", spy)
    attempt = replace.attempt

    def uncounted(*args: Any, **kwargs: Any) -> Any:
        before = len(steps)
        trial = attempt(*args, **kwargs)
        del steps[before:]
        return trial

    monkeypatch.setattr(replace, "attempt", uncounted)
    return steps


class _Adapted(nn.Linear):
    """A linear layer with an overridden forward."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2.0


def _part(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    return next(part for part in model.modules() if isinstance(part, kind))


@torch.no_grad()
def _output(model: Any) -> Tensor:
    output: Tensor = model.eval()(IDS).last_hidden_state
    return output


@pytest.mark.parametrize("name", MODELS)
def test_feedforwards_are_fused_and_match_the_original(name: str, fused_steps: list[bool]) -> None:
    make, kind, _ = MODELS[name]
    model = make()
    expected = _output(model)
    ch.swap(model)
    torch.testing.assert_close(_output(model), expected, rtol=1e-5, atol=1e-5)
    assert fused_steps == [True]
    assert isinstance(_part(model, kind), kind)
    ch.unswap(model)
    assert type(_part(model, kind)) is kind
    assert torch.equal(_output(model), expected)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "bert"])
def test_training_whole_feedforwards_is_fused(name: str, fused_steps: list[bool]) -> None:
    if TRANSFORMERS_4 and name == "clip":
        pytest.skip("transformers 4 cannot make CLIP's mask in float64")
    model = MODELS[name][0]().eval()
    upstream = torch.randn(*IDS.shape, 16)

    def gradients(of: Any) -> dict[str, Tensor | None]:
        output = of(IDS).last_hidden_state
        gradients = torch.autograd.grad(output, list(of.parameters()), upstream.to(output.dtype), allow_unused=True)
        return dict(zip(dict(of.named_parameters()), gradients, strict=True))

    exact, textbook = gradients(copy.deepcopy(model).double()), gradients(model)
    assert not fused_steps
    ch.swap(model)
    gradients_of_swapped = gradients(model)
    assert fused_steps == [True]
    for key, truth in exact.items():
        actual, other = gradients_of_swapped[key], textbook[key]
        if truth is None or actual is None or other is None:
            assert truth is actual is other
            continue
        within_budget(key, actual, other, truth, terms=IDS.numel() * 40)


def test_training_half_a_feedforward_runs_op_by_op(fused_steps: list[bool]) -> None:
    model = _bert()
    ch.swap(model)
    model(IDS).last_hidden_state.sum().backward()
    assert fused_steps == [False]
    assert _part(model, BertIntermediate).dense.weight.grad is not None


@pytest.mark.parametrize(("name", "part"), [(name, part) for name, row in MODELS.items() for part in row[2]])
def test_a_hook_on_a_part_fires(name: str, part: str, fused_steps: list[bool]) -> None:
    make, kind, _ = MODELS[name]
    model, fired = make(), []
    expected = _output(model)
    ch.swap(model)
    handle = _part(model, kind).get_submodule(part).register_forward_hook(lambda *given: fired.append(given[2]))
    torch.testing.assert_close(_output(model), expected, rtol=1e-5, atol=1e-5)
    assert len(fired) == 1
    # Hooks after the fused operator do not prevent it.
    assert fused_steps == [name == "gpt2" and part == "dropout"]
    handle.remove()


@pytest.mark.parametrize("name", MODELS)
def test_a_replaced_part_is_called(name: str, fused_steps: list[bool]) -> None:
    make, kind, parts = MODELS[name]
    model = make()
    ch.swap(model)
    setattr(_part(model, kind), parts[0], _Adapted(16, {"gpt2": 64, "modernbert": 80}.get(name, 40)))
    assert bool(_output(model).isfinite().all())
    assert fused_steps == [False]


def test_a_subclass_with_its_own_forward_is_left() -> None:
    class Louder(BertIntermediate):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states) + 1.0

    model = _bert()
    part = _part(model, BertIntermediate)
    part.__class__ = Louder
    expected = _output(model)
    report = ch.swap(model)
    assert type(part) is Louder
    torch.testing.assert_close(_output(model), expected, rtol=1e-5, atol=1e-5)
    row = next(row for row in report.left if row.class_name == "Louder")
    assert row.difference > 0.01
    assert row.reason.startswith("its fused form differs by ")


@pytest.mark.parametrize("activation", sorted(set(ACT2FN) - {"prelu", "xielu"}))
def test_supported_activations_are_fused(activation: str, fused_steps: list[bool]) -> None:
    model = _bert(activation)
    expected = _output(model)
    ch.swap(model)
    torch.testing.assert_close(_output(model), expected, rtol=1e-5, atol=1e-5)
    fused = {"gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish"}
    assert any(fused_steps) == (activation in fused)


@pytest.mark.parametrize("name", MODELS)
def test_copies_and_pickles_of_a_swapped_model_stay_fused(name: str) -> None:
    model = MODELS[name][0]()
    ch.swap(model)
    expected = _output(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(_output(copied), expected)
        ch.unswap(copied)
        assert type(_part(copied, MODELS[name][1])) is MODELS[name][1]


def test_dropouts_are_swapped_and_restored() -> None:
    model = _bert()
    ch.swap(model)
    dropouts = [part for part in model.modules() if isinstance(part, nn.Dropout)]
    assert dropouts
    assert all(type(part) is not nn.Dropout and type(part).__name__ == "Dropout" for part in dropouts)
    ch.unswap(model)
    assert all(type(part) is nn.Dropout for part in dropouts)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_feedforward_matches_eager_mode(name: str) -> None:
    model = MODELS[name][0]()
    ch.swap(model)
    part = _part(model, MODELS[name][1]).eval()
    x = torch.randn(2, 6, 16)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(part, backend="eager", fullgraph=True)(x), part(x))
