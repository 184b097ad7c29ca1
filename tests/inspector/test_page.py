"""The page as a file: self-contained, inert data, written whole or not at all."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from clearhead.errors import DataError
from clearhead.inspector import render, write_page
from clearhead.inspector.html import inert
from tests.inspector.sample import sample


def data_in(page: str) -> object:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_data_comes_back_out_of_the_page() -> None:
    data = sample(examples=1).data
    assert data_in(render(data)) == data


def test_nothing_is_loaded_from_anywhere() -> None:
    page = render(sample(examples=1).data)
    markup = page.replace("http://www.w3.org/2000/svg", "")  # a namespace's name, which nobody fetches
    assert not re.search(r"https?://|//cdn|@import|url\(", markup)
    assert not re.search(r"<(?:script|img|iframe|object)[^>]*\ssrc=", markup)
    assert re.findall(r'href="([^"]*)"', markup) == ["data:,", "#view"]
    assert "default-src 'none'" in page


def test_no_place_of_the_template_is_left_open() -> None:
    assert "{{" not in render(sample(examples=1).data)


HOSTILE = '</script><script>alert(1)</script><!--<img src=x onerror="alert(2)">&amp;\u2028{{script}}'


def test_hostile_text_stays_text() -> None:
    data = sample(examples=1).data | {"title": HOSTILE, "classes": [HOSTILE, "yes"], "made_by": HOSTILE}
    page = render(data)
    assert data_in(page) == data
    assert page.count("</script>") == 2
    assert "<img" not in page
    assert "<!--" not in page


def test_inert_text_holds_no_markup() -> None:
    assert not set("<>&\u2028\u2029") & set(inert({"text": HOSTILE}))


def test_the_scripts_put_no_text_in_as_markup() -> None:
    page = render(sample(examples=1).data)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", page)


def test_damaged_data_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"render: version must be 1"):
        write_page(sample(examples=1).data | {"version": 3}, tmp_path / "page" / "index.html")
    assert list(tmp_path.iterdir()) == []


def test_the_page_replaces_an_older_one_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "index.html"
    path.write_text("older")

    def interrupted(source: object, target: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_page(sample(examples=1).data, path)
    assert path.read_text() == "older"
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    assert write_page(sample(examples=1).data, path).read_text("utf-8").startswith("<!doctype html>")
