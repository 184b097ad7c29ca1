"""Records: values with named fields that can be moved to a device, printed, encoded and decoded.

Masks and score rules are records. A record is encoded as a short text and a list of tensors, so one torch operator
can take any of them under ``torch.compile`` and ``torch.export``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from clearhead.errors import UnsupportedError
from clearhead.torch_private import constant_when_compiled

__all__ = ["Record", "as_index", "decode", "describe"]

_KINDS: dict[str, type[Record]] = {}
_FUNCTIONS: dict[str, Callable[..., Any]] = {}


class Record:
    """A value described by its ``fields``: numbers, tensors, functions and other records, in order."""

    fields: ClassVar[tuple[str, ...]] = ()
    #: Its name in an encoded text: the class's name, with a number if another class has it.
    kind: ClassVar[str] = "Record"
    #: The text that stands for the record's function, if it has one.
    handle: str = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.kind = _free_name(cls)
        _KINDS[cls.kind] = cls

    def tensors(self) -> list[Tensor]:
        """Every tensor in the record and in the records within it, in field order."""
        tensors: list[Tensor] = []
        for name in self.fields:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                tensors.append(value)
            elif isinstance(value, Record):
                tensors.extend(value.tensors())
        return tensors

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same record with ``change`` applied to each tensor."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        for name in self.fields:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                copy.__dict__[name] = change(value)
            elif isinstance(value, Record):
                copy.__dict__[name] = value.mapped(change)
        return copy

    def to(self, device: torch.device) -> Self:
        """The same record with its tensors on ``device``; the record itself if they already are."""
        if all(tensor.device == device for tensor in self.tensors()):
            return self
        return self.mapped(lambda tensor: tensor.to(device))

    def encode(self, tensors: list[Tensor]) -> str:
        """The record as text; its tensors are appended to ``tensors`` and named by their index."""
        parts = []
        for name in self.fields:
            parts.append(_encode(getattr(self, name), tensors, self.handle))
        return f"{self.kind}({','.join(parts)})"

    def __repr__(self) -> str:
        shown = (f"{name}={describe(getattr(self, name))}" for name in self.fields)
        return f"{type(self).__name__}({', '.join(shown)})"


def _free_name(cls: type[Record]) -> str:
    """The class's name, with a number if another class has it; a class that is defined again keeps its name."""
    registered, number = _KINDS.get(cls.__name__), 1
    name = cls.__name__
    while registered is not None and (registered.__module__, registered.__qualname__) != (
        cls.__module__,
        cls.__qualname__,
    ):
        number += 1
        name = f"{cls.__name__}_{number}"
        registered = _KINDS.get(name)
    return name


def _encode(value: Any, tensors: list[Tensor], handle: str) -> str:
    if isinstance(value, Tensor):
        tensors.append(value)
        return f"t{len(tensors) - 1}"
    if isinstance(value, Record):
        return value.encode(tensors)
    if callable(value):
        return _named(value, handle)
    return repr(value)


@constant_when_compiled
def _named(function: Callable[..., Any], handle: str) -> str:
    """The text that stands for a user's function in this process.

    A compiled graph refers to the function by this text only, so the function is kept alive.
    """
    name = handle or f"f_{id(function)}"
    _FUNCTIONS[name] = function
    return name


def _function(name: str) -> Callable[..., Any]:
    if name not in _FUNCTIONS:
        raise UnsupportedError.about(
            "attention",
            "mask or scores",
            must="name functions of this process",
            got="a program exported by another process, which contains no functions",
            then="Export masks and rules made of ch.Causal, ch.Window, ch.RelativeBias and others.",
        )
    return _FUNCTIONS[name]


def decode(text: str, tensors: Sequence[Tensor]) -> Any:
    """The record, tuple or value of a text that ``encode`` made."""
    return _decode(ast.parse(text, mode="eval").body, tensors)


def _decode(node: ast.expr, tensors: Sequence[Tensor]) -> Any:
    match node:
        case ast.Call(func=ast.Name(id=kind), args=args):
            record = object.__new__(_KINDS[kind])
            values = (_decode(argument, tensors) for argument in args)
            record.__dict__.update(zip(record.fields, values, strict=True))
            return record
        case ast.Tuple(elts=items):
            return tuple(_decode(item, tensors) for item in items)
        case ast.Name(id=name) if name[0] == "t":
            return tensors[int(name[1:])]
        case ast.Name(id=name) if name[0] == "f":
            return _function(name)
        case _:
            return ast.literal_eval(node)


def describe(value: Any) -> str:
    """A value as a short text: a small tensor by its elements, a large one by dtype and shape."""
    if isinstance(value, Tensor):
        if value.ndim <= 1 and value.numel() <= 8:
            return str(value.tolist())
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind}{list(value.shape)}"
    if callable(value) and not isinstance(value, Record):
        return str(getattr(value, "__qualname__", type(value).__name__))
    return repr(value)


def as_index(value: Sequence[int] | Tensor | int) -> Tensor:
    """Whole numbers as an int64 tensor, on their device."""
    return torch.as_tensor(value).to(torch.int64)
