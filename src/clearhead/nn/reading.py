"""A cache of records read from modules, valid until a part of the module is replaced."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, repeat
from operator import is_, itemgetter
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from clearhead.errors import UnsupportedError
from clearhead.ops.packed_weight import PackedParameter
from clearhead.torch_private import UNREAD, any_hooks, is_hooked, parameters_of, submodules_of, versions_of

__all__ = ["cached_reading", "is_frozen", "no_gradients_if_frozen", "set_frozen"]

Record = TypeVar("Record")


def cached_reading(
    module: nn.Module,
    key: Hashable,
    read: Callable[[], Record | None],
    *,
    may_be_hooked: Callable[[], Collection[nn.Module]] = tuple,
    views: bool = False,
) -> Record | None:
    """``read()``, or its cached result if it would return the same now; None if a submodule is hooked.

    A record refers to parameters themselves, so their new values, ``data`` and dtype count at once. It is read again
    when a class, an attribute, a submodule or a parameter in the module's tree was replaced.

    Args:
        module: whose tree ``read`` reads.
        key: what else the record depends on.
        read: makes the record.
        may_be_hooked: gives the modules of the tree whose hooks and ``forward`` the caller looks at. Where this or
            ``read`` raises AttributeError, something else stands in the place of a part: None.
        views: whether the record has views of parameters. It is read again when a parameter has other storage; where
            gradients are enabled views are part of a graph, and are made for each call. That of a module with
            quantised weights is also read again when one was written to.

    Raises:
        UnsupportedError: a frozen module is in training mode, or a part or a parameter of it was replaced.

    Cost: one comparison for each attribute and parameter in the tree, about 10 us for a transformer layer; of a frozen
    module one for each submodule and parameter, about 3 us.
    """
    learns = torch.is_grad_enabled()
    keep = not (views and learns)
    reading = _READINGS.get(module) if keep else None
    if reading is not None and reading.is_current(key):
        return reading.record  # type: ignore[return-value]
    try:
        outer = may_be_hooked()
    except AttributeError:
        return None
    state = (_FrozenState if is_frozen(module) else _State)(module, outer)
    if state.is_hooked():
        return None
    parameters = [*module.parameters()]
    parts = _Parts.of(filter(_consists_of_tensors, parameters))
    viewed = [
        _Viewed.of(each)
        for each in parameters
        if views and not isinstance(each, PackedParameter) and not _consists_of_tensors(each)
    ]
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(learns):
            record = read()
    except AttributeError:
        record = None
    if keep:
        _READINGS[module] = _CachedReading(key, state, record, viewed, parts)
    return record


def set_frozen(modules: Iterable[nn.Module], frozen: bool) -> None:
    """Freeze modules, whose attributes then count as constant; or end that."""
    for module in modules:
        _READINGS.pop(module, None)
        if frozen:
            _FROZEN[module] = _contents_of(module)
        else:
            _FROZEN.pop(module, None)


def is_frozen(module: nn.Module) -> bool:
    """Whether ``ch.freeze`` froze the module."""
    return module in _FROZEN


def no_gradients_if_frozen(module: nn.Module, inputs: Iterable[object]) -> AbstractContextManager[object]:
    """Context: no gradients where a frozen module reads inputs that want none; its parameters want none either."""
    alone = torch.is_grad_enabled() and is_frozen(module)
    alone = alone and not any(isinstance(each, Tensor) and each.requires_grad for each in inputs)
    return torch.no_grad() if alone else nullcontext()


class _FrozenState:
    """What may not change in a frozen module's tree: submodules, parameters, and eval mode. Hooks are looked at.

    Args:
        module: the root of the tree, which is not kept alive.
        may_be_hooked: modules of the tree whose hooks do not count.

    Raises:
        UnsupportedError: something was replaced since the tree was frozen, or is in training mode.
    """

    def __init__(self, module: nn.Module, may_be_hooked: Collection[nn.Module]) -> None:
        parts = [*module.modules()]
        for part in parts:
            _check_contents(_contents_of(part), _FROZEN.get(part, ()))
        self._attributes = [*map(vars, parts)]
        self._plain = [vars(part) for part in parts if part not in may_be_hooked]
        self._tables = _tables_of(parts)
        self._packed = _packed_in(self._tables)
        self._contents = _contents(self._tables, self._packed)
        self._check_mode()

    def holds(self) -> bool:
        """True where nothing is hooked; raises where something was replaced, or is in training mode."""
        _check_contents(_contents(self._tables, self._packed), self._contents)
        self._check_mode()
        return not self.is_hooked()

    def _check_mode(self) -> None:
        if any(map(_TRAINING, self._attributes)):
            _refuse("stay in eval mode", "a part in training mode")

    def is_hooked(self) -> bool:
        """Whether a module is hooked or its ``forward`` was replaced on the object."""
        return any_hooks(self._plain) or any(map(dict.__contains__, self._plain, repeat("forward")))


def _tables_of(parts: Iterable[nn.Module]) -> list[dict[str, Any]]:
    return [table for part in parts for table in (parameters_of(part), submodules_of(part)) if table]


def _packed_in(tables: Iterable[dict[str, Any]]) -> list[PackedParameter]:
    return [each for table in tables for each in table.values() if isinstance(each, PackedParameter)]


def _contents(tables: Iterable[dict[str, Any]], packed: Iterable[PackedParameter]) -> list[object]:
    """Parameters and submodules, and what packed parameters have: torch.utils.swap_tensors exchanges it."""
    return [*chain.from_iterable(map(dict.values, tables)), *map(getattr, packed, repeat("packed"), repeat(None))]


def _contents_of(part: nn.Module) -> list[object]:
    tables = _tables_of([part])
    return _contents(tables, _packed_in(tables))


def _check_contents(now: Sequence[object], before: Sequence[object]) -> None:
    if len(now) != len(before) or not all(map(is_, now, before)):
        _refuse("keep its parameters and submodules", "others")


def _refuse(must: str, got: str) -> None:
    raise UnsupportedError.about("freeze", "a frozen model", must=must, got=got, then="Call ch.unfreeze(model) first.")


_TRAINING: Final = itemgetter("training")
#: What each frozen module had itself when it was frozen.
_FROZEN: Final[WeakKeyDictionary[nn.Module, list[object]]] = WeakKeyDictionary()


class _State:
    """What a module's tree is: classes, attributes, submodules and parameters. Hooks are not part of it.

    Args:
        module: the root of the tree, which is not kept alive.
        may_be_hooked: modules of the tree whose hooks do not count.
    """

    def __init__(self, module: nn.Module, may_be_hooked: Collection[nn.Module]) -> None:
        root, *parts = module.modules()
        # The tables keep the parts alive anyway, but not the root.
        self._root, self._parts = ref(root), parts
        self._classes = [*map(type, (root, *parts))]
        self._attributes = [*map(vars, (root, *parts))]
        self._plain = [part for part in parts if part not in may_be_hooked]
        self._looks_at_root = root not in may_be_hooked
        self._tables = [table for part in (root, *parts) for table in (parameters_of(part), submodules_of(part))]
        self._getters = [itemgetter(*(name for name in part if name not in UNREAD)) for part in self._attributes]
        self._sizes, self._values = self._sizes_now(), [*self._values_now()]

    def holds(self) -> bool:
        """Whether nothing was replaced, and no module is hooked."""
        parts = (self._root(), *self._parts)
        if [*map(type, parts)] != self._classes or not all(map(is_, map(vars, parts), self._attributes)):
            return False
        if self._sizes_now() != self._sizes:
            return False
        if any_hooks(self._attributes) and self.is_hooked():
            return False
        try:
            return all(map(is_, self._values_now(), self._values))
        except KeyError:
            return False

    def is_hooked(self) -> bool:
        """Whether a module is hooked or its ``forward`` was replaced on the object."""
        root = self._root()
        return any(map(is_hooked, self._plain)) or (self._looks_at_root and root is not None and is_hooked(root))

    def _sizes_now(self) -> list[int]:
        return [*map(len, self._attributes), *map(len, self._tables)]

    def _values_now(self) -> Iterator[object]:
        """Attributes, the tables of parameters and submodules among them, and what is in the tables."""
        attributes = map(itemgetter.__call__, self._getters, self._attributes)
        return chain.from_iterable(chain(attributes, map(dict.values, self._tables)))


class _Viewed(NamedTuple):
    """A parameter of which a record has a view, and what tells whether it still is one.

    Attributes:
        parameter: the parameter.
        storage: where its elements are.
        alias: keeps the storage alive, so that no other tensor can be in its place.
    """

    parameter: nn.Parameter
    storage: tuple[object, ...]
    alias: Tensor

    @classmethod
    def of(cls, parameter: nn.Parameter) -> _Viewed:
        """The parameter as it is now."""
        return cls(parameter, _storage_of(parameter), parameter.detach())

    def is_current(self) -> bool:
        """Whether the view is up to date."""
        return _storage_of(self.parameter) == self.storage


def _consists_of_tensors(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "__tensor_flatten__")


class _Parts(NamedTuple):
    """Tensors that parameters consist of, as quantised weights of torchao, of which a record has some or copies.

    Attributes:
        owners: for each tensor the parameter whose attribute it is.
        names: of the attributes.
        tensors: these tensors.
        written: those that count writes to them.
        versions: how often each of these had been written to.
    """

    owners: Sequence[nn.Parameter]
    names: Sequence[str]
    tensors: Sequence[Tensor]
    written: Sequence[Tensor]
    versions: Sequence[int]

    @classmethod
    def of(cls, parameters: Iterable[Any]) -> _Parts:
        """The parts of parameters as they are now."""
        places = [(each, name) for each in parameters for name in each.__tensor_flatten__()[0]]
        tensors = [getattr(each, name) for each, name in places]
        written = [tensor for tensor in tensors if not tensor.is_inference()]
        return cls([each for each, _ in places], [name for _, name in places], tensors, written, versions_of(written))

    def are_current(self) -> bool:
        """Whether the tensors are the same, and none was written to."""
        same = all(map(is_, map(getattr, self.owners, self.names), self.tensors))
        return same and versions_of(self.written) == self.versions


class _CachedReading(NamedTuple):
    """A record, and all that it depends on. ``viewed`` are parameters of which it has views."""

    key: Hashable
    state: _State | _FrozenState
    record: object
    viewed: Sequence[_Viewed]
    parts: _Parts

    def is_current(self, key: Hashable) -> bool:
        """Whether another reading would give the same."""
        if key != self.key or not self.state.holds() or not self.parts.are_current():
            return False
        return not self.viewed or all(viewed.is_current() for viewed in self.viewed)


_READINGS: Final[WeakKeyDictionary[nn.Module, _CachedReading]] = WeakKeyDictionary()


def _storage_of(parameter: Tensor) -> tuple[object, ...]:
    return parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype
