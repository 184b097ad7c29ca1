"""The views of a page, in a real Chromium: their numbers are the library's, and they are linked."""

from __future__ import annotations

import copy
import csv
import io
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.inspector import Page
from tests.inspector.fox import (
    AT,
    HEADS,
    HOSTILE,
    LAYERS,
    MODEL,
    PAGE,
    TRACED,
    WEIGHTS,
    WORDS,
    Open,
    T,
    box,
    said_weight,
    settle,
)
from tests.inspector.sample import TOLERANCE, Case, cases

pytestmark = pytest.mark.browser


def _together(named: dict[str, Case]) -> Page:
    """One page with one layer for each case."""
    whole: dict[str, Any] = {}
    for name, case in named.items():
        data = copy.deepcopy(dict(ch.view(case.query, case.key, **case.options).data))
        layer = data["layers"][0]
        if whole:
            for field in ("queries", "tokens"):
                layer[field] += len(whole["texts"])
            for head in layer["heads"]:
                head["mask"] = None if head["mask"] is None else head["mask"] + len(whole["masks"])
        for field in ("texts", "masks", "layers"):
            whole.setdefault(field, []).extend(data[field])
        layer["name"] = name
    return Page({**PAGE.data, **whole})


@pytest.mark.slow
def test_weights_in_the_browser_equal_the_library(open_page: Open) -> None:
    named = cases()
    opened = open_page(_together(named))
    draw = np.random.default_rng(0)
    for layer, (name, case) in enumerate(named.items()):
        exact = case.weights()[0]
        for head in range(exact.shape[0]):
            places = np.stack([draw.integers(size, size=60) for size in exact.shape[1:]], axis=1).tolist()
            read = opened.read(
                """async ([layer, head, places]) => {
                  const numbers = await clearhead.model.head(layer, head);
                  const tile = numbers.tile(0, numbers.rows, 0, numbers.columns);
                  const both = (row, column) => [numbers.weight(row, column), tile[row * numbers.columns + column]];
                  return places.map((place) => both(...place).map((weight) => Number.isNaN(weight) ? 0 : weight));
                }""",
                [layer, head, places],
            )
            truth = np.array([exact[head, row, column] for row, column in places])
            assert np.abs(np.array(read) - truth[:, None]).max() <= TOLERANCE, name
    assert opened.complaints == []


def test_grid_shows_every_head_and_selects_one(open_page: Open) -> None:
    opened = open_page()
    thumbs = opened.page.locator(".thumb")
    assert thumbs.count() == LAYERS * HEADS
    before = opened.text("#readout")
    thumbs.nth(4).click()
    assert opened.read(AT)[:2] == [1, 1]
    # A head is decoded after the click; the readout changes last.
    opened.page.wait_for_function("(before) => document.querySelector('#readout').innerText !== before", arg=before)
    assert "head 1" in opened.text("#head-title")
    row = T - 1
    weight = WEIGHTS[1][1, row, row]
    assert abs(said_weight(opened.text("#readout")) - weight) <= TOLERANCE
    entropy = PAGE.data["layers"][1]["heads"][1]["scores"]["entropy"]
    assert thumbs.nth(4).locator(".badge.entropy").inner_text() == f"{entropy:.2f}"


def test_heads_are_sorted_and_filtered_by_a_score(open_page: Open) -> None:
    opened = open_page()
    opened.page.locator("#sort").select_option("previous")
    scores = {
        f"{layer}.{head}": record["heads"][head]["scores"]["previous"]
        for layer, record in enumerate(PAGE.data["layers"])
        for head in range(HEADS)
    }
    places = opened.read("[...document.querySelectorAll('.thumb')].map((thumb) => thumb.dataset.place)")
    assert places == sorted(scores, key=lambda place: -scores[place])
    least = sorted(scores.values())[3] - 1e-6
    opened.read("(least) => clearhead.change({least})", least)
    assert opened.page.locator(".thumb").count() == 3
    opened.page.locator("#sort").select_option("layer")
    assert opened.page.locator(".thumb").count() == LAYERS * HEADS


def test_heads_are_found_by_name_and_saved_with_their_scores(open_page: Open) -> None:
    page = ch.view(torch.randn(1, 8, 9, 4), torch.randn(1, 8, 9, 4))
    opened = open_page(page)
    opened.page.locator("#sort").select_option("previous")
    scores = [head["scores"]["previous"] for head in page.data["layers"][0]["heads"]]
    saved = {}
    for kind in ("png", "svg", "csv"):
        with opened.page.expect_download() as waiting:
            opened.page.locator(f"#grid-{kind}").click()
        assert waiting.value.suggested_filename == f"Attention-heads.{kind}"
        saved[kind] = Path(waiting.value.path()).read_bytes()
    assert saved["png"].startswith(b"\x89PNG")
    assert len(ElementTree.fromstring(saved["svg"]).findall("{http://www.w3.org/2000/svg}image")) == 8
    rows = list(csv.DictReader(io.StringIO(saved["csv"].decode())))
    assert [float(row["previous"]) for row in rows] == sorted(scores, reverse=True)
    assert [int(row["head"]) for row in rows] == sorted(range(8), key=lambda head: -scores[head])
    opened.page.locator("#find").fill("attention head 3")
    assert opened.read("[...document.querySelectorAll('#heads .thumb')].map((one) => one.dataset.place)") == ["0.3"]
    opened.page.locator("#find").fill("nothing such")
    assert "No head matches" in opened.text("#heads")


def test_click_selects_a_cell_and_hover_shows_its_values(open_page: Open) -> None:
    opened = open_page()
    x, y = box(opened, 0, 9, 4)
    opened.page.locator("#map").hover(position={"x": x, "y": y})
    exact = WEIGHTS[0][0, 9, 4]
    said = opened.text("#tip")
    assert said.startswith("Query 9 “and” → key 4 “jumps”: weight ")
    assert abs(said_weight(said) - exact) <= TOLERANCE
    score = float(TRACED[0].masked[0, 0, 9, 4])
    assert abs(float(said.rpartition("score ")[2].replace("−", "-")) - score) <= 0.02
    opened.page.locator("#map").click(position={"x": x, "y": y})
    assert opened.read(AT) == [0, 0, 9, 4]
    x, y = box(opened, 0, 3, 9)
    opened.page.locator("#map").hover(position={"x": x, "y": y})
    assert opened.text("#tip").endswith("forbidden by the mask")


def test_lightness_rises_with_the_weight(open_page: Open) -> None:
    opened = open_page()
    settle(opened)
    light = """([x, y]) => {
      const [r, g, b] = document.getElementById("map").getContext("2d").getImageData(x, y, 1, 1).data;
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    }"""
    row = WEIGHTS[0][0, T - 2]
    read = [opened.read(light, [round(at) for at in box(opened, 0, T - 2, column)]) for column in range(1, T - 1)]
    order = np.argsort(row[1 : T - 1])
    differ = np.diff(row[1 : T - 1][order]) > 1e-3
    assert (np.diff(np.array(read)[order])[differ] > 0).all(), "lightness rises with the weight"


def test_zoom_goes_down_to_single_weights_and_back(open_page: Open) -> None:
    opened = open_page()
    look = "clearhead.app.views.map.matrix.look"
    whole = opened.read(look)
    opened.page.locator("#map").focus()
    for key in ("ArrowUp", "ArrowLeft", "Enter"):
        opened.page.keyboard.press(key)
    opened.page.keyboard.press("+")
    closer = opened.read(look)
    assert closer["size"] > whole["size"]
    assert opened.read(AT)[2:] == [T - 2, T - 2]
    for _ in range(6):
        opened.page.locator("#zoom-in").click()
    assert opened.read(look)["size"] == 72
    canvas = opened.page.locator("#map").bounding_box()
    opened.page.mouse.move(canvas["x"] + 400, canvas["y"] + 300)
    before = opened.read(look)
    opened.page.mouse.down()
    opened.page.mouse.move(canvas["x"] + 430, canvas["y"] + 360, steps=3)
    opened.page.mouse.up()
    moved = opened.read(look)
    assert moved["top"] < before["top"]
    assert opened.read(AT)[2:] == [T - 2, T - 2], "dragging chooses nothing"
    opened.page.mouse.wheel(0, 300)
    settle(opened)
    assert opened.read(look)["size"] < 72
    opened.page.locator("#map").focus()
    opened.page.keyboard.press("0")
    assert opened.read(look) == whole


def test_lines_lead_to_the_largest_weights(open_page: Open) -> None:
    opened = open_page(fragment="view=lines&query=8&edges=2")
    edges = opened.read(
        "[...document.querySelectorAll('#lines .edge')].map((edge) => [+edge.dataset.query, +edge.dataset.key])"
    )
    for row in range(T):
        best = set(np.argsort(-WEIGHTS[0][0, row])[: min(2, row + 1)].tolist())
        assert {key for query, key in edges if query == row} == best
    strong = opened.read(
        "[...document.querySelectorAll('#lines .edge[opacity=\"1\"]')].map((edge) => +edge.dataset.query)"
    )
    assert set(strong) == {8}
    opened.page.locator("#lines .token.query >> nth=5").click()
    assert opened.read("clearhead.state.query") == 5
    opened.page.locator("#lines [tabindex='0']").focus()
    opened.page.keyboard.press("ArrowDown")
    assert opened.read("clearhead.state.query") == 6


def test_token_view_equals_explain(open_page: Open) -> None:
    opened = open_page(fragment="view=token&layer=1&head=2&query=7")
    rows = opened.read(
        "[...document.querySelectorAll('#token-rows tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    numbers = {int(row[0]): [float(cell.replace("−", "-")) for cell in (row[2], row[3], row[5])] for row in rows}
    assert len(numbers) == T
    points = TRACED[1]
    for key in range(8):
        raw, scaled, weight = numbers[key]
        assert abs(raw - float(points.scores[0, 2, 7, key])) <= 0.1
        assert abs(scaled - float(points.scaled[0, 2, 7, key])) <= 0.02
        assert abs(weight - WEIGHTS[1][2, 7, key]) <= TOLERANCE
    assert [row[4] for row in rows].count("no") == T - 8
    weights = [number[2] for number in numbers.values()]
    assert weights == sorted(weights, reverse=True)
    assert f"8 of {T} keys are allowed: Causal()" in opened.text("#steps")
    opened.page.locator("#order").select_option("place")
    assert opened.page.locator("#token-rows th").first.inner_text() == "0"


def test_weighted_values_and_their_sum_equal_explain(open_page: Open) -> None:
    ids = torch.arange(T)[None]
    opened = open_page(fragment="view=token&layer=1&head=2&query=7&key=3")
    for layer, head, query in ((0, 0, 0), (0, 1, 5), (1, 2, 7), (1, 0, 12)):
        explanation = ch.explain(MODEL, ids, layer=layer, head=head, token=query)
        step = explanation.step("weighted sum")
        assert step is not None
        read = opened.read(
            """async ([layer, head, query]) => {
              const numbers = await clearhead.model.head(layer, head), carried = await numbers.values();
              const {values, width} = carried, weighted = [];
              for (let key = 0; key < numbers.columns; key++) {
                const weight = numbers.weight(query, key);
                weighted.push(Array.from(values.subarray(key * width, (key + 1) * width), (value) => weight * value));
              }
              const norms = Array.from(numbers.norms, (norm, key) => norm * numbers.weight(query, key));
              return {weighted, norms, output: [...numbers.output(query, carried)]};
            }""",
            [layer, head, query],
        )
        values = TRACED[layer].value[0, head].double().numpy()
        weighted = explanation.weights.numpy()[:, None] * values
        assert np.abs(np.array(read["weighted"]) - weighted).max() <= TOLERANCE
        assert np.abs(np.array(read["norms"]) - np.linalg.norm(weighted, axis=1)).max() <= TOLERANCE
        assert np.abs(np.array(read["output"]) - step.exact.numpy()).max() <= TOLERANCE
    said = opened.text("#steps li:last-child span")
    step = ch.explain(MODEL, ids, layer=1, head=2, token=7).step("weighted sum")
    assert step is not None
    shown = [float(number) for number in said.strip("[]").replace("−", "-").split(", ")]
    assert np.abs(np.array(shown) - step.exact.numpy()).max() <= TOLERANCE
    assert opened.page.locator("#token-sum .strip").count() == 1


def test_page_without_values_says_how_to_store_them(open_page: Open) -> None:
    opened = open_page(ch.view(TRACED, tokens=WORDS, values=False), fragment="view=token")
    assert "values=True" in opened.text("#token-more")
    assert opened.page.locator("#value-column").is_hidden()
    assert opened.page.locator("#norm-column").is_visible()
    bare = open_page(ch.view(torch.eye(3), torch.eye(3)), fragment="view=token")
    assert bare.complaints == []


def test_profile_sums_the_weights(open_page: Open) -> None:
    opened = open_page(fragment="view=profile&query=4")
    profile = opened.read(
        "(async () => { const {profile} = await clearhead.model.head(0, 0);"
        "return Object.fromEntries(Object.entries(profile).map(([name, values]) => [name, [...values]])); })()"
    )
    weights = WEIGHTS[0][0]
    logs = np.log(np.where(weights > 0, weights, 1.0))
    away = np.abs(np.arange(T)[:, None] - np.arange(T))
    assert np.allclose(profile["received"], weights.sum(axis=0), atol=T * TOLERANCE)
    assert np.allclose(profile["entropy"], -(weights * logs).sum(axis=1), atol=0.01)
    assert np.allclose(profile["distance"], (weights * away).sum(axis=1), atol=0.01)
    assert opened.page.locator("#profile [data-chart]").count() == 4
    assert "query 4 “jumps”: entropy" in opened.text("#profile-note")
    opened.page.locator("#profile").focus()
    opened.page.keyboard.press("ArrowRight")
    assert opened.read("clearhead.state.query") == 5


def test_two_heads_are_compared(open_page: Open) -> None:
    opened = open_page(fragment="view=compare&other=1.2&query=9&key=3")
    gap = WEIGHTS[0][0, 9, 3] - WEIGHTS[1][2, 9, 3]
    said = opened.text("#compare-note")
    assert abs(float(said.rpartition("= ")[2].replace("−", "-")) - gap) <= 2 * TOLERANCE
    read = opened.read("clearhead.app.views.compare.source.tile(9, 10, 3, 4)[0]")
    assert abs(read - gap) <= 2 * TOLERANCE
    opened.page.locator("#other").select_option("0.1")
    assert opened.read("clearhead.state.other") == "0.1"


def test_two_masks_are_compared_by_what_they_allow(open_page: Open) -> None:
    query, key = torch.randn(2, 1, 2, 30, 8, generator=torch.Generator().manual_seed(4))
    masks = {"causal": ch.Causal(), "near": ch.Window(4, 3), "table": ch.Dense(torch.eye(30) < 1), "all": None}
    dense = {name: torch.ones(30, 30).bool() if mask is None else mask.dense(30, 30) for name, mask in masks.items()}
    opened = open_page(ch.view(query, key, mask=masks), fragment="view=compare&head=1")
    assert opened.text("#other option:checked") == "near: attention, head 1", "the same head under the next mask"
    for place, name in list(enumerate(masks))[1:]:
        opened.page.locator("#other").select_option(f"{place}.1")
        opened.page.wait_for_function("([place]) => clearhead.app.views.compare.source.other.number === 1", arg=[place])
        settle(opened)
        one, other = (dense[each].reshape(30, 30).numpy() for each in ("causal", name))
        only = np.where(one & ~other, 1, np.where(other & ~one, 2, 0))
        read = opened.read(
            "Array.from({length: 900}, (_, at) => clearhead.app.views.compare.source.only(at / 30 | 0, at % 30))"
        )
        assert np.array_equal(np.array(read).reshape(30, 30), only)
        counts = f"allows it ({(only == 1).sum()} places) · ╲ only the other’s ({(only == 2).sum()})"
        assert counts in opened.text("#compare-masks")
        with opened.page.expect_download() as waiting:
            opened.page.locator("#save-svg").click()
        lines = ElementTree.parse(waiting.value.path()).findall("{http://www.w3.org/2000/svg}path")
        assert [line.get("d", "").count("M") for line in lines] == [(only > 0).sum()]
    opened.page.locator(".run").nth(1).click()
    assert opened.read(AT)[:2] == [1, 1]
    assert opened.page.locator("#heads .thumb").count() == 2


def picture_page() -> tuple[Page, Case, torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    query, key = 2 * torch.randn(2, 1, 2, 1 + 3 * 4, 8, generator=generator)
    image = torch.rand(30, 40, 3, generator=generator)
    tokens = ["[CLS]", *(f"p{place}" for place in range(12))]
    page = ch.view(query, key, tokens=tokens, image=image, grid=(3, 4), grid_first=1, title="Picture")
    return page, Case(query, key), image


def test_picture_view_shows_the_weights_of_patches(open_page: Open) -> None:
    page, case, image = picture_page()
    weights = case.weights()[0]
    opened = open_page(page, fragment="view=picture&query=3&key=3")
    read = "(name) => [...clearhead.app.views.picture.values(name)]"
    for head in range(2):
        opened.read("(head) => clearhead.change({head})", head)
        opened.page.wait_for_function("(head) => clearhead.app.views.picture.numbers.number === head", arg=head)
        assert np.abs(np.array(opened.read(read, "looks")) - weights[head, 3]).max() <= TOLERANCE
        assert np.abs(np.array(opened.read(read, "looked")) - weights[head, :, 3]).max() <= TOLERANCE
        assert np.abs(np.array(opened.read(read, "received")) - weights[head].sum(axis=0)).max() <= 13 * TOLERANCE
    plain = opened.page.locator("[data-panel=plain] canvas")
    size = plain.bounding_box()
    plain.click(position={"x": size["width"] * 2.5 / 4, "y": size["height"] * 1.5 / 3})
    assert opened.read(AT)[2:] == [7, 7], "row 1, column 2 behind the class token"
    looks = opened.page.locator("[data-panel=looks] canvas")
    looks.click(position={"x": 5, "y": 5})
    assert opened.read(AT)[2:] == [7, 1]
    looks.hover(position={"x": size["width"] - 4, "y": size["height"] - 4})
    said = opened.text("#picture-note")
    assert "row 2, column 3" in said
    assert abs(said_weight(said) - weights[1, 7, 12]) <= TOLERANCE
    plain.focus()
    opened.page.keyboard.press("ArrowUp")
    assert opened.read(AT)[2:] == [3, 3]
    opened.page.locator("[data-panel=plain] .chip").click()
    assert opened.read(AT)[2:] == [0, 0]
    pixel = opened.read("""async () => {
      const {canvas} = await clearhead.model.picture(0);
      return [canvas.width, canvas.height, ...canvas.getContext("2d").getImageData(7, 4, 1, 1).data.slice(0, 3)];
    }""")
    spread = (image - image.min()) / (image.max() - image.min())
    assert pixel[:2] == [40, 30]
    assert np.abs(np.array(pixel[2:]) - 255 * spread[4, 7].numpy()).max() <= 1
    opened.page.locator("#picture-heads .thumb").first.click()
    assert opened.read(AT)[:2] == [0, 0]
    opened.page.locator("#tab-map").click()
    assert opened.page.locator("#text-card").is_visible()
    assert opened.complaints == []


def test_page_without_image_has_no_picture_view(open_page: Open) -> None:
    opened = open_page(fragment="view=picture")
    assert opened.read("clearhead.state.view") == "map"
    assert opened.page.locator("#tab-picture").is_hidden()


def test_results_and_runs_are_shown_above_the_views(open_page: Open) -> None:
    two = ch.view({"one": TRACED, HOSTILE: TRACED}, tokens=WORDS).data
    runs = [dict(run) for run in two["runs"]]
    runs[0] |= {"says": HOSTILE, "bars": [{"label": HOSTILE, "value": 0.75}, {"label": "b", "value": 0.25}]}
    runs[1] |= {"start": {"layer": 3, "head": 2, "query": 5}}
    data = dict(two) | {"runs": runs, "facts": [{"label": HOSTILE, "value": "98%", "note": HOSTILE}]}
    opened = open_page(Page(data))
    assert HOSTILE in opened.text("#facts")
    assert opened.text("#run-says") == HOSTILE
    heights = opened.read("[...document.querySelectorAll('#run-bars i')].map((bar) => bar.style.height)")
    assert heights == ["75%", "25%"]
    opened.page.locator(".run[aria-checked=true]").focus()
    opened.page.keyboard.press("ArrowRight")
    assert opened.read(AT) == [3, 2, 5, 5]
    settle(opened)
    assert opened.page.locator("#run-says").is_hidden()
    places = opened.read("[...document.querySelectorAll('#heads .thumb')].map((thumb) => thumb.dataset.place)")
    assert {place.split(".")[0] for place in places} == {"2", "3"}
    assert open_page().page.locator("#runs-card").is_hidden()
    assert opened.complaints == []


def test_views_share_their_state_and_the_url_stores_it(open_page: Open) -> None:
    opened = open_page()
    opened.page.locator("#reading .word").nth(6).click()
    assert opened.read("clearhead.state.query") == 6
    opened.page.locator(".thumb").nth(5).click()
    opened.page.locator("#tab-token").click()
    opened.page.wait_for_selector("#token-rows tr")
    assert "Query 6 “the”" in opened.text("#token-title")
    opened.page.locator("#token-rows tr >> nth=1").click()
    here = opened.read(AT)
    opened.page.wait_for_timeout(300)
    fragment = opened.page.url.partition("#")[2]
    reopened = open_page(fragment=fragment)
    assert reopened.read(AT) == here
    assert reopened.page.locator("#panel-token").is_visible()
    wrong = open_page(fragment="layer=99&head=-4&query=abc&view=none&zoom=x&toString=1")
    assert wrong.read(AT) == [LAYERS - 1, 0, T - 1, T - 1]
    assert wrong.complaints == []


def test_each_view_is_saved_as_png_svg_and_csv(open_page: Open) -> None:
    data = dict(ch.view(TRACED, tokens=WORDS, image=torch.eye(4), grid=(3, 4), title="A fox").data)
    opened, rows = open_page(Page(data)), {}
    for view in ("map", "lines", "token", "profile", "compare", "picture"):
        opened.page.locator(f"#tab-{view}").click()
        opened.page.wait_for_selector(f"#panel-{view}", state="visible")
        settle(opened)
        saved = {}
        for kind in ("png", "svg", "csv"):
            with opened.page.expect_download() as waiting:
                opened.page.locator(f"#save-{kind}").click()
            download = waiting.value
            assert download.suggested_filename == f"A-fox-{view}.{kind}"
            saved[kind] = Path(download.path()).read_bytes()
        assert saved["png"].startswith(b"\x89PNG"), view
        assert ElementTree.fromstring(saved["svg"]).tag.endswith("svg"), view
        rows[view] = list(csv.reader(io.StringIO(saved["csv"].decode())))
        assert len({len(row) for row in rows[view]}) == 1, view
    assert len(rows["map"]) == 1 + T * T
    assert len(rows["picture"]) == 1 + T
    assert rows["token"][-1][0] == "sum"
    output = TRACED[0].head_outputs[0, 0, T - 1].numpy()
    assert np.abs(np.array(rows["token"][-1][8:], dtype=float) - output).max() <= TOLERANCE
    gaps = [abs(float(row[6]) - WEIGHTS[0][0, int(row[0]), int(row[2])]) for row in rows["map"][1:]]
    assert max(gaps) <= TOLERANCE
    assert opened.complaints == []
