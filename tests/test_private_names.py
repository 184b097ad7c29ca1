"""Private names of torch and transformers are used in one file, each with its reason; tests use none of clearhead's."""

from __future__ import annotations

import ast
import os
import re
from collections import namedtuple
from collections.abc import Iterator, Mapping
from inspect import isfunction
from pathlib import Path

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead import torch_private

PACKAGE = Path(ch.__file__).parent
TESTS = Path(__file__).parent
TOOLS = TESTS.parent / "tools"
HOME = "torch_private.py"
#: A section of the file is one use.
MOST_USES = 8
MOST_PLACES = 33
LIBRARIES = ("torch", "transformers")
#: Underscored attributes of transformers' configs and models.
OF_TRANSFORMERS = {
    "_active_collector",
    "_attn_implementation",
    "_attn_implementation_internal",
    "_can_set_attn_implementation",
    "_supports_sdpa",
}
#: Those, and underscored attributes of modules, tensors, their classes and compiled functions.
UNDERSCORED = (
    OF_TRANSFORMERS
    | {
        name
        for owner in (nn.Module(), torch.zeros(0), torch.nn.Parameter(torch.zeros(0)), nn.Module, torch.Tensor)
        for name in dir(owner)
        if name.startswith("_") and not name.startswith("__")
    }
    | {"_torchdynamo_orig_callable", "_torchdynamo_disable", "_dynamo_marked_constant", "_orig_mod"}
)


def private_names(source: str) -> list[str]:
    """The private names of torch and transformers in a program, one for each place.

    >>> private_names("import torch; torch._C.f(layer._modules)")
    ['_modules', 'torch._C']
    """
    nodes = [*ast.walk(ast.parse(source))]
    ours = {name for node in nodes for name in _defined(node)}
    paths = {name: path for node in nodes for name, path in _imported(node)}
    return [name for node in nodes for name in _names(node, ours, paths)]


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Names bound to a part of one of the libraries, and its path."""
    if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in LIBRARIES:
        yield from ((each.asname or each.name, f"{node.module}.{each.name}") for each in node.names)
    if isinstance(node, ast.Import):
        yield from ((each.asname, each.name) for each in node.names if each.asname is not None)


def _defined(node: ast.AST) -> Iterator[str]:
    """Attributes that the file's classes define, which have nothing to do with torch's."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
        yield node.attr
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _names(node: ast.AST, ours: set[str], paths: Mapping[str, str]) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in LIBRARIES:
        yield from (f"{node.module}.{each.name}" for each in node.names if _is_private(f"{node.module}.{each.name}"))
    elif isinstance(node, ast.Import):
        names = [each.name for each in node.names if each.name.partition(".")[0] in LIBRARIES]
        yield from (name for name in names if _is_private(name))
    elif isinstance(node, ast.Attribute):
        root, _, rest = _path(node).partition(".")
        path = f"{paths.get(root, root)}.{rest}"
        if path.partition(".")[0] in LIBRARIES:
            # Only the longest path counts.
            if _is_private(path) and not _is_private(path.rpartition(".")[0]):
                yield path
        elif node.attr in UNDERSCORED and node.attr not in ours:
            yield node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in UNDERSCORED:
        yield node.value


def _path(node: ast.expr) -> str:
    """``a.b.c`` of names and attributes; "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    inner = _path(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""


def _is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def underscored(source: str) -> tuple[set[str], list[str]]:
    """Underscored names that a file defines, and those that it takes from another module or object.

    >>> underscored("_g = 1; self._mine = 2; from clearhead.cache import _f; a._key; patch.setattr(g, '_h', 1)")[1]
    ['_f', '_h', '_key']
    """
    nodes = [*ast.walk(ast.parse(source))]
    defined = (name for node in nodes for name in (*_defined(node), *_assigned(node)))
    used = (name for node in nodes for name in _names_in(node))
    is_private = re.compile("_[^_]").match
    return {*filter(is_private, defined)}, sorted(filter(is_private, used))


def _names_in(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom):
        yield from (each.name for each in node.names)
    elif isinstance(node, ast.Attribute) and not _is_self(node.value):
        yield node.attr
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("attr"):
        words = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
        yield from (word.rpartition(".")[2] for word in words if isinstance(word, str))


def _assigned(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Assign):
        yield from (part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name))


@pytest.mark.slow
def test_tests_use_no_private_names_of_ours() -> None:
    files = [*PACKAGE.rglob("*.py"), *TESTS.rglob("*.py"), *TOOLS.glob("*.py")]
    names = {file: underscored(file.read_text(encoding="utf-8")) for file in files}
    others = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, os, namedtuple("Any", ()))
    theirs = UNDERSCORED | {"_repr_html_"} | {name for kind in others for name in dir(kind)}
    ours = {name for defined, _ in names.values() for name in defined} - theirs
    uses = {
        file.relative_to(TESTS).as_posix(): [name for name in used if name in ours]
        for file, (_, used) in names.items()
        if file.is_relative_to(TESTS)
    }
    assert {file: used for file, used in uses.items() if used} == {}


@pytest.mark.slow
def test_private_names_are_used_in_one_file() -> None:
    files = (file for file in PACKAGE.rglob("*.py") if file.name != HOME)
    uses = {str(file.relative_to(PACKAGE)): private_names(file.read_text()) for file in files}
    assert {file: names for file, names in uses.items() if names} == {}


def test_uses_are_few() -> None:
    source = (PACKAGE / HOME).read_text()
    assert len(re.findall(r"^# \d+\. ", source, re.MULTILINE)) <= MOST_USES
    assert len(private_names(source)) <= MOST_PLACES


def test_each_use_says_what_happens_without_it() -> None:
    functions = [getattr(torch_private, name) for name in torch_private.__all__]
    silent = [each.__name__ for each in functions if isfunction(each) and "Without" not in (each.__doc__ or "")]
    assert silent == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch\ntorch._C._is_tracing()", ["torch._C"]),
        ("from torch._subclasses import FakeTensor", ["torch._subclasses.FakeTensor"]),
        ("from torch.nn.modules.module import _has_any_global_hook", ["torch.nn.modules.module._has_any_global_hook"]),
        (
            "from torch.autograd import forward_ad\nforward_ad._current_level",
            ["torch.autograd.forward_ad._current_level"],
        ),
        ("import torch.overrides as overrides\noverrides._stack()", ["torch.overrides._stack"]),
        ("layer._modules", ["_modules"]),
        ("getattr(tensor, '_version', 0)", ["_version"]),
        ("torch.compiler.is_compiling(); layer.weight; self._mine", []),
    ],
)
def test_checker_finds_private_names(source: str, names: list[str]) -> None:
    assert private_names(source) == names
