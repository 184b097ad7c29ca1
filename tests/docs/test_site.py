"""The site builds without a warning, every link in it leads somewhere, and its search works from a folder."""

from __future__ import annotations

import inspect
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

from tests.api.snapshot import INTERNAL, PACKAGES
from tests.inspector.chromium import Opened

DOCS = Path(__file__).parents[2] / "docs"
#: Anchors that a page's own script answers.
SCRIPTED = frozenset({"", "top"})

pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """The links and the anchors of one HTML file."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        for key in ("id", "name"):
            if given.get(key):
                self.anchors.add(str(given[key]))
        for key in ("href", "src"):
            if given.get(key) is not None:
                self.links.append(str(given[key]))


def dangling(folder: Path) -> list[str]:
    """Relative links of a folder of HTML files that lead to no file, or to no anchor in it."""
    pages = {path.resolve(): Page(path.read_text("utf-8")) for path in folder.rglob("*.html")}
    return [
        f"{path.relative_to(folder.resolve())}: {link}"
        for path, page in pages.items()
        for link in page.links
        if not _resolves(path, link, pages)
    ]


def _resolves(path: Path, link: str, pages: dict[Path, Page]) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.exists():
        return False
    fragment = unquote(parts.fragment)
    return target not in pages or fragment in SCRIPTED or fragment in pages[target].anchors


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a page whose cells did not run has no outputs, and everything else."""
    pytest.importorskip("sphinx", reason="sphinx is not installed (clearhead[docs] brings it)")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-D", "nb_execution_mode=off"]
    # Only a cell that runs names its language.
    command += ["-D", "suppress_warnings=myst-nb.lexer"]
    places = ["-d", str(folder / "doctrees"), str(DOCS), str(folder / "html")]
    built = subprocess.run([*command, *places], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder / "html"


def test_a_dangling_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#one">1</a><a href="b.html#two">2</a><img src="c.png">', "utf-8")
    (tmp_path / "b.html").write_text(
        '<p id="one"></p><a href="#none"></a><a href="https://pytorch.org/x#y"></a>', "utf-8"
    )
    assert sorted(dangling(tmp_path)) == ["a.html: b.html#two", "a.html: c.png", "b.html: #none"]


def test_every_relative_link_and_anchor_resolves(site: Path) -> None:
    assert len(list(site.rglob("*.html"))) > 30
    assert dangling(site) == []


def test_every_page_is_reached_from_the_first_one(site: Path) -> None:
    pages = {path.resolve(): Page(path.read_text("utf-8")) for path in site.rglob("*.html")}
    reached, waiting = set(), [(site / "index.html").resolve()]
    while waiting:
        path = waiting.pop()
        if path in reached or path not in pages:
            continue
        reached.add(path)
        waiting += [(path.parent / unquote(urlsplit(link).path)).resolve() for link in pages[path].links if link]
    assert sorted(str(path.relative_to(site.resolve())) for path in set(pages) - reached) == ["_modules/index.html"]


def test_public_names_and_their_methods_are_in_the_inventory(site: Path) -> None:
    inventory = pytest.importorskip("sphinx.util.inventory").InventoryFile
    names = {
        name for kind in inventory.loads((site / "objects.inv").read_bytes(), uri="").data.values() for name in kind
    }
    missing = []
    for package in PACKAGES:
        for name in import_module(package).__all__:
            path, value = f"{package}.{name}", getattr(import_module(package), name)
            if path in INTERNAL or isinstance(value, (ModuleType, int, str, tuple, dict)):
                continue
            homes = [each for each in names if each == path or _value(each) is value]
            members = ["", *(f".{member}" for member in _methods(value) if f"{path}.{member}" not in INTERNAL)]
            missing += [path + each for each in members if not any(home + each in names for home in homes)]
    # These are documented under the name of the package that is called.
    assert sorted({*missing} - {"clearhead.observe.observe", "clearhead.verify.verify"}) == []
    assert sorted(names & INTERNAL) == []


def _value(path: str) -> object:
    """What a name of a public package stands for, or None."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name, None) if module in PACKAGES else None


def _methods(value: object) -> list[str]:
    """The public methods and properties of a class that have a docstring of their own."""
    if not inspect.isclass(value):
        return []
    members = {name: getattr(member, "__func__", member) for name, member in vars(value).items() if name[0] != "_"}
    shown = (property, type(_methods))
    return [
        name
        for name, member in members.items()
        if isinstance(member, shown) and member.__doc__ and name != "extra_repr"
    ]


@pytest.mark.browser
def test_search_finds_a_name_from_a_folder(site: Path, browser: object) -> None:
    opened = Opened(browser, site / "index.html")
    try:
        opened.page.fill("input[name=q]", "query_offset")
        opened.page.press("input[name=q]", "Enter")
        opened.page.wait_for_selector("#search-results li a")
        assert "Attention" in opened.page.inner_text("#search-results")
        assert opened.complaints == []
        assert {url.partition(":")[0] for url in opened.requests} <= {"file", "data"}
    finally:
        opened.context.close()


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_is_wider_than_a_phone(site: Path, browser: object, scheme: str) -> None:
    too_wide = []
    opened = Opened(browser, site / "index.html", color_scheme=scheme)
    opened.page.set_viewport_size({"width": 390, "height": 844})
    try:
        for path in sorted(site.rglob("*.html")):
            if "_modules" in path.parts:
                continue
            opened.page.goto(path.as_uri())
            width = opened.page.evaluate("document.documentElement.scrollWidth")
            too_wide += [f"{path.relative_to(site)}: {width}"] if width > 390 else []
        assert too_wide == []
    finally:
        opened.context.close()
