"""Layers that add to scores by relative positions, MPNet's and DeBERTa's, against the original in float64."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from typing import Any, Final

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")

import clearhead as ch  # noqa: E402
from clearhead.integrations.transformers import layer as layers  # noqa: E402
from clearhead.integrations.transformers.relative import bias_rule, buckets_of, disentangled_bias  # noqa: E402
from clearhead.scores import DenseBias, RelativeBias  # noqa: E402
from tests.bridges.hf_checks import attending, distinct, ids_of  # noqa: E402
from tests.bridges.hf_models import needs_5  # noqa: E402
from tests.budget import within_budget  # noqa: E402

pytestmark = pytest.mark.covering(0)

WIDTH: Final = 32
_SMALL: Final[Mapping[str, Any]] = {
    "vocab_size": 50, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 96, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_RELATIVE: Final[Mapping[str, Any]] = {**_SMALL, "relative_attention": True}
_BOTH: Final = ["p2c", "c2p"]
DEBERTA: Final[Mapping[str, Mapping[str, Any]]] = {
    "v3": {**_RELATIVE, "position_buckets": 4, "norm_rel_ebd": "layer_norm", "share_att_key": True,
           "pos_att_type": _BOTH, "position_biased_input": False, "type_vocab_size": 0},
    "v2": {**_RELATIVE, "pos_att_type": _BOTH, "conv_kernel_size": 3, "conv_act": "gelu"},
    "few distances": {**_RELATIVE, "pos_att_type": _BOTH, "max_relative_positions": 3},
    "content to position": {**_RELATIVE, "position_buckets": 4, "pos_att_type": ["c2p"]},
    "position to content": {**_RELATIVE, "position_buckets": 4, "pos_att_type": ["p2c"]},
    "no terms": {**_RELATIVE, "pos_att_type": []},
    "absolute": {**_SMALL, "pos_att_type": ["c2p"]},
}  # fmt: skip
NAMES: Final = ("mpnet", *DEBERTA)


@pytest.fixture(autouse=True)
def native(_kernels: None) -> None:
    """Use the kernels on every processor."""


def _made(name: str) -> Any:
    if name == "mpnet":
        return transformers.MPNetModel(transformers.MPNetConfig(**_SMALL, pad_token_id=1))
    return transformers.DebertaV2Model(transformers.DebertaV2Config(**DEBERTA[name]))


def _model(name: str) -> Any:
    return distinct(lambda: _made(name))


def _batch(padding: str, length: int) -> tuple[dict[str, Tensor], Tensor]:
    real = torch.ones(2, length, dtype=torch.long)
    if padding != "none":
        real[0, slice(0, 3) if padding == "left" else slice(length - 3, length)] = 0
    batch = {"input_ids": ids_of(2, length)} | ({} if padding == "none" else {"attention_mask": real})
    return batch, real.bool()


def _outputs(model: Any, batch: Mapping[str, Tensor], real: Tensor) -> Tensor:
    output: Tensor = model(**batch).last_hidden_state[real]
    return output


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of a swapped layer, whether it was taken."""
    fused, call = list[bool](), layers.layer_output

    def spy(*args: Any, **kwargs: Any) -> Tensor | None:
        output = call(*args, **kwargs)
        fused.append(output is not None)
        return output

    from clearhead.integrations.transformers import forwards

    monkeypatch.setattr(forwards, "layer_output", spy)
    return fused


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_outputs_and_gradients_are_within_the_error_budget(name: str, padding: str, calls: list[bool]) -> None:
    model, (batch, real) = _model(name), _batch(padding, 17)
    ours, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    report = ch.swap(ours)
    assert [row.class_name for row in report.left] == []
    del calls[:]
    with torch.no_grad():
        three = [_outputs(each, batch, real) for each in (ours, model, exact)]
    within_budget("output", *three, terms=48)
    assert calls == [True] * 2
    arriving = torch.linspace(-1, 1, three[0].numel()).view_as(three[0])
    learned = [
        torch.autograd.grad(
            _outputs(each.train(), batch, real), [*each.parameters()], arriving.to(three.dtype), allow_unused=True
        )
        for each, three in zip((ours, model, exact), three, strict=True)
    ]
    assert calls == [True] * 4
    for key, actual, textbook, truth in zip(dict(model.named_parameters()), *learned, strict=True):
        assert (actual is None) == (truth is None), key
        if truth is not None:
            size = float(truth.abs().max())
            within_budget(key, actual, textbook, truth, terms=34 * 48, size=size)


@pytest.mark.parametrize("length", [1, 2, 40])
@pytest.mark.parametrize("name", ["mpnet", "v3", "v2"])
def test_short_and_long_sequences_are_computed(name: str, length: int, calls: list[bool]) -> None:
    model, batch = _model(name), {"input_ids": ids_of(2, length)}
    ours, exact, real = copy.deepcopy(model), copy.deepcopy(model).double(), torch.ones(2, length).bool()
    ch.swap(ours)
    del calls[:]
    with torch.no_grad():
        within_budget("output", *(_outputs(each, batch, real) for each in (ours, model, exact)), terms=48)
    assert calls == [True] * 2


@torch.no_grad()
def test_mpnet_is_one_operator_and_deberta_its_parts(fused_kinds: list[str]) -> None:
    for name, how, kinds in (("mpnet", "fused", 2), ("v3", "native", 0)):
        model = _model(name)
        report = ch.swap(model)
        assert {row.how for row in report.replaced if row.class_name.endswith("Layer")} == {how}
        model(ids_of())
        assert len(attending(fused_kinds)) == kinds
        del fused_kinds[:]


@needs_5
@pytest.mark.parametrize("padding", ["left", "right"])
@torch.no_grad()
def test_mpnet_removes_padding(padding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "LEAST_UNPADDED", 1)
    model, (batch, real) = _model("mpnet"), _batch(padding, 17)
    ours, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    ch.swap(ours)
    within_budget("output", *(_outputs(each, batch, real) for each in (ours, model, exact)), terms=48)
    assert bool((ours(**batch).last_hidden_state[~real] == 0.0).all())
    with ch.observe(ours, ch.Want(lse=True)):
        within_budget("observed", *(_outputs(each, batch, real) for each in (ours, model, exact)), terms=48)
        assert bool((ours(**batch).last_hidden_state[~real] == 0.0).all())
    ch.swap(ours, leave_padding_out=False)
    within_budget(
        "output",
        *(ours(**batch).last_hidden_state, *(each(**batch).last_hidden_state for each in (model, exact))),
        terms=48,
    )


@pytest.mark.parametrize("name", ["mpnet", "v3", "v2"])
def test_swap_is_undone_copied_and_pickled(name: str) -> None:
    model, batch = _model(name), _batch("right", 9)
    kinds, expected = [*map(type, model.modules())], _outputs(model, *batch)
    report = ch.swap(model)
    second = ch.swap(model)
    assert second.replaced == ()
    assert second.before == report.replaced
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for each in (model, copy.deepcopy(model), torch.load(file, weights_only=False)):
        torch.testing.assert_close(_outputs(each, *batch), expected, rtol=1e-4, atol=1e-5)
        assert ch.unswap(each).replaced == report.replaced
        assert [*map(type, each.modules())] == kinds
        assert torch.equal(_outputs(each, *batch), expected)


@pytest.mark.parametrize("name", ["mpnet", "v3"])
def test_weights_and_hidden_states_are_those_of_the_original(name: str) -> None:
    model, batch = _model(name), _batch("none", 9)[0]
    expected = model(**batch, output_attentions=True, output_hidden_states=True)
    ch.swap(model)
    actual = model(**batch, output_attentions=True, output_hidden_states=True)
    assert len(actual.attentions) == 2
    for one, other in zip(
        (*actual.attentions, *actual.hidden_states), (*expected.attentions, *expected.hidden_states), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mpnet", "v3", "v2"])
@torch.no_grad()
def test_observers_see_the_weights_of_the_original(name: str) -> None:
    model, batch = _model(name), _batch("none", 9)[0]
    weights = model(**batch, output_attentions=True).attentions
    ch.swap(model)
    plain = model(**batch).last_hidden_state
    with ch.observe(model, ch.Want(received=True)) as records:
        output = model(**batch).last_hidden_state
    torch.testing.assert_close(output, plain, rtol=1e-5, atol=1e-5)
    assert len(records) == 2
    for record, right in zip(records.values(), weights, strict=True):
        torch.testing.assert_close(record.received, right.sum(2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mpnet", "v3"])
def test_dropout_of_weights_and_outputs_is_drawn(name: str, calls: list[bool]) -> None:
    model = _model(name)
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.4
    ch.swap(model)
    model.train()
    del calls[:]
    torch.manual_seed(0)
    first, second = (model(ids_of()).last_hidden_state for _ in range(2))
    torch.manual_seed(0)
    assert torch.equal(model(ids_of()).last_hidden_state, first)
    assert not torch.equal(first, second)
    assert calls == [True] * 6


# ---- parts --------------------------------------------------------------------------------------------------


def _distances(length: int) -> Tensor:
    place = torch.arange(length)
    return (place[:, None] - place).clamp(-6, 6)[None]


@pytest.mark.parametrize("length", [1, 2, 7, 30])
@pytest.mark.parametrize("name", ["v3", "few distances", "content to position", "position to content"])
def test_disentangled_terms_are_those_of_the_module(name: str, length: int) -> None:
    core = _model(name).double().encoder.layer[0].attention.self
    query, key = (torch.randn(2, 4, length, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    embeddings = torch.randn(2 * core.pos_ebd_size, WIDTH, dtype=torch.float64, requires_grad=True)
    distances, factor = _distances(length), 1 + len(core.pos_att_type)
    buckets = buckets_of(distances, length)
    assert buckets is not None
    actual = disentangled_bias(core, query, key, buckets, embeddings)
    expected = core.disentangled_attention_bias(query.flatten(0, 1), key.flatten(0, 1), distances, embeddings, factor)
    expected = expected.view(2, 4, length, length)
    assert actual is not None
    # The module computes its scale in float32.
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    arriving, wanted = torch.randn_like(expected), [query, key, embeddings]
    for one, other in zip(
        *(torch.autograd.grad(each, wanted, arriving, allow_unused=True) for each in (actual, expected)), strict=True
    ):
        assert (one is None) == (other is None)
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_a_bias_is_a_rule_by_distance_if_it_depends_on_nothing_else() -> None:
    table = torch.randn(4, 13)
    bias = table[:, (_distances(7)[0] + 6)][None].expand(3, -1, -1, -1).contiguous()
    rule = bias_rule(bias)
    assert isinstance(rule, RelativeBias)
    assert torch.equal(rule.table, table)
    assert isinstance(bias_rule(bias.clone().requires_grad_()), DenseBias)
    bias[2, 3, 0, 1] += 1.0
    assert isinstance(bias_rule(bias), DenseBias)
    bias = bias[:1].contiguous()
    assert isinstance(bias_rule(bias), RelativeBias)
    bias[0, 3, 5, 1] += 1.0
    assert isinstance(bias_rule(bias), DenseBias)


def test_distances_that_are_none_go_to_the_original(calls: list[bool]) -> None:
    model = _model("v3")
    x, mask = torch.randn(2, 9, WIDTH), torch.ones(2, 1, 9, 9)
    distances = torch.randint(-3, 4, (1, 9, 9), generator=torch.Generator().manual_seed(0))
    assert buckets_of(distances, 9) is None
    assert buckets_of(_distances(9), 8) is None
    embeddings = model.encoder.get_rel_embedding()

    def call() -> Tensor:
        output: Tensor = model.encoder.layer[0](x, mask, relative_pos=distances, rel_embeddings=embeddings)[0]
        return output

    expected = call()
    ch.swap(model)
    del calls[:]
    torch.testing.assert_close(call(), expected, rtol=1e-4, atol=1e-5)
    assert calls == [False]


@torch.no_grad()
def test_a_bias_of_any_values_is_added(calls: list[bool]) -> None:
    model = _model("mpnet")
    x, bias = torch.randn(2, 9, WIDTH), torch.randn(2, 4, 9, 9)
    expected = model.encoder.layer[0](x, None, position_bias=bias)[0]
    ch.swap(model)
    del calls[:]
    torch.testing.assert_close(model.encoder.layer[0](x, None, position_bias=bias)[0], expected, rtol=1e-4, atol=1e-5)
    assert calls == [True]
    # The rule is cached for a tensor, and read anew once it was written.
    bias[0, 0, 0, 0] += 3.0
    changed = model.encoder.layer[0](x, None, position_bias=bias)[0]
    assert not torch.allclose(changed, expected, atol=1e-3)
    with pytest.raises(RuntimeError):
        model.encoder.layer[0](x, None, position_bias=bias[..., :5])


def test_an_empty_sentence_gives_finite_outputs() -> None:
    for name in ("mpnet", "v3"):
        model = _model(name)
        ch.swap(model)
        real = torch.ones(2, 9, dtype=torch.long)
        real[0] = 0
        output = model(ids_of(), attention_mask=real).last_hidden_state
        assert bool(output.isfinite().all())
        output.sum().backward()
        assert all(bool(part.grad.isfinite().all()) for part in model.parameters() if part.grad is not None)
