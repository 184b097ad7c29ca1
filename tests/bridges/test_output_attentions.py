"""``output_attentions=True`` gives eager's weights, in swapped models and with ``attn_implementation="clearhead"``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from transformers import StaticCache

import clearhead as ch
from clearhead.benchmark.memory import peak_extra_bytes
from clearhead.bridges import transformers as bridge
from clearhead.integrations.torch import attention as torch_attention
from clearhead.integrations.torch import attention_weights
from clearhead.integrations.torch.attention_weights import WeightedCall, with_weights
from tests.bridges.hf_checks import attending
from tests.bridges.hf_models import (
    MODELS,
    TOKENS,
    TRANSFORMERS_4,
    VOCAB,
    as_double,
    eager,
    exact,
    in_float64,
    inputs,
    needs_5,
)
from tests.budget import within_budget

pytestmark = pytest.mark.covering(0)

Padding = Literal["left", "right", "none"]
Road = Literal["swap", "implementation"]
#: Where models of transformers return weights.
FIELDS: Final = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
#: Terms of the longest sums of the tiny models: a layer's width and a feedforward's.
TERMS: Final = 48
ROADS: Final[Sequence[Road]] = ("swap", "implementation")


@pytest.fixture(params=["formula", "kernels"])
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the weights of small models by the formula, as by default, and by the kernels."""
    if request.param == "kernels":
        monkeypatch.setattr(attention_weights, "FEW_WEIGHTS", 0)


def by_road(model: Any, road: Road) -> Any:
    if road == "swap":
        ch.swap(model)
    else:
        bridge.enable()
        model.set_attn_implementation("clearhead")
    return model


def _needs_weights_by_interface(name: str) -> None:
    if TRANSFORMERS_4 and name in ("gpt2", "vit"):
        pytest.skip("this release does not tell its attention function, and returns None for weights as with sdpa")


def weights_of(output: Any) -> dict[str, tuple[Tensor, ...]]:
    return {name: output[name] for name in FIELDS if getattr(output, name, None) is not None}


def same_weights(name: str, actual: Any, textbook: Any, truth: Any, real: Tensor | None = None) -> None:
    """Assert that outputs have the same weights; with ``real`` only in rows of real tokens, others are undefined."""
    ours, theirs, right = map(weights_of, (actual, textbook, truth))
    assert ours.keys() == theirs.keys()
    assert ours
    for field in ours:
        assert isinstance(ours[field], tuple)
        assert len(ours[field]) == len(theirs[field])
        for one, other, third in zip(ours[field], theirs[field], right[field], strict=True):
            assert one.shape == other.shape
            assert one.dtype == other.dtype
            assert one.is_contiguous()
            rows = real is not None and field != "cross_attentions" and one.shape[2] == real.shape[1]
            keep = real[:, None, :, None] if rows and real is not None else torch.ones(1, dtype=torch.long)
            parts = [each.masked_fill(keep == 0, 0.0) for each in (one, other, third)]
            within_budget(f"{name} {field}", *parts, terms=TERMS, dtype=one.dtype)


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("padding", ["left", "right", "none"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_match_eager(name: str, padding: Padding, road: Road) -> None:
    _needs_weights_by_interface(name)
    if MODELS[name].kind in ("vision", "audio") and padding != "none":
        pytest.skip("has no padding")
    batch = inputs(name, padding=padding)
    with torch.no_grad():
        truth = exact(name)(**as_double(batch), output_attentions=True)
        textbook = eager(name)(**batch, output_attentions=True)
        model = by_road(eager(name), road)
        output = model(**batch, output_attentions=True)
        plain = model(**batch)
    if truth.logits.isnan().any():
        pytest.skip("this release of transformers computes NaN")
    same_weights(name, output, textbook, truth, batch.get("attention_mask"))
    assert not any(weights_of(plain).values())
    real = batch.get("attention_mask", torch.ones(1, 1))
    keep = real.bool()[..., None] if real.shape == output.logits.shape[:2] else torch.ones(1, dtype=torch.bool)
    torch.testing.assert_close(output.logits * keep, plain.logits * keep, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 95])
@pytest.mark.parametrize("name", ["bert", "gemma2", "gpt-oss"])
def test_weights_match_eager_at_every_length(name: str, length: int) -> None:
    ids = torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        calls = (by_road(eager(name), "swap"), eager(name), exact(name))
        same_weights(name, *(model(input_ids=ids, output_attentions=True) for model in calls))


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["bert", "gemma2"])
def test_weights_have_the_dtype_of_eager(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_weights, "STRIP", 2**11)
    ids = inputs(name)["input_ids"]
    # Rounded weights, which every model then has.
    textbook = eager(name).to(dtype)
    with torch.no_grad():
        truth = in_float64(textbook)(input_ids=ids, output_attentions=True)
        output = by_road(eager(name).to(dtype), "swap")(input_ids=ids, output_attentions=True)
        theirs = textbook(input_ids=ids, output_attentions=True)
    same_weights(name, output, theirs, truth)
    assert output.attentions[0].dtype == dtype


CACHED: Final = ["llama", "mistral", "gemma2", "gpt-oss", "gpt2", "t5", "bart", "whisper"]


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("padding", ["left", "none"])
@pytest.mark.parametrize("name", CACHED)
def test_generate_returns_the_weights_of_eager(name: str, padding: Padding, road: Road) -> None:
    _needs_weights_by_interface(name)
    if MODELS[name].kind == "audio" and padding != "none":
        pytest.skip("has no padding")
    batch = inputs(name, padding=padding)
    batch.pop("decoder_input_ids", None)
    real = batch.get("attention_mask")
    for beams in (1, 3):
        settings = {"max_new_tokens": 5, "do_sample": False, "num_beams": beams, "min_new_tokens": 5}
        asked = {**settings, "output_attentions": True, "return_dict_in_generate": True}
        theirs, ours = (model.generate(**batch, **asked) for model in (eager(name), by_road(eager(name), road)))
        assert torch.equal(theirs.sequences, ours.sequences)
        assert weights_of(theirs).keys() == weights_of(ours).keys()
        for field, steps in weights_of(theirs).items():
            # The encoder has no steps.
            pairs = [(steps, ours[field])] if field == "encoder_attentions" else zip(steps, ours[field], strict=True)
            for place, (expected, actual) in enumerate(pairs):
                assert len(expected) == len(actual) == 2
                for one, other in zip(actual, expected, strict=True):
                    assert one.shape == other.shape
                    assert one.dtype == other.dtype
                    keep = torch.ones(1)
                    if real is not None and place == 0 and field in ("attentions", "encoder_attentions"):
                        keep = real.repeat_interleave(len(one) // len(real), dim=0)[:, None, :, None]
                    torch.testing.assert_close(one * keep, other * keep, rtol=1e-3, atol=2e-4)


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_weights_with_a_static_cache_cover_its_unused_places(name: str) -> None:
    ids = inputs(name)["input_ids"]
    outputs = []
    for model in (by_road(eager(name), "swap"), eager(name), exact(name)):
        cache = StaticCache(config=model.config, max_cache_len=32)
        with torch.no_grad():
            calls = [model(part, past_key_values=cache, output_attentions=True) for part in ids.split([9, 1, 13], 1)]
        outputs.append(calls)
    for ours, theirs, right in zip(*outputs, strict=True):
        same_weights(name, ours, theirs, right)


def _loss(output: Any) -> Tensor:
    """A sum that weighs every attention weight and logit differently."""
    parts = [output.logits, *(weights for field in weights_of(output).values() for weights in field)]
    return sum(((part * torch.arange(part.numel()).view(part.shape).cos()).sum() for part in parts), torch.zeros(()))


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", ["bert", "gemma2", "gpt-oss", "t5", "bart"])
def test_gradients_flow_through_the_weights(name: str, road: Road) -> None:
    batch = inputs(name)

    def gradients(model: Any, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        _loss(model(**given, output_attentions=True)).backward()
        return {key: part.grad for key, part in model.named_parameters() if part.grad is not None}

    truth, textbook = gradients(exact(name), as_double(batch)), gradients(eager(name), batch)
    actual = gradients(by_road(eager(name), road), batch)
    assert actual.keys() == textbook.keys()
    for key, right in truth.items():
        size = float(right.abs().max())
        within_budget(key, actual[key], textbook[key], right, terms=TERMS * TOKENS, size=size)


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "bart"])
def test_weights_in_training_are_those_after_dropout_drawn_as_eager_draws(name: str) -> None:
    _needs_weights_by_interface(name)
    outputs = []
    for model in (eager(name), by_road(eager(name), "implementation")):
        for module in model.modules():
            for field in ("dropout", "attention_dropout", "attn_dropout"):
                if isinstance(getattr(module, field, None), float):
                    setattr(module, field, 0.4)
                elif isinstance(getattr(module, field, None), nn.Dropout):
                    getattr(module, field).p = 0.4
        model.train()
        torch.manual_seed(7)
        outputs.append(model(**inputs(name), output_attentions=True))
    for field, expected in weights_of(outputs[0]).items():
        for one, other in zip(outputs[1][field], expected, strict=True):
            assert bool((other == 0).any())
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("_path")
def test_a_row_that_may_attend_to_nothing_has_weights_0() -> None:
    batch = inputs("llama", padding="left")
    with torch.no_grad():
        output = by_road(eager("llama"), "swap")(**batch, output_attentions=True)
    padding = batch["attention_mask"] == 0
    for weights in output.attentions:
        sums = weights.sum(-1).transpose(1, 2)
        assert bool((sums[padding] == 0).all())
        torch.testing.assert_close(sums[~padding], torch.ones_like(sums[~padding]))


@pytest.mark.parametrize("name", ["bert", "gemma2", "gpt2", "t5", "bart", "modernbert"])
def test_layers_are_fused_again_after_a_call_that_asks_for_weights(name: str, fused_kinds: list[str]) -> None:
    batch, model = inputs(name), by_road(eager(name), "swap")
    with torch.no_grad():
        model(**batch)
        before = list(fused_kinds)
        fused_kinds.clear()
        model(**batch, output_attentions=True)
        assert before
        assert not attending(fused_kinds)
        fused_kinds.clear()
        model(**batch)
    assert fused_kinds == before


@pytest.mark.usefixtures("_path")
def test_an_observed_model_returns_the_same_weights() -> None:
    batch, model = inputs("gemma2", padding="left"), by_road(eager("gemma2"), "swap")
    with torch.no_grad():
        expected = model(**batch, output_attentions=True)
        with ch.observe(model, ch.Want(rows=range(TOKENS))) as observed:
            output = model(**batch, output_attentions=True)
    assert torch.equal(output.logits, expected.logits)
    for layer, weights in zip(observed, output.attentions, strict=True):
        torch.testing.assert_close(observed[layer].rows, weights, rtol=1e-4, atol=1e-6)


def test_weights_after_an_edit_are_returned() -> None:
    batch, model = inputs("llama"), by_road(eager("llama"), "swap")
    with torch.no_grad(), ch.trace(model, record=False) as traced:
        traced.replace("masked", lambda scores: torch.zeros_like(scores), layers=0, heads=2)
        output = model(**batch, output_attentions=True)
    mean = torch.ones(2, TOKENS, TOKENS) / TOKENS
    torch.testing.assert_close(output.attentions[0][:, 2], mean)
    assert bool((output.attentions[0][:, 1].std(-1) > 1e-3).any())


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("masked", [False, True])
def test_nan_in_a_masked_key_stays_out_of_the_weights(masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 6, 8, generator=generator) for heads in (4, 2, 2))
    allowed = torch.ones(6, 6, dtype=torch.bool)
    allowed[:, 3] = not masked
    call = WeightedCall(query=query, key=key.clone(), value=value, mask=ch.Dense(allowed), query_offset=0)
    call.key[:, :, 3] = torch.nan
    output, weights = with_weights(call)
    assert bool(output.isnan().any()) is not masked
    assert bool(weights.isnan().any()) is not masked
    if masked:
        key[:, :, 3] = 0.0
        clean = ch.observe_attention(query, key, value, mask=call.mask, want=ch.Want(rows=range(6)))
        torch.testing.assert_close(output, clean.output)
        torch.testing.assert_close(weights, clean.rows)


MASKS: Final[Mapping[str, Callable[[int], ch.Mask | None]]] = {
    "none": lambda length: None,
    "causal": lambda length: ch.Causal(),
    "window and padding": lambda length: ch.Causal() & ch.Window(9) & ch.Padding(torch.tensor([length + 2, 3])),
    "table": lambda length: ch.Dense(torch.rand(2, 4, length, length + 3) > 0.4),
    "either": lambda length: ch.Causal() | ch.Dense(torch.rand(length, length + 3) > 0.9),
}
RULES: Final[Mapping[str, Callable[[int], list[ch.ScoreRule]]]] = {
    "none": lambda length: [],
    "ALiBi": lambda length: [ch.Alibi(num_heads=4)],
    "T5": lambda length: [ch.RelativeBias(torch.randn(4, 19))],
    "table and cap": lambda length: [ch.DenseBias(torch.randn(4, length, length + 3)), ch.SoftCap(2.0)],
    "sink": lambda length: [ch.Sink(torch.randn(4))],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", [1, 37])
def test_formula_and_kernels_match_the_reference(
    mask: str, rules: str, dtype: torch.dtype, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, size, 8).to(dtype) for heads, size in ((4, length), (2, length + 3), (2, length + 3))
    )
    options = {"mask": MASKS[mask](length), "scores": RULES[rules](length), "scale": 0.7, "query_offset": 3}
    want = ch.Want(rows=range(length))
    truth = ch.observe_attention(
        *(each.double() for each in (query, key, value)), want=want, backend="reference", **options
    )
    assert truth.rows is not None
    results = []
    for few in (2**30, 0):
        monkeypatch.setattr(attention_weights, "FEW_WEIGHTS", few)
        monkeypatch.setattr(attention_weights, "STRIP", 2**9)
        results.append(with_weights(WeightedCall(query=query, key=key, value=value, **options)))
    for output, weights in results:
        assert weights.dtype == output.dtype == dtype
        within_budget("weights", weights, truth.rows.to(dtype), truth.rows, terms=8, dtype=dtype)
        within_budget("output", output, truth.output.to(dtype), truth.output, terms=length, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [None, ch.Causal() & ch.Padding(torch.tensor([2000]))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_the_weights_and_little_besides(dtype: torch.dtype, mask: ch.Mask | None) -> None:
    query, key, value = (torch.randn(1, heads, 4096, 64).to(dtype) for heads in (4, 2, 2))
    call = WeightedCall(query=query, key=key, value=value, mask=mask, query_offset=0)
    size = query.element_size() * (4 * 4096 * 4096 + query.numel())
    peak = peak_extra_bytes(lambda: with_weights(call))
    if peak is None:
        pytest.skip("this system does not report the peak of resident memory")
    assert size * 0.9 < peak < size * 1.1


# ---- programs that use the weights --------------------------------------------------------------------------------


def _rollout(attentions: Sequence[Tensor]) -> Tensor:
    """Attention rollout (Abnar and Zuidema 2020, section 3), written out."""
    joint = one = torch.eye(attentions[0].shape[-1], dtype=attentions[0].dtype)
    for weights in attentions:
        mixed = 0.5 * weights.mean(dim=1) + 0.5 * one
        joint = (mixed / mixed.sum(-1, keepdim=True)) @ joint
    return joint


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_rollout_written_by_hand_matches_eager(name: str) -> None:
    _needs_weights_by_interface(name)
    batch = inputs(name)
    with torch.no_grad():
        ours = _rollout(by_road(eager(name), "swap")(**batch, output_attentions=True).attentions)
        theirs = _rollout(eager(name)(**batch, output_attentions=True).attentions)
        truth = _rollout(exact(name)(**as_double(batch), output_attentions=True).attentions)
    within_budget(name, ours, theirs, truth, terms=TERMS)


def _speech() -> Any:
    """A Whisper that marks words in time."""
    model = eager("whisper")
    config = model.generation_config
    config.alignment_heads = [[0, 1], [1, 2], [1, 3]]
    config.no_timestamps_token_id, config.is_multilingual, config.max_initial_timestamp_index = 50, False, None
    return model


@pytest.mark.slow
@needs_5
@pytest.mark.parametrize("beams", [1, 3])
def test_whisper_marks_words_in_time_with_our_weights(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    features = inputs("whisper")["input_features"]
    settings = {"return_token_timestamps": True, "num_beams": beams, "max_new_tokens": 9}
    theirs = _speech().generate(features, **settings)
    model = by_road(_speech(), "swap")
    calls: list[WeightedCall] = []
    monkeypatch.setattr(
        "clearhead.integrations.transformers.attention.with_weights",
        lambda call: calls.append(call) or with_weights(call),
    )
    ours = model.generate(features, **settings)
    assert torch.equal(ours["sequences"], theirs["sequences"])
    assert torch.equal(ours["token_timestamps"], theirs["token_timestamps"])
    assert len({*ours["token_timestamps"].flatten().tolist()}) > 2
    # transformers itself would have selected eager attention, for good.
    assert calls
    assert model.config is model.model.config
    assert model.config._attn_implementation == "clearhead"
    ch.unswap(model)
    assert type(model) is type(_speech())
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("view", ["head_view", "model_view"])
def test_bertviz_draws_the_weights_of_a_swapped_model(view: str) -> None:
    pytest.importorskip("IPython", reason="BertViz needs it")
    bertviz = pytest.importorskip("bertviz", reason="needs BertViz")
    ids = inputs("bert")["input_ids"][:1]
    tokens = [f"t{place}" for place in range(TOKENS)]

    def drawn(model: Any) -> Tensor:
        with torch.no_grad():
            attentions = model(input_ids=ids, output_attentions=True).attentions
        page = getattr(bertviz, view)(attentions, tokens, html_action="return").data
        numbers = re.search(r'"attn": ([][0-9.,e +-]*), "', page)
        assert numbers is not None
        return torch.tensor(json.loads(numbers[1]))

    ours, theirs = drawn(by_road(eager("bert"), "swap")), drawn(eager("bert"))
    assert ours.shape == (2, 4, TOKENS, TOKENS)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_captum_attributes_layers_of_a_swapped_model() -> None:
    attr = pytest.importorskip("captum.attr", reason="needs Captum")
    batch = inputs("bert", padding="right")
    ids, real = batch["input_ids"], batch["attention_mask"]

    def attributions(model: Any) -> list[Tensor]:
        def logit(tokens: Tensor, mask: Tensor) -> Tensor:
            # With weights its output is tensors alone, which Captum needs.
            return model(input_ids=tokens, attention_mask=mask, output_attentions=True).logits[:, 1, 5]

        layer = model.bert.encoder.layer[1]
        gradients = attr.LayerIntegratedGradients(logit, model.bert.embeddings).attribute(
            ids, baselines=torch.zeros_like(ids), additional_forward_args=(real,), n_steps=4
        )
        others = [
            kind(logit, layer.attention.self).attribute(ids, additional_forward_args=(real,))
            for kind in (attr.LayerGradientXActivation, attr.LayerActivation)
        ]
        firsts = (each[0] if isinstance(each, tuple) else each for each in (gradients, *others))
        return [each.detach() * real[..., None] for each in firsts]

    for ours, theirs in zip(*map(attributions, (by_road(eager("bert"), "swap"), eager("bert"))), strict=True):
        assert ours.shape == theirs.shape
        assert bool((theirs != 0).any())
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("average", [False, True])
def test_need_weights_of_a_swapped_attention_takes_the_kernels(average: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(64, 4, batch_first=True).eval()
    x = torch.randn(2, 150, 64)
    padding = torch.arange(150) >= torch.tensor([[150], [90]])
    with torch.no_grad():
        expected = module(x, x, x, key_padding_mask=padding, average_attn_weights=average)
        ch.swap(module)
        by_kernel: list[WeightedCall] = []
        kernel = attention_weights.by_kernels
        monkeypatch.setattr(attention_weights, "by_kernels", lambda call: by_kernel.append(call) or kernel(call))
        monkeypatch.setattr(nn.functional, "multi_head_attention_forward", None)
        monkeypatch.setattr(torch_attention.SwappedMultiheadAttention, "by_torch", None)
        actual = module(x, x, x, key_padding_mask=padding, average_attn_weights=average)
    assert len(by_kernel) == 1
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
