"""The variants in a real Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from clearhead.lab import variants
from clearhead.lab.variants_starts import STARTS
from tests.lab.opened import Room, opened
from tests.lab.running import Ticketless, running

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def lab() -> Iterator[Any]:
    with running() as started:
        yield started


@pytest.fixture(scope="module")
def page(browser: Any, lab: Any) -> Iterator[Room]:
    with opened(browser, lab, "variants") as room:
        yield room


@pytest.fixture
def room(page: Room) -> Room:
    """The room with a causal mask and no rules."""
    start(page, "Causal")
    return page


def start(room: Room, name: str) -> None:
    room.after(lambda: room.page.select_option("#variants-start", name))


def fill(room: Room, name: str, text: str) -> None:
    room.after(lambda: room.page.fill(f"#{name}", text))


def facts(room: Room) -> dict[str, str]:
    """What is said of the mask."""
    return room.page.evaluate(  # type: ignore[no-any-return]
        "Object.fromEntries([...document.querySelectorAll('.shape-of .facts dt')]"
        ".map((name) => [name.textContent, name.nextElementSibling.textContent]))"
    )


def pixel(room: Room, place: int, query: int, key: int, tokens: int = 24) -> list[int]:
    """The colour of a place in one of the three maps; the first has no words beside it."""
    return room.page.evaluate(  # type: ignore[no-any-return]
        """([place, query, key, tokens]) => {
          const canvas = document.querySelectorAll('.square')[place], ratio = canvas.width / canvas.clientWidth;
          const left = place === 0 ? 3 : 46, size = (canvas.clientWidth - left - 3) / tokens;
          const at = (index) => Math.round((left + (index + 0.5) * size) * ratio);
          return [...canvas.getContext('2d').getImageData(at(key), at(query), 1, 1).data];
        }""",
        [place, query, key, tokens],
    )


def python(room: Room) -> str:
    return str(room.root.locator(".python").text_content())


@pytest.mark.parametrize("name", [each.name for each in STARTS])
def test_each_start_is_shown(room: Room, name: str) -> None:
    if name != "Causal":
        start(room, name)
    (chosen,) = (each for each in STARTS if each.name == name)
    params = {"mask": list(chosen.mask), "rules": list(chosen.rules), "head": chosen.head}
    answer = variants.compute(params, Ticketless())
    assert python(room) == answer["python"]
    assert facts(room)["Mask"] == answer["mask"]["python"]
    assert f"{100 * answer['mask']['fraction']:.1f} %" in facts(room)["Allowed"]
    allowed = pixel(room, 0, 0, 0)
    for query, key in ((23, 0), (12, 5), (5, 12), (20, 19)):
        assert (pixel(room, 0, query, key) == allowed) == (answer["mask"]["allowed"][query][key] == "1")
    assert room.root.locator("strong").inner_text() == answer["dispatch"]["choice"]


class TestMasks:
    def test_add_join_turn_and_take_away(self, room: Room) -> None:
        room.after(lambda: room.page.get_by_role("button", name="Add a mask").click())
        room.after(lambda: room.page.get_by_label("kind of mask 2").select_option("Window"))
        fill(room, "mask-1-before", "2")
        assert facts(room)["Mask"] == "ch.Causal() & ch.Window(before=2, after=0)"
        room.after(lambda: room.page.get_by_label("turn mask 2 around").click())
        room.after(lambda: room.page.get_by_label("how mask 2 is joined").select_option("|"))
        assert facts(room)["Mask"] == "ch.Causal() | ~ch.Window(before=2, after=0)"
        assert room.page.input_value("#variants-start") == "Your own"
        room.after(lambda: room.page.get_by_label("take mask 1 away").click())
        assert facts(room)["Mask"] == "~ch.Window(before=2, after=0)"
        room.after(lambda: room.page.get_by_label("take mask 1 away").click())
        assert facts(room)["Allowed"] == "576 of 576 places, 100.0 %"

    def test_empty_rows_are_named(self, room: Room) -> None:
        room.after(lambda: room.page.get_by_label("kind of mask 1").select_option("Expression"))
        fill(room, "mask-0-formula", "k_pos < q_pos")
        assert facts(room)["Empty rows"].startswith("query 0: nothing to attend to")
        assert facts(room)["A query sees"] == "0 to 23 keys, 11.5 on average"

    def test_tiles(self, room: Room) -> None:
        assert facts(room)["Tiles of 8×8"].startswith("3 of 9 are empty and skipped, 3 are full")


class TestFormulas:
    def test_a_bad_one_is_said_beside_it(self, room: Room) -> None:
        room.after(lambda: room.page.get_by_label("kind of mask 1").select_option("Expression"))
        before = python(room)
        fill(room, "mask-0-formula", "k_pos <= q_pos and foo")
        said = room.page.locator("#refused-mask-0")
        assert "column 20 must hold one of q_pos, k_pos, batch, head; got 'foo'" in said.inner_text()
        assert room.page.get_attribute("#mask-0-formula", "aria-invalid") == "true"
        assert python(room) == before
        fill(room, "mask-0-formula", "k_pos <= q_pos and head >= 0")
        assert said.is_hidden()
        assert room.page.get_attribute("#mask-0-formula", "aria-invalid") is None
        assert "head >= 0" in python(room)

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
    def test_a_hostile_one_is_shown_and_never_run(self, room: Room, text: str) -> None:
        room.after(lambda: room.page.get_by_label("kind of mask 1").select_option("Expression"))
        fill(room, "mask-0-formula", text)
        assert "mask expression: column" in room.page.locator("#refused-mask-0").inner_text()
        assert room.page.locator("img").count() == 0
        assert room.page.input_value("#mask-0-formula") == text

    def test_a_rule_that_is_not_finite_is_said(self, room: Room) -> None:
        room.after(lambda: room.page.get_by_role("button", name="Add a rule").click())
        room.after(lambda: room.page.get_by_label("kind of rule 1").select_option("Expression"))
        fill(room, "rule-0-formula", "score / (q_pos - k_pos)")
        assert "rules must give finite scores where the mask allows" in room.text("[role=alert]")
        fill(room, "rule-0-formula", "score / (1 + q_pos - k_pos)")
        assert room.root.locator("[role=alert]").first.inner_text() == ""


class TestHead:
    def test_pointing_at_a_weight_tells_it(self, room: Room) -> None:
        start(room, "ALiBi")
        answer = variants.compute(
            {"mask": list(STARTS[5].mask), "rules": list(STARTS[5].rules), "head": "uniform"}, Ticketless()
        )
        after = room.root.locator(".square").nth(2)
        box = after.bounding_box()
        size = (box["width"] - 46 - 3) / 24
        after.hover(position={"x": 46 + 4.5 * size, "y": 46 + 7.5 * size})
        words, weight = answer["words"], answer["after"]["weights"][7][4]
        said = room.text(".readout")
        assert said.startswith(
            f"query 7 “{words[7]}” → key 4 “{words[4]}”: weight 0.041667 → {weight:.6f}, score 0.000000"
        )
        after.hover(position={"x": 46 + 9.5 * size, "y": 46 + 7.5 * size})
        assert room.text(".readout").endswith("forbidden by the mask")

    def test_arrow_keys_walk_the_map(self, room: Room) -> None:
        maps = room.root.locator(".square")
        maps.nth(1).hover(position={"x": 60, "y": 60})
        maps.nth(1).focus()
        words = variants.compute({}, Ticketless())["words"]
        for key, query, place in (("ArrowDown", 2, 1), ("ArrowRight", 2, 2), ("ArrowUp", 1, 2), ("ArrowLeft", 1, 1)):
            room.page.keyboard.press(key)
            assert room.text(".readout").startswith(f"query {query} “{words[query]}” → key {place} “{words[place]}”")
        for _ in range(3):
            room.page.keyboard.press("ArrowLeft")
        assert room.text(".readout").startswith("query 1 “cat” → key 0 “the”")

    def test_charts_say_their_numbers(self, room: Room) -> None:
        start(room, "Sink")
        labels = [
            chart.get_attribute("aria-label")
            for chart in room.root.locator("section:not([hidden]) .chart svg[role=img]").all()
        ]
        assert [label.split(".")[0] for label in labels] == [
            "Entropy of the weights, in nats",
            "Mean distance to what is attended to",
            "Sum of the weights: the rest is the sink's",
        ]
        assert "before: 1.00 to 1.00" in labels[2]

    def test_more_tokens_and_another_head(self, room: Room) -> None:
        room.after(lambda: room.page.select_option("#variants-tokens", "64"))
        room.after(lambda: room.page.select_option("#variants-head", "same word"))
        assert facts(room)["Allowed"] == "2080 of 4096 places, 50.8 %"
        assert "looks for its own word" in room.root.inner_text()
        room.after(lambda: room.page.select_option("#variants-tokens", "24"))

    def test_temperature(self, room: Room) -> None:
        fill(room, "variants-temperature", "0.5")
        assert "scale=query.shape[-1] ** -0.5 / 0.5" in python(room)
        fill(room, "variants-temperature", "warm")
        assert "temperature must be a number from 0.01 to 100; got 'warm'" in room.text("[role=alert]")


@pytest.mark.parametrize("width", [800, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off(browser: Any, lab: Any, width: int, scheme: str) -> None:
    settings = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    with opened(browser, lab, "variants", **settings) as room:
        start(room, "Formulas of your own")
        assert room.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert room.root.locator("input:not([id]), textarea:not([id])").count() == 0
        assert room.page.evaluate(
            "[...document.querySelectorAll('#room-variants :is(input, select, textarea)')].every("
            "(each) => each.labels.length || each.getAttribute('aria-label'))"
        )
