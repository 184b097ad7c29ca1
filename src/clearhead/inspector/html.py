"""One HTML file that needs nothing else: style, script and data inlined under a policy that allows exactly these."""

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
    """ES modules as one script, each in a scope of its own, in an order in which none is used before it is there."""
    parts = ['"use strict";']
    for name in modules:
        text = read(folder, f"{name}.js")
        exported = ", ".join(found[2] for found in _EXPORT.finditer(text))
        text = _EXPORT.sub(r"\1 \2", _IMPORT.sub(r"const \1 = in_\2;", text))
        parts.append(f"const in_{name} = (() => {{\n{text}return {{{exported}}};\n}})();")
    return "\n".join(["(() => {", *parts, "})();"])


def policy(style: str, script: str) -> str:
    """The content security policy: this style, this script, and no request at all."""
    return f"default-src 'none'; style-src {digest(style)}; script-src {digest(script)}; img-src data:"


def digest(text: str) -> str:
    """A text as the source expression that allows it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def inert(data: Mapping[str, Any]) -> str:
    """JSON in which nothing can end a script element or start a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def fill(template: str, parts: Mapping[str, str]) -> str:
    """A template with its ``{{places}}`` filled in one pass: what is filled in is never searched for further ones."""
    first, *pieces = template.split("{{")
    filled = [first]
    for piece in pieces:
        name, rest = piece.split("}}", 1)
        filled += [parts[name], rest]
    return "".join(filled)
