"""The page in a real Chromium, offline."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clearhead.inspector import render, write_page
from tests.inspector.chromium import Opened, chromium
from tests.inspector.sample import COLUMNS, HEADS, LAYERS, SCALE, TOKENS, sample

pytestmark = pytest.mark.browser

SAMPLE = sample()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    opened: list[Opened] = []

    def open_it(data: dict[str, Any] | str = SAMPLE.data, **settings: Any) -> Opened:
        path = tmp_path / "index.html"
        if isinstance(data, str):
            path.write_text(data, "utf-8")
        else:
            write_page(data, path)
        opened.append(Opened(browser, path, **settings))
        return opened[-1]

    yield open_it
    for page in opened:
        page.context.close()


Open = Callable[..., Opened]


def test_it_opens_offline_and_asks_for_nothing_else(open_page: Open) -> None:
    seen = open_page()
    seen.page.locator(".head").nth(1).click()
    assert len(seen.requests) == 1
    assert seen.requests[0].startswith("file://")
    assert seen.complaints == []
    assert seen.page.locator("#alert").is_hidden()


def test_it_shows_the_digit_the_heads_and_the_results(open_page: Open) -> None:
    seen = open_page()
    assert seen.text("h1") == "A sample"
    assert seen.page.locator(".head").count() == LAYERS * HEADS
    assert seen.page.locator("#digit .cell").count() == TOKENS
    shades = seen.read("[...document.querySelectorAll('#digit .cell')].map((cell) => cell.style.backgroundColor)")
    values = SAMPLE.data["examples"][0]["values"]
    assert len({(value, shade) for value, shade in zip(values, shades, strict=True)}) == len(set(values))
    assert len(set(shades)) == len(set(values))
    facts = seen.text("#facts")
    assert "98.1%" in facts
    assert "352 of 359" in facts
    assert "but it is no" in seen.text("#verdict")
    assert seen.text("#made") == "made by a test"


def test_its_weights_are_the_librarys(open_page: Open) -> None:
    seen = open_page()
    random = np.random.default_rng(0)
    for _ in range(40):
        example, layer, head, token = (int(random.integers(size)) for size in (3, LAYERS, HEADS, TOKENS))
        at = {"example": example, "layer": layer, "head": head, "token": token}
        theirs = seen.read("(at) => clearhead.weights(at)", at)
        ours = SAMPLE.weights[example, layer, head, token].numpy()
        assert np.abs(np.array(theirs) - ours).max() < 1e-5


def test_the_map_that_is_drawn_holds_these_weights(open_page: Open) -> None:
    seen = open_page()
    drawn = seen.read("[...document.querySelectorAll('#map .cell')].map((cell) => Number(cell.dataset.weight))")
    assert np.abs(np.array(drawn) - SAMPLE.weights[0, 1, 2, 3].numpy()).max() < 1e-5
    seen.page.locator("#mode-received").click()
    drawn = seen.read("[...document.querySelectorAll('#map .cell')].map((cell) => Number(cell.dataset.weight))")
    assert np.abs(np.array(drawn) - SAMPLE.weights[0, 1, 2].mean(dim=0).numpy()).max() < 1e-5


def test_it_starts_with_the_most_telling_view(open_page: Open) -> None:
    seen = open_page()
    assert seen.text("#map-title") == "Layer 1, head 2"
    assert seen.page.locator(".head[aria-checked=true]").count() == 1
    assert "(0, 3)" in seen.text("#map-caption")


def test_a_head_and_a_pixel_can_be_chosen(open_page: Open) -> None:
    seen = open_page()
    before = seen.page.locator("#map").evaluate("(map) => map.innerHTML")
    seen.page.locator(".head").nth(1).click()
    assert seen.text("#map-title") == "Layer 0, head 1"
    after_head = seen.page.locator("#map").evaluate("(map) => map.innerHTML")
    assert after_head != before
    seen.page.locator("#digit .cell").nth(7).click()
    assert seen.read("[clearhead.view.layer, clearhead.view.head, clearhead.view.token]") == [0, 1, 7]
    assert "(1, 3)" in seen.text("#map-caption")
    assert seen.page.locator("#map").evaluate("(map) => map.innerHTML") != after_head
    best = int(SAMPLE.weights[0, 0, 1, 7].argmax())
    assert f"looks most at key ({best // COLUMNS}, {best % COLUMNS})" in seen.text("#readout")
    assert seen.text("#keys tbody th >> nth=0") == f"({best // COLUMNS}, {best % COLUMNS})"


def test_another_sequence_can_be_picked(open_page: Open) -> None:
    seen = open_page()
    seen.page.locator(".example").nth(2).click()
    assert "Sequence 2" in seen.text("#verdict")
    assert "and right" in seen.text("#verdict")
    assert seen.read("[clearhead.view.layer, clearhead.view.head, clearhead.view.token]") == [1, 2, 5]


def test_hovering_says_query_key_and_weight(open_page: Open) -> None:
    seen = open_page()
    seen.page.locator("#map .cell").nth(6).hover()
    weight = SAMPLE.weights[0, 1, 2, 3, 6].item()
    said = seen.text("#readout")
    assert said.startswith("Query (0, 3) → key (1, 2): weight ")
    found = re.search(r"weight (\d\.\d+)", said)
    assert found is not None
    assert abs(float(found[1]) - weight) <= 0.5e-4 + 1e-6


def test_the_keyboard_reaches_everything(open_page: Open) -> None:
    seen = open_page()
    keys = seen.page.keyboard
    seen.page.locator("#digit .cell[tabindex='0']").focus()
    keys.press("ArrowRight")
    keys.press("ArrowLeft")
    keys.press("ArrowDown")
    assert seen.read("clearhead.view.token") == 3 + COLUMNS
    keys.press("Home")
    assert seen.read("clearhead.view.token") == COLUMNS
    seen.page.locator(".head[tabindex='0']").focus()
    keys.press("ArrowLeft")
    assert seen.read("[clearhead.view.layer, clearhead.view.head]") == [1, 1]
    keys.press("ArrowUp")
    assert seen.read("[clearhead.view.layer, clearhead.view.head]") == [0, 1]
    seen.page.locator(".example[tabindex='0']").focus()
    keys.press("ArrowRight")
    assert seen.read("clearhead.view.example") == 1
    seen.page.locator("#mode-token").focus()
    keys.press("ArrowRight")
    assert seen.read("clearhead.view.mode") == "received"
    names = seen.read(
        "[...document.querySelectorAll('button, [role=gridcell], [role=img]')]"
        ".filter((one) => !(one.getAttribute('aria-label') || one.textContent.trim())).length"
    )
    assert names == 0


def test_tab_visits_each_group_once(open_page: Open) -> None:
    seen = open_page()
    visited = []
    for _ in range(10):  # one more would come back to the start
        seen.page.keyboard.press("Tab")
        visited.append(seen.read("document.activeElement.closest('[id]')?.id ?? ''"))
    stops = [name for name in visited if name]
    for group in ("theme", "examples", "heads", "shared", "mode-token", "digit", "map"):
        assert stops.count(group) == 1, (group, visited)


def test_the_steps_are_recomputed_in_float64(open_page: Open) -> None:
    seen = open_page()
    rows = seen.read("[...document.querySelectorAll('#steps tbody tr')].map((row) => row.dataset.step)")
    assert rows == ["query", "scores", "scaled", "mask", "weights", "head output", "head’s part"]
    steps = seen.read(
        "(at) => Object.fromEntries(Object.entries(clearhead.steps(at)).map(([name, v]) => [name, Array.from(v)]))",
        {"example": 0, "layer": 1, "head": 2, "token": 3},
    )
    assert np.allclose(np.array(steps["scaled"]), SCALE * np.array(steps["scores"]), rtol=1e-14)
    assert abs(sum(steps["weights"]) - 1) < 1e-14
    assert "2.0" in seen.text("#steps tbody tr:nth-child(2) td:last-child")


def test_the_librarys_output_is_checked_in_the_browser(open_page: Open) -> None:
    gaps = re.findall(r"by (?:at most )?([\d.]+)(?:\u202fe\u2212(\d+))?", open_page().text("#gap"))
    assert len(gaps) == 2
    assert all(float(number) * 10 ** -int(power or 0) < 1e-5 for number, power in gaps)
    data = sample(examples=1).data
    data["examples"][0]["layers"][1]["output"] = data["examples"][0]["layers"][0]["output"]
    assert "\u202fe" not in open_page(data).text("#gap").partition("log-sum-exp")[0], "a wrong output shows"


def test_a_row_of_the_whole_matrix_chooses_its_query(open_page: Open) -> None:
    seen = open_page()
    box = seen.page.locator("#matrix").bounding_box()
    seen.page.locator("#matrix").click(position={"x": 5, "y": box["height"] * 7.5 / TOKENS})
    assert seen.read("clearhead.view.token") == 7
    dark = seen.read("""() => {
      const canvas = document.getElementById("matrix");
      return [...canvas.getContext("2d").getImageData(0, 7, canvas.width, 1).data].filter((_, i) => i % 4 === 0);
    }""")
    assert int(np.argmin(dark)) == int(SAMPLE.weights[0, 1, 2, 7].argmax())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_have_readable_text(open_page: Open, scheme: str) -> None:
    seen = open_page(color_scheme=scheme)
    contrast = seen.read("""() => {
      const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
      const linear = (c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
      const light = (text) => rgb(text).map((c) => linear(c / 255))
        .reduce((total, c, place) => total + c * [0.2126, 0.7152, 0.0722][place], 0);
      const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
      const card = getComputedStyle(document.querySelector(".card")).backgroundColor;
      return ["h2", ".hint", "#readout", "#steps th", ".few", ".head .peak", ".example.wrong span"]
        .map((one) => ratio(getComputedStyle(document.querySelector(one)).color, card));
    }""")
    assert min(contrast) >= 4.5, contrast  # WCAG 2.2, 1.4.3
    ramp = seen.read("""() => {
      const canvas = document.getElementById("legend");
      const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, 1).data;
      const part = [0.2126, 0.7152, 0.0722];
      const light = (i) => part.reduce((total, factor, channel) => total + factor * data[4 * i + channel], 0);
      return Array.from({length: canvas.width}, (_, i) => light(i));
    }""")
    change = np.diff(ramp)
    # Lightness alone must tell weights apart, whatever colours an eye can see; half a grey level is rounding.
    assert (change <= 0.5).all() or (change >= -0.5).all()
    assert abs(ramp[-1] - ramp[0]) > 120


def test_the_theme_can_be_switched(open_page: Open) -> None:
    seen = open_page(color_scheme="light")
    before = seen.read("getComputedStyle(document.body).backgroundColor")
    seen.page.locator("#theme").click()
    seen.page.locator("#theme").click()
    assert seen.text("#theme") == "Theme: dark"
    assert seen.read("getComputedStyle(document.body).backgroundColor") != before


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_window(open_page: Open, width: int) -> None:
    seen = open_page()
    seen.page.set_viewport_size({"width": width, "height": 800})
    assert seen.read("document.documentElement.scrollWidth") <= width


HOSTILE = '</script><script>alert("ran")</script><img src=x onerror=alert("ran")>'


def test_hostile_text_is_shown_and_not_run(open_page: Open) -> None:
    data = sample(examples=1).data | {"title": HOSTILE, "classes": [HOSTILE, "b"], "made_by": HOSTILE}
    data["examples"][0] |= {"name": HOSTILE, "predicted": 0}
    data["facts"] = [{"label": HOSTILE, "value": HOSTILE, "note": HOSTILE}]
    seen = open_page(data)
    assert seen.complaints == []
    assert seen.text("h1") == HOSTILE
    assert HOSTILE in seen.text("#verdict")
    assert seen.text("#facts .value") == HOSTILE
    assert seen.page.locator("img").count() == 0
    assert len(seen.requests) == 1


DAMAGE: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("its data has version 9, and this page reads version 1", lambda d: d.update(version=9)),
    ("its data is not of the format clearhead-page", lambda d: d.update(format="<b>x</b>")),
    ("grid.rows is not a whole number", lambda d: d["grid"].update(rows="3")),
    ("it holds no sequence", lambda d: d.update(examples=[])),
    ("examples[1].layers[0].key is not base64", lambda d: d["examples"][1]["layers"][0].update(key="@")),
    ("examples[1].layers[0].key does not hold 180 numbers", lambda d: d["examples"][1]["layers"][0].update(key="AAAA")),
    ("examples[0].values does not have 12 numbers", lambda d: d["examples"][0]["values"].pop()),
    ("examples[2].telling names no view", lambda d: d["examples"][2].update(telling=None)),
]


@pytest.mark.parametrize(("says", "change"), DAMAGE, ids=[says for says, _ in DAMAGE])
def test_damaged_data_gives_a_plain_message(
    open_page: Open, says: str, change: Callable[[dict[str, Any]], object]
) -> None:
    whole = sample().data
    page = render(whole)
    marked = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert marked is not None
    change(whole)
    seen = open_page(page.replace(marked[1], json.dumps(whole).replace("<", "\\u003c")))
    assert seen.text("#alert") == f"This page cannot be shown: {says}. Make it again with the command that wrote it."
    assert seen.page.locator("#main").is_hidden()
    assert seen.complaints == []


def test_a_page_that_was_cut_short_says_so(open_page: Open) -> None:
    page = render(SAMPLE.data)
    start = page.index('id="data">') + len('id="data">')
    seen = open_page(page[: start + 500] + page[page.index("</script>", start) :])
    assert "its data is not whole JSON" in seen.text("#alert")
