"""Sphinx directives for what the site generates from the library, and which docstrings it shows."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import cleandoc
from types import ModuleType
from typing import Any, ClassVar

import generated
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from tests.api.snapshot import INTERNAL

__all__ = ["setup"]


class _Generated(SphinxDirective):
    """Parses the Markdown of a function as part of the page."""

    write: ClassVar[Callable[..., str]]

    def run(self) -> list[nodes.Node]:
        # The text depends on the library, which Sphinx does not compare with the last build.
        self.env.note_reread()
        return self.parse_text_to_nodes(type(self).write(*self.arguments), allow_section_headings=True)


class _RepositoryPage(SphinxDirective):
    """Shows a Markdown file of the repository as part of the page."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Callable[[str], Any]]] = {"heading": str}

    def run(self) -> list[nodes.Node]:
        source, page = self.arguments[0], f"{self.env.docname}.md"
        self.env.note_dependency(str(generated.ROOT / source))
        text = generated.repository_page(source, page)
        if "heading" in self.options:
            # In place of the title: MyST puts sections into those of the page, so no text may stand before the first.
            text = f"## {self.options['heading']}\n{text.partition(chr(10))[2]}"
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def _directive(write: Callable[..., str], arguments: int = 0) -> type[_Generated]:
    members = {"write": staticmethod(write), "required_arguments": arguments}
    return type(f"Generated_{write.__name__}", (_Generated,), members)


def document_called_package(
    app: Sphinx, what: str, name: str, thing: object, settings: object, lines: list[str]
) -> None:
    """Give ``clearhead.observe`` and ``clearhead.verify`` the docstring of the function that a call of them runs."""
    if what == "function" and isinstance(thing, ModuleType):
        called: Any = vars(type(thing))["__call__"]
        lines[:] = cleandoc(called.__func__.__doc__).split("\n")


def skip_internal(app: Sphinx, what: str, name: str, thing: Any, skip: bool, settings: object) -> bool | None:
    """Leave out the methods by which clearhead's modules call each other; None keeps autodoc's own decision."""
    qualified = f".{getattr(thing, '__qualname__', name)}"
    internal = name == "extra_repr" or any(each.endswith(qualified) for each in INTERNAL)
    return True if what == "class" and internal else None


def correct_source_links(app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Lead a page of source code back to each name as it is documented.

    viewcode assumes one documented module for each file; ``clearhead.trace`` and ``clearhead.observe.Trace`` share one.
    """
    if not pagename.startswith("_modules/clearhead"):
        return
    documented: dict[str, list[str]] = {}
    for name, entry in app.env.domains.python_domain.objects.items():
        documented.setdefault(entry.docname, []).append(name)

    def corrected(match: re.Match[str]) -> str:
        names = documented.get(match["page"], [])
        parts = match["name"].split(".")
        tails = (".".join(parts[start:]) for start in range(len(parts)))
        fitting = (name for tail in tails for name in names if name == tail or name.endswith(f".{tail}"))
        return f"{match['up']}{match['page']}.html#{next(fitting, match['name'])}"

    context["body"] = re.sub(r"(?P<up>(?:\.\./)+)(?P<page>[\w/]+)\.html#(?P<name>[\w.]+)", corrected, context["body"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives and the handler."""
    app.add_directive("backend-table", _directive(generated.backends))
    app.add_directive("processor-table", _directive(generated.processors))
    app.add_directive("option-table", _directive(generated.options, arguments=1))
    app.add_directive("command-line", _directive(generated.command_line))
    app.add_directive("repository-page", _RepositoryPage)
    app.connect("html-page-context", correct_source_links)
    app.connect("autodoc-skip-member", skip_internal)
    # Before napoleon, which reads the Google sections of the lines.
    app.connect("autodoc-process-docstring", document_called_package, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
