"""The attention modules of a model, the choice of layers and heads among them, and records by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Generic, TypeVar

from torch import nn

from clearhead.arguments import one_of, repr_of, several, whole_number
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.checks import check_model
from clearhead.torch_private import WRAPPED_MODULE, is_compiled_module
from clearhead.watch import attends, recognise

__all__ = [
    "LayerRecords",
    "Layers",
    "attention_layers",
    "choose_heads",
    "choose_layers",
    "meant",
    "not_called",
    "places",
    "whole_numbers",
]

#: What users give to choose layers: a number, a name or a glob, or several of them; None for all.
Layers = int | str | Sequence[int | str] | None

_SHOWN, _FEW = 40, 4

recognise(lambda module: isinstance(module, MultiHeadAttention))


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every module of a model whose attention can be observed, by dotted name, in the order of registration.

    Args:
        model: a module, which may be an attention layer itself (its name is then ``""``).

    Raises:
        UnsupportedError: ``model`` is not a ``torch.nn.Module``.

    >>> from clearhead.nn import Encoder
    >>> list(attention_layers(Encoder(8, num_heads=2, num_layers=2)))
    ['blocks.0.attention', 'blocks.1.attention']
    """
    check_model("attention_layers", model)
    return {_plain(name): part for name, part in model.named_modules() if attends(part)}


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != WRAPPED_MODULE)


def choose_layers(function: str, model: nn.Module, layers: Layers) -> dict[str, nn.Module]:
    """The attention layers that ``layers`` selects, in the model's order.

    Raises:
        UnsupportedError: the attention of no module can be observed.
        ShapeError: there is no such layer; the text lists those that exist.
    """
    check_model(function, model)
    attention = attention_layers(model)
    if not attention:
        raise UnsupportedError.about(
            function,
            "model",
            must="have attention that can be observed",
            got=_without(model),
            then="Use modules of clearhead, or call ch.swap(model) for those of torch and transformers.",
        )
    names = list(attention)
    return {name: attention[name] for name in meant(function, names, names, layers)}


def meant(function: str, existing: Sequence[str], chosen: Sequence[str], layers: Layers) -> list[str]:
    """The ``chosen`` names that ``layers`` selects; numbers count all ``existing`` layers.

    Raises:
        ShapeError: an entry of ``layers`` selects none; the text lists the existing layers.
    """
    if layers is None:
        return list(chosen)
    matches: set[str] = set()
    named = several(layers)
    if not named:
        must, got = f"name at least one of {_listed(existing, chosen)}", "none"
        raise ShapeError.about(function, "layers", must=must, got=got, then="Leave it out for all of them.")
    for layer in named:
        matching = set(_named(existing, layer)) & set(chosen)
        if not matching:
            listed = _listed(existing, chosen)
            must, got = f"be one of {listed}", repr_of(layer)
            raise ShapeError.about(function, "layers", must=must, got=got, then="Pass numbers, names or globs.")
        matches |= matching
    return [name for name in chosen if name in matches]


def _named(names: Sequence[str], layer: object) -> list[str]:
    """The names that one number, name or glob selects; empty if there is no such layer."""
    if isinstance(layer, str):
        return [layer] if layer in names else [name for name in names if fnmatchcase(name, layer)]
    number = whole_number(layer)
    return [names[number]] if number is not None and 0 <= number < len(names) else []


def whole_numbers(
    function: str, argument: str, given: object, then: str = "Pass an int, or several."
) -> tuple[int, ...]:
    """One whole number or several.

    Raises:
        ShapeError: an entry is not a whole number.
    """
    numbers = []
    for value in several(given):
        number = whole_number(value)
        if number is None:
            raise ShapeError.about(function, argument, must="be whole numbers", got=repr_of(value), then=then)
        numbers.append(number)
    return tuple(numbers)


def _listed(existing: Sequence[str], chosen: Sequence[str]) -> str:
    """Layers by number and name; the first 40 and the last if there are more."""
    texts = [f"{place} ({name})" if name else str(place) for place, name in enumerate(existing) if name in chosen]
    return ", ".join(texts) if len(texts) <= _SHOWN else f"{', '.join(texts[:_SHOWN])}, up to {texts[-1]}"


def _without(model: nn.Module) -> str:
    """A description of a model without attention layers, for the error."""
    foreign = {type(part).__name__ for part in model.modules() if type(part).__name__.endswith("ttention")}
    return f"{type(model).__name__} with {', '.join(sorted(foreign))}" if foreign else type(model).__name__


def not_called(function: str, model: nn.Module, names: Sequence[str]) -> UnsupportedError:
    """The error for a block that ended without a call of the chosen layers, with the likely reason."""
    compiled = any(map(is_compiled_module, model.modules()))
    why = (
        "Graphs of torch.compile cannot be observed; use the model before it is compiled."
        if compiled
        else "Run the model within the block, in the same thread."
    )
    missing = ", ".join(name or type(model).__name__ for name in names[:_FEW])
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    got = f"no call of {missing}{more}"
    return UnsupportedError.about(function, "model", must="be run within the block", got=got, then=why)


def choose_heads(function: str, heads: int | Sequence[int] | None, num_heads: int) -> tuple[int, ...]:
    """The chosen heads, all of them for None.

    Raises:
        ShapeError: there is no such head.
    """
    if heads is None:
        return tuple(range(num_heads))
    return places(function, "heads", heads, num_heads, f"The layer has {num_heads}, counted from 0.")


def places(function: str, argument: str, chosen: object, count: int, then: str) -> tuple[int, ...]:
    """One index or several below ``count``.

    Raises:
        ShapeError: an index is not a whole number from 0 to ``count - 1``.
    """
    indices = []
    for given in several(chosen):
        place = whole_number(given)
        if place is None or not 0 <= place < count:
            raise ShapeError.about(function, argument, must=f"lie from 0 to {count - 1}", got=repr_of(given), then=then)
        indices.append(place)
    return tuple(indices)


class LayerNotRecordedError(ShapeError, KeyError):
    """There is no record of a layer; also a ``KeyError``, as for any mapping."""

    __str__ = Exception.__str__


Record = TypeVar("Record")


class LayerRecords(Mapping[str, Record], Generic[Record]):
    """A mapping from layers, by name or by number in the model, to records of their last call or of all calls."""

    def __init__(self, function: str, chosen: Sequence[str], existing: Sequence[str], keep: str) -> None:
        mode = one_of(function, "keep", keep, ("last", "all"), "'last' keeps the newest call.")
        self._function, self._existing, self._all = function, list(existing), mode == "all"
        self._records: dict[str, list[Record]] = {name: [] for name in chosen}

    def __getitem__(self, layer: str | int) -> Record:
        """The record of the last call of a layer, given by name or by number among all layers of the model."""
        return self.calls(layer)[-1]

    def calls(self, layer: str | int) -> tuple[Record, ...]:
        """Every record of a layer, oldest first; with ``keep="last"`` there is one.

        Raises:
            ShapeError: there is no record of the layer; the text lists the layers with records.
        """
        names = _named(self._existing, layer)
        records = tuple(self._records.get(names[0], ())) if len(names) == 1 else ()
        if not records:
            existing = _listed(self._existing, list(self)) or "none"
            why = "was not called" if len(names) == 1 and names[0] in self._records else "was not observed"
            got = f"{repr_of(layer)}, which {why if names else 'does not exist'}"
            must, then = f"be one of {existing}", "Choose one of them."
            raise LayerNotRecordedError.about(self._function, "layer", must=must, got=got, then=then)
        return records

    def every_call(self) -> Iterator[tuple[str, Record]]:
        """Every record, layer by layer, as ``(name, record)``; the name says which call if a layer has several."""
        for name, records in self._records.items():
            for place, record in enumerate(records, start=1):
                yield name if len(records) == 1 else f"{name} (call {place} of {len(records)})", record

    def __iter__(self) -> Iterator[str]:
        return (name for name, records in self._records.items() if records)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _add(self, name: str, record: Record) -> None:
        records = self._records[name]
        if not self._all:
            records.clear()
        records.append(record)

    def _names(self) -> list[str]:
        """The layers that were chosen."""
        return list(self._records)
