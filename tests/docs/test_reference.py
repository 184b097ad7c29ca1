"""The reference pages name everything that is public, and what the site generates covers what it is generated from."""

from __future__ import annotations

import re
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tools.check_words import NAMES

from clearhead.choices import TABLE
from clearhead.dispatch import BACKENDS
from clearhead.errors import ClearheadError
from clearhead.train import ClassifierOptions
from tests.api.snapshot import INTERNAL, PACKAGES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DOCUMENTED = re.compile(r"^\.\. (?:auto(?:function|class|data)|py:data):: ([\w.]+)$", re.MULTILINE)
#: Variables of this project that a program reads.
READ = re.compile(
    r"""(?:environ(?:\.get\(|\[|\.setdefault\()|Variable\()\s*["'](CLEARHEAD_\w+)|=\s*["'](CLEARHEAD_\w+)["']"""
)


def _generated() -> Any:
    spec = util.spec_from_file_location("generated", DOCS / "_ext" / "generated.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _text(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


def _value(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def documented() -> list[str]:
    """The names that the reference pages document, in the order of the pages."""
    pages = sorted((DOCS / "reference").glob("*.md"))
    return [name for page in pages for name in DOCUMENTED.findall(page.read_text("utf-8"))]


def public() -> dict[str, Any]:
    """The names that ``tests/api/snapshot.py`` lists and that are no modules, with their values."""
    paths = [f"{package}.{name}" for package in PACKAGES for name in import_module(package).__all__]
    values = {path: _value(path) for path in paths if path not in INTERNAL}
    called = {
        path: type(value).__call__
        for path, value in values.items()
        if isinstance(value, ModuleType) and callable(value)
    }
    return {path: value for path, value in values.items() if not isinstance(value, ModuleType)} | called


def test_every_public_name_stands_on_a_reference_page() -> None:
    names = documented()
    objects = {id(value) for value in map(_value, names)}
    objects |= {id(type(value).__call__) for value in map(_value, names) if isinstance(value, ModuleType)}
    missing = [
        path
        for path, value in public().items()
        if path not in names and (isinstance(value, (int, str, tuple)) or id(value) not in objects)
    ]
    assert missing == []


def test_no_name_is_documented_twice() -> None:
    names = documented()
    assert sorted(names) == sorted(set(names))
    assert len({id(_value(name)) for name in names}) == len(names)


def test_backend_table_has_a_column_for_each_backend() -> None:
    head, _, *rows = _generated().backends().strip().split("\n")
    assert [cell.strip(" `") for cell in head.strip("|").split("|")][1:] == list(BACKENDS)
    assert {row.split("|")[1].strip() for row in rows} >= {"devices", "dtypes", "score rules", "statistics", "gradient"}
    assert all(row.count("|") == len(BACKENDS) + 2 for row in rows)


def test_processor_table_has_a_row_for_each_row_of_choices() -> None:
    _, _, *rows = _generated().processors().strip().split("\n")
    assert [row.split("|")[1].strip() for row in rows] == [row.processors for row in TABLE]


def test_links_of_repository_files_lead_to_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generated = _generated()
    (tmp_path / "benchmarks").mkdir()
    links = "[a](results/zen4.md) [b](../CONTRIBUTING.md#tests) [c](../docs/adr/1.md) [d](../native/x.h) [e](https://a.b/c.md)"
    (tmp_path / "benchmarks" / "README.md").write_text(links, "utf-8")
    monkeypatch.setattr(generated, "ROOT", tmp_path)
    shown = "[a](results/zen4.md) [b](../contributing.md#tests) [c](../adr/1.md) d (`native/x.h`) [e](https://a.b/c.md)"
    assert generated.repository_page("benchmarks/README.md", "evidence/benchmarks.md") == shown


def test_repository_files_have_their_page_in_the_site() -> None:
    pages = _generated().PAGES
    assert {name: (ROOT / "docs" / page).exists() for name, page in pages.items()} == dict.fromkeys(pages, True)


def test_option_table_has_a_row_for_each_field() -> None:
    text = _generated().options("clearhead.train.ClassifierOptions")
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == list(ClassifierOptions.__dataclass_fields__)


def test_command_line_has_every_command_and_option_of_the_snapshot() -> None:
    text = _generated().command_line()
    sections = {part.split("`", 2)[1]: part for part in re.split(r"^#{2,3} ", text, flags=re.MULTILINE)[1:]}
    snapshot = (ROOT / "tests" / "api" / "snapshot.txt").read_text("utf-8")
    commands = re.findall(r"^\$ (clearhead[\w ]*)$", snapshot, re.MULTILINE)
    options = re.findall(r"^\$ (clearhead[a-z ]*?) (--[\w-]+)[^:]*:", snapshot, re.MULTILINE)
    assert (
        re.search(r"(?<!`)(?<!\S)--[a-z]", re.sub(r"^ {4}.*$|^```text\n.*?^```$", "", text, flags=re.M | re.S)) is None
    )
    assert len(commands) > 10
    assert len(options) > 50
    assert set(commands) <= set(sections)
    assert [(command, option) for command, option in options if f"`{option}`" not in sections[command]] == []


def test_every_environment_variable_stands_on_its_page() -> None:
    page = _text("reference/environment.md")
    folders = ("src", "tests", "tools", "benchmarks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)]
    names = {name for path in files for pair in READ.findall(path.read_text("utf-8")) for name in pair if name}
    assert {"CLEARHEAD_NATIVE", "CLEARHEAD_ISA", "CLEARHEAD_PROJECTION", "CLEARHEAD_KEEP_MEMORY"} <= names
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


@pytest.mark.parametrize("error", ClearheadError.__subclasses__(), ids=lambda error: error.__name__)
def test_every_error_has_a_section_with_messages(error: type[ClearheadError]) -> None:
    sections = re.split(r"^## ", _text("reference/errors.md"), flags=re.MULTILINE)
    section = next(part for part in sections if part.startswith(f"`{error.__name__}`"))
    assert "message(" in section


def test_glossary_lists_the_names_that_are_not_used() -> None:
    page = _text("glossary.md")
    assert [name for name in sorted(NAMES) if f"`{name}`" not in page] == []


def test_glossary_defines_each_term_once() -> None:
    terms = [
        line
        for block in re.findall(r"^```\{glossary\}\n(.*?)^```", _text("glossary.md"), re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
        if line and not line.startswith(" ")
    ]
    assert len(terms) > 60
    assert sorted(terms) == sorted(set(terms))
