"""Lazy imports: names of a package and torch operators whose modules are imported on first use (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import torch

__all__ = ["lazy_names", "lazy_operators"]


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package whose names and modules are imported on first use.

    Args:
        package: the package's ``__name__``.
        modules: for each module, the names that the package takes from it, separated by spaces.

    >>> read, names = lazy_names("clearhead", {"clearhead.masks": "Causal Window"})
    >>> read("Causal")
    <class 'clearhead.masks.positional.Causal'>
    """
    sources = {name: module for module, names in modules.items() for name in names.split()}

    def read(name: str) -> Any:
        if name in sources:
            value = getattr(import_module(sources[name]), name)
            # Later reads find the value among the package's variables.
            setattr(sys.modules[package], name, value)
            return value
        if name.startswith("_") or find_spec(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f"{package}.{name}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *getattr(sys.modules[package], "__all__", ())})

    return read, names


#: The module that registers fake kernels, gradients and operation counts of the operators written in C++.
_LIBRARY: Final = "clearhead.ops.library"


def lazy_operators(modules: Mapping[str, str]) -> None:
    """Import the module that defines an operator on the first access to it in ``torch.ops.clearhead``.

    ``torch.export.load`` looks up the operators of a program in a process that has only imported clearhead.

    Args:
        modules: for each module, the operators that it defines, separated by spaces.
    """
    sources = {name: module for module, names in modules.items() for name in names.split()}

    def define(name: str) -> Any:
        module = sources.get(name, _LIBRARY)
        # A module that is being imported looks up its own operators.
        if module not in sys.modules:
            import_module(module)
        # torch then looks the operator up.
        raise AttributeError(name)

    vars(torch.ops.clearhead)["__getattr__"] = define
