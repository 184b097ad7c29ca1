"""The page of ``view`` in a real Chromium, offline: opening, keyboard, themes, printing, damage, long input."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.inspector import Page
from tests.inspector.chromium import Opened
from tests.inspector.fox import (
    AT,
    HOSTILE,
    PAGE,
    WEIGHTS,
    Open,
    settle,
)
from tests.inspector.sample import TOLERANCE

pytestmark = pytest.mark.browser


def test_page_opens_offline_without_requests(open_page: Open) -> None:
    opened = open_page()
    for view in ("lines", "token", "profile", "compare", "map"):
        opened.page.locator(f"#tab-{view}").click()
    assert len(opened.requests) == 1
    assert opened.requests[0].startswith("file://")
    assert opened.complaints == []
    assert opened.page.locator("#alert").is_hidden()


def test_page_of_version_1_opens_in_the_viewer(open_page: Open) -> None:
    stored = json.loads((Path(__file__).parent / "version_1.json").read_text("utf-8"))
    opened = open_page(Page(stored["page"]))
    assert opened.page.locator(".thumb").count() == 4
    for head, weights in enumerate(stored["weights"]):
        read = opened.read(
            """async (head) => {
              const numbers = await clearhead.model.head(0, head);
              return Array.from({length: numbers.rows}, (_, row) => [...numbers.row(row)]);
            }""",
            head,
        )
        assert np.abs(np.array(read) - np.array(weights)).max() <= TOLERANCE
    for view in ("lines", "token", "profile", "compare", "map"):
        opened.page.locator(f"#tab-{view}").click()
    assert opened.complaints == []


def test_page_prints_in_light_colours_on_one_sheet(open_page: Open) -> None:
    opened = open_page(color_scheme="dark")
    opened.read("dispatchEvent(new Event('beforeprint'))")
    opened.page.emulate_media(media="print", color_scheme="dark")
    look = """() => {
      const canvas = document.getElementById("map"), context = canvas.getContext("2d");
      const {size} = clearhead.app.views.map.matrix.look;
      const pixel = (x, y) => [...context.getImageData(3 * x, 3 * y, 1, 1).data.slice(0, 3)];
      const at = (row, column) => pixel(132 + (column + 0.5) * size, 104 + (row + 0.5) * size);
      return {fine: canvas.width / canvas.clientWidth, corner: pixel(1, 1),
        row: Array.from({length: 13}, (_, column) => at(11, column)), forbidden: [at(0, 8), at(0, 9)]};
    }"""
    settle(opened)
    read = opened.read(look)
    assert read["fine"] == pytest.approx(3, abs=0.5)
    assert read["corner"] == [255, 255, 255]
    light = np.array(read["row"])[:12] @ [0.2126, 0.7152, 0.0722]
    order = np.argsort(WEIGHTS[0][0, 11, :12])
    assert (np.diff(light[order]) <= 1).all(), "more weight is more ink"
    assert read["forbidden"][0] != read["forbidden"][1], "what is forbidden is checked"
    assert opened.page.locator(".side").is_hidden()
    opened.read("dispatchEvent(new Event('afterprint'))")
    settle(opened)
    assert sum(opened.read(look)["corner"]) < 300
    pdf = opened.page.pdf(print_background=True)
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == 1


def test_keyboard_reaches_every_control(open_page: Open) -> None:
    opened = open_page()
    visited = []
    for _ in range(30):
        opened.page.keyboard.press("Tab")
        visited.append(opened.read("document.activeElement.id || document.activeElement.dataset.place || ''"))
    wanted = {
        "scale",
        "save-png",
        "save-svg",
        "save-csv",
        "theme",
        "grid-png",
        "sort",
        "0.0",
        "tab-map",
        "map",
        "zoom-in",
        "zoom-all",
    }
    assert wanted <= set(visited)
    opened.page.locator(".thumb[tabindex='0']").focus()
    opened.page.keyboard.press("ArrowRight")
    assert opened.read(AT)[:2] == [0, 1]
    opened.page.keyboard.press("ArrowDown")
    assert opened.read(AT)[:2] == [1, 1]
    assert opened.read("document.activeElement.dataset.place") == "1.1"
    opened.page.locator("#tab-map").focus()
    opened.page.keyboard.press("ArrowLeft")
    assert opened.read("clearhead.state.view") == "compare"
    assert opened.read("document.activeElement.id") == "tab-compare"
    unnamed = opened.read(
        "[...document.querySelectorAll('button, select, input, canvas[tabindex], [role=img], [role=tabpanel]')]"
        ".filter((one) => !(one.getAttribute('aria-label') || one.getAttribute('aria-labelledby') || one.labels?.length"
        " || one.textContent.trim())).length"
    )
    assert unnamed == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_have_readable_text(open_page: Open, scheme: str) -> None:
    opened = open_page(color_scheme=scheme)
    contrast = opened.read("""() => {
      const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
      const linear = (c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
      const light = (text) => rgb(text).map((c) => linear(c / 255))
        .reduce((total, c, place) => total + c * [0.2126, 0.7152, 0.0722][place], 0);
      const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
      const words = [...document.querySelectorAll("#reading .word:not(.forbidden)")]
        .map((word) => ratio(word.style.color, word.style.backgroundColor));
      const card = getComputedStyle(document.querySelector(".card")).backgroundColor;
      return [...words, ...["h2", ".hint", "#readout", ".badge", "[role=tab]", ".number"]
        .map((one) => ratio(getComputedStyle(document.querySelector(one)).color, card))];
    }""")
    assert min(contrast) >= 4.5, contrast  # WCAG 2.2, 1.4.3
    ramp = opened.read("""() => {
      const canvas = document.getElementById("legend"), read = [];
      const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, 1).data;
      const light = (at) => 0.2126 * data[at] + 0.7152 * data[at + 1] + 0.0722 * data[at + 2];
      for (let at = 0; at < data.length; at += 4) read.push(light(at));
      return read;
    }""")
    # Lightness alone must distinguish weights, for readers with colour blindness.
    assert (np.diff(ramp) >= -0.5).all()
    assert ramp[-1] - ramp[0] > 150


def test_the_theme_can_be_switched(open_page: Open) -> None:
    opened = open_page(color_scheme="light")
    corner = "[...document.getElementById('map').getContext('2d').getImageData(2, 2, 1, 1).data]"
    settle(opened)
    before = opened.read(corner)
    for _ in range(2):
        opened.page.locator("#theme").click()
    settle(opened)
    assert opened.text("#theme") == "Theme: dark"
    assert sum(opened.read(corner)[:3]) < sum(before[:3]) / 2


@pytest.mark.parametrize("width", [360, 1280])
def test_no_view_is_wider_than_the_window(open_page: Open, width: int) -> None:
    opened = open_page()
    opened.page.set_viewport_size({"width": width, "height": 800})
    for view in ("map", "lines", "token", "profile", "compare"):
        opened.page.locator(f"#tab-{view}").click()
        assert opened.read("document.documentElement.scrollWidth") <= width, view


def test_hostile_token_is_shown_as_text(open_page: Open) -> None:
    words = [HOSTILE, "]]>", "<!--", "\u202eabc", "", "\n", "שלום", "日本語のとても長い言葉" * 4, "👩‍👩‍👧‍👦" * 30]
    page = ch.view(torch.eye(9), torch.eye(9), tokens=words, title=HOSTILE, mask=ch.Causal())
    opened = open_page(page)
    for view in ("map", "lines", "profile", "compare", "token"):
        opened.page.locator(f"#tab-{view}").click()
        assert opened.complaints == []
        assert opened.page.locator("img").count() == 0
    assert opened.text("h1") == HOSTILE
    opened.page.locator("#tab-token").click()
    assert HOSTILE in opened.read("document.querySelector('#token-rows').textContent")
    assert HOSTILE in opened.read("document.querySelector('#reading').textContent")
    with opened.page.expect_download() as waiting:
        opened.page.locator("#save-svg").click()
    assert b"<script" not in Path(waiting.value.path()).read_bytes()


@pytest.mark.parametrize(
    ("words", "reads"),
    [
        (["[CLS]", "un", "##believ", "##able", "word", "[SEP]"], "[CLS] unbelievable word [SEP]"),
        (["<s>", "▁un", "believ", "able", "▁w", "ord", "."], "<s> unbelievable word."),
        (["un", "believ", "Ġable", "ĠÃ©tÃ©", "ĠæĹ", "¥", "Ċ", "<|end|>"], "unbeliev able été ⟨E6 97⟩⟨A5⟩ ↵ <|end|>"),
        ([" The", " quick", "ly", ".", "\n"], "The quickly. ↵"),
        ([*"a cat"], "a\u00a0cat"),
        (["plain", "words", "Übung", "\n"], "plain words Übung ↵"),
    ],
)
def test_subwords_are_joined_for_reading(open_page: Open, words: list[str], reads: str) -> None:
    size = len(words)
    opened = open_page(ch.view(torch.eye(size), torch.eye(size), tokens=words))
    assert opened.read("document.querySelector('#reading').textContent") == reads


def _head(data: dict[str, Any]) -> Any:
    return data["layers"][0]["heads"][0]


DAMAGE: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("its data has version 9, and this page reads versions 1 and 2", lambda d: d.update(version=9)),
    ("its data is not of the format clearhead-view", lambda d: d.update(format="<b>x</b>")),
    ("it has no layer", lambda d: d.update(layers=[])),
    ("texts[0] is not a list of texts", lambda d: d["texts"].__setitem__(0, [1])),
    ("layers[0].q_len is not a whole number", lambda d: d["layers"][0].update(q_len="3")),
    ("layers[0].heads[0].rules[0] is not a rule", lambda d: _head(d).update(rules=[{}])),
    ("layers[0].heads[0].mask names no mask", lambda d: _head(d).update(mask=7)),
    (
        "layers[0].heads[0].query does not have 104 elements",
        lambda d: _head(d)["query"].update(data=_head(d)["lse"]["data"]),
    ),
    ("layers[0].heads[0].query is not complete", lambda d: _head(d)["query"].update(data="0000000000")),
    (
        "layers[0].heads[0].query contains a character that is not base 85",
        lambda d: _head(d)["query"].update(data="&&&&&"),
    ),
]


@pytest.mark.parametrize(("says", "change"), DAMAGE, ids=[says for says, _ in DAMAGE])
def test_damaged_page_shows_the_reason(open_page: Open, says: str, change: Callable[[dict[str, Any]], object]) -> None:
    data = copy.deepcopy(dict(PAGE.data))
    change(data)
    opened = open_page(Page(data))
    assert opened.text("#alert") == f"This page cannot be shown: {says}. Make it again with the command that wrote it."
    assert opened.page.locator("#main").is_hidden()
    assert opened.complaints == []


def test_truncated_page_shows_the_reason(open_page: Open) -> None:
    page = PAGE.html
    start = page.index('id="data">') + len('id="data">')
    opened = open_page(page[: start + 500] + page[page.index("</script>", start) :])
    assert "its data is not complete JSON" in opened.text("#alert")


def test_page_runs_in_a_sandboxed_frame(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "cell.html"
    path.write_text(f"<!doctype html><body>{PAGE._repr_html_()}</body>", "utf-8")
    opened = Opened(browser, path)
    frame = opened.page.frame_locator("iframe")
    frame.locator("#main[data-ready]").wait_for()
    frame.locator("#tab-lines").click()
    assert frame.locator("#lines .edge").count() > 0
    assert opened.complaints == []
    # Its origin is opaque: the frame cannot access cookies or the notebook.
    assert opened.read(
        "(() => { try { return document.querySelector('iframe').contentDocument === null; } catch { return true; } })()"
    )
    opened.context.close()


@pytest.mark.slow
def test_page_of_16384_tokens_is_responsive(browser: Any, tmp_path: Path) -> None:
    length, limit_s, limit_bytes, longest_task_ms = 16384, 3.0, 6 * 10**6, 100
    torch.manual_seed(0)
    query, key = 3.0 * torch.randn(1, 1, length, 64), torch.randn(1, 1, length, 64)
    mask = ch.Causal()
    page = ch.view(query, key, mask=mask, tokens=[f"token{place}" for place in range(length)])
    path = page.save(tmp_path / "long.html")
    assert path.stat().st_size <= limit_bytes
    opened = Opened(browser, path)
    opened.page.wait_for_selector("#main[data-ready]", state="attached")
    ready = opened.read("performance.getEntriesByName('ready')[0].startTime")
    draw = np.random.default_rng(0)
    rows = np.sort(draw.integers(length, size=40))
    exact = ch.observe_attention(query, key, key, mask=mask, want=ch.Want(rows=rows.tolist())).rows
    assert exact is not None
    truth = exact[0, 0].double().numpy()
    columns = [[int(truth[at].argmax()), *draw.integers(row + 1, size=20).tolist()] for at, row in enumerate(rows)]
    read = opened.read(
        """async ([rows, columns]) => {
          const numbers = await clearhead.model.head(0, 0);
          return rows.map((row, at) => columns[at].map((column) => numbers.weight(row, column)));
        }""",
        [rows.tolist(), columns],
    )
    for at, chosen in enumerate(columns):
        assert np.abs(np.array(read[at]) - truth[at, chosen]).max() <= TOLERANCE
    opened.read("""() => {
      globalThis.tasks = [];
      new PerformanceObserver((list) => tasks.push(...list.getEntries().map((task) => task.duration)))
        .observe({type: "longtask"});
    }""")
    opened.page.locator("#map").focus()
    opened.page.keyboard.press("Enter")
    for _ in range(8):
        opened.page.keyboard.press("-")
    canvas = opened.page.locator("#map").bounding_box()
    for turn in range(4):
        opened.page.mouse.move(canvas["x"] + 600, canvas["y"] + 450)
        opened.page.mouse.down()
        opened.page.mouse.move(canvas["x"] + 200 + 90 * turn, canvas["y"] + 150, steps=12)
        opened.page.mouse.up()
    opened.page.wait_for_timeout(500)
    assert opened.read("clearhead.app.views.map.matrix.settled")
    tasks = opened.read("tasks")
    print(
        f"ready after {ready / 1000:.2f} s, longest task {max(tasks, default=0):.0f} ms, {path.stat().st_size:,} bytes"
    )
    assert ready / 1000 <= limit_s
    assert max(tasks, default=0) <= longest_task_ms
    for view in ("lines", "token", "profile", "compare"):
        opened.page.locator(f"#tab-{view}").click()
        settle(opened)
    assert opened.complaints == []
    opened.context.close()


def test_embedded_page_does_not_scroll_the_page_around_it(browser: Any, tmp_path: Path) -> None:
    page = ch.view(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8))
    path = tmp_path / "notebook.html"
    path.write_text(f"<div style='height:3000px'></div>{page._repr_html_()}", encoding="utf-8")
    context = browser.new_context()
    opened = context.new_page()
    opened.goto(path.as_uri())
    opened.frame_locator("iframe").locator("#main[data-ready]").wait_for(state="attached")
    assert opened.evaluate("scrollY") == 0
    context.close()
