"""The demo's page data: valid, and the browser's numbers can be remade from it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from clearhead.demo.contents import LOST, page_of, pick
from clearhead.demo.digits import Digits
from clearhead.demo.inside import influence, layers_on, most_influential
from clearhead.demo.training import Recipe, log_probabilities, new_model
from clearhead.demo.words import beside, blocks
from clearhead.inspector import validate
from clearhead.inspector.arrays import unpack
from clearhead.nn import SequenceClassifier
from clearhead.observe.explain import explain
from tests.inspector.sample import TOLERANCE, page_weights


@pytest.fixture(scope="module")
def model() -> SequenceClassifier:
    return new_model(Recipe(embed_dim=16, num_heads=2), 0).eval()


@pytest.fixture(scope="module")
def digits() -> Digits:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 17, (40, 64), generator=generator)
    return Digits(ids, torch.arange(40) % 10, torch.arange(100, 140))


def test_demo_page_is_valid_and_contains_the_weights(model: SequenceClassifier, digits: Digits) -> None:
    shown = digits.select(torch.tensor([3, 8]))
    facts = [{"label": "a", "value": "b", "note": "c"}]
    data = json.loads(json.dumps(page_of(model, shown, facts).data))
    validate(data)
    assert data["facts"] == facts
    run, layer = data["runs"][1], data["layers"][3]
    assert run["name"].startswith("digit 108")
    assert sum(bar["value"] for bar in run["bars"]) == pytest.approx(1)
    assert (layer["run"], layer["image"]) == (1, 1)
    assert layer["name"] == data["layers"][1]["name"] == "encoder.blocks.1.attention"
    weights, head = page_weights(data, 3, 1), layer["heads"][1]
    observed = explain(model, shown.ids[1:], layer=1, head=1, token=9)
    assert np.abs(weights[9] - observed.weights.numpy()).max() <= TOLERANCE
    step = observed.step("weighted sum")
    assert step is not None
    output = weights[9] @ unpack(layer["values"][head["key"]]) + unpack(head["rest"])[9]
    assert np.abs(output - step.exact.numpy()).max() <= TOLERANCE
    pixels = unpack(data["images"][1]["pixels"])[..., 0]
    assert np.array_equal(pixels.reshape(-1), np.rint(shown.ids[1].numpy() * 255 / 16))


def test_each_digit_starts_with_its_most_influential_head(model: SequenceClassifier, digits: Digits) -> None:
    shown = digits.select(torch.tensor([3, 8, 21]))
    data = page_of(model, shown, []).data
    chances = log_probabilities(model, shown.ids)
    for place, run in enumerate(data["runs"]):
        predicted = int(chances[place].argmax())
        lost = influence(model, shown.ids[place], predicted)
        layers = [layer for layer in data["layers"] if layer["run"] == place]
        assert [[head["scores"][LOST] for head in layer["heads"]] for layer in layers] == lost
        focus = most_influential(layers_on(model, shown.ids), lost, place)
        assert data["layers"][run["start"]["layer"]] is layers[focus.layer]
        assert (run["start"]["head"], run["start"]["query"]) == (focus.head, focus.token)
        assert f"The model predicts {predicted} " in run["says"]
        assert run["name"].endswith("✗") == (predicted != int(shown.labels[place]))


def test_pick_returns_ten_classes_and_confident_mistakes(model: SequenceClassifier, digits: Digits) -> None:
    places = pick(model, digits, mistakes=3)
    assert digits.labels[places[:10]].tolist() == list(range(10))
    assert len(set(places)) == len(places) == 13
    sure, predicted = log_probabilities(model, digits.ids).max(dim=-1)
    assert all(int(predicted[place]) != int(digits.labels[place]) for place in places[10:])
    assert sure[places[10]] >= sure[places[11]] >= sure[places[12]]


def test_blocks_are_darker_for_larger_numbers() -> None:
    drawn = blocks([0.0, 16.0, *[8.0] * 62], 16.0)
    assert drawn[1] == "│  ██" + "▒▒" * 6 + "│"
    assert len(drawn) == 10
    assert {len(line) for line in drawn} == {18}


def test_beside_keeps_the_lines() -> None:
    assert beside(["a", "bb"], ["c"]) == ["a    c", "bb"]
