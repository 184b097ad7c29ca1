"""Whether modules are still what they were when somebody took them apart: one comparison instead of a look at each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Final, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from clearhead.backends.guards import versions

__all__ = ["TakenApart", "Unchanged"]

#: Of what is called around ``forward``. Whoever registers something there changes no attribute.
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Unchanged:
    """What modules and all within them are now: classes, attributes, parts, parameters, buffers, none of them hooked.

    Args:
        modules: those.
        apart_from: those within them that may have become others in themselves.

    A parameter that is written into is the same one; one that stands in its place is another.

    >>> layers = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    >>> seen = Unchanged(layers)
    >>> seen.holds()
    True
    >>> layers[1].p = 0.2
    >>> seen.holds()
    False
    """

    def __init__(self, *modules: nn.Module, apart_from: Sequence[nn.Module] = ()) -> None:
        self._modules = [part for module in modules for part in module.modules() if part not in apart_from]
        self._kinds = [*map(type, self._modules)]
        self._hooks = [vars(part)[name] for part in self._modules for name in _HOOKS]
        # Attributes, parts, parameters and buffers: where there are none of these, some may come.
        self._state = [
            own for part in self._modules for own in (vars(part), part._modules, part._parameters, part._buffers)
        ]  # fmt: skip
        self._versions, self._values = versions(self._state), self._values_now()

    def holds(self) -> bool:
        """Whether they are that still, and nobody has hooked one."""
        if any(self._hooks) or not all(map(is_, map(type, self._modules), self._kinds)):
            return False
        now = versions(self._state)
        if now is not None and now == self._versions:
            return True
        values = self._values_now()
        if len(values) != len(self._values) or not all(map(is_, values, self._values)):
            return False
        # What was put there is what had been there.
        self._versions = now
        return True

    def _values_now(self) -> list[object]:
        return [value for own in self._state for value in own.values()]


Found = TypeVar("Found")


class _Known(NamedTuple):
    like: tuple[object, ...]
    parts: list[nn.Module | None]
    unchanged: Unchanged
    found: object


class TakenApart(Generic[Found]):
    """What modules were found to be, if anything, for as long as their parts are what they were."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()

    def of(
        self, module: nn.Module, like: tuple[object, ...], parts: list[nn.Module | None],
        find: Callable[[], Found | None], *, apart_from: Sequence[nn.Module] = (),
    ) -> Found | None:  # fmt: skip
        """What ``find`` makes of a module, or made of it before; None where that is nothing, or a part is hooked.

        Args:
            module: it.
            like: what else decides.
            parts: those that are asked whether they are what they were.
            find: what it is.
            apart_from: as in ``Unchanged``; these may be hooked.
        """
        known = self._known.get(module)
        if known is None or known.like != like or known.parts != parts or not known.unchanged.holds():
            others = [part for part in parts if part is not None and part not in apart_from]
            unchanged = Unchanged(*others, apart_from=apart_from)
            if not unchanged.holds():
                return None
            known = self._known[module] = _Known(like, parts, unchanged, find())
        return known.found  # type: ignore[return-value]

    def is_nothing(self, module: nn.Module) -> bool:
        """Whether it was found to be nothing when it was looked at last."""
        known = self._known.get(module)
        return known is not None and known.found is None
