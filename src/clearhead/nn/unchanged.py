"""Whether modules are still what they were when somebody read them: one comparison instead of reading each."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from weakref import ref

from torch import nn

from clearhead.torch_private import is_hooked, submodules_of, tensors_of

__all__ = ["Unchanged"]


class Unchanged:
    """What modules and their submodules are now: classes, attributes, submodules, parameters, buffers, no hooks.

    A parameter that is written into, or whose ``data`` is replaced, is the same one.

    Args:
        modules: those.
        apart_from: modules among them that may be hooked.

    >>> layers = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    >>> unchanged = Unchanged(layers)
    >>> unchanged.holds()
    True
    >>> layers[1].p = 0.2
    >>> unchanged.holds()
    False
    """

    def __init__(self, *modules: nn.Module, apart_from: Sequence[nn.Module] = ()) -> None:
        parts = [part for module in modules for part in module.modules()]
        # Weak, so that whoever keeps this for a module keeps no module alive.
        self._modules = [ref(part) for part in parts]
        self._classes = [*map(type, parts)]
        plain = [part for part in parts if part not in apart_from]
        self._plain = [ref(part) for part in plain]
        self._dicts = [own for part in parts for own in (vars(part), submodules_of(part), *tensors_of(part))]
        self._values = self._values_now()

    def holds(self) -> bool:
        """Whether nothing has changed, and none is hooked."""
        if self.is_hooked() or [type(part()) for part in self._modules] != self._classes:
            return False
        values = self._values_now()
        return len(values) == len(self._values) and all(map(is_, values, self._values))

    def is_hooked(self) -> bool:
        """Whether a module is hooked or its ``forward`` was replaced on the object."""
        return any((part := reference()) is not None and is_hooked(part) for reference in self._plain)

    def _values_now(self) -> list[object]:
        return [value for own in self._dicts for value in own.values()]
