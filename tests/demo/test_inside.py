"""What the demo says about a model: that its checks can fail, and that its figures are what they claim to be."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.demo.exact import Agreement, compare, exact
from clearhead.demo.inside import influence, layers_on, most_influential
from clearhead.demo.speed import as_torch, measure
from clearhead.demo.training import Recipe, log_probabilities, new_model
from clearhead.nn import SequenceClassifier
from clearhead.observe.capture import attention_modules
from clearhead.observe.explain import explain

RECIPE = Recipe(embed_dim=16, num_heads=2)


@pytest.fixture(scope="module")
def model() -> SequenceClassifier:
    return new_model(RECIPE, 0).eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 17, (6, 64), generator=torch.Generator().manual_seed(0))


def test_model_is_deterministic_for_a_seed() -> None:
    vector = torch.nn.utils.parameters_to_vector
    first, repeated, other = (vector(new_model(RECIPE, seed).parameters()) for seed in (0, 0, 1))
    assert torch.equal(first, repeated)
    assert not torch.equal(first, other)


def test_exact_equals_a_hand_computed_row() -> None:
    query = torch.tensor([[[[1.0, 0.0]]]])
    key = torch.tensor([[[[2.0, 0.0], [0.0, 5.0]]]])
    value = torch.tensor([[[[1.0], [3.0]]]])
    captured = exact(query, key, value, 0.5)
    first = np.e / (np.e + 1)
    assert np.allclose(captured.weights, [first, 1 - first], rtol=1e-15)
    assert np.allclose(captured.output, first + 3 * (1 - first), rtol=1e-15)
    assert np.allclose(captured.lse, np.log(np.e + 1), rtol=1e-15)


def test_every_head_agrees_with_float64(model: SequenceClassifier, ids: torch.Tensor) -> None:
    agreement = compare(layers_on(model, ids))
    assert agreement.holds
    assert agreement.sequences == 6
    assert [len(row) for row in agreement.worst] == [2, 2]
    assert 0 < agreement.largest < 1e-5


def test_wrong_head_is_detected(model: SequenceClassifier, ids: torch.Tensor) -> None:
    layers = layers_on(model, ids)
    heads = layers[1].heads.clone()
    heads[3, 1, 5, 2] += 1e-4
    layers[1] = dataclasses.replace(layers[1], heads=heads)
    agreement = compare(layers)
    assert not agreement.holds
    assert agreement.place == (1, 1)
    assert agreement.largest == pytest.approx(1e-4, rel=0.05)


def test_nan_does_not_hold() -> None:
    assert not Agreement(1, ((float("nan"),),), ((1e-6,),)).holds


def test_captured_tensors_equal_the_module(model: SequenceClassifier, ids: torch.Tensor) -> None:
    for layer, module in zip(layers_on(model, ids), attention_modules(model).values(), strict=True):
        output = ch.attention(layer.query, layer.key, layer.value)
        assert torch.allclose(output, layer.heads, atol=1e-6)
        assert module.output_projection is not None
        with torch.no_grad():
            joined = module.output_projection(layer.heads.transpose(1, 2).flatten(-2))
            assert torch.allclose(joined, module(layer.x), atol=1e-6)


def test_influence_is_the_loss_without_the_head(model: SequenceClassifier, ids: torch.Tensor) -> None:
    lost = influence(model, ids[0], 3)
    assert np.shape(lost) == (2, 2)
    before = log_probabilities(model, ids[:1])[0, 3].item()
    silenced = new_model(RECIPE, 0).eval()
    module = list(attention_modules(silenced).values())[1]
    assert module.output_projection is not None
    with torch.no_grad():
        module.output_projection.weight[:, :8] = 0.0  # head 0's channels
    assert lost[1][0] == pytest.approx(before - log_probabilities(silenced, ids[:1])[0, 3].item(), abs=1e-6)
    assert log_probabilities(model, ids[:1])[0, 3].item() == before, "the model is as it was"


@pytest.mark.slow
def test_most_influential_returns_the_head_with_the_largest_loss(model: SequenceClassifier, ids: torch.Tensor) -> None:
    focus = most_influential(layers_on(model, ids), [[0.0, 0.1], [0.3, 0.2]], 2)
    assert (focus.layer, focus.head) == (1, 0)
    norms = []
    for token in range(64):
        part = explain(model, ids[2:3], layer=1, head=0, token=token).part
        assert part is not None
        norms.append(part.norm().item())
    assert norms[focus.token] == pytest.approx(max(norms), rel=1e-6)


def test_as_torch_gives_the_same_output(model: SequenceClassifier, ids: torch.Tensor) -> None:
    layer = layers_on(model, ids)[0]
    with torch.no_grad():
        theirs = as_torch(layer.module)(layer.x, layer.x, layer.x, need_weights=False)[0]
        assert torch.allclose(theirs, layer.module(layer.x), atol=1e-5)
    speed = measure(layer, repeats=3, seconds=1.0)
    assert speed.difference < 1e-5
    assert speed.times == pytest.approx(speed.torch.median / speed.ours.median)
    assert f"torch {torch.__version__}" in speed.conditions()
