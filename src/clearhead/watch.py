"""The one place where a module's attention passes by, so that what runs inside a model can be watched and edited.

Modules call ``attend`` where they would call ``attention``. Nobody watching, it is the same call. Within
``watching(...)`` each watcher of the thread gets every call with the means to go on: it may add statistics to
what is wanted, read them, change the call before, or the output after. Nothing is left on a module.

Who else knows something that watchers need says it here: bridges which modules come by (``recognise``), and those who
lay a padded batch end to end what it was (``laid_out``). Hooks that can be shown such a batch say so
(``sees_layouts``); for others it stays padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

from clearhead.dispatch import choose
from clearhead.functional import attention, observe_attention
from clearhead.masks import Documents
from clearhead.problem import Problem
from clearhead.shapes import Float
from clearhead.statistics import Observation, Want

__all__ = [
    "Attend",
    "Call",
    "Watcher",
    "active",
    "attend",
    "attend_wanting",
    "attends",
    "carried",
    "edited",
    "innermost",
    "laid_out",
    "layout_of",
    "recognise",
    "sees_layouts",
    "shown_padding",
    "watched",
    "watching",
]

_FUNCTION: Final = "observe_attention"
_NOTHING: Final = Want()


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One call of ``attention``: its tensors, and its keyword arguments as ``options``.

    ``silent`` says that it is computed once more, for statistics or in the backward pass of a checkpoint: watchers
    that edit it do so as before, those that record do not.
    """

    query: Float[Tensor, "*leading q_len head_dim"]
    key: Float[Tensor, "*kv_leading k_len head_dim"]
    value: Float[Tensor, "*kv_leading k_len value_dim"]
    options: Mapping[str, Any] = field(default_factory=dict)
    silent: bool = False

    def problem(self) -> Problem:
        """The call as a validated statement of the work."""
        options = {name: value for name, value in self.options.items() if name != "backend"}
        return Problem.of(_FUNCTION, self.query, self.key, self.value, **options)

    def with_options(self, **options: Any) -> Call:
        """The same call with other keyword arguments."""
        return replace(self, options={**self.options, **options})


#: Computes a call, with the statistics that are wanted.
Attend = Callable[[Call, Want], Observation]


class Watcher(Protocol):
    """Stands around every call of the thread while it is active.

    A watcher with an attribute ``edits = False`` promises to hand on what was computed as it was.
    """

    def attend(self, owner: object, call: Call, want: Want, inner: Attend) -> Observation:
        """Answer a call of the module ``owner``, usually by ``inner(call, want)`` and a look at what came back.

        ``want`` is what watchers further out have asked for; ``inner`` may be called with another.
        """
        ...


_WATCHERS: ContextVar[tuple[Watcher, ...]] = ContextVar("clearhead_watchers", default=())


def watched() -> bool:
    """Whether any watcher is active in this thread; never while a graph is being compiled."""
    return not torch.compiler.is_compiling() and bool(_WATCHERS.get())


def edited() -> bool:
    """Whether a watcher is active in this thread that may change what is computed."""
    return watched() and any(getattr(watcher, "edits", True) for watcher in _WATCHERS.get())


def active(watcher: Watcher) -> bool:
    """Whether this watcher is active in this thread."""
    return watched() and any(each is watcher for each in _WATCHERS.get())


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Make a watcher active in this thread, around those that are already."""
    _WATCHERS.set((watcher, *_WATCHERS.get()))
    try:
        yield
    finally:
        # Blocks need not end in the order in which they began: only this one's watcher goes.
        _WATCHERS.set(tuple(each for each in _WATCHERS.get() if each is not watcher))


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
    return attend_wanting(owner, query, key, value, want=_NOTHING, **options).output


def attend_wanting(
    owner: object,
    query: Float[Tensor, "*leading q_len head_dim"],
    key: Float[Tensor, "*kv_leading k_len head_dim"],
    value: Float[Tensor, "*kv_leading k_len value_dim"],
    *,
    want: Want,
    **options: Any,
) -> Observation:
    """``attend`` for a module that needs statistics itself, those of what watchers made of the call."""
    reach: Attend = _compute
    for watcher in reversed(_WATCHERS.get()):
        reach = _around(watcher, owner, reach)
    return reach(Call(query=query, key=key, value=value, options=options, silent=_in_backward()), want)


def innermost(inner: Attend) -> bool:
    """Whether no other watcher stands between this one and the computation."""
    return inner is _compute


def _around(watcher: Watcher, owner: object, inner: Attend) -> Attend:
    return lambda call, want: watcher.attend(owner, call, want, inner)


def _compute(call: Call, want: Want) -> Observation:
    """The call, its output bit for bit what it is without statistics: a backend that gives both gives them in one
    pass, else the statistics are computed apart."""
    if call.options.get("query_offset") == 0 and call.query.shape[-2] == call.key.shape[-2]:
        # It says nothing new, and without it small calls take their own road, as they do when nobody watches.
        call = call.with_options(query_offset=None)
    if not want.names:
        return Observation(output=attention(call.query, call.key, call.value, **call.options))
    if call.silent or call.options.get("backend", "auto") != "auto":
        return _observed(call, want)
    problem = call.problem()
    # Stating the problem has drawn the seed of its dropout; drawing another would change what comes after.
    again = call if problem.dropout == 0.0 else call.with_options(seed=problem.seed)
    plain = choose(_FUNCTION, problem, _NOTHING)
    # Small calls that record gradients have a road of their own past the table.
    if not problem.needs_gradient and not plain.capability.reasons_against(problem, want):
        return _observed(again.with_options(backend=plain.name), want)
    output = attention(call.query, call.key, call.value, **again.options)
    return replace(_observed(again.with_options(dropout=0.0), want), output=output)


def _observed(call: Call, want: Want) -> Observation:
    return observe_attention(call.query, call.key, call.value, want=want, **call.options)


#: Its property asks autograd; as a context it would follow modules.
_TRACKER: Final = ModuleTracker()


def _in_backward() -> bool:
    """Whether this is autograd's backward pass, where checkpoints compute once more what has been watched."""
    return bool(_TRACKER.is_bw)


def carried() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For ``torch.utils.checkpoint.checkpoint(..., context_fn=carried)``: what is computed once more in the backward
    pass is edited as it was the first time, also after the watchers' block has ended."""
    return nullcontext(), _again(_WATCHERS.get())


@contextmanager
def _again(watchers: tuple[Watcher, ...]) -> Iterator[None]:
    token = _WATCHERS.set(watchers)
    try:
        yield
    finally:
        _WATCHERS.reset(token)


_RECOGNISED: list[Callable[[nn.Module], bool]] = []


def recognise(known: Callable[[nn.Module], bool]) -> None:
    """Let ``known`` say of a module whether its attention passes ``attend``."""
    _RECOGNISED.append(known)


def attends(module: nn.Module) -> bool:
    """Whether somebody has said that the module's attention passes ``attend``."""
    return any(known(module) for known in _RECOGNISED)


_LAYOUTS: WeakKeyDictionary[Documents, tuple[int, int]] = WeakKeyDictionary()


def laid_out(documents: Documents, batch: int, length: int) -> None:
    """Say that ``documents`` keeps apart the sequences of a padded ``[batch, length]``; any after those are filling."""
    if watched():
        _LAYOUTS[documents] = (batch, length)


def layout_of(documents: Documents) -> tuple[int, int] | None:
    """What was said of these documents."""
    return _LAYOUTS.get(documents)


_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def sees_layouts(hook: _Hook) -> _Hook:
    """Mark a hook of a module as one that knows a packed batch when it is shown one."""
    hook.sees_layouts = True  # type: ignore[attr-defined]
    return hook


def shown_padding(hooks: Iterable[Callable[..., Any]]) -> bool:
    """Whether any of a module's hooks has to be shown the padded batch that it would see without us."""
    return not all(getattr(hook, "sees_layouts", False) for hook in hooks)
