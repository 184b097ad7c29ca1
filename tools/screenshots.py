"""The README's two pictures: pages of real small runs, opened in Chromium without a network.

    python tools/screenshots.py                 # docs/images/digits.png and docs/images/text.png
    python tools/screenshots.py --epochs 20     # a shorter training, for a quick check

The first is the page of ``clearhead demo``. The second is a small language model, trained for a few seconds on this
repository's README and pages, by ``clearhead train`` and ``clearhead view``. Seeds are fixed; numbers differ between
machines by roundings, and the times on the first page are those of this machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlencode

from playwright.sync_api import Browser, sync_playwright

from clearhead.inspector import Page

ROOT = Path(__file__).resolve().parent.parent
TEXT = "The page computes its weights from queries and keys, and shows them."
WIDTH, HEIGHT = 1280, {"digits": 1010, "text": 860}
MOST_BYTES = 300_000
_LEARNED = ("README.md", "docs/inside/architecture.md", "docs/inside/kernels.md")
_COMMAND = ("-c", "import sys; sys.argv[0] = 'clearhead'; from clearhead.cli.app import main; main()")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="folder for the two pictures")
    parser.add_argument("--epochs", type=int, help="of the digits, instead of the demo's usual")
    settings = parser.parse_args()
    settings.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        digits, text = _digits(Path(folder), settings.epochs), _text(Path(folder))
        browser = play.chromium.launch(
            executable_path=_chromium(), args=["--headless", "--no-sandbox", "--disable-gpu"]
        )
        try:
            _picture(browser, digits, "", settings.out / "digits.png", "light")
            _picture(browser, text, _previous_token_view(text), settings.out / "text.png", "dark")
        finally:
            browser.close()
    return 0


def _run(*words: str) -> None:
    subprocess.run([sys.executable, *_COMMAND, *words], check=True, stdout=subprocess.DEVNULL)


def _digits(folder: Path, epochs: int | None) -> Path:
    _run("demo", "--out", str(folder / "demo"), *([] if epochs is None else ["--epochs", str(epochs)]))
    return folder / "demo" / "index.html"


def _text(folder: Path) -> Path:
    learned, run, page = folder / "own.txt", folder / "run", folder / "text.html"
    learned.write_text("\n".join((ROOT / name).read_text("utf-8") for name in _LEARNED), "utf-8")
    _run(
        "train", "lm", "--data", str(learned), "--out", str(run), "--tokenizer", "bpe", "--vocab-size", "900",
        "--embed-dim", "96", "--num-heads", "6", "--num-layers", "3", "--context", "96", "--steps", "600",
        "--eval-every", "300", "--dropout", "0", "--lr", "0.003", "--seed", "0",
    )  # fmt: skip
    _run("view", str(run), "--text", TEXT, "--out", str(page), "--title", "A small language model reads a sentence")
    return page


def _previous_token_view(page: Path) -> str:
    """The URL fragment of the head with the most attention on the previous token, with heads sorted by that score."""
    layers = Page.open(page).data["layers"]
    heads = ((at, place) for at, layer in enumerate(layers) for place in range(len(layer["heads"])))
    layer, head = max(heads, key=lambda at: float(layers[at[0]]["heads"][at[1]]["scores"]["previous"]))
    query = layers[layer]["q_len"] // 2
    return urlencode({"sort": "previous", "layer": layer, "head": head, "query": query, "key": query - 1})


def _picture(browser: Browser, page: Path, fragment: str, out: Path, scheme: str) -> None:
    dark = scheme == "dark"
    context = browser.new_context(
        offline=True,
        viewport={"width": WIDTH, "height": HEIGHT[out.stem]},
        device_scale_factor=1.25,
        color_scheme="dark" if dark else "light",
    )
    tab = context.new_page()
    tab.goto(f"{page.as_uri()}#{fragment}")
    tab.wait_for_selector("#main[data-ready]", state="attached")
    tab.wait_for_timeout(500)
    tab.screenshot(path=out)
    context.close()
    size = out.stat().st_size
    if size > MOST_BYTES:
        raise SystemExit(f"{out} has {size:,} bytes, more than {MOST_BYTES:,}: make the window smaller")
    print(f"{out}: {size:,} bytes")


def _chromium() -> str:
    path = os.environ.get("CLEARHEAD_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        raise SystemExit("there is no chromium on the path (Debian: apt install chromium; or set CLEARHEAD_CHROMIUM)")
    return path


if __name__ == "__main__":
    sys.exit(main())
