"""Classes of transformers that are known by what the source of their ``forward`` says, which many of them share.

transformers repeats code rather than sharing it, so a class says what it does by its text alone: sixty decoder layers
are Llama's, word for word. What is known are digests of such texts, without comments, annotations and spacing.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from hashlib import sha256
from types import FunctionType
from typing import Any, Final, TypeAlias

import torch
from torch import nn

__all__ = ["Way", "by_source", "digest_of", "known_by_source", "made_of", "way_of"]

#: What is done in place of a forward: of a module and the forward's arguments, None for whoever asks to call that.
Way: TypeAlias = Callable[..., Any]

_WAYS: Final[dict[str, Way]] = {}
_ATTRIBUTES: Final[dict[Way, dict[str, object]]] = {}
#: Ours by theirs, and theirs by ours.
_CLASSES: Final[dict[type[nn.Module], type[nn.Module]]] = {}
_MADE_OF: Final[dict[type[nn.Module], type[nn.Module]]] = {}
#: What says nothing of what is computed, or differs between versions of Python.
_LEFT_OUT: Final = frozenset(("annotation", "ctx", "kind", "returns", "type_comment", "type_params"))
_LENGTH: Final = 16


def known_by_source(digest: str, way: Way, **attributes: object) -> None:
    """Take ``way`` where a forward has this digest, in a class that has these attributes besides."""
    _WAYS[digest], _ATTRIBUTES[way] = way, attributes


@functools.cache
def digest_of(function: object) -> str | None:
    """Of what a function's source says, its decorators among it, whatever it is called, and whatever else is wrapped
    around it; None without one.

    >>> digest_of(nn.Linear.forward) == digest_of(nn.Bilinear.forward), digest_of(len)
    (False, None)
    """
    plain = inspect.unwrap(function) if callable(function) else None
    if not isinstance(plain, FunctionType):
        return None
    try:
        found = ast.parse(textwrap.dedent(inspect.getsource(plain))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(found, ast.FunctionDef):
        return None
    body = found.body[1:] if ast.get_docstring(found, clean=False) is not None else found.body
    return sha256(_said((found.args, body, *found.decorator_list)).encode()).hexdigest()[:_LENGTH]


def _said(node: object) -> str:
    if isinstance(node, ast.AST):
        fields = [
            f"{name}={_said(value)}" for name, value in ast.iter_fields(node)
            if name not in _LEFT_OUT and value is not None and value != []
        ]  # fmt: skip
        return f"{type(node).__name__}({','.join(fields)})"
    return f"[{','.join(map(_said, node))}]" if isinstance(node, list | tuple) else repr(node)


def by_source(kind: type[nn.Module]) -> type[nn.Module] | None:
    """A class like ``kind`` that takes the way that is known for its own forward, if one is."""
    way, own = _way(kind), vars(kind).get("forward")
    if way is None or own is None or made_of(kind) is not None:
        return None
    if kind not in _CLASSES:

        @functools.wraps(own)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # A compiler knows theirs.
            found = None if torch.compiler.is_compiling() else way(self, *args, **kwargs)
            return own(self, *args, **kwargs) if found is None else found

        def reduce(self: nn.Module, _protocol: object) -> tuple[object, ...]:
            # Nobody could import this class.
            return _made_again, (kind,), self.__dict__

        body = {"forward": forward, "__reduce_ex__": reduce, "__module__": __name__, **_ATTRIBUTES[way]}
        _CLASSES[kind] = ours = type(f"Swapped{kind.__name__}", (kind,), body)
        _MADE_OF[ours] = kind
    return _CLASSES[kind]


def made_of(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class that ``by_source`` made ``kind`` of."""
    return _MADE_OF.get(kind)


def way_of(kind: type[nn.Module]) -> Way | None:
    """What is done in place of the forward of a class that ``by_source`` made."""
    own = made_of(kind)
    return None if own is None else _way(own)


def _way(kind: type[nn.Module]) -> Way | None:
    digest = digest_of(vars(kind).get("forward"))
    return None if digest is None else _WAYS.get(digest)


def _made_again(kind: type[nn.Module]) -> nn.Module:
    """An empty module, for pickle and deepcopy."""
    # Whoever unpickles may not have swapped anything yet.
    from clearhead.bridges.transformers_layers import faster

    ours = faster(kind) or kind
    made: nn.Module = ours.__new__(ours)
    return made
