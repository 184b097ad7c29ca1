"""The one place where a module's attention passes by, so that what runs inside a model can be watched and edited.

Modules call ``attend`` where they would call ``attention``. Nobody watching, it is the same call. Within
``watching(...)`` each watcher of the thread gets every call with the means to go on: it may add statistics to
what is wanted, read them, change the call before, or the output after. Nothing is left on a module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from clearhead.functional import attention, observe_attention
from clearhead.shapes import Float
from clearhead.statistics import Observation, Want

__all__ = ["Attend", "Call", "Watcher", "attend", "watched", "watching"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One call of ``attention``: its tensors, and its keyword arguments as ``options``."""

    query: Float[Tensor, "*leading q_len head_dim"]
    key: Float[Tensor, "*kv_leading k_len head_dim"]
    value: Float[Tensor, "*kv_leading k_len value_dim"]
    options: Mapping[str, Any] = field(default_factory=dict)


#: Computes a call, with the statistics that are wanted.
Attend = Callable[[Call, Want], Observation]


class Watcher(Protocol):
    """Stands around every call of the thread while it is active."""

    def attend(self, owner: object, call: Call, want: Want, inner: Attend) -> Observation:
        """Answer a call of the module ``owner``, usually by ``inner(call, want)`` and a look at what came back.

        ``want`` is what watchers further out have asked for; ``inner`` may be called with another.
        """
        ...


_WATCHERS: ContextVar[tuple[Watcher, ...]] = ContextVar("clearhead_watchers", default=())


def watched() -> bool:
    """Whether any watcher is active in this thread; never while a graph is being compiled."""
    return not torch.compiler.is_compiling() and bool(_WATCHERS.get())


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Make a watcher active in this thread, around those that are already."""
    token = _WATCHERS.set((watcher, *_WATCHERS.get()))
    try:
        yield
    finally:
        _WATCHERS.reset(token)


def attend(
    owner: object,
    query: Float[Tensor, "*leading q_len head_dim"],
    key: Float[Tensor, "*kv_leading k_len head_dim"],
    value: Float[Tensor, "*kv_leading k_len value_dim"],
    **options: Any,
) -> Float[Tensor, "*leading q_len value_dim"]:
    """``attention(query, key, value, **options)`` on behalf of the module ``owner``, past whoever watches."""
    if not watched():
        return attention(query, key, value, **options)
    reach: Attend = _compute
    for watcher in reversed(_WATCHERS.get()):
        reach = _around(watcher, owner, reach)
    return reach(Call(query=query, key=key, value=value, options=options), _NOTHING).output


_NOTHING = Want()


def _compute(call: Call, want: Want) -> Observation:
    if not want.names:
        return Observation(output=attention(call.query, call.key, call.value, **call.options))
    return observe_attention(call.query, call.key, call.value, want=want, **call.options)


def _around(watcher: Watcher, owner: object, inner: Attend) -> Attend:
    return lambda call, want: watcher.attend(owner, call, want, inner)
