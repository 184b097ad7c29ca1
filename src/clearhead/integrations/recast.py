"""Replacements of another library's module classes: the same name, the same state, another ``forward``.

A module is swapped by assigning ``__class__``. Its parameters, its hooks and every reference to it stay valid. Tools
find modules by the name of their class, so a replacement has the name of its original.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from importlib import import_module
from typing import Any, Final, Protocol, TypeVar

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from clearhead.invariance import eager_if_invariant

__all__ = ["Fast", "class_of", "fast_of", "original_of", "recast", "replacement", "stands_for"]


class Fast(Hashable, Protocol):
    """Computes a call of a module; a frozen record, so that pickle can write it."""

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's result; None leaves the call to the original code."""
        ...


_Replacement = TypeVar("_Replacement", bound=type[nn.Module])
_ORIGINALS: Final[dict[type[nn.Module], type[nn.Module]]] = {}
_REPLACEMENTS: Final[dict[tuple[type[nn.Module], Fast], type[nn.Module]]] = {}
_FAST: Final[dict[type[nn.Module], Fast]] = {}


def stands_for(original: type[nn.Module]) -> Callable[[_Replacement], _Replacement]:
    """Decorator of a subclass of ``original`` that ``swap`` puts in its place."""

    def renamed(ours: _Replacement) -> _Replacement:
        path = ours.__module__, ours.__qualname__
        _rename(ours, original, lambda self: (_empty_by_path, path, self.__dict__))
        return ours

    return renamed


def replacement(original: type[nn.Module], fast: Fast, **attributes: object) -> type[nn.Module]:
    """The subclass of ``original`` whose calls go to ``fast`` first."""
    ours = _REPLACEMENTS.get((original, fast))
    if ours is None:
        theirs = original.forward

        @eager_if_invariant
        @functools.wraps(theirs)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            output = None if torch.compiler.is_compiling() else fast(self, args, kwargs)
            return theirs(self, *args, **kwargs) if output is None else output

        ours = type(original.__name__, (original,), {"forward": forward, **attributes})
        _rename(ours, original, lambda self: (_empty, (original, fast), self.__dict__))
        _REPLACEMENTS[original, fast], _FAST[ours] = ours, fast
    return ours


def original_of(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class that ``kind`` stands for; None if it is no replacement."""
    return _ORIGINALS.get(kind)


def fast_of(module: nn.Module) -> Fast | None:
    """What computes a swapped module's calls."""
    return _FAST.get(class_of(module))


def class_of(module: nn.Module) -> type[nn.Module]:
    """The module's class without the subclass that ``torch.nn.utils.parametrize`` makes."""
    kind: type[nn.Module] = type_before_parametrizations(module)
    return kind


def recast(module: nn.Module, kind: type[nn.Module]) -> None:
    """Make the module one of ``kind``; a parametrized module keeps its properties, in a subclass."""
    if is_parametrized(module):
        properties = {name: value for name, value in vars(type(module)).items() if name not in _NOT_COPIED}
        kind = type(type(module).__name__, (kind,), properties)
    module.__class__ = kind


_NOT_COPIED: Final = ("__dict__", "__weakref__")


def _rename(
    ours: type[nn.Module], original: type[nn.Module], reduced: Callable[[nn.Module], tuple[object, ...]]
) -> None:
    ours.__name__, ours.__qualname__, ours.__module__ = original.__name__, original.__qualname__, original.__module__
    # Pickle would import the original under this name.
    setattr(ours, "__reduce_ex__", lambda self, _protocol: reduced(self))  # noqa: B010
    _ORIGINALS[ours] = original


def _empty_by_path(module: str, name: str) -> nn.Module:
    kind = getattr(import_module(module), name)
    empty: nn.Module = kind.__new__(kind)
    return empty


def _empty(original: type[nn.Module], fast: Fast) -> nn.Module:
    kind = replacement(original, fast)
    return kind.__new__(kind)
