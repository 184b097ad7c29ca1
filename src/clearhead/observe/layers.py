"""Which modules of a model attend, which of them and of their heads are meant, and what was kept of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Generic, TypeVar

from torch import nn

from clearhead.arguments import one_of, repr_of, several, whole_number
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.nn.attention import MultiHeadAttention
from clearhead.torch_private import WRAPPED_MODULE, is_compiled_module
from clearhead.watch import attends, recognise

__all__ = [
    "Kept",
    "Layers",
    "attention_layers",
    "check_model",
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
    """Every module whose attention can be watched by its dotted name, in the order of registration.

    >>> from clearhead.nn import Encoder
    >>> list(attention_layers(Encoder(8, num_heads=2, num_layers=2)))
    ['blocks.0.attention', 'blocks.1.attention']
    """
    check_model("attention_layers", model)
    return {_plain(name): part for name, part in model.named_modules() if attends(part)}


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != WRAPPED_MODULE)


def choose_layers(function: str, model: nn.Module, layers: Layers) -> dict[str, nn.Module]:
    """The attention layers that ``layers`` means, in the model's order.

    Raises:
        UnsupportedError: no module of the model can be watched.
        ShapeError: there is no such layer; the text lists those that exist.
    """
    check_model(function, model)
    known = attention_layers(model)
    if not known:
        raise UnsupportedError.about(
            function,
            "model",
            must="have attention that can be observed",
            got=_without(model),
            then="Modules of clearhead can, and torch's and transformers' after ch.swap(model).",
        )
    names = list(known)
    return {name: known[name] for name in meant(function, names, names, layers)}


def check_model(function: str, model: object) -> None:
    """Raise unless ``model`` is a module."""
    if not isinstance(model, nn.Module):
        raise UnsupportedError.about(
            function, "model", must="be a torch.nn.Module", got=type(model).__name__, then="Pass the model itself."
        )


def meant(function: str, existing: Sequence[str], chosen: Sequence[str], layers: Layers) -> list[str]:
    """Which of the ``chosen`` names ``layers`` means; numbers count all that exist.

    Raises:
        ShapeError: one of them means none; the text lists those that there are.
    """
    if layers is None:
        return list(chosen)
    found: set[str] = set()
    named = several(layers)
    if not named:
        must, got = f"name at least one of {_listed(existing, chosen)}", "none"
        raise ShapeError.about(function, "layers", must=must, got=got, then="Leave it out for all of them.")
    for layer in named:
        own = set(_named(existing, layer)) & set(chosen)
        if not own:
            listed = _listed(existing, chosen)
            must, got = f"be one of {listed}", repr_of(layer)
            raise ShapeError.about(function, "layers", must=must, got=got, then="Pass numbers, names or globs.")
        found |= own
    return [name for name in chosen if name in found]


def _named(names: Sequence[str], layer: object) -> list[str]:
    """The names that one choice means, none where there is no such layer."""
    if isinstance(layer, str):
        return [layer] if layer in names else [name for name in names if fnmatchcase(name, layer)]
    number = whole_number(layer)
    return [names[number]] if number is not None and 0 <= number < len(names) else []


def whole_numbers(
    function: str, argument: str, given: object, then: str = "Pass an int, or several."
) -> tuple[int, ...]:
    """One whole number or several.

    Raises:
        ShapeError: something else is among them.
    """
    found = []
    for value in several(given):
        number = whole_number(value)
        if number is None:
            raise ShapeError.about(function, argument, must="be whole numbers", got=repr_of(value), then=then)
        found.append(number)
    return tuple(found)


def _listed(existing: Sequence[str], chosen: Sequence[str]) -> str:
    """Layers by number and name; of very many the first and the last."""
    texts = [f"{place} ({name})" if name else str(place) for place, name in enumerate(existing) if name in chosen]
    return ", ".join(texts) if len(texts) <= _SHOWN else f"{', '.join(texts[:_SHOWN])}, up to {texts[-1]}"


def _without(model: nn.Module) -> str:
    """What a model without layers is, for the error."""
    foreign = {type(part).__name__ for part in model.modules() if type(part).__name__.endswith("ttention")}
    return f"{type(model).__name__} with {', '.join(sorted(foreign))}" if foreign else type(model).__name__


def not_called(function: str, model: nn.Module, names: Sequence[str]) -> UnsupportedError:
    """The error for a block that has ended without a call of the layers chosen, with what may be the reason."""
    compiled = any(map(is_compiled_module, model.modules()))
    why = (
        "Graphs of torch.compile pass by unseen; use the model before it is compiled."
        if compiled
        else "Run the model within the block, in the same thread."
    )
    missing = ", ".join(name or type(model).__name__ for name in names[:_FEW])
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    got = f"no call of {missing}{more}"
    return UnsupportedError.about(function, "model", must="be run within the block", got=got, then=why)


def choose_heads(function: str, heads: int | Sequence[int] | None, num_heads: int) -> tuple[int, ...]:
    """The heads meant, all of them for None.

    Raises:
        ShapeError: there is no such head.
    """
    if heads is None:
        return tuple(range(num_heads))
    return places(function, "heads", heads, num_heads, f"The layer has {num_heads}, counted from 0.")


def places(function: str, argument: str, chosen: object, count: int, then: str) -> tuple[int, ...]:
    """One place or several among ``count``.

    Raises:
        ShapeError: there is no such place.
    """
    found = []
    for given in several(chosen):
        place = whole_number(given)
        if place is None or not 0 <= place < count:
            raise ShapeError.about(function, argument, must=f"lie from 0 to {count - 1}", got=repr_of(given), then=then)
        found.append(place)
    return tuple(found)


class _NotSeen(ShapeError, KeyError):
    """No record of a layer: an error of the user's, and what a mapping raises."""

    __str__ = Exception.__str__


Record = TypeVar("Record")


class Kept(Mapping[str, Record], Generic[Record]):
    """Records by layer, of its last call or of all its calls; also found by the layer's number in the model."""

    def __init__(self, function: str, chosen: Sequence[str], existing: Sequence[str], keep: str) -> None:
        kept = one_of(function, "keep", keep, ("last", "all"), "'last' keeps the newest call.")
        self._function, self._existing, self._all = function, list(existing), kept == "all"
        self._records: dict[str, list[Record]] = {name: [] for name in chosen}

    def __getitem__(self, layer: str | int) -> Record:
        """The last call's record; by the layer's name, or its number among all layers of the model."""
        return self.calls(layer)[-1]

    def calls(self, layer: str | int) -> tuple[Record, ...]:
        """Every record that was kept of a layer, oldest first.

        Raises:
            ShapeError: nothing is known of such a layer; the text lists those of which something is.
        """
        found = _named(self._existing, layer)
        kept = tuple(self._records.get(found[0], ())) if len(found) == 1 else ()
        if not kept:
            known = _listed(self._existing, list(self)) or "none"
            why = "was not called" if len(found) == 1 and found[0] in self._records else "was not watched"
            got = f"{repr_of(layer)}, which {why if found else 'does not exist'}"
            must, then = f"be one of {known}", "Choose one of them."
            raise _NotSeen.about(self._function, "layer", must=must, got=got, then=then)
        return kept

    def every_call(self) -> Iterator[tuple[str, Record]]:
        """Every record that was kept, layer by layer, with what to name it by: the layer, and which of its calls."""
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
