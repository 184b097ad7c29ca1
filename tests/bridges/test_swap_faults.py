"""Regressions of swap: stale weights, names, modes, tools and divided models."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs the extra 'hf'")

import transformers

import clearhead as ch
import clearhead.integrations.transformers as integration
from tests.agreement import needs_native
from tests.bridges.hf_checks import distinct, ids_of

pytestmark = [needs_native, pytest.mark.usefixtures("_kernels")]

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=None)
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    "modernbert": lambda: transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(
            **{**SIZES, "num_hidden_layers": 3}, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2
        )
    ),
}


def _output(model: Any) -> Tensor:
    with torch.no_grad():
        return model(ids_of()).logits  # type: ignore[no-any-return]


def _replace_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9


def _write_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def _load(model: nn.Module, *, assign: bool = False) -> None:
    model.load_state_dict({key: value * 0.9 for key, value in model.state_dict().items()}, assign=assign)


def _new_parameters(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.detach() * 0.9))


def _transpose_layout(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = (parameter.data * 0.9).t().contiguous().t()


CHANGES: dict[str, Callable[[Any], object]] = {
    "data": _replace_data,
    "in place": _write_in_place,
    "load": _load,
    "load, assigned": lambda model: _load(model, assign=True),
    "new parameters": _new_parameters,
    "another layout": _transpose_layout,
    "dtype round trip": lambda model: (model.double(), _write_in_place(model), model.float()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", MODELS)
def test_parameters_changed_between_calls_take_effect(name: str, change: str) -> None:
    model = distinct(MODELS[name])
    original = copy.deepcopy(model)
    ch.swap(model)
    before = _output(model)
    for each in (model, original):
        CHANGES[change](each)
    after = _output(model)
    torch.testing.assert_close(after, _output(original), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(after, before, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", MODELS)
def test_swapped_classes_have_the_names_of_their_originals(name: str) -> None:
    model = distinct(MODELS[name])
    kinds = [type(module) for module in model.modules()]
    assert ch.swap(model).replaced
    swapped = [type(module) for module in model.modules()]
    assert swapped != kinds
    for ours, theirs in zip(swapped, kinds, strict=True):
        assert issubclass(ours, theirs)
        for attribute in ("__name__", "__qualname__", "__module__"):
            assert getattr(ours, attribute) == getattr(theirs, attribute)


def test_dropout_modules_in_training_mode_drop_in_a_model_in_eval_mode() -> None:
    model = distinct(MODELS["bert"])
    ch.swap(model)
    assert torch.equal(_output(model), _output(model))
    for module in model.modules():
        if type(module).__name__.startswith("Dropout"):
            module.train()
    samples = torch.stack([_output(model) for _ in range(8)])
    assert float(samples.std(0).mean()) > 0.05


def test_an_unused_window_is_accepted() -> None:
    """Qwen2-MoE creates a mask with a window of -1 or 0 if it uses none."""
    config = transformers.Qwen2MoeConfig(
        **SIZES,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        shared_expert_intermediate_size=16,
        num_key_value_heads=4,
    )
    assert not config.use_sliding_window
    model = distinct(lambda: transformers.Qwen2MoeForCausalLM(config))
    expected = _output(model)
    ch.swap(model)
    torch.testing.assert_close(_output(model), expected, rtol=1e-4, atol=1e-4)


class _Divided(nn.Module):
    """Parts of a BERT inside a user's model."""

    def __init__(self, embeddings: nn.Module, encoder: nn.Module) -> None:
        super().__init__()
        self.embeddings, self.encoder = embeddings, encoder

    def forward(self, ids: Tensor) -> Tensor:
        return self.encoder(self.embeddings(ids))[0]  # type: ignore[no-any-return]


@torch.no_grad()
def test_parts_of_a_transformers_model_are_left_and_reported() -> None:
    bert = distinct(MODELS["bert"]).bert
    divided = _Divided(bert.embeddings, bert.encoder)
    expected = divided(ids_of())
    report = ch.swap(divided)
    assert report.replaced == ()
    assert {row.path for row in report.left} >= {"encoder.layer.0.attention", "encoder.layer.0.attention.self"}
    assert all("outside its PreTrainedModel" in row.reason for row in report.left)
    assert torch.equal(divided(ids_of()), expected)


@torch.no_grad()
def test_unswap_of_parts_restores_the_attention_implementation() -> None:
    bert = distinct(MODELS["bert"]).bert
    divided = _Divided(bert.embeddings, bert.encoder)
    expected, implementation = divided(ids_of()), bert.config._attn_implementation
    ch.swap(bert)
    torch.testing.assert_close(divided(ids_of()), expected, rtol=1e-4, atol=1e-4)
    assert ch.unswap(divided).replaced
    assert bert.config._attn_implementation == implementation
    assert torch.equal(divided(ids_of()), expected)


def test_dynamic_quantisation_of_a_swapped_model_warns() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 1, enable_nested_tensor=False)
    ch.swap(model)
    with pytest.warns(UserWarning, match="swapped linear layers are not quantised"):
        torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    ch.unswap(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="swapped linear layers")
        torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


def test_attention_of_other_libraries_is_reported() -> None:
    attention = type("CausalSelfAttention", (nn.Linear,), {"__module__": "example.models"})
    report = ch.swap(nn.ModuleDict({"block": attention(4, 4), "torch": nn.MultiheadAttention(8, 2)}))
    assert [(row.path, row.class_name, row.reason) for row in report.left] == [
        ("block", "CausalSelfAttention", "attention of example, which swap does not recognise")
    ]
    assert [row.path for row in report.replaced] == ["torch"]


@pytest.mark.parametrize("name", MODELS)
def test_swap_has_no_side_effects(name: str) -> None:
    model = distinct(MODELS[name])
    state = {key: value.clone() for key, value in model.state_dict().items()}
    generator, fired = torch.get_rng_state(), list[object]()
    for module in model.modules():
        module.register_forward_hook(lambda *given: fired.append(given))
    implementation = model.config._attn_implementation
    with torch.inference_mode():
        ch.swap(model)
    assert torch.equal(torch.get_rng_state(), generator)
    assert fired == []
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert all(not module.training for module in model.modules())
    ch.unswap(model)
    assert model.config._attn_implementation == implementation


def test_a_layer_that_disagrees_is_left_and_its_difference_reported() -> None:
    class Doubled(transformers.models.llama.modeling_llama.LlamaDecoderLayer):  # type: ignore[misc]
        def forward(
            self, hidden_states: Tensor, attention_mask: Any = None, position_embeddings: Any = None, **kwargs: Any
        ) -> Any:
            given = {"attention_mask": attention_mask, "position_embeddings": position_embeddings}
            return super().forward(hidden_states, **given, **kwargs) * 2.0

    model = distinct(MODELS["llama"])
    model.model.layers[1].__class__ = Doubled
    expected = _output(model)
    report = ch.swap(model)
    (row,) = [row for row in report.left if row.path == "model.layers.1"]
    assert row.difference is not None
    assert 0.1 < row.difference < 10.0
    assert row.reason == f"its fused form differs by {row.difference:.1e}"
    assert "model.layers.0" in {row.path for row in report.replaced if row.how == "fused"}
    torch.testing.assert_close(_output(model), expected, rtol=1e-4, atol=1e-4)


def test_an_unknown_argument_runs_the_original_code() -> None:
    class Shifted(transformers.models.llama.modeling_llama.LlamaDecoderLayer):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, shift: float | None = None, **kwargs: Any) -> Any:
            output = super().forward(hidden_states, **kwargs)
            return output if shift is None else output + shift

    model = distinct(MODELS["llama"])
    layer = model.model.layers[0]
    layer.__class__ = Shifted
    ch.swap(model)
    rotary = model.model.rotary_emb(torch.zeros(1), torch.arange(4)[None])
    x = torch.randn(1, 4, 32)
    with torch.no_grad():
        plain = layer(x, position_embeddings=rotary)
        torch.testing.assert_close(layer(x, shift=1.0, position_embeddings=rotary), plain + 1.0)
        torch.testing.assert_close(layer(x, 1.0, position_embeddings=rotary), plain + 1.0)


def test_an_old_transformers_raises_one_line() -> None:
    with pytest.raises(ch.UnsupportedError, match=r"^swap: transformers must be of version 4\.57 or later; got 4\.40"):
        integration.check_version("4.40.1")
