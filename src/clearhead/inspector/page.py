"""From a page's data to one HTML file that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clearhead.inspector.html import fill, inert, policy, read
from clearhead.inspector.schema import validate

__all__ = ["render", "write_page"]

_FILES = "files"
_SCRIPTS = ("data.js", "maths.js", "draw.js", "steps.js", "page.js")


def render(data: Mapping[str, Any]) -> str:
    """The page for ``data`` as text: style, script and data inlined.

    The data stands in a script element that is not run, with every ``<`` escaped, and the page's own policy allows
    exactly the one style and the one script that are written here and no request at all: a text inside the data
    can be shown, but it cannot become markup and it cannot run.

    Args:
        data: an object that follows ``inspector.schema``.

    Raises:
        DataError: the data does not follow the format; names the field.
    """
    validate(data, function="render")
    style = read(_FILES, "page.css")
    script = "\n".join(['(() => {"use strict";', *(read(_FILES, name) for name in _SCRIPTS), "})();"])
    parts = {
        "policy": policy(style, script),
        "title": html.escape(str(data["title"])),
        "style": style,
        "script": script,
        "data": inert(data),
    }
    return fill(read(_FILES, "template.html"), parts)


def write_page(data: Mapping[str, Any], path: Path) -> Path:
    """Write the page for ``data`` to ``path``, whole or not at all, and give the path back.

    Raises:
        DataError: the data does not follow the format; names the field.
    """
    # Not at the top: training is much to import for whoever writes no page.
    from clearhead.train.files import write_bytes

    write_bytes(path, render(data).encode("utf-8"))
    return path
