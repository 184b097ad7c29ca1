"""The demo's page data: valid, and the browser's numbers can be remade from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clearhead.demo.contents import page_data, pick
from clearhead.demo.digits import Digits
from clearhead.demo.training import Recipe, log_probabilities, new_model
from clearhead.demo.words import beside, blocks
from clearhead.inspector import unpack_floats, validate
from clearhead.inspector.schema import STEPS
from clearhead.nn import SequenceClassifier
from clearhead.observe.explain import explain


@pytest.fixture(scope="module")
def model() -> SequenceClassifier:
    return new_model(Recipe(embed_dim=16, num_heads=2), 0).eval()


@pytest.fixture(scope="module")
def digits() -> Digits:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 17, (40, 64), generator=generator)
    return Digits(ids, torch.arange(40) % 10, torch.arange(100, 140))


def test_the_data_follows_the_format_and_gives_back_the_weights(model: SequenceClassifier, digits: Digits) -> None:
    shown = digits.taken(torch.tensor([3, 8]))
    data = page_data(model, shown, [{"label": "a", "value": "b", "note": "c"}])
    validate(data)
    example = data["examples"][1]
    assert (example["name"], example["truth"]) == ("Digit 108", 8)
    assert sum(example["probabilities"]) == pytest.approx(1)
    packed = example["layers"][1]
    query, key = (unpack_floats(packed[name]).reshape(2, 64, 8).astype(np.float64) for name in ("query", "key"))
    seen = explain(model, shown.ids[1:], layer=1, head=1, token=9)
    scores = data["attention"]["scale"] * key[1] @ query[1, 9]
    weights = np.exp(scores - unpack_floats(packed["lse"]).reshape(2, 64)[1, 9])
    assert np.abs(weights - seen.weights.numpy()).max() < 1e-6
    differences = unpack_floats(packed["differences"]).reshape(len(STEPS), 2, 64)
    assert float(differences.max()) < 1e-5
    assert float(differences.max()) > 0


def test_ten_classes_are_shown_and_then_the_surest_mistakes(model: SequenceClassifier, digits: Digits) -> None:
    places = pick(model, digits, mistakes=3)
    assert digits.labels[places[:10]].tolist() == list(range(10))
    assert len(set(places)) == len(places) == 13
    sure, predicted = log_probabilities(model, digits.ids).max(dim=-1)
    assert all(int(predicted[place]) != int(digits.labels[place]) for place in places[10:])
    assert sure[places[10]] >= sure[places[11]] >= sure[places[12]]


def test_blocks_are_darker_where_numbers_are_larger() -> None:
    drawn = blocks([0.0, 16.0, *[8.0] * 62], 16.0)
    assert drawn[1] == "│  ██" + "▒▒" * 6 + "│"
    assert len(drawn) == 10
    assert {len(line) for line in drawn} == {18}


def test_texts_beside_each_other_keep_their_lines() -> None:
    assert beside(["a", "bb"], ["c"]) == ["a    c", "bb"]
