"""Whether modules are still what they were when somebody took them apart: one comparison instead of a look at each."""

from __future__ import annotations

from operator import is_
from typing import Final

from torch import Tensor, nn

__all__ = ["Unchanged"]

#: Of what is called around ``forward``. Whoever registers something there changes no attribute.
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Unchanged:
    """What modules and all within them are now: classes, attributes, parts and parameters, none of them hooked.

    A parameter that is written into is the same one; one that stands in its place is another.

    >>> layers = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    >>> seen = Unchanged(layers)
    >>> seen.holds()
    True
    >>> layers[1].p = 0.2
    >>> seen.holds()
    False
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._modules = [part for module in modules for part in module.modules()]
        self._attributes = [vars(part) for part in self._modules]
        self._parts = [part._modules for part in self._modules if part._modules]
        self._parameters = [part._parameters for part in self._modules if part._parameters]
        self._hooks = [vars(part)[name] for part in self._modules for name in _HOOKS]
        self._kinds, self._state, self._tensors = self._kinds_now(), self._state_now(), self._tensors_now()

    def holds(self) -> bool:
        """Whether they are that still, and nobody has hooked one."""
        tensors = self._tensors_now()
        if any(self._hooks) or len(tensors) != len(self._tensors) or not all(map(is_, tensors, self._tensors)):
            return False
        try:
            # What is the same object is not compared further.
            return self._kinds_now() == self._kinds and self._state_now() == self._state
        except (RuntimeError, TypeError, ValueError):  # attributes that are arrays, and others than before
            return False

    def _kinds_now(self) -> list[type]:
        return [type(part) for part in self._modules]

    def _state_now(self) -> list[tuple[object, ...]]:
        return [tuple(own.values()) for own in (*self._attributes, *self._parts)]

    def _tensors_now(self) -> list[Tensor | None]:
        return [tensor for own in self._parameters for tensor in own.values()]
