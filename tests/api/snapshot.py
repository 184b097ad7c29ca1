"""The public interface as text, one line per item: ``python tests/api/snapshot.py > tests/api/snapshot.txt``.

A line is a qualified name and what a caller may rely on: parameters with their kinds and defaults, fields, bases,
values of constants, keys of state dicts, commands and options of the command line. Annotations are left out.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
import typer
from torch import nn

import clearhead as ch
from clearhead.cli.app import app

__all__ = ["lines"]

PACKAGES: Final = (
    "clearhead", "clearhead.nn", "clearhead.masks", "clearhead.scores", "clearhead.positions", "clearhead.sparse",
    "clearhead.linear", "clearhead.observe", "clearhead.verify", "clearhead.bridges", "clearhead.bridges.transformers",
    "clearhead.inspector", "clearhead.train", "clearhead.errors", "clearhead.functional", "clearhead.distributed",
    "clearhead.corpus",
)  # fmt: skip

#: Names without an underscore that only clearhead's modules use; no page or docstring mentions them.
INTERNAL: Final = frozenset({
    "clearhead.bridges.transformers.attentions", "clearhead.bridges.transformers.check",
    "clearhead.bridges.transformers.hand_over", "clearhead.bridges.transformers.models",
    "clearhead.bridges.transformers.take_back", "clearhead.positions.MOST_POSITIONS", "clearhead.positions.as_rotary",
    "clearhead.positions.table_of", "clearhead.positions.rotated", "clearhead.nn.MultiHeadAttention.cache_view",
    "clearhead.nn.MultiHeadAttention.projections", "clearhead.nn.FeedForward.plain_layers",
    "clearhead.nn.Encoder.layout", "clearhead.nn.Encoder.run", "clearhead.nn.Decoder.layout",
    "clearhead.nn.Decoder.run",
    "clearhead.nn.Decoder.cached_length",
})  # fmt: skip

#: Bases that are implementation details.
PLUMBING: Final = frozenset({"ABC", "Bound", "Carrying", "Generic", "Protocol", "Record"})
OPERATORS: Final = frozenset({"__call__", "__len__", "__iter__", "__getitem__", "__enter__"})

#: One small instance of each module class, for its state keys and attribute names.
MODULES: Final[Mapping[str, Callable[[], nn.Module]]] = {
    "MultiHeadAttention(8, 2)": lambda: ch.nn.MultiHeadAttention(8, 2),
    "MultiHeadAttention(8, 2, bias=False, output_projection=False, scores=RelativeBias)": lambda: (
        ch.nn.MultiHeadAttention(
            8, 2, bias=False, output_projection=False, scores=ch.RelativeBias(nn.Parameter(torch.zeros(2, 5)))
        )
    ),
    "FeedForward(8)": lambda: ch.nn.FeedForward(8),
    "FeedForward(8, gated=True)": lambda: ch.nn.FeedForward(8, gated=True),
    "EncoderBlock(8, 2)": lambda: ch.nn.EncoderBlock(8, 2),
    "EncoderBlock(8, 2, norm='rms')": lambda: ch.nn.EncoderBlock(8, 2, norm="rms"),
    "DecoderBlock(8, 2, cross_attention=True)": lambda: ch.nn.DecoderBlock(8, 2, cross_attention=True),
    "Encoder(8, 2, 1)": lambda: ch.nn.Encoder(8, 2, 1),
    "Decoder(8, 2, 1, cross_attention=True)": lambda: ch.nn.Decoder(8, 2, 1, cross_attention=True),
    "LanguageModel(9, 8, 2, 1)": lambda: ch.nn.LanguageModel(9, 8, 2, 1),
    "SequenceClassifier(9, 8, 2, 1, 3)": lambda: ch.nn.SequenceClassifier(9, 8, 2, 1, 3),
    "EncoderDecoder(9, 9, 8, 2, 1)": lambda: ch.nn.EncoderDecoder(9, 9, 8, 2, 1),
    "LinearAttention(8, 2)": lambda: ch.nn.LinearAttention(8, 2),
}


def lines() -> list[str]:
    """The snapshot of the library that is imported."""
    written: dict[int, str] = {}
    listed = [line for package in PACKAGES for line in _of_package(package, written)]
    listed += [line for record in _returned() for line in _of_class(f"returned {record.__name__}", record)]
    listed += [line for name, make in MODULES.items() for line in _of_module(name, make())]
    return [*listed, *_of_command("clearhead", typer.main.get_command(app))]


def _of_package(package: str, written: dict[int, str]) -> Iterator[str]:
    module = import_module(package)
    written.setdefault(id(module), package)
    if callable(module):
        yield f"{package}{_signature(module)}"
    for name in sorted(module.__all__):
        path, value = f"{package}.{name}", getattr(module, name)
        if path in INTERNAL:
            continue
        if isinstance(value, ModuleType):
            yield f"{path}: module"
        elif id(value) in written and not isinstance(value, (int, str, tuple)):
            yield f"{path} is {written[id(value)]}"
        else:
            written[id(value)] = path
            yield from _of_value(path, value)


def _of_value(path: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        yield from _of_class(path, value)
    elif callable(value):
        yield f"{path}{_signature(value)}"
    else:
        yield f"{path} = {_shown(value)}"


def _of_class(path: str, cls: type) -> Iterator[str]:
    bases = [base.__name__ for base in cls.__mro__[1:-1] if base.__name__ not in PLUMBING]
    yield f"{path}{_signature(cls)} <- {', '.join(bases) or 'object'}"
    fielded = fields(cls) if is_dataclass(cls) else ()
    for field in fielded:
        yield f"{path}.{field.name}: field{_default(field)}"
    for name in sorted({*dir(cls)} - {field.name for field in fielded}):
        home = next((base for base in cls.__mro__ if name in vars(base)), object)
        ours = home.__module__.startswith("clearhead") and home.__name__ not in PLUMBING and name != "kind"
        if ours and (name in OPERATORS or not name.startswith("_")) and f"{path}.{name}" not in INTERNAL:
            line = _member(vars(home)[name])
            # An inherited member, or one with the base's signature, is listed with the base.
            if not any(_has(base, name, line) for base in cls.__mro__[1:] if base in (ch.Mask, ch.ScoreRule)):
                yield f"{path}.{name}{line}"


def _has(base: type, name: str, line: str) -> bool:
    home = next((each for each in base.__mro__ if name in vars(each)), None)
    return home is not None and _member(vars(home)[name]) == line


def _member(member: Any) -> str:
    if isinstance(member, property):
        return ": property"
    if isinstance(member, (classmethod, staticmethod)):
        return f"{_signature(member.__func__, bound=isinstance(member, classmethod))} [{type(member).__name__}]"
    if inspect.isfunction(member):
        return _signature(member, bound=True)
    return f" = {_shown(member)}" if isinstance(member, (int, float, str, tuple, bool)) else ": attribute"


def _default(field: Field[Any]) -> str:
    if field.default_factory is not MISSING:
        return " = <factory>"
    return "" if field.default is MISSING else f" = {_shown(field.default)}"


def _signature(function: Any, *, bound: bool = False) -> str:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return "(...)"
    empty = inspect.Parameter.empty
    plain = [
        each.replace(annotation=empty, default=empty if each.default is empty else _Text(_shown(each.default)))
        for each in (parameters[1:] if bound else parameters)
    ]
    return str(inspect.Signature(plain))


class _Text(str):
    """A default whose ``repr`` is its source text."""

    def __repr__(self) -> str:
        return str(self)


def _shown(value: Any) -> str:
    """The ``repr`` of a value without memory addresses."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: ..." for key in value) + "}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"<{value.__qualname__}>"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(str(value) if isinstance(value, Path) else value))


def _returned() -> Iterator[type]:
    """Result classes that no package exports."""
    tokens = torch.zeros(1, 1, 2, 4)
    yield type(ch.explain_dispatch(tokens, tokens, tokens))
    yield type(ch.swap(nn.TransformerEncoderLayer(8, 2, batch_first=True)).replaced[0])


def _of_module(name: str, module: nn.Module) -> Iterator[str]:
    for key, tensor in module.state_dict().items():
        yield f"{name} state {key} {list(tensor.shape)}"
    for path, part in module.named_modules():
        theirs = next(kind for kind in type(part).__mro__ if kind.__module__.startswith("torch."))
        if path:
            yield f"{name} part {path}" if theirs is nn.Module else f"{name} part {path}: {theirs.__name__}"
    attributes = sorted(key for key in vars(module) if not key.startswith("_") and key != "training")
    yield f"{name} attributes {', '.join(attributes)}"


def _of_command(path: str, command: Any) -> Iterator[str]:
    for parameter in command.params:
        spelled = ", ".join([*parameter.opts, *parameter.secondary_opts])
        notes = [parameter.param_type_name, *(["required"] if parameter.required else [])]
        default = parameter.default
        shown = "" if default is None or callable(default) else f" = {_shown(default)}"
        yield f"$ {path} {spelled}: {', '.join(notes)}{shown}"
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield f"$ {path} {name}"
        yield from _of_command(f"{path} {name}", inner)


if __name__ == "__main__":
    print("\n".join(lines()))
