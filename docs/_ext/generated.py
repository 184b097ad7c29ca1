"""What the site generates from the library: tables of backends, processors and options, and the command line.

Each function returns Markdown. ``docs/_ext/directives.py`` puts the result into a page at build time.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import typer

from clearhead.choices import TABLE
from clearhead.cli.app import app
from clearhead.dispatch import BACKENDS, loaded

__all__ = ["backends", "command_line", "options", "processors", "repository_page"]

ROOT = Path(__file__).parents[2]
#: Files of the repository that are pages of the site.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/CONFORMANCE.md": "evidence/conformance.md",
    "benchmarks/README.md": "evidence/benchmarks.md",
    "benchmarks/RESULTS.md": "evidence/results.md",
    **{
        f"benchmarks/results/{path.name}": f"evidence/results/{path.name}"
        for path in ROOT.glob("benchmarks/results/*.md")
    },
}
#: An option in a sentence, or code, which stays as it is written.
_OPTION = re.compile(r"`[^`]*`|(?<![\w-])(?P<option>--[a-z][a-z-]*)")
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")

#: Facts of ``Capability.row()`` that depend on the machine, not on the backend.
_LOCAL = frozenset({"usable"})


def backends() -> str:
    """A column for each backend, a row for each fact of its capability record."""
    records = {name: {"what": loaded(name).summary, **loaded(name).capability.row()} for name in BACKENDS}
    facts = [fact for fact in next(iter(records.values())) if fact not in _LOCAL]
    rows = [[fact, *(records[name][fact] for name in BACKENDS)] for fact in facts]
    limits = {name: loaded(name).capability for name in BACKENDS}
    rows.append(["largest head size", *(_limit(limits[name].max_head_dim) for name in BACKENDS)])
    rows.append(["most scores at once", *(_limit(limits[name].max_scores) for name in BACKENDS)])
    rows.append(["statistics without a gradient", *(_names(limits[name].without_gradient) for name in BACKENDS)])
    return _table(["", *(f"`{name}`" for name in BACKENDS)], rows)


def processors() -> str:
    """The table from which ``clearhead`` reads GEMM and attention paths; the first row that matches counts."""
    heads = ["processors", "needs", "dtypes", "forward", "input gradient", "weight gradient", "narrow forward",
             "narrow input gradient", "few rows", "attention", "basis"]  # fmt: skip
    return _table(heads, [_processor(row) for row in TABLE])


def options(path: str) -> str:
    """A table of the fields of a dataclass of options: name, default, limits, meaning."""
    module, _, name = path.rpartition(".")
    rows = [
        [f"`{item.name}`", f"`{item.default!r}`", _limits(item.metadata), item.metadata["help"]]
        for item in fields(getattr(import_module(module), name))
    ]
    return _table(["option", "default", "limits", "meaning"], rows)


def command_line() -> str:
    """A section for each command, its help, its usage and a table of its parameters."""
    return "\n".join(_command("clearhead", typer.main.get_command(app)))


def repository_page(source: str, page: str) -> str:
    """A Markdown file of the repository, its links rewritten for a page of the site.

    A link to a file that is no page becomes the path of the file.

    Args:
        source: path of the file within the repository.
        page: path of the page within ``docs``.
    """

    def rewritten(match: re.Match[str]) -> str:
        text, (address, _, anchor) = match[1], match[2].partition("#")
        if not address or "://" in address or address.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), address))
        target = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if target is None or not target.endswith((".md", ".png", ".svg")):
            return text if text.startswith("`") else f"{text} (`{path}`)"
        relative = posixpath.relpath(target, posixpath.dirname(page) or ".")
        return f"[{text}]({relative}{'#' + anchor if anchor else ''})"

    return _LINK.sub(rewritten, (ROOT / source).read_text("utf-8"))


def _command(path: str, command: Any) -> Iterable[str]:
    depth = "#" * (2 + (len(path.split()) > 2))
    children = dict(getattr(command, "commands", {}))
    yield f"{depth} `{path}`\n"
    yield _help(command.help or "")
    yield f"```text\n{_usage(path, command, children)}\n```\n"
    rows = [[_spelled(each), _default(each), _marked(each.help or "")] for each in command.params if not each.hidden]
    if rows:
        yield _table(["parameter", "default", "meaning"], rows)
    for name, child in children.items():
        yield from _command(f"{path} {name}", child)


def _help(text: str) -> str:
    """Help as Markdown; a line that begins with a bold term stays a line."""
    lines = (line if line.startswith("    ") else _marked(line) for line in text.strip().split("\n"))
    return "\n".join(lines).replace("\n**", "\\\n**") + "\n"


def _marked(text: str) -> str:
    """A sentence whose options are code; as text two hyphens would become a dash."""
    return _OPTION.sub(lambda match: f"`{match['option']}`" if match["option"] else match[0], text)


def _usage(path: str, command: Any, children: dict[str, Any]) -> str:
    needed = [f"{each.opts[0]} {each.name.upper()}" for each in command.params if each.required and _is_option(each)]
    arguments = [each.metavar or _optional(each) for each in command.params if not _is_option(each)]
    optional = ["[OPTIONS]"] if any(_is_option(each) and not each.required for each in command.params) else []
    return " ".join([path, *optional, *needed, *arguments, *(["COMMAND"] if children else [])])


def _optional(parameter: Any) -> str:
    return str(parameter.name.upper() if parameter.required else f"[{parameter.name.upper()}]")


def _is_option(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "option")


def _spelled(parameter: Any) -> str:
    if not _is_option(parameter):
        return f"`{parameter.metavar or parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if parameter.is_flag if _is_option(parameter) else False:
        return "on" if parameter.default else "off"
    value = parameter.default
    if value is None or value == () or callable(value):
        return ""
    return f"`{','.join(map(str, value)) if isinstance(value, (list, tuple)) else value}`"


def _processor(row: Any) -> list[str]:
    sizes = row.sdpa_from
    attention = "native" if sizes is None else f"sdpa from {sizes.full} keys, causal from {sizes.causal}; else native"
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in row.dtypes)
    paths = (row.forward, row.input_gradient, row.weight_gradient, row.narrow_forward, row.narrow_input_gradient)
    few = row.few_rows or row.forward
    return [row.processors, _names(row.needs), dtypes, *(_either(path) for path in (*paths, few)), attention, row.basis]


def _either(paths: Sequence[str]) -> str:
    return " or ".join(paths)


def _names(values: Iterable[str]) -> str:
    return ", ".join(sorted(values)) or "none"


def _limit(value: int | None) -> str:
    return "none" if value is None else f"{value:,}"


def _limits(metadata: Any) -> str:
    words = {"least": "≥ {}", "above": "> {}", "most": "≤ {:,}", "below": "< {}"}
    said = [form.format(metadata[key]) for key, form in words.items() if metadata.get(key) is not None]
    choices = metadata.get("choices")
    return ", ".join(said + [f"`{choice}`" for choice in choices or ()])


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(backends(), processors(), options("clearhead.train.LanguageOptions"), command_line(), sep="\n")
