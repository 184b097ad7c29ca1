"""The single entry point of every module's attention, where watchers observe and edit it.

Modules call ``attend`` instead of ``attention``; without a watcher the two are the same. Within ``watching(...)`` each
watcher of the thread receives every call and a function that computes it: the watcher may request more statistics,
read them, change the call, or change the output. No hook is added to a module.

Integrations register which modules call ``attend`` (``recognise``), and code that packs a padded batch registers the
batch's layout (``laid_out``). A hook that accepts a packed batch is marked with ``sees_layouts``; other hooks are shown
the padded batch.
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
from clearhead.functional.exact import attention, observe_attention
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

    ``silent`` is True if the call is a recomputation, for statistics or in the backward pass of a checkpoint: watchers
    that edit must edit it again, watchers that record must ignore it.
    """

    query: Float[Tensor, "*leading q_len head_dim"]
    key: Float[Tensor, "*kv_leading k_len head_dim"]
    value: Float[Tensor, "*kv_leading k_len value_dim"]
    options: Mapping[str, Any] = field(default_factory=dict)
    silent: bool = False

    def validated(self) -> Problem:
        """The call as a validated ``Problem``."""
        options = {name: value for name, value in self.options.items() if name != "backend"}
        return Problem.of(_FUNCTION, self.query, self.key, self.value, **options)

    def problem(self) -> Problem:
        """The same as watchers read it: int8 rows of a cache become keys and values of the query's dtype."""
        problem = self.validated()
        if not problem.is_quantized:
            return problem
        plain, dtype = problem.dequantized, problem.query.dtype
        return plain.with_tensors(plain.query, plain.key.to(dtype), plain.value.to(dtype))

    def with_options(self, **options: Any) -> Call:
        """The same call with other keyword arguments."""
        return replace(self, options={**self.options, **options})


#: Computes a call and the requested statistics.
Attend = Callable[[Call, Want], Observation]


class Watcher(Protocol):
    """An observer of every attention call in its thread, while it is active.

    A watcher with an attribute ``edits = False`` promises to return the computed output unmodified.
    """

    def attend(self, owner: object, call: Call, want: Want, inner: Attend) -> Observation:
        """Compute a call of the module ``owner``, usually by ``inner(call, want)``, and read or change the result.

        ``want`` has the statistics that outer watchers requested; ``inner`` may be called with another ``Want``.
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
    """Make a watcher active in this thread, outside the watchers that are already active."""
    _WATCHERS.set((watcher, *_WATCHERS.get()))
    try:
        yield
    finally:
        # Blocks need not end in reverse order of their start, so remove only this block's watcher.
        _WATCHERS.set(tuple(each for each in _WATCHERS.get() if each is not watcher))


def attend(
    owner: object,
    query: Float[Tensor, "*leading q_len head_dim"],
    key: Float[Tensor, "*kv_leading k_len head_dim"],
    value: Float[Tensor, "*kv_leading k_len value_dim"],
    **options: Any,
) -> Float[Tensor, "*leading q_len value_dim"]:
    """``attention(query, key, value, **options)`` on behalf of the module ``owner``, passed through the watchers."""
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
    """``attend`` for a module that needs statistics; they describe the call as the watchers edited it."""
    reach: Attend = _compute
    for watcher in reversed(_WATCHERS.get()):
        reach = _around(watcher, owner, reach)
    return reach(Call(query=query, key=key, value=value, options=options, silent=_in_backward()), want)


def innermost(inner: Attend) -> bool:
    """Whether ``inner`` is the computation itself and not another watcher."""
    return inner is _compute


def _around(watcher: Watcher, owner: object, inner: Attend) -> Attend:
    return lambda call, want: watcher.attend(owner, call, want, inner)


def _compute(call: Call, want: Want) -> Observation:
    """Compute the call; statistics leave the output bitwise identical.

    A backend that supports the statistics computes both in one pass; otherwise another pass computes the statistics.
    """
    if call.options.get("query_offset") == 0 and call.query.shape[-2] == call.key.shape[-2]:
        # This offset is the default. Without it small calls take the same path as when they are not observed.
        call = call.with_options(query_offset=None)
    if not want.names:
        return Observation(output=attention(call.query, call.key, call.value, **call.options))
    if call.silent or call.options.get("backend", "auto") != "auto":
        return _observed(call, want)
    problem = call.validated()
    # The problem has drawn the seed of its dropout; another draw would change the random state for later calls.
    seeded = call if problem.dropout == 0.0 else call.with_options(seed=problem.seed)
    plain = choose(_FUNCTION, problem, _NOTHING)
    # Small calls that record gradients take a path outside the dispatch table.
    if not problem.needs_gradient and not plain.capability.reasons_against(problem, want):
        return _observed(seeded.with_options(backend=plain.name), want)
    output = attention(call.query, call.key, call.value, **seeded.options)
    return replace(_observed(seeded.with_options(dropout=0.0), want), output=output)


def _observed(call: Call, want: Want) -> Observation:
    return observe_attention(call.query, call.key, call.value, want=want, **call.options)


#: Used only for its property, which asks autograd; as a context manager it would track modules.
_TRACKER: Final = ModuleTracker()


def _in_backward() -> bool:
    """Whether autograd's backward pass is running, where checkpoints recompute observed calls."""
    return bool(_TRACKER.is_bw)


def carried() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The ``context_fn`` of ``torch.utils.checkpoint.checkpoint`` that keeps watchers active in recomputation.

    The backward pass then recomputes with the same edits, even after the watchers' block has ended.
    """
    return nullcontext(), _restored(_WATCHERS.get())


@contextmanager
def _restored(watchers: tuple[Watcher, ...]) -> Iterator[None]:
    token = _WATCHERS.set(watchers)
    try:
        yield
    finally:
        _WATCHERS.reset(token)


_RECOGNISED: list[Callable[[nn.Module], bool]] = []


def recognise(predicate: Callable[[nn.Module], bool]) -> None:
    """Register a predicate that says whether a module calls ``attend``."""
    _RECOGNISED.append(predicate)


def attends(module: nn.Module) -> bool:
    """Whether a registered predicate says that the module calls ``attend``."""
    return any(predicate(module) for predicate in _RECOGNISED)


_LAYOUTS: WeakKeyDictionary[Documents, tuple[int, int]] = WeakKeyDictionary()


def laid_out(documents: Documents, batch: int, length: int) -> None:
    """Register ``documents`` as a packed ``[batch, length]``; documents after the first ``batch`` are filler."""
    if watched():
        _LAYOUTS[documents] = (batch, length)


def layout_of(documents: Documents) -> tuple[int, int] | None:
    """The ``(batch, length)`` that was registered for these documents, or None."""
    return _LAYOUTS.get(documents)


_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def sees_layouts(hook: _Hook) -> _Hook:
    """Mark a module's hook as one that accepts a packed batch."""
    hook.sees_layouts = True  # type: ignore[attr-defined]
    return hook


def shown_padding(hooks: Iterable[Callable[..., Any]]) -> bool:
    """Whether any of a module's hooks needs the padded batch, as it is not marked with ``sees_layouts``."""
    return not all(getattr(hook, "sees_layouts", False) for hook in hooks)
