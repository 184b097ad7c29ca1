"""A self-contained HTML file: style, script and data inlined, and a content security policy that allows only these."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

__all__ = ["bundle", "digest", "fill", "inert", "policy", "read"]

_IMPORT = re.compile(r'^import (\{[^}]+\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|const|class) (\w+)", re.MULTILINE)


def read(folder: str, name: str) -> str:
    """The text of one file beside this module."""
    return (files("clearhead.inspector") / folder / name).read_text("utf-8")


def bundle(folder: str, modules: Sequence[str]) -> str:
    """ES modules as one script, each in its own scope; ``modules`` lists each after the modules that it imports."""
    parts = ['"use strict";']
    for name in modules:
        text = read(folder, f"{name}.js")
        exported = ", ".join(match[2] for match in _EXPORT.finditer(text))
        text = _EXPORT.sub(r"\1 \2", _IMPORT.sub(r"const \1 = in_\2;", text))
        parts.append(f"const in_{name} = (() => {{\n{text}return {{{exported}}};\n}})();")
    return "\n".join(["(() => {", *parts, "})();"])


def policy(style: str, script: str) -> str:
    """The content security policy: this style, this script, and no request."""
    return f"default-src 'none'; style-src {digest(style)}; script-src {digest(script)}; img-src data:"


def digest(text: str) -> str:
    """The source expression of a content security policy that allows ``text``."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def inert(data: Mapping[str, Any]) -> str:
    """JSON in which nothing can end a script element or start a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def fill(template: str, parts: Mapping[str, str]) -> str:
    """A template with its ``{{names}}`` replaced in one pass, so names within ``parts`` are not replaced."""
    first, *pieces = template.split("{{")
    filled = [first]
    for piece in pieces:
        name, rest = piece.split("}}", 1)
        filled += [parts[name], rest]
    return "".join(filled)
