"""The limits of the tab "Your model": refusals of one line, and what is cached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clearhead.errors import ClearheadError
from clearhead.lab.limits import Limits
from clearhead.lab.views import policy_of
from clearhead.readers import Reader, reader_of
from tests.lab.asking import FILMS, PLAY, TEXT, Asking, model_folders

pytest.importorskip("safetensors", reason="needs the extra 'train'")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return model_folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def ask(folders: list[Path]) -> Asking:
    return Asking(folders)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({}, "lab: model must be a whole number from 0 to 6; got nothing."),
        ({"model": 7}, "lab: model must be a whole number from 0 to 6; got 7."),
        ({"model": -1}, "lab: model must be"),
        ({"model": "../secret"}, "got '../secret'"),
        ({"model": True}, "got True"),
        ({"model": 1}, "lab: text must be a text; got nothing."),
        ({"model": 1, "text": 3}, "lab: text must be a text; got 3."),
        ({"model": 1, "text": "x" * 101}, "lab: text must have at most 100 characters; got 101. Use a shorter one."),
        ({"model": 1, "text": ""}, "text must have at least one token"),
        ({"model": 1, "text": "Speak #"}, "must have only characters of the training text; got '#'"),
        ({"model": 1, "text": "Speak, speak. All:"}, "lab: text must have at most 16 tokens; got 18."),
        ({"model": 1, "text": "Sp", "layers": [2]}, "lab: layers must be whole numbers from 0 to 1; got [2]."),
        ({"model": 1, "text": "Sp", "layers": "all"}, "lab: layers must be whole numbers"),
        ({"model": 1, "text": "Sp", "place": -1}, "lab: place must be"),
        ({"model": 1, "text": "Sp", "edits": [{"layer": 2}]}, "lab: layer must be a whole number from 0 to 1; got 2."),
        ({"model": 1, "text": "Sp", "edits": [{}]}, "lab: layer must be a whole number"),
        ({"model": 1, "text": "Sp", "edits": {}}, "lab: edits must be a list"),
        ({"model": 1, "text": "Sp", "edits": [{"layer": 0, "off": [2]}]}, "trace: heads must lie from 0 to 1; got 2."),
        ({"model": 1, "text": "Sp", "edits": [{"layer": 0, "temperature": 0}]}, "lab: temperature must be a number"),
        ({"model": 1, "text": "Sp", "edits": [{"layer": 0, "mask": "odd"}]}, "lab: mask must be one of own, none"),
        ({"model": 1, "text": "Sp", "edits": [{"layer": 0, "mask": "window", "reach": -1}]}, "lab: reach must be"),
        ({"model": 1, "text": "Sp", "edits": [{"layer": 0, "off": "all"}]}, "lab: off must be whole numbers"),
    ],
)
def test_invalid_request_raises_one_line(folders: list[Path], params: dict[str, Any], says: str) -> None:
    ask = Asking(folders, Limits(characters=100, tokens=16))
    with pytest.raises(ClearheadError) as refused:
        ask("compare", **params)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_page_above_the_limit_says_how_many_layers_fit(folders: list[Path]) -> None:
    # One layer: 2 heads of width 8, with 5 queries and 5 keys.
    ask = Asking(folders, Limits(numbers=170))
    with pytest.raises(
        ClearheadError, match=r"lab: layers must be at most 1 for a text of 5 tokens; got 2\. Choose some"
    ):
        ask("look", model=PLAY, text="Speak")
    assert ask("look", model=PLAY, text="Speak", layers=[0])["view"]


def test_model_above_the_limit_is_not_read(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Asking(folders, Limits(parameters=1000))
    monkeypatch.setattr("clearhead.lab.models.reader_of", lambda *_: pytest.fail("it was read"))
    with pytest.raises(ClearheadError, match=r"must have at most 1,000 parameters; got [\d,]+\. Use a smaller model"):
        ask("look", model=PLAY, text="Speak")


def test_number_of_loaded_models_is_limited(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def noted(function: str, folder: Path) -> Reader:
        read.append(folder)
        return reader_of(function, folder)

    monkeypatch.setattr("clearhead.lab.models.reader_of", noted)
    ask = Asking(folders, Limits(models=1))
    for model in (PLAY, PLAY, FILMS, FILMS, PLAY):
        ask("edit", model=model, text=TEXT[model])
    assert [path.name for path in read] == ["play", "films", "play"]


def test_number_of_views_is_limited_and_the_oldest_is_dropped(folders: list[Path]) -> None:
    ask = Asking(folders, Limits(views=2))
    one, two = (ask("look", model=PLAY, text="Speak")["view"] for _ in range(2))
    assert ask.views.get(one) is not None
    three = ask("look", model=PLAY, text="Speak")["view"]
    assert (len(ask.views), ask.views.get(two)) == (2, None)
    assert len({one, two, three}) == 3
    small = Asking(folders, Limits(view_bytes=1000))
    with pytest.raises(ClearheadError, match=r"look: page must have at most"):
        small("look", model=PLAY, text="Speak")


def test_view_has_its_own_policy_and_a_sandbox(ask: Asking) -> None:
    html = ask.views.get(ask("look", model=PLAY, text="Speak")["view"])
    assert html is not None
    policy = policy_of(html)
    assert policy.startswith("sandbox allow-scripts allow-downloads; frame-ancestors 'self'; default-src 'none'; ")
    assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]
    assert "allow-same-origin" not in policy
