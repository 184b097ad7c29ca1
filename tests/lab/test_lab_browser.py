"""The lab's page in a real Chromium: its shell, and the tab "Your model"."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from clearhead.lab.limits import Limits
from clearhead.lab.server import Lab
from clearhead.lab.work import Work
from tests.lab.conftest import trained_example
from tests.lab.folders import bert, language_run
from tests.lab.running import WAITING, running, until

pytest.importorskip("safetensors", reason="needs the extra 'train'")
pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=alert(1)></script><b>"
EXAMPLE = "the old birds behind the fox beside the cat"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("models")
    run = language_run(home)
    # A folder's name is untrusted text.
    hostile = run.rename(home / "<i>play")
    return [hostile, bert(home)]


@pytest.fixture
def lab(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    reader = trained_example()
    monkeypatch.setattr("clearhead.lab.example.made", lambda ticket: reader)
    with running(folders, Limits(works=2), works=[Work("slow", WAITING.run)]) as started:
        yield started


class Page:
    """The lab's page, with its requests and console messages."""

    def __init__(self, browser: Any, lab: Lab, tab: str = "model", **settings: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, **settings)
        self.page = self.context.new_page()
        self.page.set_default_timeout(40_000)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.context.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", self._dialog)
        self.page.goto(f"{lab.url}#{tab}")
        self.page.wait_for_selector(f"#panel-{tab}[data-ready]")

    def _dialog(self, dialog: Any) -> None:
        self.complaints.append(dialog.message)
        dialog.dismiss()

    def button(self, name: str) -> Any:
        return self.page.get_by_role("button", name=name, exact=True)

    def switch(self, name: str) -> Any:
        return self.page.get_by_role("switch", name=name, exact=True)

    def look(self) -> Any:
        """Press Look, and return the viewer's frame after it has loaded."""
        self.button("Look").click()
        return self.viewer()

    def viewer(self) -> Any:
        self.page.wait_for_selector("iframe[src]")
        frame = self.page.frame_locator("iframe")
        frame.locator("#main[data-ready]").wait_for(state="attached")
        return frame

    def rows(self) -> list[list[str]]:
        """The prediction's table: the cells of each row."""
        return [
            [cell.strip() for cell in row.all_inner_texts() if cell.strip()]
            for row in (each.locator("th, td") for each in self.page.locator(".mdl-said tbody tr").all())
        ]


@pytest.fixture
def opened(browser: Any, lab: Lab) -> Iterator[Page]:
    page = Page(browser, lab)
    yield page
    page.context.close()


@pytest.mark.slow
def test_text_is_shown_edited_and_compared(opened: Page, lab: Lab) -> None:
    frame = opened.look()
    assert frame.locator("#title").inner_text() == f"Small example: {EXAMPLE}"
    assert frame.locator("[data-place]").count() > 0
    rows = opened.rows()
    assert {row[0] for row in rows[:4]} == {"run", "sing", "sleep", "wait"}
    opened.switch("layer 0 head 2").click()
    opened.page.wait_for_selector(".mdl-after")
    assert opened.switch("layer 0 head 2").get_attribute("aria-checked") == "false"
    moved = {row[0]: (row[1], row[2]) for row in opened.rows()}
    assert float(moved["run"][1].split()[0]) < float(moved["run"][0].split()[0])
    assert "of the probability has moved. First was" in opened.page.inner_text(".readout")
    opened.button("Compare every head").click()
    opened.page.wait_for_selector("iframe[title='Every head before and after']")
    opened.viewer().get_by_text("after: decoder.blocks.1.attention").first.wait_for(state="attached")
    opened.button("Undo all changes").click()
    opened.page.wait_for_selector(".mdl-after", state="detached")
    assert opened.switch("layer 0 head 2").get_attribute("aria-checked") == "true"
    assert opened.complaints == []
    assert {urlsplit(url).netloc for url in opened.requests if not url.startswith("data:")} == {f"127.0.0.1:{lab.port}"}


def test_temperature_and_mask_of_one_or_all_layers(opened: Page) -> None:
    opened.look()
    page = opened.page
    page.get_by_label("temperature of all layers").fill("20")
    page.wait_for_selector(".mdl-after")
    assert page.get_by_label("temperature of layer 1", exact=True).input_value() == "20"
    flat = opened.rows()
    page.get_by_label("temperature of all layers").fill("1")
    page.wait_for_selector(".mdl-after", state="detached")
    page.get_by_label("mask of layer 0", exact=True).select_option("window")
    page.wait_for_selector(".mdl-after")
    assert opened.rows() != flat
    reach = page.get_by_label("how many tokens away the window of layer 0 reaches")
    reach.fill("0")
    until(lambda: page.evaluate("document.querySelector('.readout').textContent.includes('moved')"), 40)
    page.get_by_label("temperature of layer 0", exact=True).fill("-1")
    assert page.get_by_label("temperature of layer 0", exact=True).get_attribute("aria-invalid") == "true"
    assert opened.complaints == []


def test_model_tab_works_with_the_keyboard_alone(opened: Page) -> None:
    page = opened.page
    keys = page.keyboard
    page.locator("#mdl-text").focus()
    keys.press("Control+a")
    keys.type("the birds near the fox")
    keys.press("Control+Enter")
    opened.viewer()
    assert page.locator(".mdl-token").all_inner_texts() == ["the", "birds", "near", "the", "fox"]
    at = "document.activeElement.getAttribute('aria-label')"
    for _ in range(12):
        keys.press("Tab")
        if page.evaluate(at) == "token 4: fox":
            break
    assert page.evaluate(at) == "token 4: fox"
    keys.press("ArrowLeft")
    assert page.evaluate(at) == "token 3: the"
    until(lambda: page.evaluate("document.querySelector('.mdl-said th.word').textContent !== 'near'"), 40)
    assert {row[0] for row in opened.rows()[:6]} & {"cat", "dog", "bird", "fox", "red", "old", "foxes", "birds", "cats"}
    for _ in range(8):
        keys.press("Tab")
        if page.evaluate(at) == "layer 0 head 0":
            break
    assert page.evaluate(at) == "layer 0 head 0"
    keys.press("ArrowDown")
    assert page.evaluate(at) == "layer 1 head 0"
    keys.press("ArrowRight")
    keys.press("Space")
    page.wait_for_selector(".mdl-after")
    assert opened.switch("layer 1 head 1").get_attribute("aria-checked") == "false"


def test_url_fragment_selects_the_tab(opened: Page) -> None:
    page = opened.page
    assert page.get_by_role("tab", selected=True).inner_text() == "Your model"
    page.get_by_role("tab", name="Your model").focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#panel-worked[data-ready]")
    assert page.evaluate("location.hash") == "#worked"
    page.keyboard.press("End")
    page.wait_for_selector("#panel-variants[data-ready]")
    assert page.get_by_role("tab", selected=True).inner_text() == "Variants"
    assert page.locator("[role=tabpanel]:visible").count() == 1
    page.evaluate("location.hash = 'model'")
    page.wait_for_selector("#panel-model:visible")
    assert opened.complaints == []


def test_markup_in_texts_and_names_is_shown_as_text(opened: Page) -> None:
    page = opened.page
    page.locator("#mdl-model").select_option(label="<i>play")
    page.locator("#mdl-text").fill(HOSTILE)
    opened.button("Look").click()
    said = page.get_by_role("alert").filter(has_text="must have only characters of the training text")
    said.wait_for()
    assert "'<'" in said.inner_text()
    page.locator("#mdl-model").select_option(label="BertForMaskedLM")
    page.locator("#mdl-text").fill(f"a [MASK] {HOSTILE}")
    frame = opened.look()
    assert HOSTILE.split()[0] in frame.locator("#title").inner_text()
    page.locator("#mdl-model").select_option(label="<i>play")
    page.locator("#mdl-text").fill("Speak, sp")
    opened.button("Look").click()
    until(lambda: page.evaluate("document.querySelectorAll('.mdl-token').length === 9"), 40)
    assert page.locator("#panel-model i, #panel-model img, #panel-model b").count() == 0
    assert opened.complaints == []


def test_prediction_is_at_the_mask_token(opened: Page) -> None:
    page = opened.page
    page.locator("#mdl-model").select_option(label="BertForMaskedLM")
    page.locator("#mdl-text").fill("a [MASK] film")
    opened.look()
    assert page.locator(".mdl-token[aria-checked=true]").inner_text() == "[MASK]"
    assert page.locator("#mdl-said-title").inner_text() == "Masked token"
    assert len(opened.rows()) == 10


def test_long_job_shows_progress_and_can_be_cancelled(browser: Any, lab: Lab) -> None:
    lab_page = Page(browser, lab)
    page = lab_page.page
    page.route("**/works/look", lambda route: route.continue_(url=f"{lab.url}works/slow"))
    lab_page.button("Look").click()
    until(lambda: page.evaluate("document.querySelector('#panel-model progress').value > 0"), 40)
    assert page.locator("#panel-model [role=status]").first.inner_text().startswith("at ")
    until(lambda: lab.desk.num_jobs == 1)
    lab_page.button("Cancel").click()
    until(lambda: lab.desk.num_jobs == 0, 3)
    assert page.get_by_text("Cancelled.").is_visible()
    assert lab_page.button("Cancel").is_hidden()
    lab_page.button("Look").click()
    # Evaluate in the page while waiting, as `route` continues requests only then.
    until(lambda: page.evaluate("true") and lab.desk.num_jobs == 1)
    # Closing the page cancels its job.
    lab_page.context.close()
    until(lambda: lab.desk.num_jobs == 0, 3)


def test_stopped_lab_is_reported(browser: Any, folders: list[Path]) -> None:
    with running(folders) as lab:
        page = Page(browser, lab)
    page.button("Look").click()
    page.page.get_by_role("alert").filter(has_text="The lab does not answer").wait_for()
    page.context.close()


def test_other_page_cannot_use_the_lab(browser: Any, lab: Lab, tmp_path: Path) -> None:
    """A page of another origin with the token cannot read an answer, start a job, or frame the lab."""
    other = tmp_path / "other.html"
    other.write_text(
        f"""<!doctype html><iframe src="{lab.url}"></iframe><script>
        const works = "{lab.url}works/models", json = {{"content-type": "application/json"}};
        const said = [() => "read", () => "refused"];
        const tried = [
          fetch(works, {{method: "POST", body: "{{}}", mode: "no-cors"}}).then((answer) => answer.type, said[1]),
          fetch(works, {{method: "POST", body: "{{}}", headers: json}}).then(...said),
          fetch("{lab.url}").then(...said),
        ];
        Promise.all(tried).then((all) => {{ document.title = all.join(); }});
        </script>"""
    )
    context = browser.new_context()
    page = context.new_page()
    page.goto(other.as_uri())
    until(lambda: page.evaluate("document.title !== ''"), 40)
    assert page.title().split(",")[1:] == ["refused", "refused"]
    assert "clearhead lab" not in page.frames[1].content()
    until(lambda: lab.desk.num_jobs == 0)
    context.close()


@pytest.mark.parametrize("width", [1280, 800, 420])
def test_nothing_is_cut_off(browser: Any, lab: Lab, width: int) -> None:
    page = Page(browser, lab)
    page.page.set_viewport_size({"width": width, "height": 900})
    page.look()
    page.switch("layer 0 head 0").click()
    page.page.wait_for_selector(".mdl-after")
    wide = page.page.evaluate("document.documentElement.scrollWidth")
    assert wide <= width
    page.context.close()
