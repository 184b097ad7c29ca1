"""Hugging Face models with clearhead's attention match eager logits, gradients and tokens."""

from __future__ import annotations

import copy
import math
import re
import sys
from collections import defaultdict
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs the extra 'hf'")

import transformers

import clearhead as ch
from clearhead.bridges import transformers as bridge
from clearhead.integrations.transformers import interface
from clearhead.integrations.transformers.attention import attend_for
from clearhead.integrations.transformers.masks import MaskTensor
from clearhead.projection import selection
from tests.bridges.hf_models import BATCH, MODELS, TOKENS, VOCAB, as_double, eager, exact, inputs, real_logits
from tests.budget import within_budget
from tests.gemms import name_gemm

pytestmark = pytest.mark.covering(0)

Padding = Literal["left", "right", "none"]

#: Terms of the longest sums of the tiny models: a layer's width and a feedforward's.
TERMS = 48
#: Relative rounding error of a gradient's largest element.
ROUNDED = 2**-22


def ours(name: str) -> Any:
    model = eager(name)
    ch.swap(model)
    return model


def _makes_masks(name: str) -> bool:
    """True if this release of transformers passes the model's masks and attention through its interfaces."""
    file = sys.modules[type(eager(name)).__module__]
    return any(make in vars(file) for make in ("create_causal_mask", "create_bidirectional_mask"))


def _needs_interface(name: str) -> None:
    if not _attentions(eager(name)):
        pytest.skip("this release of transformers has no attention interface for it")


@pytest.fixture
def symbolic(monkeypatch: pytest.MonkeyPatch) -> list[MaskTensor]:
    """Record the masks of a test; none may be materialised."""
    made: list[MaskTensor] = []
    plain = MaskTensor.__new__

    def note(cls: type, *args: Any) -> MaskTensor:
        made.append(plain(cls, *args))
        return made[-1]

    def refuse(self: MaskTensor) -> Tensor:
        raise AssertionError(f"{self!r} was written out")

    monkeypatch.setattr(MaskTensor, "__new__", note)
    monkeypatch.setattr(MaskTensor, "table", refuse)
    return made


@pytest.mark.parametrize("padding", ["left", "right", "none"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_match_eager(name: str, padding: Padding, symbolic: list[MaskTensor]) -> None:
    kind = MODELS[name].kind
    if kind in ("vision", "audio") and padding != "none":
        pytest.skip("has no padding")
    batch = inputs(name, padding=padding)
    with torch.no_grad():
        truth = real_logits(exact(name), as_double(batch))
        textbook = real_logits(eager(name), batch)
        logits = real_logits(ours(name), batch)
    if truth.isnan().any():
        pytest.skip("this release of transformers computes NaN")
    within_budget(name, logits, textbook, truth, terms=TERMS)
    encoded = kind == "encoder" and padding == "none"
    assert symbolic or encoded or kind == "vision" or not _makes_masks(name)


def _layer(key: str) -> str:
    """A parameter's name up to its last number, or all of it."""
    numbered = re.match(r".*\.\d+(?=\.)", key)
    return key if numbered is None else numbered[0]


def _gradients(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for field in ("dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, field, None), float):
                setattr(module, field, 0.0)
    loss = real_logits(model, batch).log_softmax(-1)[..., 1].mean()
    loss.backward()
    return {key: value.grad for key, value in model.named_parameters() if value.grad is not None}


def _errors(actual: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """The largest error of each layer's gradients, relative to their size."""
    assert actual.keys() == truth.keys()
    # Some are 0 except for rounding, such as a key bias: their error scales with the terms that cancel.
    largest, errors = max(gradient.abs().max().item() for gradient in truth.values()), dict[str, float]()
    for key, right in truth.items():
        error = (actual[key] - right).abs().max().item() / max(0.05 * largest, right.abs().max().item())
        errors[_layer(key)] = max(error, errors.get(_layer(key), 0.0))
    return errors


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_match_eager(name: str) -> None:
    """The geometric mean of the errors over six batches is at most twice eager's: rounding in later layers reaches
    every gradient, so the ratio of one batch varies from 0.5 to 5 for ModernBERT."""
    padding: Padding = "none" if MODELS[name].kind in ("vision", "audio") else "right"
    logarithms = defaultdict[str, list[float]](list)
    for seed in range(1, 7):
        batch = inputs(name, padding=padding, seed=seed)
        truth = _gradients(exact(name), as_double(batch))
        if any(gradient.isnan().any() for gradient in truth.values()):
            pytest.skip("this release of transformers computes NaN")
        textbook, actual = (_errors(_gradients(make(name), batch), truth) for make in (eager, ours))
        for layer, error in actual.items():
            logarithms[layer].append(math.log((error + ROUNDED) / (textbook[layer] + ROUNDED)))
    ratios = {layer: math.exp(sum(values) / len(values)) for layer, values in logarithms.items()}
    assert max(ratios.values()) <= 2.0, ratios


@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize("name", [name for name, row in MODELS.items() if row.generates])
def test_generate_gives_the_same_tokens(name: str, cache: str, symbolic: list[MaskTensor]) -> None:
    batch = inputs(name, padding="none" if MODELS[name].kind == "audio" else "left")
    batch.pop("decoder_input_ids", None)
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "use_cache": cache != "none"}
    if cache == "static":
        settings["cache_implementation"] = "static"
    elif MODELS[name].kind == "decoder":
        # With a dynamic cache, also test beam search.
        settings["num_beams"] = 2 if cache == "dynamic" else 1
    wanted = eager(name).generate(**batch, **settings)
    generated = ours(name).generate(**batch, **settings)
    assert generated.tolist() == wanted.tolist()
    assert symbolic or not _makes_masks(name)


@pytest.mark.parametrize("name", [name for name, row in MODELS.items() if row.kind == "decoder"])
def test_packed_position_ids_separate_sequences(name: str, symbolic: list[MaskTensor]) -> None:
    ids = inputs(name)["input_ids"][:1]
    lengths = [9, 1, 13]
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    model = ours(name)
    # The trial of a model's layers makes masks too.
    symbolic.clear()
    with torch.no_grad():
        truth, textbook, actual = (
            each(input_ids=ids, position_ids=places, use_cache=False).logits
            for each in (exact(name), eager(name), model)
        )
        alone = torch.cat([model(input_ids=part).logits for part in ids.split(lengths, dim=1)], dim=1)
    within_budget(name, actual, textbook, truth, terms=TERMS)
    # transformers does not read positions for gpt-oss's masks: it lets packed sequences see each other.
    if name != "gpt-oss":
        within_budget(name, alone, textbook, truth, terms=TERMS)
        assert "Documents" in repr(symbolic[0].mask)


def test_a_prompt_in_two_pieces_matches_the_whole() -> None:
    for name in ("llama", "mistral", "gemma2"):
        model, ids = ours(name), inputs(name)["input_ids"]
        with torch.no_grad():
            whole = model(input_ids=ids).logits
            first = model(input_ids=ids[:, :9], use_cache=True)
            second = model(input_ids=ids[:, 9:], past_key_values=first.past_key_values).logits
        torch.testing.assert_close(torch.cat([first.logits, second], dim=1), whole, rtol=1e-5, atol=1e-5)


def test_bfloat16_has_at_most_1_25_times_eagers_error() -> None:
    for name in ("llama", "bert", "gpt-oss"):
        batch = inputs(name, padding="right")
        with torch.no_grad():
            truth = real_logits(exact(name), batch)
            textbook = real_logits(eager(name).to(torch.bfloat16), batch)
            actual = real_logits(ours(name).to(torch.bfloat16), batch)
        error, eager_error = ((each.double() - truth).abs().mean().item() for each in (actual, textbook))
        assert error <= 1.25 * eager_error, name


def test_dropout_is_active_only_in_training_mode() -> None:
    model = eager("bert")
    for layer in model.bert.encoder.layer:
        layer.attention.self.dropout.p = 0.5
    batch = inputs("bert")
    ch.swap(model)
    assert torch.equal(real_logits(model, batch), real_logits(model, batch))
    for layer in model.bert.encoder.layer:
        layer.attention.self.train()
    torch.manual_seed(0)
    first = real_logits(model, batch)
    torch.manual_seed(0)
    assert torch.equal(real_logits(model, batch), first)
    assert not torch.equal(real_logits(model, batch), first)


def test_unsupported_features_raise() -> None:
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ch.UnsupportedError, match=r"indices must be absent.*Identity"):
        attend_for(nn.Identity(), x, x, x, None, indices=torch.zeros(1))


def test_user_masks_match_eager() -> None:
    generator = torch.Generator().manual_seed(3)
    allowed = torch.rand(BATCH, 1, TOKENS, TOKENS, generator=generator) > 0.4
    allowed |= torch.eye(TOKENS, dtype=torch.bool)
    added = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    ids = inputs("llama")["input_ids"]
    with torch.no_grad():
        truth = exact("llama")(input_ids=ids, attention_mask=allowed).logits
        textbook = eager("llama")(input_ids=ids, attention_mask=added).logits
        model = ours("llama")
        for mask in (allowed, added):
            within_budget("llama", model(input_ids=ids, attention_mask=mask).logits, textbook, truth, terms=TERMS)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_observed_rows_match_eagers_weights(name: str) -> None:
    _needs_interface(name)
    batch = inputs(name, padding="none" if MODELS[name].kind in ("vision", "audio") else "right")
    model, plain = ours(name), eager(name)
    with torch.no_grad():
        with ch.observe(model, ch.Want(rows=torch.arange(7))) as observations:
            output = model(**batch).logits
        assert torch.equal(output, model(**batch).logits)
        result = plain(**batch, output_attentions=True)
    assert list(observations) == _attentions(model)
    if MODELS[name].kind in ("encoder-decoder", "audio"):
        wanted = list(result.encoder_attentions)
        for attention, cross in zip(result.decoder_attentions, result.cross_attentions, strict=True):
            wanted += [attention, cross]
    else:
        wanted = list(result.attentions)
    for path, weights in zip(observations, wanted, strict=True):
        rows = observations[path].rows
        assert rows is not None
        torch.testing.assert_close(rows, weights[:, :, :7, : rows.shape[3]], rtol=1e-4, atol=1e-5, msg=path)


def test_generate_is_observed_step_by_step() -> None:
    model = ours("llama")
    with torch.no_grad(), ch.observe(model, ch.Want(entropy=True), layers=0, keep="all") as observations:
        model.generate(**inputs("llama", padding="left"), max_new_tokens=4, do_sample=False)
    calls = observations.calls("model.layers.0.self_attn")
    assert [call.queries for call in calls] == [tuple(range(TOKENS)), *((TOKENS + step,) for step in range(3))]
    assert ch.unswap(model)
    with (
        pytest.raises(ch.UnsupportedError, match=r"model must have attention that can be observed"),
        ch.observe(model, ch.Want(entropy=True)),
    ):
        pass


def test_the_attention_implementation_can_be_set_by_name() -> None:
    bridge.enable()
    model = eager("llama")
    model.set_attn_implementation("clearhead")
    batch = inputs("llama", padding="left")
    with torch.no_grad():
        # Norms and positions of a swapped one are ours too.
        torch.testing.assert_close(real_logits(model, batch), real_logits(ours("llama"), batch), rtol=1e-4, atol=1e-4)
    config = transformers.LlamaConfig(**MODELS["llama"].settings)
    made = transformers.LlamaForCausalLM._from_config(config, attn_implementation="clearhead")
    assert made.config._attn_implementation == "clearhead"


@pytest.mark.parametrize("name", MODELS)
def test_swap_keeps_parameters_and_unswap_restores_classes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "LEAST_LAYER", 0)
    # On every processor linear layers gain by themselves.
    name_gemm(monkeypatch, "native")
    model = eager(name)
    kinds = [type(module) for module in model.modules()]
    state = {key: value.data_ptr() for key, value in model.state_dict().items()}
    report = ch.swap(model)
    names = _attentions(model)
    assert set(names) <= {row.path for row in report.replaced}
    assert all(row.difference is None or row.difference < 1e-4 for row in report.replaced)
    assert not set(names) & {row.path for row in report.left}
    assert [type(module).__name__ for module in model.modules()] == [kind.__name__ for kind in kinds]
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert {key: value.data_ptr() for key, value in model.state_dict().items()} == state
    second = ch.swap(model)
    assert second.replaced == ()
    assert second.before == report.replaced
    copied = copy.deepcopy(model)
    for each in (model, copied):
        assert ch.unswap(each).replaced == report.replaced
        assert [type(module) for module in each.modules()] == kinds
        assert all(config._attn_implementation == "eager" for _, config in interface.configs_in(each.config))
        assert ch.unswap(each).replaced == ()


def _attentions(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if interface.attends(type(module)) == "by interface"]


def test_saved_configs_do_not_mention_clearhead(tmp_path: Any) -> None:
    model = ours("bert")
    model.save_pretrained(tmp_path)
    assert "clearhead" not in (tmp_path / "config.json").read_text(encoding="utf-8")


def test_a_transformers_model_inside_a_module_is_swapped() -> None:
    both = nn.ModuleDict({"text": eager("llama"), "torch": nn.MultiheadAttention(8, 2)})
    report = ch.swap(both)
    assert "text.model.layers.1.self_attn" in [part.name for part in report.replaced]
    assert "torch" in [part.name for part in report.replaced]
    assert {part.name for part in ch.unswap(both).replaced} == {part.name for part in report.replaced}
    assert both["text"].config._attn_implementation == "eager"


def test_a_model_with_custom_attention_is_left_and_the_rest_swapped() -> None:
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
    model = nn.Sequential(eager("llama"), transformers.BloomModel(config), nn.TransformerEncoderLayer(8, 2))
    bloom = [type(module) for module in model[1].modules() if not isinstance(module, nn.Linear | nn.Dropout)]
    report = ch.swap(model)
    left = {row.path: row for row in report.left}
    assert {"1.h.0.self_attention", "1.h.1.self_attention"} <= left.keys()
    assert "without transformers' attention interface" in left["1.h.0.self_attention"].reason
    assert [type(module) for module in model[1].modules() if not isinstance(module, nn.Linear | nn.Dropout)] == bloom
    assert model[0].config._attn_implementation == "clearhead"
    assert model[1].config._attn_implementation != "clearhead"
    assert {"2", "0.model.layers.0"} <= {row.path for row in report.replaced}
