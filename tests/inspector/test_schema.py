"""The format of a page's data: what it accepts, and that it names what is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clearhead.errors import DataError
from clearhead.inspector import pack_floats, unpack_floats, validate
from clearhead.inspector.schema import FIELDS
from tests.inspector.sample import sample

DATA = sample(examples=1).data


def broken(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    data = copy.deepcopy(DATA)
    change(data)
    return data


def test_a_whole_page_is_accepted() -> None:
    validate(DATA)


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_needed(name: str) -> None:
    with pytest.raises(DataError, match=rf"validate: {name} must be there; got nothing\. Make the page again\."):
        validate(broken(lambda data: data.pop(name)))


def test_an_added_field_is_no_error() -> None:
    validate(broken(lambda data: data.update(comment="later versions may say more")))


WRONG: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("format must be 'clearhead-page'", lambda d: d.update(format="other")),
    ("version must be 1; got 2", lambda d: d.update(version=2)),
    ("version must be 1; got True", lambda d: d.update(version=True)),
    ("title must be text", lambda d: d.update(title=None)),
    ("classes must have at least 2", lambda d: d.update(classes=["one"])),
    ("grid.rows must be a whole number", lambda d: d["grid"].update(rows=0)),
    ("attention.scale must be a finite number", lambda d: d["attention"].update(scale=float("nan"))),
    ("examples must have at least 1", lambda d: d.update(examples=[])),
    ("examples must be a list", lambda d: d.update(examples=7)),
    ("output_weights must be a list of 2", lambda d: d["output_weights"].pop()),
    ("examples[0].values must be a list of 12", lambda d: d["examples"][0]["values"].pop()),
    ("examples[0].values must be a whole number from 0 to 4", lambda d: d["examples"][0].update(values=[5] * 12)),
    ("examples[0].truth must be a whole number from 0 to 1", lambda d: d["examples"][0].update(truth=2)),
    ("examples[0].predicted must be", lambda d: d["examples"][0].update(predicted=None)),
    ("probabilities must be a number from 0 to 1", lambda d: d["examples"][0].update(probabilities=[0.5, 1.5])),
    ("telling.head must be", lambda d: d["examples"][0]["telling"].update(head=3)),
    ("influence must be a list of 3", lambda d: d["examples"][0]["influence"][1].pop()),
    ("examples[0].layers must have 2 entries", lambda d: d["examples"][0]["layers"].pop()),
    ("layers[1].query must be base64", lambda d: d["examples"][0]["layers"][1].update(query="@@@")),
    ("layers[1].key must be base64 of 3 x 12 x 5", lambda d: d["examples"][0]["layers"][1].update(key="AAAA")),
    (
        "layers[0].lse must be base64 of 3 x 12 finite",
        lambda d: d["examples"][0]["layers"][0].update(lse=pack_floats(np.full(36, np.inf))),
    ),
    ("examples[0].layers must be a list", lambda d: d["examples"][0].update(layers={})),
]


@pytest.mark.parametrize(("says", "change"), WRONG, ids=[says for says, _ in WRONG])
def test_what_is_wrong_is_named(says: str, change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(DataError) as caught:
        validate(broken(change))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("data", [None, [], "page", {}])
def test_other_things_are_refused(data: object) -> None:
    with pytest.raises(DataError, match="must be"):
        validate(data)


def test_packed_floats_come_back_bit_for_bit() -> None:
    numbers = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    assert np.array_equal(unpack_floats(pack_floats(numbers)), numbers.ravel())
