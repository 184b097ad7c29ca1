"""Find the names and phrases that docs/glossary.md replaces: ``make lint`` runs it.

A name is checked where it is bound (functions, classes, arguments, assignments, files), a phrase in comments,
docstrings, strings and pages.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMES = frozenset(
    """
    own found held kept known again taken apart alike marks told stays passing between behind edge turned pace ahead
    once seen
    """.split()  # noqa: SIM905, a list would take a line a name
)
"""Names that say nothing about the value. ``after`` is missing: it is an argument of ``ch.Window``."""

PUBLIC = frozenset({"observe.observe.Seen", "train.batches.Sequences.taken", "verify.report.Report.known"})
"""Public names that stay; a better one needs an alias and an ADR."""

PHRASES = {
    r"ways? out": "epilogue",
    r"(laid|lie|lies|laying) end to end": "packed",
    r"taken apart": "matched, or converted to a spec",
    r"told apart": "distinguished",
    r"lie(s)? plainly": "contiguous",
    r"asked for ahead": "prefetched",
    r"written down": "recorded",
    r"played back": "replayed",
    r"norms? (first|behind)": "pre-norm, post-norm",
    r"leav(e|es|ing) padding out": "removes padding",
    r"leav(e|es|ing) out padding": "removes padding",
    r"whoever": "observer, caller",
    r"by parts": "op by op",
    r"pairs of bfloat16": "bf16 dot-product instructions",
    r"numbers that are not normal": "subnormals",
    r"units in the last place": "ULPs",
    r"stays? as (it|they) (was|were)": "unmodified",
    r"product's rate": "peak throughput",
    r"rooms?": "buffer, workspace, capacity",
}
"""Phrases that the field has a term for, and the term."""

SOURCES = (".py", ".cpp", ".h", ".md", ".js", ".css", ".html", ".toml")
EXEMPT = frozenset({"tools/check_words.py", "docs/glossary.md"})
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
STRING = re.compile(r'"(?:\\.|[^"\\\n])*"')


def tracked() -> list[str]:
    """The files that git knows, and those that it does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return sorted(set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")))


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Each name that Python code binds, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def python_names(text: str) -> Iterator[tuple[int, str]]:
    """The empty names that a Python file binds.

    >>> list(python_names("held = 1\\nfor width in held: pass"))
    [(1, 'held')]
    """
    for line, name in bound_names(ast.parse(text)):
        if name.strip("_").lower() in NAMES:
            yield line, name


def native_names(text: str) -> Iterator[tuple[int, str]]:
    """The empty names in C++, comments and strings apart.

    >>> list(native_names("int held = 1; // held\\n"))
    [(1, 'held')]
    """
    code = STRING.sub('""', COMMENT.sub(lambda match: "\n" * match[0].count("\n"), text))
    for match in re.finditer(r"\b[A-Za-z_]+\b", code):
        if match[0].strip("_").lower() in NAMES and not code[: match.start()].endswith(("std::", "#pragma ")):
            yield code.count("\n", 0, match.start()) + 1, match[0]


def phrases(text: str) -> Iterator[tuple[int, str, str]]:
    """The phrases of ``PHRASES`` in a text, each with its line and the term."""
    for pattern, term in PHRASES.items():
        for match in re.finditer(rf"\b{pattern.replace(' ', chr(92) + 's+')}\b", text, re.IGNORECASE):
            yield text.count("\n", 0, match.start()) + 1, match[0], term


def _file_of(dotted: str) -> str:
    """The file that defines a public name, without the package's folder.

    >>> _file_of("verify.report.Report.known")
    'verify/report.py'
    """
    package, module, *_ = dotted.split(".")
    return f"{package}/{module}.py"


def complaints(name: str) -> Iterator[str]:
    """What is wrong with one file, a line each."""
    path = ROOT / name
    if name in EXEMPT or path.suffix not in SOURCES or not path.is_file():
        return
    text = path.read_text(encoding="utf-8")
    if path.stem.strip("_") in NAMES:
        yield f"{name}: rename the file: {path.stem!r} says nothing"
    names = python_names if path.suffix == ".py" else native_names if path.suffix in (".cpp", ".h") else None
    allowed = {dotted.rpartition(".")[2] for dotted in PUBLIC if name.startswith(f"src/clearhead/{_file_of(dotted)}")}
    for line, found_name in names(text) if names else ():
        if found_name in allowed:
            continue
        yield f"{name}:{line}: rename {found_name!r}: it says nothing about the value"
    for line, phrase, term in phrases(text):
        yield f"{name}:{line}: {phrase!r}: write {term}"


def repeated_classes() -> Iterator[str]:
    """Class names that the library uses more than once."""
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    for name, where in places.items():
        if len(where) > 1:
            yield f"class {name!r} is defined {len(where)} times, rename all but one: {', '.join(where)}"


def main() -> None:
    """Print each complaint; exit with status 1 if there is one."""
    prefixes = tuple(sys.argv[1:]) or ("",)
    names = [name for name in tracked() if name.startswith(prefixes)]
    lines = [line for name in names for line in complaints(name)] + list(repeated_classes())
    print("\n".join(lines) or "words: nothing to change")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
