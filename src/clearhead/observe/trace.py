"""``trace``: read and edit the inner points of a model's attention while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from clearhead.arguments import flag, number, repr_of
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.observe.layers import (
    LayerRecords,
    Layers,
    attention_layers,
    choose_heads,
    choose_layers,
    meant,
    not_called,
    whole_numbers,
)
from clearhead.observe.packed import sequences_of
from clearhead.observe.points import POINTS, SQUARES, Changed, Points, run_changed
from clearhead.observe.text import table
from clearhead.problem import Problem
from clearhead.record import Record
from clearhead.statistics import Observation, Want
from clearhead.watch import Attend, Call, active, sees_layouts, watching

__all__ = ["Edit", "Trace", "trace"]

_FUNCTION: Final = "trace"
#: The axis of heads in points that have one.
_HEADS: Final = -3
_Rule = TypeVar("_Rule", bound=Record)

#: The replacement of a point: a tensor that broadcasts to it, or a function of it.
Replacement = Tensor | Callable[[Tensor], Tensor]


@dataclass(eq=False)
class Edit:
    """One edit of a ``Trace``; ``undo()`` or the end of the block removes it.

    Attributes:
        point: name of the edited point.
        layers: names of the edited layers.
        heads: indices of the edited heads; None for all.
        by: the tensor that replaces the point, or a function of the point's tensor.
    """

    point: str
    layers: frozenset[str]
    heads: tuple[int, ...] | None
    by: Replacement
    _edits: list[Edit] = field(repr=False)

    def undo(self) -> None:
        """Remove the edit; later calls of the model run without it."""
        if self in self._edits:
            self._edits.remove(self)

    def apply(self, tensor: Tensor) -> Tensor:
        """The point's tensor after the edit, in the same shape and dtype.

        Raises:
            ShapeError: the replacement has another shape, or there is no such head.
        """
        if self.heads is None:
            return self._replaced(tensor)
        heads = list(choose_heads(_FUNCTION, self.heads, tensor.shape[_HEADS]))
        index = torch.tensor(heads, dtype=torch.int64, device=tensor.device)
        part = self._replaced(tensor.index_select(_HEADS, index))
        return tensor.index_copy(_HEADS, index, part)

    def _replaced(self, tensor: Tensor) -> Tensor:
        new = self.by if isinstance(self.by, Tensor) else self.by(tensor)
        if isinstance(new, Tensor) and new.shape != tensor.shape and isinstance(self.by, Tensor):
            new = _expanded(new, tensor)
        if not isinstance(new, Tensor) or new.shape != tensor.shape:
            got = f"shape {tuple(new.shape)}" if isinstance(new, Tensor) else type(new).__name__
            raise ShapeError.about(
                _FUNCTION,
                self.point,
                must=f"be replaced by a tensor of shape {tuple(tensor.shape)}",
                got=got,
                then="Return a tensor of the same shape.",
            )
        return new.to(tensor.dtype)


def _expanded(new: Tensor, tensor: Tensor) -> Tensor:
    try:
        return new.expand(tensor.shape)
    except RuntimeError:
        return new


class Trace(LayerRecords[Points]):
    """A mapping from layers to ``Points``, and the edits: ``traced["encoder.blocks.3.attention"]``, or ``traced[3]``.

    ``calls(layer)`` gives every recorded call of a layer. ``str()`` gives a table of points and their shapes.
    """

    def __init__(self, chosen: Sequence[str], existing: Sequence[str], keep: str) -> None:
        super().__init__(_FUNCTION, chosen, existing, keep)
        self._edits: list[Edit] = []
        self._order: list[str] = []

    def passed(self) -> list[tuple[str, Points]]:
        """The recorded calls of the last forward pass in order, as ``(name, points)``.

        The name of a module that the model uses several times includes the number of the call.
        """
        counts, before = Counter(self._order), Counter[str]()
        calls = []
        for name in self._order:
            before[name] += 1
            place, count = before[name], counts[name]
            records = self._records[name][-count:]
            if count == 1:
                calls.append((name, records[-1]))
            elif len(records) == count:
                calls.append((f"{name} (call {place} of {count})", records[place - 1]))
            elif place == count:
                calls.append((f"{name} (last of {count} calls)", records[-1]))
        return calls

    def incomplete(self) -> list[str]:
        """The layers of the last forward pass of which only the last of several calls was recorded."""
        return [name for name, points in self.passed() if name.startswith(f"{points.layer} (last of ")]

    def _begin(self) -> None:
        """Start a new forward pass of the model."""
        self._order.clear()

    def _add(self, name: str, record: Points) -> None:
        super()._add(name, record)
        self._order.append(name)

    def replace(
        self, point: str, by: Replacement, *, layers: Layers = None, heads: int | Sequence[int] | None = None
    ) -> Edit:
        """Replace a point in all later calls; everything after it is computed from the new tensor.

        Args:
            point: one of ``query key value scores scaled masked weights head_outputs output``.
            by: a function of the point's tensor, or a tensor that broadcasts to it.
            layers: which traced layers, by number, name or glob such as ``"encoder.*"``, or several; by default all.
            heads: which heads to edit, key heads for ``key`` and ``value``; by default all. Not for ``output``.

        Returns:
            The ``Edit``, which ``undo()`` removes.

        Raises:
            ShapeError: there is no such point or layer. An unknown head or a wrong shape raises when the model runs.
            UnsupportedError: ``by`` is neither a tensor nor a function.

        Cost: an edit of ``scores``, ``scaled``, ``masked`` or ``weights`` runs its layer on the reference backend, with
        ``q_len * k_len`` memory.
        """
        if not isinstance(point, str) or point not in POINTS:
            raise ShapeError.about(
                _FUNCTION, "point", must=f"be one of {', '.join(POINTS)}", got=repr_of(point), then="Choose one."
            )
        if not isinstance(by, Tensor) and not callable(by):
            raise UnsupportedError.about(
                _FUNCTION,
                "by",
                must="be a tensor or a function of one",
                got=type(by).__name__,
                then="Pass lambda tensor: 0 * tensor.",
            )
        chosen = None if heads is None else whole_numbers(_FUNCTION, "heads", heads)
        if chosen is not None and point == "output":
            raise ShapeError.about(
                _FUNCTION,
                "heads",
                must="be left out for output, where heads are mixed",
                got=list(chosen),
                then="Edit head_outputs.",
            )
        names = frozenset(meant(_FUNCTION, self._existing, self._names(), layers))
        edit = Edit(point, names, chosen, by, self._edits)
        self._edits.append(edit)
        return edit

    def switch_off(self, heads: int | Sequence[int], *, layers: Layers = None) -> Edit:
        """Set the output of heads to 0 in all later calls (zero ablation).

        Args:
            heads: index of one query head, or several.
            layers: which traced layers, by number, name or glob such as ``"encoder.*"``, or several; by default all.

        Returns:
            The ``Edit``, which ``undo()`` removes.

        Paper: Michel et al. 2019, "Are sixteen heads really better than one?", section 2.3.
        """
        return self.replace("head_outputs", torch.zeros_like, layers=layers, heads=heads)

    def temperature(
        self, temperature: float, *, layers: Layers = None, heads: int | Sequence[int] | None = None
    ) -> Edit:
        """Divide scores by ``temperature`` in all later calls, before score rules.

        A temperature below 1 sharpens the weights, one above 1 flattens them. The edit divides the queries.

        Args:
            temperature: a number above 0.
            layers: which traced layers, by number, name or glob such as ``"encoder.*"``, or several; by default all.
            heads: indices of query heads; by default all.

        Returns:
            The ``Edit``, which ``undo()`` removes.
        """
        divisor = number(
            _FUNCTION,
            "temperature",
            temperature,
            must="be a number above 0",
            fits=lambda given: given > 0.0,
            then="1.0 changes nothing.",
        )
        return self.replace("query", lambda query: query / divisor, layers=layers, heads=heads)

    def _edits_of(self, layer: str, points: Sequence[str]) -> list[Edit]:
        return [edit for edit in self._edits if layer in edit.layers and edit.point in points]

    def __str__(self) -> str:
        rows = []
        for name in self:
            for place, points in enumerate(self.calls(name)):
                for point, shape in points.shapes.items():
                    note = "edited" if point in points.edited else ""
                    rows.append([name, str(place), point, str(list(shape)), note])
        return table(["layer", "call", "point", "shape", ""], rows, right={1})

    def __repr__(self) -> str:
        return f"Trace({', '.join(self)})"


@contextmanager
def trace(
    model: nn.Module, *, layers: Layers = None, keep: str = "last", record: bool = True, detach: bool = True
) -> Iterator[Trace]:
    """Record and edit the inner points of every attention layer of a model while it runs within a ``with`` block.

    Points are ``query key value scores scaled masked weights head_outputs output``, in the order of computation.
    ``scores``, ``scaled``, ``masked`` and ``weights`` are computed from the formula when they are read, so a trace
    takes memory linear in the length. They describe weights before dropout. A packed batch remains packed.

    Edits (``replace``, ``switch_off``, ``temperature``) apply to all later calls, in forward and backward, and are
    removed at the end of the block. With activation checkpoints, run backward within the block too.

    Args:
        model: a model with modules of clearhead, or one that was passed to ``ch.swap``.
        layers: which attention layers, by number, name or glob such as ``"encoder.*"``, or several; by default all.
        keep: ``"last"`` records the last call of each layer, ``"all"`` every call.
        record: whether points are recorded; False for edits alone.
        detach: whether points are copies that are detached from the autograd graph.

    Returns:
        A ``Trace``: the ``Points`` of each layer by its dotted name, to be read within the block and after it.

    Raises:
        UnsupportedError: the model has no attention that can be observed, or none was called within the block.
        ShapeError: there is no such layer, head or point; the text lists what exists.

    Cost: a copy of queries, keys, values and outputs; ``q_len * k_len`` memory for each of ``scores``, ``scaled``,
    ``masked`` and ``weights`` that is read or edited.

    >>> import torch, clearhead as ch
    >>> module = ch.nn.MultiHeadAttention(4, num_heads=2)
    >>> with ch.trace(module) as traced:
    ...     edit = traced.switch_off(heads=1)
    ...     output = module(torch.randn(1, 3, 4), mask=ch.Causal())
    >>> traced[0].weights.shape, traced[0].head_outputs[:, 1].abs().max()
    (torch.Size([1, 2, 3, 3]), tensor(0.))
    """
    chosen = choose_layers(_FUNCTION, model, layers)
    record, detach = flag(_FUNCTION, "record", record), flag(_FUNCTION, "detach", detach)
    traced = Trace(list(chosen), list(attention_layers(model)), keep)
    tracer = CallTracer(traced, chosen, record=record, detach=detach)
    with ExitStack() as stack:
        stack.callback(tracer.close)
        # Registered before the hooks of the layers, as the model may be a layer itself.
        stack.callback(model.register_forward_pre_hook(tracer.began).remove)
        for module in chosen.values():
            stack.callback(module.register_forward_pre_hook(tracer.entered, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(tracer.left).remove)
        stack.enter_context(watching(tracer))
        yield traced
    if not tracer.called:
        raise not_called(_FUNCTION, model, list(chosen))


@dataclass(eq=False)
class _Frame:
    """A module whose call has not returned."""

    module: nn.Module
    inputs: tuple[Any, ...]
    options: dict[str, Any]
    points: list[Points] = field(default_factory=list)


class CallTracer:
    """The ``Watcher`` of ``trace``."""

    def __init__(self, traced: Trace, chosen: Mapping[str, nn.Module], *, record: bool, detach: bool) -> None:
        self._traced, self._record, self._detach = traced, record, detach
        # Weak references: a checkpoint may keep the tracer alive until its backward pass.
        self._names = WeakKeyDictionary({module: name for name, module in chosen.items()})
        self._frames: list[_Frame] = []
        self._open = True
        self.called = False

    @property
    def edits(self) -> bool:
        """Whether there is an edit."""
        return bool(self._traced._edits)

    def close(self) -> None:
        """Stop recording; edits apply only to what a checkpoint recomputes in its backward pass."""
        self._frames.clear()
        self._open = False

    @sees_layouts
    def began(self, *_: object) -> None:
        """A pre-forward hook: the model was called."""
        if active(self):
            self._traced._begin()

    @sees_layouts
    def entered(self, module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any] | None = None) -> None:
        """A pre-forward hook: a chosen module was called.

        While another thread's block ends, torch may call that block's hook in this thread without ``options``.
        """
        if active(self):
            self._frames.append(
                _Frame(module, tuple(map(self._detached, inputs)), _each(options or {}, self._detached))
            )

    @sees_layouts
    def left(self, module: nn.Module, _: tuple[Any, ...], output: Any) -> Any:
        """A forward hook: a chosen module returned; apply the edits of its output."""
        if not active(self):
            return output
        # A call that raised has left its frame above this one's.
        while self._frames and self._frames[-1].module is not module:
            self._frames.pop()
        name, frame = self._names[module], self._frames.pop() if self._frames else None
        first = output[0] if isinstance(output, tuple) else output
        changed = self._changed(name, [])("output", first)
        for points in frame.points if frame is not None else ():
            edited = points.edited if changed is first else (*points.edited, "output")
            saved = self._copied(changed) if isinstance(changed, Tensor) else None
            self._traced._add(name, replace(points, output=saved, edited=edited))
        if changed is first:
            return output
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    def attend(self, owner: object, call: Call, want: Want, inner: Attend) -> Observation:
        """Compute the call with its edits, and record its points."""
        name = self._names.get(owner) if isinstance(owner, nn.Module) else None
        if name is None or not (self._open or call.silent):
            return inner(call, want)
        self.called = True
        edited: list[str] = []
        changed = self._changed(name, edited)
        call = replace(
            call, query=changed("query", call.query), key=changed("key", call.key), value=changed("value", call.value)
        )
        squares: dict[str, Tensor] | None = None
        if self._traced._edits_of(name, SQUARES):
            answer, squares = run_changed(call, want, inner, changed)
        else:
            answer = inner(call, want)
        answer = replace(answer, output=changed("head_outputs", answer.output))
        if self._record and not call.silent:
            self._keep(owner, name, call, answer.output, edited, squares)
        return answer

    def _changed(self, name: str, edited: list[str]) -> Changed:
        def changed(point: str, tensor: Tensor) -> Tensor:
            for edit in self._traced._edits_of(name, (point,)):
                tensor = edit.apply(tensor)
                edited.append(point)
            return tensor

        return changed

    def _keep(
        self,
        owner: object,
        name: str,
        call: Call,
        heads: Tensor,
        edited: list[str],
        squares: dict[str, Tensor] | None,
    ) -> None:
        frame = self._frames[-1] if self._frames and self._frames[-1].module is owner else None
        heads, call = self._copied(heads), call.with_options(dropout=0.0)
        points = Points(
            layer=name,
            problem=self._copied_problem(call.problem()),
            output=None,
            edited=tuple(dict.fromkeys(edited)),
            head_outputs=heads.reshape((1,) * (4 - heads.ndim) + heads.shape),
            inputs=() if frame is None else frame.inputs,
            options={} if frame is None else frame.options,
            squares=None if squares is None else _each(squares, self._copied),
            sequences=sequences_of(call),
        )
        if frame is None:
            self._traced._add(name, points)
        else:
            frame.points.append(points)

    def _copied(self, tensor: Tensor) -> Tensor:
        # A copy, as caches and in-place operations overwrite tensors that a model has computed.
        return tensor.detach().clone() if self._detach else tensor

    def _detached(self, value: Any) -> Any:
        # Only tensors in a graph are detached; detaching a lazy mask would materialise its table.
        return value.detach() if self._detach and isinstance(value, Tensor) and value.requires_grad else value

    def _copied_problem(self, problem: Problem) -> Problem:
        def copied(rule: _Rule) -> _Rule:
            return rule.mapped(self._copied)

        return replace(
            problem,
            query=self._copied(problem.query),
            key=self._copied(problem.key),
            value=self._copied(problem.value),
            mask=None if problem.mask is None else copied(problem.mask),
            scores=tuple(map(copied, problem.scores)),
        )


def _each(values: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: change(value) for name, value in values.items()}
