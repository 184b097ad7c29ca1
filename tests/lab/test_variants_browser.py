"""The variants in a real Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from clearhead.lab import variants
from clearhead.lab.variants_starts import STARTS
from tests.lab.opened import Tab, opened
from tests.lab.running import Ticketless, running

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def lab() -> Iterator[Any]:
    with running() as started:
        yield started


@pytest.fixture(scope="module")
def page(browser: Any, lab: Any) -> Iterator[Tab]:
    with opened(browser, lab, "variants") as tab:
        yield tab


@pytest.fixture
def tab(page: Tab) -> Tab:
    """The tab with a causal mask and no rules."""
    start(page, "Causal")
    return page


def start(tab: Tab, name: str) -> None:
    tab.until_shown(lambda: tab.page.select_option("#variants-start", name))


def fill(tab: Tab, name: str, text: str) -> None:
    tab.until_shown(lambda: tab.page.fill(f"#{name}", text))


def facts(tab: Tab) -> dict[str, str]:
    """What is said of the mask."""
    return tab.page.evaluate(  # type: ignore[no-any-return]
        "Object.fromEntries([...document.querySelectorAll('.shape-of .facts dt')]"
        ".map((name) => [name.textContent, name.nextElementSibling.textContent]))"
    )


def pixel(tab: Tab, place: int, query: int, key: int, tokens: int = 24) -> list[int]:
    """The colour of a place in one of the three maps; the first has no words beside it."""
    return tab.page.evaluate(  # type: ignore[no-any-return]
        """([place, query, key, tokens]) => {
          const canvas = document.querySelectorAll('.square')[place], ratio = canvas.width / canvas.clientWidth;
          const left = place === 0 ? 3 : 46, size = (canvas.clientWidth - left - 3) / tokens;
          const at = (index) => Math.round((left + (index + 0.5) * size) * ratio);
          return [...canvas.getContext('2d').getImageData(at(key), at(query), 1, 1).data];
        }""",
        [place, query, key, tokens],
    )


def python(tab: Tab) -> str:
    return str(tab.root.locator(".python").text_content())


@pytest.mark.slow
@pytest.mark.parametrize("name", [each.name for each in STARTS])
def test_each_preset_is_shown(tab: Tab, name: str) -> None:
    if name != "Causal":
        start(tab, name)
    (chosen,) = (each for each in STARTS if each.name == name)
    params = {"mask": list(chosen.mask), "rules": list(chosen.rules), "head": chosen.head}
    answer = variants.compute(params, Ticketless())
    assert python(tab) == answer["python"]
    assert facts(tab)["Mask"] == answer["mask"]["python"]
    assert f"{100 * answer['mask']['fraction']:.1f} %" in facts(tab)["Allowed"]
    allowed = pixel(tab, 0, 0, 0)
    for query, key in ((23, 0), (12, 5), (5, 12), (20, 19)):
        assert (pixel(tab, 0, query, key) == allowed) == (answer["mask"]["allowed"][query][key] == "1")
    assert tab.root.locator("strong").inner_text() == answer["dispatch"]["choice"]


class TestMasks:
    def test_masks_are_added_joined_negated_and_removed(self, tab: Tab) -> None:
        tab.until_shown(lambda: tab.page.get_by_role("button", name="Add a mask").click())
        tab.until_shown(lambda: tab.page.get_by_label("kind of mask 2").select_option("Window"))
        fill(tab, "mask-1-before", "2")
        assert facts(tab)["Mask"] == "ch.Causal() & ch.Window(before=2, after=0)"
        tab.until_shown(lambda: tab.page.get_by_label("negate mask 2").click())
        tab.until_shown(lambda: tab.page.get_by_label("how mask 2 is joined").select_option("|"))
        assert facts(tab)["Mask"] == "ch.Causal() | ~ch.Window(before=2, after=0)"
        assert tab.page.input_value("#variants-start") == "Your own"
        tab.until_shown(lambda: tab.page.get_by_label("remove mask 1").click())
        assert facts(tab)["Mask"] == "~ch.Window(before=2, after=0)"
        tab.until_shown(lambda: tab.page.get_by_label("remove mask 1").click())
        assert facts(tab)["Allowed"] == "576 of 576 places, 100.0 %"

    def test_empty_rows_are_named(self, tab: Tab) -> None:
        tab.until_shown(lambda: tab.page.get_by_label("kind of mask 1").select_option("Expression"))
        fill(tab, "mask-0-formula", "k_pos < q_pos")
        assert facts(tab)["Empty rows"].startswith("query 0: nothing to attend to")
        assert facts(tab)["A query sees"] == "0 to 23 keys, 11.5 on average"

    def test_tiles(self, tab: Tab) -> None:
        assert facts(tab)["Tiles of 8×8"].startswith("3 of 9 are empty and skipped, 3 are full")


class TestFormulas:
    def test_invalid_formula_is_reported_beside_it(self, tab: Tab) -> None:
        tab.until_shown(lambda: tab.page.get_by_label("kind of mask 1").select_option("Expression"))
        before = python(tab)
        fill(tab, "mask-0-formula", "k_pos <= q_pos and foo")
        said = tab.page.locator("#refused-mask-0")
        assert "column 20 must be one of q_pos, k_pos, batch, head; got 'foo'" in said.inner_text()
        assert tab.page.get_attribute("#mask-0-formula", "aria-invalid") == "true"
        assert python(tab) == before
        fill(tab, "mask-0-formula", "k_pos <= q_pos and head >= 0")
        assert said.is_hidden()
        assert tab.page.get_attribute("#mask-0-formula", "aria-invalid") is None
        assert "head >= 0" in python(tab)

    @pytest.mark.parametrize(
        "text",
        [
            "<img src=x onerror=alert(1)>",
            "__import__('os').system('true')",
            "alert(1)",
            "k_pos\u202e < 1",
            "</textarea>",
        ],
    )
    def test_hostile_formula_is_shown_and_not_run(self, tab: Tab, text: str) -> None:
        tab.until_shown(lambda: tab.page.get_by_label("kind of mask 1").select_option("Expression"))
        fill(tab, "mask-0-formula", text)
        assert "mask expression: column" in tab.page.locator("#refused-mask-0").inner_text()
        assert tab.page.locator("img").count() == 0
        assert tab.page.input_value("#mask-0-formula") == text

    def test_non_finite_rule_is_reported(self, tab: Tab) -> None:
        tab.until_shown(lambda: tab.page.get_by_role("button", name="Add a rule").click())
        tab.until_shown(lambda: tab.page.get_by_label("kind of rule 1").select_option("Expression"))
        fill(tab, "rule-0-formula", "score / (q_pos - k_pos)")
        assert "rules must give finite scores where the mask allows" in tab.text("[role=alert]")
        fill(tab, "rule-0-formula", "score / (1 + q_pos - k_pos)")
        assert tab.root.locator("[role=alert]").first.inner_text() == ""


class TestHead:
    def test_hover_shows_the_weight(self, tab: Tab) -> None:
        start(tab, "ALiBi")
        answer = variants.compute(
            {"mask": list(STARTS[5].mask), "rules": list(STARTS[5].rules), "head": "uniform"}, Ticketless()
        )
        map_after = tab.root.locator(".square").nth(2)
        box = map_after.bounding_box()
        size = (box["width"] - 46 - 3) / 24
        map_after.hover(position={"x": 46 + 4.5 * size, "y": 46 + 7.5 * size})
        words, weight = answer["words"], answer["after"]["weights"][7][4]
        said = tab.text(".readout")
        assert said.startswith(
            f"query 7 “{words[7]}” → key 4 “{words[4]}”: weight 0.041667 → {weight:.6f}, score 0.000000"
        )
        map_after.hover(position={"x": 46 + 9.5 * size, "y": 46 + 7.5 * size})
        assert tab.text(".readout").endswith("forbidden by the mask")

    def test_arrow_keys_move_in_the_map(self, tab: Tab) -> None:
        maps = tab.root.locator(".square")
        maps.nth(1).hover(position={"x": 60, "y": 60})
        maps.nth(1).focus()
        words = variants.compute({}, Ticketless())["words"]
        for key, query, place in (("ArrowDown", 2, 1), ("ArrowRight", 2, 2), ("ArrowUp", 1, 2), ("ArrowLeft", 1, 1)):
            tab.page.keyboard.press(key)
            assert tab.text(".readout").startswith(f"query {query} “{words[query]}” → key {place} “{words[place]}”")
        for _ in range(3):
            tab.page.keyboard.press("ArrowLeft")
        assert tab.text(".readout").startswith("query 1 “cat” → key 0 “the”")

    def test_charts_show_their_values(self, tab: Tab) -> None:
        start(tab, "Sink")
        labels = [
            chart.get_attribute("aria-label")
            for chart in tab.root.locator("section:not([hidden]) .chart svg[role=img]").all()
        ]
        assert [label.split(".")[0] for label in labels] == [
            "Entropy of the weights, in nats",
            "Mean distance to the attended keys",
            "Sum of the weights: the rest is the sink's",
        ]
        assert "before: 1.00 to 1.00" in labels[2]

    def test_more_tokens_and_another_head(self, tab: Tab) -> None:
        tab.until_shown(lambda: tab.page.select_option("#variants-tokens", "64"))
        tab.until_shown(lambda: tab.page.select_option("#variants-head", "same word"))
        assert facts(tab)["Allowed"] == "2080 of 4096 places, 50.8 %"
        assert "attends to occurrences of its own word" in tab.root.inner_text()
        tab.until_shown(lambda: tab.page.select_option("#variants-tokens", "24"))

    def test_temperature(self, tab: Tab) -> None:
        fill(tab, "variants-temperature", "0.5")
        assert "scale=query.shape[-1] ** -0.5 / 0.5" in python(tab)
        fill(tab, "variants-temperature", "warm")
        assert "temperature must be a number from 0.01 to 100; got 'warm'" in tab.text("[role=alert]")


@pytest.mark.parametrize("width", [800, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off(browser: Any, lab: Any, width: int, scheme: str) -> None:
    settings = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    with opened(browser, lab, "variants", **settings) as tab:
        start(tab, "Typed formulas")
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert tab.root.locator("input:not([id]), textarea:not([id])").count() == 0
        assert tab.page.evaluate(
            "[...document.querySelectorAll('#panel-variants :is(input, select, textarea)')].every("
            "(each) => each.labels.length || each.getAttribute('aria-label'))"
        )
