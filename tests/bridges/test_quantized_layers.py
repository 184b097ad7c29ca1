"""Layers whose linear layers torchao quantised, as one operator: results, bits, changes, and what runs op by op."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.integrations.torch.quantized import is_quantized, quantized_weight
from clearhead.invariance import invariant
from clearhead.nn.linear import Linear
from clearhead.nn.weight_packing import MOST_BYTES
from clearhead.testing import forbid_fused, fused_calls
from tests.agreement import needs_native

pytestmark = [needs_native, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
torchao = pytest.importorskip("torchao.quantization", reason="the extra quantized (torchao) is not installed")
granularity = pytest.importorskip("torchao.quantization.granularity")

CONFIGS: dict[str, Callable[[], Any]] = {
    "int8": torchao.Int8WeightOnlyConfig,
    "int8, dynamic": torchao.Int8DynamicActivationInt8WeightConfig,
    "int4": lambda: torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=granularity.PerGroup(32)),
}
SIZES = {
    "vocab_size": 99,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
#: Classes of models, and their sizes.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {**SIZES, "num_key_value_heads": 2}),
    # Norms of heads.
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**SIZES, "num_key_value_heads": 2, "head_dim": 32}),
    # Gate and up projection are one weight; so are queries, keys and values.
    "Phi3": ("Phi3ForCausalLM", "Phi3Config", {**SIZES, "pad_token_id": 0}),
    # Biases, and post-norm.
    "BERT": ("BertForMaskedLM", "BertConfig", SIZES),
    # A relative bias, and a memory.
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 99, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4},
    ),
}
IDS = torch.arange(22).view(2, 11) * 7 % 99


def _model(name: str = "Llama", dtype: torch.dtype = torch.float32) -> Any:
    kind, config, sizes = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).eval().to(dtype)
    if name == "T5":
        # T5 does not scale its scores; its checkpoints have small weights instead.
        for module in model.modules():
            if hasattr(module, "q"):
                module.q.weight.data.mul_(32**-0.5)
    return model


def _logits(model: Any) -> Tensor:
    more = {"decoder_input_ids": IDS[:, :5]} if hasattr(model, "decoder") else {}
    logits: Tensor = model(IDS, **more).logits
    return logits


def _quantised(config: str, name: str = "Llama", dtype: torch.dtype = torch.float32) -> Any:
    model = _model(name, dtype)
    _quantise(model, config)
    return model


def _quantise(
    model: nn.Module, config: str, leaves: tuple[str, ...] = ("lm_head", "cls.predictions.decoder", "out_proj")
) -> None:
    def chosen(part: nn.Module, name: str) -> bool:
        return isinstance(part, nn.Linear) and not name.endswith(leaves)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchao.quantize_(model, CONFIGS[config](), filter_fn=chosen)


def _difference(one: Tensor, other: Tensor) -> float:
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


def _dequantised(model: Any) -> Any:
    """The same model with the integers' values as weights, in float64."""
    wide = copy.deepcopy(ch.unswap(model) and model)
    for part in wide.modules():
        if is_quantized(part):
            part.weight = nn.Parameter(quantized_weight(part).dequantized(torch.float64))
    ch.swap(model)
    return wide.double()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", MODELS)
def test_layers_are_one_operator_and_agree_with_torchao(name: str, config: str) -> None:
    model, plain = _quantised(config, name), _model(name)
    with torch.no_grad():
        theirs = _logits(model)
        report = ch.swap(model)
        with fused_calls() as calls:
            ours = _logits(model)
        ch.swap(plain)
        with fused_calls() as calls_in_float:
            _logits(plain)
    assert calls == calls_in_float
    assert ("layer" if name != "T5" else "feedforward") in calls
    # An integer of a rounded input that moves by one is a difference of 1/256 of the largest element of its row.
    assert _difference(ours, theirs) < (2e-2 if "dynamic" in config else 2e-6)
    assert all(row.how != "left" for row in report.rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", ["int8", "int4"])
def test_error_against_float64_is_at_most_that_of_torchao(config: str, dtype: torch.dtype) -> None:
    model = _quantised(config, dtype=dtype)
    with torch.no_grad():
        theirs = model(IDS).logits
        ch.swap(model)
        ours, exact = model(IDS).logits, _dequantised(model)(IDS).logits
    assert _difference(ours, exact) < 1.5 * _difference(theirs, exact)


@pytest.mark.parametrize("config", CONFIGS)
def test_stack_decodes_with_the_bits_of_single_layers(config: str) -> None:
    model = _quantised(config)
    ch.swap(model)

    def decoded() -> list[Tensor]:
        cache = transformers.DynamicCache()
        return [model(part, past_key_values=cache).logits for part in IDS.split([8, 1, 1, 1], 1)]

    with torch.no_grad():
        single = decoded()
        assert [row.how for row in ch.freeze(model).rows] == ["fused"]
        with fused_calls() as calls:
            together = decoded()
    # The first call makes the cache.
    assert calls[-3:] == ["stack"] * 3
    assert all(map(torch.equal, together, single))


@pytest.mark.parametrize("config", CONFIGS)
def test_observed_layer_has_the_same_bits(config: str) -> None:
    model = _quantised(config)
    ch.swap(model)
    with torch.no_grad():
        alone = model(IDS).logits
        with fused_calls() as calls, ch.trace(model) as traced:
            observed = model(IDS).logits
    assert len(traced) == 2
    assert "layer" not in calls
    assert torch.equal(observed, alone)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("fused", [True, False])
def test_token_has_the_same_bits_in_prefill_and_decoding(config: str, fused: bool) -> None:
    model = _quantised(config)
    with torch.no_grad(), invariant():
        assert ch.swap(model).outside == ()
        with fused_calls() as calls:
            whole = model(IDS).logits
            cache = transformers.DynamicCache()
            parts = [model(part, past_key_values=cache).logits for part in IDS.split([5, 1, 3, 1, 1], 1)]
            alone = model(IDS[1:]).logits
        if not fused:
            with forbid_fused():
                assert torch.equal(model(IDS).logits, whole)
    assert calls.count("layer") >= 12
    assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(alone[0], whole[1])


# ---- changes ---------------------------------------------------------------------------------------------------------


def _first(model: Any) -> Any:
    return model.model.layers[0].mlp.down_proj


def _scaled(model: Any) -> None:
    _first(model).weight.scale.mul_(2.0)


def _zeroed(model: Any) -> None:
    _first(model).weight.qdata.zero_()


def _with_another_scale(model: Any) -> None:
    weight = _first(model).weight
    weight.scale = weight.scale * 3.0


def _replaced(model: Any) -> None:
    _first(model).weight = model.model.layers[1].mlp.down_proj.weight


def _in_float(model: Any) -> None:
    layer = _first(model)
    layer.weight = nn.Parameter(torch.randn(layer.weight.shape), requires_grad=False)


CHANGES = [_scaled, _zeroed, _with_another_scale, _replaced, _in_float]


@pytest.mark.covering(2)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("config", CONFIGS)
def test_changed_weight_is_read_again(config: str, change: Callable[[Any], None]) -> None:
    model, theirs = _quantised(config), _quantised(config)
    ch.swap(model)
    with torch.no_grad():
        before = model(IDS).logits
        for each in (model, theirs):
            torch.manual_seed(1)
            change(each)
        after = model(IDS).logits
        assert _difference(before, after) > 1e-3
        assert _difference(after, theirs(IDS).logits) < (2e-2 if "dynamic" in config else 2e-6)


@pytest.mark.parametrize("config", CONFIGS)
def test_frozen_layer_reads_a_weight_that_was_written_to(config: str) -> None:
    model, theirs = _quantised(config), _quantised(config)
    ch.swap(model)
    with torch.no_grad():
        ch.freeze(model)
        model(IDS)
        for each in (model, theirs):
            _scaled(each)
        assert _difference(model(IDS).logits, theirs(IDS).logits) < (2e-2 if "dynamic" in config else 2e-6)


@pytest.mark.parametrize("name", MODELS)
def test_packed_layers_keep_their_bits_and_read_what_was_written(name: str) -> None:
    model = _quantised("int8, dynamic", name)
    ch.swap(model)
    layers = [part for part in model.modules() if is_quantized(part)]
    with torch.no_grad():
        for _ in range(2):
            before = _logits(model)
            ch.freeze(model, pack=True)
            packed = [quantized_weight(part).panels is not None for part in layers]
            # Instruction sets without dot products of bytes have panels of twice the size.
            assert all(packed) == any(packed) == (_panel_bytes() <= MOST_BYTES * 128 * 128)
            assert torch.equal(_logits(model), before)
            for part in layers:
                part.weight.qdata.neg_()
            written = _logits(model)
            assert not torch.equal(written, before)
            ch.unfreeze(model)
            assert all(quantized_weight(part).panels is None for part in layers)
            assert torch.equal(_logits(model), written)


@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.parametrize("name", [name for name in MODELS if name != "T5"])
def test_parts_of_the_rows_have_the_bits_of_all(name: str) -> None:
    """With panels, threads compute parts of the rows."""
    model, ids = _quantised("int8, dynamic", name), torch.arange(230).view(2, 115) * 7 % 99
    ch.swap(model)
    mask = torch.ones(2, 115).long()
    mask[1, 100:] = 0
    results: list[Tensor] = []
    with torch.no_grad():
        for threads, pack in ((1, False), (1, True), (2, True)):
            torch.set_num_threads(threads)
            ch.freeze(model, pack=pack)
            results.append(torch.cat([model(ids).logits, model(ids, attention_mask=mask).logits[:, :100]], 1))
    assert torch.equal(results[1], results[0])
    assert torch.equal(results[2], results[0])


def _panel_bytes() -> int:
    return int(torch.ops.clearhead.pack_weight(torch.zeros(128, 128, dtype=torch.int8)).numel())


def test_packing_leaves_weights_alone_in_integers() -> None:
    model = _model()
    _quantise(model, "int8", leaves=("lm_head", "o_proj", "up_proj"))
    ch.swap(model)
    with torch.no_grad():
        one_by_one = model(IDS, use_cache=False).logits
        ch.freeze(model, pack=True)
        with fused_calls() as calls:
            packed = model(IDS, use_cache=False).logits
    assert calls == ["stack"]
    assert _difference(packed, one_by_one) < 2e-6


# ---- what runs op by op ----------------------------------------------------------------------------------------------


def test_gradient_reaches_the_input() -> None:
    model, gradients = _quantised("int8"), list[Tensor]()
    x = torch.randn(2, 7, 128)
    for swaps in (False, True):
        if swaps:
            ch.swap(model)
        given = x.clone().requires_grad_()
        with fused_calls() as calls:
            model(inputs_embeds=given).logits.sum().backward()
        assert given.grad is not None
        gradients.append(given.grad)
        assert "layer" not in calls
    assert _difference(gradients[1], gradients[0]) < 1e-5


def test_layer_with_an_unknown_layout_says_that_it_runs_op_by_op() -> None:
    model = _model()
    torchao.quantize_(
        model, torchao.Float8WeightOnlyConfig(), filter_fn=lambda _, name: name == "model.layers.0.mlp.up_proj"
    )
    with torch.no_grad():
        theirs = model(IDS).logits
        report = ch.swap(model)
        with fused_calls() as calls:
            ours = model(IDS).logits
    layers = {row.path: (row.how, row.reason) for row in report.rows if row.class_name == "LlamaDecoderLayer"}
    assert layers["model.layers.0"] == ("left", "a quantised linear layer of it runs by itself: op by op")
    assert layers["model.layers.1"][0] == "fused"
    assert calls.count("layer") == 1
    assert _difference(ours, theirs) < 1e-5


# ---- modules of clearhead and torch ----------------------------------------------------------------------------------


def _language_model(config: str) -> ch.nn.LanguageModel:
    torch.manual_seed(0)
    model = ch.nn.LanguageModel(vocab_size=99, embed_dim=64, num_heads=4, num_layers=2, max_len=32, gated=True).eval()
    _quantise(model, config, leaves=("head",))
    return model


@pytest.mark.parametrize("config", CONFIGS)
def test_own_model_is_quantised_and_swapped(config: str) -> None:
    model = _language_model(config)
    with torch.no_grad():
        theirs = model(IDS)
        report = ch.swap(model)
        assert [row.how for row in report.rows] == ["native"] * 14
        with fused_calls() as calls:
            ours = model(IDS)
        assert calls == ["stack"]
        assert _difference(ours, theirs) < (2e-2 if "dynamic" in config else 2e-6)
        texts = model.generate(IDS[:1, :4], 6, temperature=0.0)
        step_by_step = texts[:, :4]
        for _ in range(6):
            step_by_step = torch.cat([step_by_step, model(step_by_step)[:, -1:].argmax(-1)], 1)
        assert torch.equal(texts, step_by_step)
    kinds = {type(part).__name__ for part in model.modules()}
    ch.unswap(model)
    assert {type(part).__name__ for part in model.modules()} == kinds
    assert all(type(part) is Linear for part in model.modules() if isinstance(part, nn.Linear))


def test_torchs_encoder_with_quantised_feedforward_is_one_operator() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation="gelu")
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(2, 7, 64)
    _quantise(model, "int8")
    # Eval mode of torch's own layers looks at weights and fails on quantised ones.
    exact = copy.deepcopy(model)
    for part in exact.modules():
        if is_quantized(part):
            part.weight = nn.Parameter(quantized_weight(part).dequantized())  # type: ignore[assignment]
    with torch.no_grad():
        ch.swap(model)
        with fused_calls() as calls:
            ours = model(x)
        assert calls == ["layer"] * 2
        assert _difference(ours, exact(x)) < 1e-6


@pytest.mark.parametrize("config", CONFIGS)
def test_observed_own_model_has_the_same_bits(config: str) -> None:
    model = _language_model(config)
    with torch.no_grad():
        ch.swap(model)
        alone = model(IDS)
        with ch.trace(model) as traced:
            observed = model(IDS)
        cached = model.generate(IDS[:1, :4], 3, temperature=0.0)
        with ch.observe(model, ch.Want(lse=True)) as observation:
            assert torch.equal(model.generate(IDS[:1, :4], 3, temperature=0.0), cached)
    assert len(traced) == len(observation) == 2
    assert torch.equal(observed, alone)
