"""The worked example in a real Chromium."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clearhead.lab import worked
from tests.lab.opened import Tab, opened
from tests.lab.running import Ticketless, running

pytestmark = pytest.mark.browser

PRESETS = {each["name"]: each for each in json.loads(json.dumps(worked.start({}, Ticketless())))["presets"]}


@pytest.fixture(scope="module")
def lab() -> Iterator[Any]:
    with running() as started:
        yield started


@pytest.fixture(scope="module")
def page(browser: Any, lab: Any) -> Iterator[Tab]:
    with opened(browser, lab, "worked") as tab:
        yield tab


@pytest.fixture
def tab(page: Tab) -> Tab:
    """The tab in its initial state."""
    page.page.get_by_role("button", name="Before this edit").click()
    page.until_shown(lambda: page.page.select_option("#worked-start", "lesson-0"))
    return page


def cell(tab: Tab, place: str) -> Any:
    return tab.page.locator(f'[data-cell="{place}"]')


def changed(tab: Tab) -> set[str]:
    """The places that are marked."""
    marked = tab.page.evaluate("[...document.querySelectorAll('[data-cell].changed')].map((cell) => cell.dataset.cell)")
    return set(marked)


def numbers(tab: Tab, step: str) -> list[list[str]]:
    """The texts of a step's cells."""
    return tab.page.evaluate(  # type: ignore[no-any-return]
        "(step) => [...document.querySelectorAll(`table[data-table='${step}'] tbody tr`)]"
        ".map((row) => [...row.querySelectorAll('td')].map((cell) => cell.textContent))",
        step,
    )


def written(values: list[list[float | None]]) -> list[list[str]]:
    return [["−∞" if cell is None else f"{cell:.4f}".replace("-", "−") for cell in row] for row in values]


def agrees(tab: Tab, sheet: dict[str, Any]) -> None:
    """Every step on the page is the library's, to the last place that is shown."""
    answer = json.loads(json.dumps(worked.compute(sheet, Ticketless())))
    for step in answer["steps"]:
        assert numbers(tab, step["id"]) == written(step["values"]), step["id"]
        assert tab.text(f"figure:has([data-table='{step['id']}']) .formula") == step["formula"]
        assert tab.text(f"figure:has([data-table='{step['id']}']) .shape") == step["shapes"]


def fill(tab: Tab, place: str, text: str) -> None:
    tab.until_shown(lambda: cell(tab, place).fill(text))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PRESETS))
def test_initial_worksheet_has_the_numbers_of_the_documents(tab: Tab, name: str) -> None:
    if name != "lesson-0":
        tab.until_shown(lambda: tab.page.select_option("#worked-start", name))
    agrees(tab, PRESETS[name])
    assert changed(tab) == set()


class TestEdits:
    def test_edit_marks_dependent_numbers(self, tab: Tab) -> None:
        fill(tab, "X/1/0", "2")
        sheet = json.loads(json.dumps(PRESETS["lesson-0"]))
        sheet["X"][1][0] = 2.0
        agrees(tab, sheet)
        rows = {f"{name}/1/{column}" for name in "QKV" for column in range(2)}
        squares = {
            f"{name}.0/{row}/{column}"
            for name in ("scores", "scaled", "masked")
            for row in range(3)
            for column in range(3)
            if 1 in (row, column)
        }
        everything = {f"weights.0/{row}/{column}" for row in range(3) for column in range(3)}
        everything |= {f"output.0/{row}/{column}" for row in range(3) for column in range(2)}
        assert changed(tab) == {"X/1/0"} | rows | squares | everything
        assert "36 of 60 numbers" in tab.text(".reached")

    def test_values_change_the_output_only(self, tab: Tab) -> None:
        fill(tab, "W_v/0/1", "5")
        assert changed(tab) == {"W_v/0/1"} | {f"V/{row}/1" for row in range(3)} | {
            f"output.0/{row}/1" for row in range(3)
        }

    def test_keystrokes_in_one_number_are_one_edit(self, tab: Tab) -> None:
        cell(tab, "X/0/0").focus()
        for key in ("1", ".", "2", "5"):
            tab.page.keyboard.press(key)
        tab.page.wait_for_timeout(400)
        assert "X/0/0" in changed(tab)
        fill(tab, "X/2/1", "7")
        assert "X/0/0" not in changed(tab)
        tab.page.get_by_role("button", name="The lesson").click()
        assert {"X/0/0", "X/2/1"} <= changed(tab)

    def test_causal(self, tab: Tab) -> None:
        tab.until_shown(lambda: tab.page.get_by_role("button", name="Causal").click())
        agrees(tab, PRESETS["lesson-3"])
        assert numbers(tab, "masked.0")[0] == ["−0.0700", "−∞", "−∞"]
        assert {"mask/0/1", "mask/0/2", "mask/1/2"} <= changed(tab)
        assert not any(place.startswith(("Q", "K", "scores", "scaled")) for place in changed(tab))

    def test_custom_mask(self, tab: Tab) -> None:
        for key in range(3):
            tab.until_shown(lambda key=key: cell(tab, f"mask/1/{key}").click())
        assert numbers(tab, "weights.0")[1] == ["0.0000"] * 3
        assert numbers(tab, "output.0")[1] == ["0.0000"] * 2
        assert "Query 2 may attend to no key" in tab.text(".check")

    def test_two_heads(self, tab: Tab) -> None:
        tab.until_shown(lambda: tab.page.select_option("#worked-heads", "2"))
        agrees(tab, PRESETS["lesson-0"] | {"heads": 2})
        assert "Heads joined" in [title.inner_text() for title in tab.root.locator("h2").all()]
        tab.until_shown(lambda: tab.page.select_option("#worked-start", "lesson-1"))
        assert tab.root.locator("#worked-heads option[value='2']").is_disabled()

    def test_the_scale(self, tab: Tab) -> None:
        fill(tab, "scale/0/0", "0.5")
        agrees(tab, PRESETS["lesson-0"] | {"scale": 0.5})
        tab.until_shown(lambda: tab.page.get_by_role("button", name="use the default scale").click())
        agrees(tab, PRESETS["lesson-0"])

    def test_tokens_and_channels_can_be_added_and_removed(self, tab: Tab) -> None:
        def press(name: str) -> None:
            tab.until_shown(lambda: tab.page.get_by_role("button", name=name, exact=True).click())

        press("one token more")
        press("one input channel more")
        press("one head channel more")
        assert len(numbers(tab, "scores.0")) == 4
        assert tab.root.locator("[data-table='W_q'] tbody tr").count() == 3
        assert len(numbers(tab, "Q")[0]) == 3
        for name in ("one token less", "one token less", "one token less", "one input channel less"):
            press(name)
        assert tab.page.get_by_role("button", name="one token less", exact=True).is_disabled()
        assert numbers(tab, "weights.0") == [["1.0000"]]

    def test_reset(self, tab: Tab) -> None:
        fill(tab, "X/0/0", "-3")
        tab.until_shown(lambda: tab.page.get_by_role("button", name="Causal").click())
        tab.until_shown(lambda: tab.page.click("#worked-reset"))
        agrees(tab, PRESETS["lesson-0"])
        assert cell(tab, "X/0/0").input_value() == "1.1600"
        assert changed(tab) == set()


class TestBadCells:
    @pytest.mark.parametrize("text", ["abc", "", "inf", "1e999", "--1", "<img src=x onerror=alert(1)>", "1e7", "0x10"])
    def test_invalid_cell_is_reported(self, tab: Tab, text: str) -> None:
        cell(tab, "X/1/0").fill(text)
        assert cell(tab, "X/1/0").get_attribute("aria-invalid") == "true"
        assert f"X row 2 column 1: “{text}” is no number" in tab.text("[role=alert]")
        assert tab.page.locator("img").count() == 0
        agrees(tab, PRESETS["lesson-0"])
        cell(tab, "X/1/0").press("Escape")
        assert cell(tab, "X/1/0").get_attribute("aria-invalid") is None
        assert tab.root.locator("[role=alert]").first.inner_text() == ""

    def test_common_number_formats_are_accepted(self, tab: Tab) -> None:
        for text in ("1,5", "−1.5", " 1.5 ", "+1.5", "15e-1"):
            fill(tab, "X/1/0", text)
            assert cell(tab, "X/1/0").get_attribute("aria-invalid") is None
            fill(tab, "X/1/0", "9")


class TestKeyboard:
    def test_arrow_keys_move_between_cells(self, tab: Tab) -> None:
        cell(tab, "X/0/0").focus()
        for key, place in (
            ("ArrowDown", "X/1/0"),
            ("ArrowRight", "X/1/1"),
            ("ArrowRight", "W_q/1/0"),
            ("ArrowUp", "W_q/0/0"),
            ("ArrowLeft", "X/0/1"),
            ("Enter", "X/1/1"),
            ("Enter", "X/2/1"),
            ("Enter", "X/2/1"),
            ("Tab", "W_q/0/0"),
            ("Shift+Tab", "X/2/1"),
        ):
            tab.page.keyboard.press(key)
            assert tab.focused() == place, key

    def test_arrow_keys_stay_within_an_edited_number(self, tab: Tab) -> None:
        cell(tab, "X/0/1").focus()
        tab.page.keyboard.type("12")
        tab.page.keyboard.press("ArrowLeft")
        assert tab.focused() == "X/0/1"
        tab.page.keyboard.press("ArrowLeft")
        tab.page.keyboard.press("ArrowLeft")
        assert tab.focused() == "X/0/0"

    def test_arrow_keys_move_between_results(self, tab: Tab) -> None:
        cell(tab, "scores.0/0/0").focus()
        for key, place in (("ArrowDown", "scores.0/1/0"), ("ArrowRight", "scores.0/1/1")):
            tab.page.keyboard.press(key)
            assert tab.focused() == place
        assert tab.root.locator("[data-table='scores.0'] td[tabindex='0']").count() == 1

    def test_every_cell_has_an_accessible_name(self, tab: Tab) -> None:
        assert cell(tab, "X/1/0").get_attribute("aria-label") == "X row 2 column 1"
        assert cell(tab, "weights.0/0/2").get_attribute("aria-label") == "A row 1 column 3: 0.2416"
        assert tab.root.locator("[data-cell]:not([aria-label])").count() == 0


#: What a cell is written out as, and the cells that it is made from.
MADE = {
    "Q/1/1": ("Q row 2 column 2 = 0.5700 × (−0.1657) + 1.3600 × 0.6496 = 0.7890", "X/1/0 X/1/1 W_q/0/1 W_q/1/1"),
    "scores.0/0/2": (
        "S row 1 column 3 = 0.7621 × (−0.9914) + (−0.0428) × (−2.4152) = −0.6523",
        "Q/0/0 Q/0/1 K/2/0 K/2/1",
    ),
    "scaled.0/0/2": ("Z row 1 column 3 = (−0.6523) × 0.7071 = −0.4612", "scores.0/0/2"),
    "masked.0/0/2": ("M row 1 column 3 = allowed, so −0.4612 stays = −0.4612", "scaled.0/0/2 mask/0/2"),
    "weights.0/0/2": (
        "A row 1 column 3 = e^(−0.4612) / (e^(−0.0700) + e^0.0458 + e^(−0.4612)) = 0.2416",
        "masked.0/0/0 masked.0/0/1 masked.0/0/2",
    ),
    "output.0/0/0": (
        "O row 1 column 1 = 0.3573 × 0.6038 + 0.4011 × (−0.3502) + 0.2416 × 3.8695 = 1.0100",
        "weights.0/0/0 weights.0/0/1 weights.0/0/2 V/0/0 V/1/0 V/2/0",
    ),
}


class TestMadeFrom:
    @pytest.mark.parametrize("place", list(MADE))
    def test_hover_shows_the_computation(self, tab: Tab, place: str) -> None:
        text, sources = MADE[place]
        for act in (lambda: cell(tab, place).hover(), lambda: cell(tab, place).focus()):
            tab.page.mouse.move(1, 1)
            act()
            assert tab.text(".made") == text
            places = tab.page.evaluate("[...document.querySelectorAll('.source')].map((cell) => cell.dataset.cell)")
            assert set(places) == set(sources.split())

    def test_computation_follows_edits(self, tab: Tab) -> None:
        cell(tab, "X/0/0").focus()
        cell(tab, "output.0/2/1").hover()
        before = tab.text(".made")
        tab.until_shown(lambda: tab.page.keyboard.type("3"))
        edited = tab.text(".made")
        assert before != edited
        assert edited.endswith(f"= {numbers(tab, 'output.0')[2][1]}")

    def test_split_and_joined(self, tab: Tab) -> None:
        tab.until_shown(lambda: tab.page.select_option("#worked-start", "lesson-4"))
        cell(tab, "Q.1/0/1").hover()
        assert tab.text(".made") == "Q₂ row 1 column 2 = Q row 1 column 4 = 0.3725"
        cell(tab, "concat/2/3").hover()
        assert tab.text(".made") == "O row 3 column 4 = O₂ row 3 column 2 = −0.8447"
        cell(tab, "scores.1/0/0").hover()
        assert tab.text(".made").startswith("S₂ row 1 column 1 = 0.6280 × 0.6564 + 0.3725 × (−0.3415)")


def test_export(tab: Tab, tmp_path: Path) -> None:
    fill(tab, "X/1/0", "2.5")
    tab.page.click("#worked-export")
    tab.page.wait_for_selector(".worked .python-card:not([hidden])")
    with tab.page.expect_download() as download:
        tab.page.get_by_role("link", name="Download").click()
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    assert path.name == "worked_example.py"
    sheet = json.loads(json.dumps(PRESETS["lesson-0"]))
    sheet["X"][1][0] = 2.5
    wanted = worked.exported(sheet, Ticketless())["script"]
    assert path.read_text("utf-8") == wanted
    assert tab.page.locator(".worked .python").text_content() == wanted


def test_embedded_lab_scrolls_itself_alone(browser: Any, lab: Any) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 600})
    page = context.new_page()
    # A page of the lab's own origin, the only one that may embed it.
    around = (
        f"<div style='height:3000px'></div><iframe src='{lab.url}#worked' style='width:100%;height:500px'></iframe>"
    )
    page.route("**/around", lambda route: route.fulfill(content_type="text/html", body=around))
    page.goto(f"http://127.0.0.1:{lab.port}/around")
    page.frame_locator("iframe").locator("#panel-worked[data-ready]").wait_for(state="attached")
    frame = page.frames[1]
    frame.evaluate("document.getElementById('worked-export').click()")
    frame.wait_for_function("document.activeElement.closest('.python-card') !== null")
    assert frame.evaluate("scrollY") > 0
    assert page.evaluate("scrollY") == 0
    context.close()


def test_busy_lab_is_reported(browser: Any, lab: Any) -> None:
    tab = Tab(browser, lab, "worked")
    tab.page.route(
        "**/works/worked",
        lambda route: route.fulfill(
            status=503,
            content_type="application/x-ndjson",
            body='{"error": "busy: <b>try again</b>"}\n',
        ),
    )
    cell(tab, "X/0/0").fill("3")
    tab.root.get_by_text("busy: <b>try again</b>", exact=True).wait_for()
    tab.context.close()


@pytest.mark.parametrize("width", [800, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off(browser: Any, lab: Any, width: int, scheme: str) -> None:
    settings = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    with opened(browser, lab, "worked", **settings) as tab:
        tab.until_shown(lambda: tab.page.select_option("#worked-start", "lesson-1"))
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        cut = (
            "[...document.querySelectorAll('input.cell')].filter((cell) => cell.scrollWidth > cell.clientWidth).length"
        )
        assert tab.page.evaluate(cut) == 0
