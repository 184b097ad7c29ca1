"""Prepare a lesson in the lab: train a small model on a text of your own, and serve it beside the worked examples.

    pip install "clearhead[train,lab]"
    python examples/teach_with_the_lab.py                      # trains, prints the lab's address, serves until Ctrl-C
    python examples/teach_with_the_lab.py --quick              # trains less, asks the lab for a sheet, and ends
    python examples/teach_with_the_lab.py --pictures FOLDER    # takes the pictures of the guide (needs Playwright)

`clearhead lab FOLDER` serves a run that exists already.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from clearhead.train import LanguageOptions, train_text_language_model

PARTS = ("worked", "model", "variants")
WIDTH, HEIGHT = 1280, 860


def write_lesson(path: Path, sentences: int = 800) -> None:
    """Sums in words, which a model learns by looking back at the two addends."""
    names = ("one", "two", "three", "four", "five", "six", "seven", "eight")
    draw = random.Random(0)
    pairs = ((draw.randrange(4), draw.randrange(4)) for _ in range(sentences))
    path.write_text("".join(f"{names[a]} and {names[b]} is {names[a + b + 1]}.\n" for a, b in pairs), "utf-8")


def train(folder: Path, steps: int) -> Path:
    """The run folder of a small language model of the lesson."""
    write_lesson(folder / "lesson.txt")
    options = LanguageOptions(
        embed_dim=48, num_heads=4, num_layers=2, context=48, steps=steps, eval_every=steps, lr=4e-3
    )
    metrics = train_text_language_model(folder / "lesson.txt", out=folder / "sums", options=options)
    print(f"trained {steps} steps: held-out loss {metrics['held_out']['loss']:.3f} nats a character")
    return folder / "sums"


@contextmanager
def serving(run: Path) -> Iterator[Any]:
    """The lab in a thread, until the block ends."""
    from clearhead.lab.server import Lab

    lab = Lab([run])
    thread = threading.Thread(target=lab.run)
    thread.start()
    try:
        yield lab
    finally:
        lab.stop()
        thread.join()


def first_sheet(lab: Any) -> dict[str, Any]:
    """The sheet that the worked example opens with, as the page asks for it."""
    connection = http.client.HTTPConnection("127.0.0.1", lab.port, timeout=60)
    try:
        head = {"Content-Type": "application/json"}
        connection.request("POST", f"/{lab.token}/works/worked-start", "{}", head)
        *_, last = connection.getresponse().read().splitlines()
    finally:
        connection.close()
    sheet: dict[str, Any] = json.loads(last)["result"]["presets"][0]
    return sheet


def take_pictures(lab: Any, folder: Path) -> None:
    """One picture of each of the lab's three parts."""
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as play:
        options = ["--headless", "--no-sandbox", "--disable-gpu"]
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=options)
        for part in PARTS:
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            page.goto(f"{lab.url}#{part}")
            page.wait_for_selector("[role=tabpanel][data-ready]:not([hidden])")
            _prepare(page, part)
            page.wait_for_timeout(1500)
            page.evaluate("window.scrollTo(0, 0)")
            page.screenshot(path=folder / f"lab_{part}.png")
            page.close()
        browser.close()


def _prepare(page: Any, part: str) -> None:
    """Make the edit that a picture shows."""
    if part == "worked":
        page.locator('[data-cell="X/1/0"]').fill("2")
    elif part == "model":
        page.locator("#mdl-model").select_option(label="sums")
        page.fill("#mdl-text", "two and three is ")
        page.get_by_role("button", name="Look", exact=True).click()
        page.frame_locator("iframe").locator("#main[data-ready]").wait_for(state="attached")
        page.get_by_role("switch", name="layer 0 head 1", exact=True).click()
        page.wait_for_selector(".mdl-after")
    else:
        page.get_by_label("take mask 2 away").click()
        page.get_by_label("kind of mask 1").select_option("Expression")
        page.fill("#mask-0-formula", "k_pos <= q_pos and (q_pos - k_pos) % 3 == 0")


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare a lesson in the lab.")
    parser.add_argument("--quick", action="store_true", help="train less, ask for one sheet, and end")
    parser.add_argument("--pictures", type=Path, help="take pictures into this folder, and end")
    chosen = parser.parse_args()
    missing = [name for name in ("tokenizers", "safetensors", "starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        print(f"skipped: needs {', '.join(missing)}: pip install 'clearhead[train,lab]'")
        return
    pictures = None if chosen.pictures is None else chosen.pictures.absolute()
    steps = 20 if chosen.quick else 600
    with tempfile.TemporaryDirectory() as name, chdir(name), serving(train(Path(), steps)) as lab:
        if pictures is not None:
            take_pictures(lab, pictures)
        elif chosen.quick:
            sheet = first_sheet(lab)
            print(f"the lab serves {sheet['title']!r}: X = {sheet['X']}")
        else:
            print(f"{lab.url}\nOpen this address in a browser of this machine. Ctrl-C ends the lab.")
            try:
                threading.Event().wait()
            except KeyboardInterrupt:
                print("ended")


if __name__ == "__main__":
    main()
