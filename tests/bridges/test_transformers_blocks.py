"""Swapped layers of BERT, ViT and other families are fused, match transformers and call hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs the extra 'hf'")

import transformers
from transformers.masking_utils import bidirectional_mask_function

import clearhead as ch
from clearhead.integrations.transformers import layer as fused
from clearhead.integrations.transformers.masks import make_mask
from tests.agreement import needs_native
from tests.bridges.hf_checks import attending, distinct, learns_between_calls_without_gradients
from tests.budget import within_budget

pytestmark = [needs_native, pytest.mark.usefixtures("_kernels"), pytest.mark.covering(0)]

LAYERS = 3
SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
PICTURES: Final[Mapping[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "image_size": 12,
    "patch_size": 4,
}
PAIRS: Final[Mapping[str, Any]] = {
    "vocab_size": 50, "d_model": 32, "encoder_layers": LAYERS, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 72, "decoder_ffn_dim": 72, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A model, what it reads, where its layers are, and the paths of some parts in each."""

    make: Callable[[], Any]
    reads: str
    layers: str
    parts: tuple[str, ...]


def _of(model: str, config: str, *settings: Mapping[str, Any], **more: Any) -> Callable[[], Any]:
    given = {key: value for each in (*settings, more) for key, value in each.items()}
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**given))


BERT: Final = (
    "attention", "attention.self", "attention.self.query", "attention.output", "attention.output.dense",
    "attention.output.LayerNorm", "intermediate", "intermediate.intermediate_act_fn", "output", "output.dropout",
)  # fmt: skip
CLIP: Final = ("self_attn", "self_attn.q_proj", "layer_norm1", "mlp", "mlp.activation_fn", "mlp.fc2")
BART: Final = ("self_attn", "self_attn.v_proj", "self_attn_layer_norm", "fc1", "activation_fn", "final_layer_norm")
ROWS: Final[Mapping[str, Row]] = {
    "bert": Row(_of("BertModel", "BertConfig", SIZES, hidden_act="gelu"), "tokens", "encoder.layer", BERT),
    "bert, relu": Row(_of("BertModel", "BertConfig", SIZES, hidden_act="relu"), "tokens", "encoder.layer", BERT),
    "roberta": Row(_of("RobertaModel", "RobertaConfig", SIZES), "tokens", "encoder.layer", BERT),
    "electra": Row(
        _of("ElectraModel", "ElectraConfig", SIZES, embedding_size=16), "tokens", "encoder.layer", BERT
    ),
    "altclip": Row(
        _of("AltCLIPTextModel", "AltCLIPTextConfig", SIZES, project_dim=32), "tokens", "roberta.encoder.layers", BERT
    ),
    # Its attention has no is_causal attribute.
    "splinter": Row(_of("SplinterModel", "SplinterConfig", SIZES), "tokens", "encoder.layer", BERT),
    "distilbert": Row(
        _of("DistilBertModel", "DistilBertConfig", vocab_size=50, dim=32, hidden_dim=72, n_layers=LAYERS, n_heads=4),
        "tokens", "transformer.layer",
        ("attention", "attention.k_lin", "sa_layer_norm", "ffn", "ffn.activation", "ffn.lin2", "ffn.dropout"),
    ),
    "vit": Row(
        _of("ViTModel", "ViTConfig", PICTURES, qkv_bias=False), "pictures", "layers",
        ("attention", "attention.v_proj", "layernorm_before", "mlp", "mlp.fc1", "layernorm_after", "dropout"),
    ),
    "clip, pictures": Row(
        _of("CLIPVisionModel", "CLIPVisionConfig", PICTURES, hidden_act="quick_gelu"), "pictures",
        "encoder.layers", CLIP,
    ),
    "clip, texts": Row(
        _of("CLIPTextModel", "CLIPTextConfig", SIZES, hidden_act="gelu", eos_token_id=3), "tokens", "encoder.layers",
        CLIP,
    ),
    "siglip": Row(_of("SiglipVisionModel", "SiglipVisionConfig", PICTURES), "pictures", "encoder.layers", CLIP),
    "bart": Row(
        lambda: _of("BartModel", "BartConfig", PAIRS, max_position_embeddings=64)().encoder, "tokens", "layers", BART
    ),
    "mbart": Row(
        lambda: _of("MBartModel", "MBartConfig", PAIRS, max_position_embeddings=64)().encoder, "tokens", "layers",
        BART,
    ),
    "whisper": Row(
        lambda: _of("WhisperModel", "WhisperConfig", PAIRS, num_mel_bins=8, max_source_positions=9)().encoder,
        "sounds", "layers", BART,
    ),
}  # fmt: skip
NAMES: Final = tuple(ROWS)
TEXTS: Final = tuple(name for name, row in ROWS.items() if row.reads == "tokens")
DTYPES: Final = (torch.float32, torch.bfloat16)
DROPS: Final = {
    "hidden_dropout_prob": 0.2,
    "attention_probs_dropout_prob": 0.3,
    "attention_dropout": 0.3,
    "dropout": 0.2,
    "activation_dropout": 0.1,
}


def _model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return distinct(ROWS[name].make, dtype)


def _layers(model: Any, name: str) -> Any:
    return model.get_submodule(ROWS[name].layers)


def _input(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    match ROWS[name].reads:
        case "tokens":
            return {"input_ids": torch.randint(4, 50, (2, 9), generator=generator)}
        case "pictures":
            return {"pixel_values": torch.randn(2, 3, 12, 12, generator=generator).to(dtype)}
        case _:
            return {"input_features": torch.randn(2, 8, 18, generator=generator).to(dtype)}


def _called(model: Any, name: str, **more: Any) -> Tensor:
    output: Tensor = model(**_input(name, next(model.parameters()).dtype), **more).last_hidden_state
    return output


# ---- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_fused_outputs_are_within_the_error_budget(name: str, dtype: torch.dtype, fused_kinds: list[str]) -> None:
    model = _model(name, dtype)
    with torch.no_grad():
        exact, expected = _called(copy.deepcopy(model).double(), name), _called(model, name)
        ch.swap(model)
        for _ in range(3):
            output = _called(model, name)
            within_budget("output", output, expected, exact, terms=LAYERS * 72, dtype=dtype)
    assert attending(fused_kinds) == ["layer"] * LAYERS * 3


@pytest.mark.parametrize("side", ["left", "right", "holes"])
@pytest.mark.parametrize("name", TEXTS)
def test_padding_matches_the_original(name: str, side: str, fused_kinds: list[str]) -> None:
    model, real = _model(name), torch.ones(2, 9, dtype=torch.long)
    real[0, {"left": slice(None, 3), "right": slice(-3, None), "holes": slice(2, 9, 3)}[side]] = 0
    with torch.no_grad():
        expected = _called(model, name, attention_mask=real)
        ch.swap(model)
        for _ in range(2):
            output = _called(model, name, attention_mask=real)
            torch.testing.assert_close(output[real.bool()], expected[real.bool()], rtol=1e-4, atol=1e-4)
    assert attending(fused_kinds) == ["layer"] * LAYERS * 2


def _padded(side: str) -> Tensor:
    real = torch.ones(2, 9, dtype=torch.long)
    real[0, slice(None, 3) if side == "left" else slice(-3, None)] = 0
    return real


def _rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of tokens that each layer computes, in the first trial of a class too."""
    rows: list[int] = []
    take = fused.fused_layers

    def spy(tokens: Any, *given: Any) -> Any:
        rows.append(tokens[0].shape[0] * tokens[0].shape[1])
        return take(tokens, *given)

    monkeypatch.setattr(fused, "fused_layers", spy)
    monkeypatch.setattr(fused, "LEAST_UNPADDED", 1)
    return rows


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", TEXTS)
def test_padding_is_removed(name: str, side: str, fused_kinds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, real, rows = _model(name), _padded(side), _rows(monkeypatch)
    upstream = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(3)) * real[..., None]

    def run(of: Any) -> tuple[Tensor, dict[str, Tensor]]:
        output = _called(of, name, attention_mask=real)
        names, tensors = zip(*((key, part) for key, part in of.named_parameters() if part.requires_grad), strict=True)
        gradients = torch.autograd.grad(output, tensors, upstream.to(output.dtype), allow_unused=True)
        return output.detach(), {key: part for key, part in zip(names, gradients, strict=True) if part is not None}

    truth, exact = run(copy.deepcopy(model).double())
    expected, textbook = run(model)
    ch.swap(model)
    rows.clear()
    for _ in range(3):
        output, gradients = run(model)
        is_real = real.bool()
        within_budget("output", output[is_real], expected[is_real], truth[is_real], terms=LAYERS * 72)
        for key, right in exact.items():
            within_budget(key, gradients[key], textbook[key], right, terms=18 * 72)
    assert rows == [15] * LAYERS * 3
    assert attending(fused_kinds) == ["layer"] * LAYERS * 3
    with torch.no_grad():
        layer, x = _layers(model, name)[0], torch.randn(2, 9, 32)
        mask = make_mask(2, 9, 9, mask_function=bidirectional_mask_function, attention_mask=real.bool())
        assert torch.equal(layer(x, mask)[~is_real], torch.zeros(3, 32))
        with ch.observe(model, ch.Want(entropy=True)):
            watched = layer(x, mask)
        assert torch.equal(watched[~is_real], torch.zeros(3, 32))
        torch.testing.assert_close(watched, layer(x, mask), rtol=1e-4, atol=1e-4)


def test_leave_padding_out_false_keeps_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    model, real, rows = _model("bert"), _padded("right"), _rows(monkeypatch)
    with torch.no_grad():
        expected = _called(model, "bert", attention_mask=real)
        ch.swap(model, leave_padding_out=False)
        rows.clear()
        torch.testing.assert_close(_called(model, "bert", attention_mask=real), expected, rtol=1e-4, atol=1e-4)
        ch.swap(model)
        output = _called(model, "bert", attention_mask=real)
        torch.testing.assert_close(output[real.bool()], expected[real.bool()], rtol=1e-4, atol=1e-4)
        assert not output[~real.bool()].any()
        ch.unswap(model)
        assert not any("leaves_padding_out" in vars(part) for part in model.modules())
        assert torch.equal(_called(model, "bert", attention_mask=real), expected)
    assert rows == [18] * LAYERS + [15] * LAYERS


@pytest.mark.parametrize("length", [0, 9])
def test_fully_padded_and_unpadded_sequences(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, real, rows = _model("bert"), torch.ones(2, 9, dtype=torch.long), _rows(monkeypatch)
    real[0, length:] = 0
    with torch.no_grad():
        expected = _called(model, "bert", attention_mask=real)
        ch.swap(model)
        rows.clear()
        output = _called(model, "bert", attention_mask=real)
    torch.testing.assert_close(output[1], expected[1], rtol=1e-4, atol=1e-4)
    assert bool(output.isfinite().all())
    assert rows == [9 + length] * LAYERS


def test_causal_layers_remove_padding_without_a_cache(monkeypatch: pytest.MonkeyPatch, fused_kinds: list[str]) -> None:
    torch.manual_seed(0)
    model = transformers.GPT2Model(transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=3, n_head=4)).eval()
    real, rows = _padded("right"), _rows(monkeypatch)
    given = {"input_ids": _input("bert")["input_ids"], "attention_mask": real, "use_cache": False}
    with torch.no_grad():
        expected = model(**given).last_hidden_state
        ch.swap(model)
        rows.clear()
        output = model(**given).last_hidden_state
        torch.testing.assert_close(output[real.bool()], expected[real.bool()], rtol=1e-4, atol=1e-4)
        assert rows == [15] * 3
        # A call with a cache keeps padding.
        output = model(**{**given, "use_cache": True}).last_hidden_state
        torch.testing.assert_close(output[real.bool()], expected[real.bool()], rtol=1e-4, atol=1e-4)
    assert rows == [15] * 3 + [18] * 3


@pytest.mark.parametrize("name", NAMES)
def test_training_is_fused_within_the_error_budget(name: str, fused_kinds: list[str]) -> None:
    model = _model(name)
    with torch.no_grad():
        upstream = torch.randn(_called(model, name).shape, generator=torch.Generator().manual_seed(3))

    def gradients(of: Any) -> dict[str, Tensor]:
        output = _called(of, name)
        names, tensors = zip(*((key, part) for key, part in of.named_parameters() if part.requires_grad), strict=True)
        gradients = torch.autograd.grad(output, tensors, upstream.to(output.dtype), allow_unused=True)
        return {key: part for key, part in zip(names, gradients, strict=True) if part is not None}

    exact, textbook = gradients(copy.deepcopy(model).double()), gradients(model)
    ch.swap(model)
    for _ in range(3):
        actual = gradients(model)
        assert actual.keys() == exact.keys()
        for key, truth in exact.items():
            within_budget(key, actual[key], textbook[key], truth, terms=18 * 72)
    assert attending(fused_kinds) == ["layer"] * LAYERS * 3


@pytest.mark.parametrize("name", NAMES)
def test_dropout_gives_the_same_bits_under_observation(name: str, fused_kinds: list[str]) -> None:
    model = _model(name)
    _drop(model)
    ch.swap(model)
    with torch.no_grad():
        plain = _called(model, name)
    model.train()
    fused_kinds.clear()

    def run() -> Tensor:
        torch.manual_seed(5)
        return _called(model, name)

    first = run()
    assert torch.equal(run(), first)
    assert not torch.allclose(first, plain)
    assert attending(fused_kinds) == ["layer"] * LAYERS * 2
    with ch.observe(model, ch.Want(entropy=True)) as observations:
        observed = run()
    assert sum(ROWS[name].layers in path for path in observations) == LAYERS
    assert len(attending(fused_kinds)) == LAYERS * 2
    assert torch.equal(observed, first)
    model.eval()
    with torch.no_grad():
        assert torch.equal(_called(model, name), plain)


def _drop(model: Any) -> None:
    """Set every dropout of a model except those of embeddings."""
    for part in model.modules():
        for key, p in DROPS.items():
            if isinstance(getattr(part, key, None), float):
                setattr(part, key, p)
        if isinstance(part, nn.Dropout):
            part.p = 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_dropout_matches_the_originals_mean_and_deviation(name: str) -> None:
    """Over many draws, mean and deviation of the outputs match transformers."""
    layer = _layers(_model(name), name)[0]
    _drop(layer)
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(2))
    many = x.expand(20000, -1, -1).contiguous()
    swapped = _model(name)
    _drop(_layers(swapped, name)[0])
    ch.swap(swapped)
    ours = _layers(swapped, name)[0]
    torch.manual_seed(0)
    with torch.no_grad():
        actual, expected = (_first(each.train()(many, attention_mask=None)).double() for each in (ours, layer))
    error = (actual.var(0) / len(many) + expected.var(0) / len(many)).sqrt()
    assert bool(((actual.mean(0) - expected.mean(0)).abs() < 6 * error).all())
    torch.testing.assert_close(actual.std(0), expected.std(0), rtol=0.05, atol=0.01)


def _first(result: Any) -> Tensor:
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def test_is_causal_without_a_mask_is_fused(fused_kinds: list[str]) -> None:
    model = _model("clip, texts")
    layer, x = model.encoder.layers[0], torch.randn(2, 9, 32)
    with torch.no_grad():
        expected = [layer(x, None, is_causal=causal) for causal in (True, False)]
        ch.swap(model)
        outputs = [layer(x, None, is_causal=causal) for causal in (True, False)]
        with ch.observe(model, ch.Want(entropy=True)):
            observed = [layer(x, None, is_causal=causal) for causal in (True, False)]
    assert all(torch.equal(one, other) for one, other in zip(observed, outputs, strict=True))
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
    assert attending(fused_kinds) == ["layer"] * 2
    assert not torch.allclose(*outputs, atol=1e-2)


# ---- op-by-op fallbacks -----------------------------------------------------------------------------------


def test_bert_decoders_with_a_memory_or_a_cache_run_op_by_op(fused_kinds: list[str]) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, is_decoder=True, add_cross_attention=True)
    model, memory = transformers.BertModel(config, add_pooling_layer=False).eval(), torch.randn(2, 5, 32)
    ids = _input("bert")["input_ids"]

    def run() -> list[Tensor]:
        with torch.no_grad():
            alone = model(ids, use_cache=False).last_hidden_state
            first = model(ids[:, :6], encoder_hidden_states=memory, use_cache=True)
            rest = model(ids[:, 6:], encoder_hidden_states=memory, past_key_values=first.past_key_values)
        return [alone, first.last_hidden_state, rest.last_hidden_state]

    expected = run()
    ch.swap(model)
    torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)
    assert attending(fused_kinds) == ["layer"] * LAYERS


def test_bert_decoding_is_fused(fused_kinds: list[str]) -> None:
    torch.manual_seed(0)
    model = transformers.BertLMHeadModel(transformers.BertConfig(**SIZES, is_decoder=True)).eval()
    ids = _input("bert")["input_ids"]

    def run() -> Tensor:
        cache, outputs = transformers.DynamicCache(config=model.config), []
        for part in ids.split([5, 1, 2, 1], 1):
            with torch.no_grad():
                outputs.append(model(part, past_key_values=cache).logits)
        return torch.cat(outputs, 1)

    expected = run()
    ch.swap(model)
    torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)
    assert attending(fused_kinds) == ["layer"] * LAYERS * 4


def test_chunked_feedforwards_and_unknown_activations_run_op_by_op(fused_kinds: list[str]) -> None:
    for more in ({"chunk_size_feed_forward": 3}, {"hidden_act": "mish"}):
        torch.manual_seed(0)
        model = transformers.BertModel(transformers.BertConfig(**SIZES, **more)).eval()
        with torch.no_grad():
            expected = _called(model, "bert")
            ch.swap(model)
            torch.testing.assert_close(_called(model, "bert"), expected, rtol=1e-4, atol=1e-4)
    assert attending(fused_kinds) == []


def test_layers_with_norms_elsewhere_run_op_by_op(fused_kinds: list[str]) -> None:
    torch.manual_seed(0)
    # It has BertLayer's forward with norms in other places.
    model = transformers.RobertaPreLayerNormModel(transformers.RobertaPreLayerNormConfig(**SIZES)).eval()
    with torch.no_grad():
        expected = _called(model, "roberta")
        ch.swap(model)
        torch.testing.assert_close(_called(model, "roberta"), expected, rtol=1e-4, atol=1e-4)
    assert attending(fused_kinds) == []


def test_float16_is_clamped_as_in_the_original(fused_kinds: list[str]) -> None:
    for name in ("whisper", "bart"):
        model = _model(name, torch.float16)
        with torch.no_grad():
            _layers(model, name)[1].fc2.bias.fill_(60000.0)
            expected = _called(model, name)
            ch.swap(model)
            output = _called(model, name)
        assert bool(output.isfinite().all()) == bool(expected.isfinite().all())
    assert attending(fused_kinds) == []


# ---- hooks and changes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "part"), [(name, part) for name in NAMES for part in ROWS[name].parts])
def test_a_hook_on_a_part_fires(name: str, part: str, fused_kinds: list[str]) -> None:
    model, fired = _model(name), list[object]()
    with torch.no_grad():
        expected = _called(model, name)
        ch.swap(model)
        _called(model, name)
        fused_kinds.clear()
        handle = (
            _layers(model, name)[1].get_submodule(part).register_forward_hook(lambda *given: fired.append(given[2]))
        )
        torch.testing.assert_close(_called(model, name), expected, rtol=1e-4, atol=1e-4)
        assert len(fired) >= 1
        assert attending(fused_kinds) == ["layer"] * (LAYERS - 1)
        handle.remove()
        _called(model, name)
    assert attending(fused_kinds) == ["layer"] * (2 * LAYERS - 1)


CHANGES: Final[Mapping[str, Callable[[Any], object]]] = {
    "another activation": lambda layer: setattr(layer.intermediate, "intermediate_act_fn", nn.Tanh()),
    "another norm": lambda layer: setattr(layer.output, "LayerNorm", nn.Identity()),
    "an epsilon": lambda layer: setattr(layer.attention.output.LayerNorm, "eps", 1.0),
    "a scale": lambda layer: setattr(layer.attention.self, "scaling", 0.1),
    "chunks": lambda layer: setattr(layer, "chunk_size_feed_forward", 3),
    "another attention": lambda layer: setattr(layer.attention, "self", _Same()),
    "a weight": lambda layer: setattr(layer.output.dense, "weight", nn.Parameter(torch.randn(32, 72))),
    "a weight in place": lambda layer: layer.attention.self.value.weight.data.mul_(2.0),
    "heads": lambda layer: (
        setattr(layer.attention.self, "num_attention_heads", 2),
        setattr(layer.attention.self, "attention_head_size", 16),
    ),
}


class _Same(nn.Module):
    def forward(self, hidden_states: Tensor, **given: Any) -> tuple[Tensor, None]:
        return hidden_states, None


@pytest.mark.parametrize("change", CHANGES)
def test_changed_layers_take_effect(change: str) -> None:
    model = _model("bert")
    ch.swap(model)
    with torch.no_grad():
        before = _called(model, "bert")
        torch.manual_seed(4)
        CHANGES[change](model.encoder.layer[1])
        output = _called(model, "bert")
        ch.unswap(model)
        torch.testing.assert_close(output, _called(model, "bert"), rtol=1e-4, atol=1e-4)
    assert change == "chunks" or not torch.allclose(output, before, atol=1e-3)


def test_hidden_states_match_and_layers_stay_fused(fused_kinds: list[str]) -> None:
    model = _model("bert")
    given = _input("bert")
    with torch.no_grad():
        expected = model(**given, output_hidden_states=True).hidden_states
        ch.swap(model)
        output = model(**given, output_hidden_states=True).hidden_states
        for one, other in zip(output, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        assert attending(fused_kinds) == ["layer"] * LAYERS


@pytest.mark.parametrize("name", NAMES)
def test_calls_without_gradients_do_not_change_training(name: str) -> None:
    learns_between_calls_without_gradients(_model(name), lambda model: _called(model, name))
