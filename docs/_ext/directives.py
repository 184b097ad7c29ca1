"""Sphinx directives for what the site generates from the library, and docstrings of packages that can be called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parent))

import generated

__all__ = ["setup"]


class _Generated(SphinxDirective):
    """Parses the Markdown of a function as part of the page."""

    write: ClassVar[Callable[..., str]]

    def run(self) -> list[nodes.Node]:
        # The text depends on the library, which Sphinx does not compare with the last build.
        self.env.note_reread()
        return self.parse_text_to_nodes(type(self).write(*self.arguments), allow_section_headings=True)


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


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives and the handler."""
    app.add_directive("backend-table", _directive(generated.backends))
    app.add_directive("processor-table", _directive(generated.processors))
    app.add_directive("option-table", _directive(generated.options, arguments=1))
    app.add_directive("command-line", _directive(generated.command_line))
    # Before napoleon, which reads the Google sections of the lines.
    app.connect("autodoc-process-docstring", document_called_package, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
