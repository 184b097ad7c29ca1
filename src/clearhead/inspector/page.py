"""From a page's data to one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from clearhead.inspector.schema import validate
from clearhead.train.files import write_bytes

__all__ = ["render", "write_page"]

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
    style = _read("page.css")
    script = "\n".join(['(() => {"use strict";', *map(_read, _SCRIPTS), "})();"])
    parts = {
        "policy": f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; img-src data:",
        "title": html.escape(str(data["title"])),
        "style": style,
        "script": script,
        "data": _inert(data),
    }
    page = _read("template.html")
    pieces = page.split("{{")
    # One pass over the template: what is filled in is never searched for further places to fill.
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, rest = piece.split("}}", 1)
        filled += [parts[name], rest]
    return "".join(filled)


def write_page(data: Mapping[str, Any], path: Path) -> Path:
    """Write the page for ``data`` to ``path``, whole or not at all, and give the path back.

    Raises:
        DataError: the data does not follow the format; names the field.
    """
    write_bytes(path, render(data).encode("utf-8"))
    return path


def _read(name: str) -> str:
    return (files("clearhead.inspector") / "files" / name).read_text("utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _inert(data: Mapping[str, Any]) -> str:
    """JSON in which nothing can end a script element or start a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text
