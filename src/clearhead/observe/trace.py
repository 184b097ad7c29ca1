"""``trace``: the inner points of a model's attention while it runs, to read and to change."""

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
    Kept,
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
#: The axis of heads, in points that have one.
_HEADS: Final = -3
_Rule = TypeVar("_Rule", bound=Record)

#: What a point is replaced by: a tensor that broadcasts to it, or a function of it.
Replacement = Tensor | Callable[[Tensor], Tensor]


@dataclass(eq=False)
class Edit:
    """One edit of a ``Trace``. ``undo()`` takes it back; the end of the block does so too."""

    point: str
    layers: frozenset[str]
    heads: tuple[int, ...] | None
    by: Replacement
    _edits: list[Edit] = field(repr=False)

    def undo(self) -> None:
        """From now on the model computes without it."""
        if self in self._edits:
            self._edits.remove(self)

    def apply(self, tensor: Tensor) -> Tensor:
        """The point's tensor, changed."""
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
                must=f"stay a tensor of shape {tuple(tensor.shape)}",
                got=got,
                then="Replace it by one of the same shape.",
            )
        return new.to(tensor.dtype)


def _expanded(new: Tensor, tensor: Tensor) -> Tensor:
    try:
        return new.expand(tensor.shape)
    except RuntimeError:
        return new


class Trace(Kept[Points]):
    """The points of each layer: ``traced["encoder.blocks.3.attention"].weights``, or ``traced[3]``; and the edits.

    ``calls(layer)`` has every call that was kept. ``str`` of it is a table of points and their shapes.
    """

    def __init__(self, chosen: Sequence[str], existing: Sequence[str], keep: str) -> None:
        super().__init__(_FUNCTION, chosen, existing, keep)
        self._edits: list[Edit] = []
        self._order: list[str] = []

    def passed(self) -> list[tuple[str, Points]]:
        """The calls of the last forward pass that were kept, in their order, each with what to name it by.

        A module that the model uses several times is named with the place of the call among its own.
        """
        counts, before = Counter(self._order), Counter[str]()
        found = []
        for name in self._order:
            before[name] += 1
            place, count = before[name], counts[name]
            kept = self._records[name][-count:]
            if count == 1:
                found.append((name, kept[-1]))
            elif len(kept) == count:
                found.append((f"{name} (call {place} of {count})", kept[place - 1]))
            elif place == count:
                found.append((f"{name} (last of {count} calls)", kept[-1]))
        return found

    def incomplete(self) -> list[str]:
        """Those calls of the last forward pass that stand for others, which were not kept."""
        return [name for name, points in self.passed() if name.startswith(f"{points.layer} (last of ")]

    def _begin(self) -> None:
        """A forward pass of the model begins."""
        self._order.clear()

    def _add(self, name: str, record: Points) -> None:
        super()._add(name, record)
        self._order.append(name)

    def replace(
        self, point: str, by: Replacement, *, layers: Layers = None, heads: int | Sequence[int] | None = None
    ) -> Edit:
        """Replace a point from now on: what follows is computed from the new tensor.

        Args:
            point: one of ``query key value scores scaled masked weights head_outputs output``.
            by: a function of the point's tensor, or a tensor that broadcasts to it.
            layers: which of the traced layers, as in ``trace``; by default all.
            heads: which heads' part of it, key heads for ``key`` and ``value``; not for ``output``.

        Raises:
            ShapeError: no such point or layer. A head or a shape that does not fit is told when the model runs.

        Cost: points from ``scores`` to ``weights`` make their layer compute by the formula, ``q_len * k_len`` memory.
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
        """Heads whose output is 0 from now on (zero ablation).

        Paper: Michel et al. 2019, "Are sixteen heads really better than one?", section 2.3.
        """
        return self.replace("head_outputs", torch.zeros_like, layers=layers, heads=heads)

    def temperature(
        self, temperature: float, *, layers: Layers = None, heads: int | Sequence[int] | None = None
    ) -> Edit:
        """Divide scores by ``temperature`` from now on, before score rules: below 1 sharper, above 1 flatter.

        It is done to queries, whose product with keys is divided by it as well.
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
    """The inner points of every attention layer of a model, by name, while it runs within the block; and edits.

    Points are ``query key value scores scaled masked weights head_outputs output``, in the order in which they are
    computed. Those with an entry for each query and each key are computed when they are read, by the formula; a trace
    itself holds O(T). They describe weights before dropout. A packed batch stays packed.

    Edits (``replace``, ``switch_off``, ``temperature``) hold from where they are made, through forward and backward,
    and are undone at the end of the block. With activation checkpoints, run backward within the block too.

    Args:
        model: a module of clearhead, or a model that holds some, or was given to ``ch.swap``.
        layers: which attention layers, by number, name or glob such as ``"encoder.*"``, or several; by default all.
        keep: of a layer's calls ``"last"`` or ``"all"``.
        record: whether points are kept; False for edits alone.
        detach: whether points are copies cut off from the graph.

    Returns:
        A ``Trace``: the ``Points`` of each layer by its dotted name, to be read within the block and after it.

    Raises:
        UnsupportedError: the model has no attention that can be observed, or none was called within the block.
        ShapeError: no such layer, head or point; the text lists what exists.

    Cost: a copy of queries, keys, values and outputs; ``q_len * k_len`` for what is read or edited between.

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
        # Before the hooks of the layers: the model may be one itself.
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
    """A module between its call and its return."""

    module: nn.Module
    inputs: tuple[Any, ...]
    options: dict[str, Any]
    points: list[Points] = field(default_factory=list)


class CallTracer:
    """The watcher behind ``trace``."""

    def __init__(self, traced: Trace, chosen: Mapping[str, nn.Module], *, record: bool, detach: bool) -> None:
        self._traced, self._record, self._detach = traced, record, detach
        # Weakly: a checkpoint may keep the tracer until its backward pass, and the trace the tracer's edits.
        self._names = WeakKeyDictionary({module: name for name, module in chosen.items()})
        self._frames: list[_Frame] = []
        self._open = True
        self.called = False

    @property
    def edits(self) -> bool:
        """Whether anything is changed."""
        return bool(self._traced._edits)

    def close(self) -> None:
        """From now on nothing is recorded, and edits hold for what is computed again in a backward pass alone."""
        self._frames.clear()
        self._open = False

    @sees_layouts
    def began(self, *_: object) -> None:
        """The model itself was called."""
        if active(self):
            self._traced._begin()

    @sees_layouts
    def entered(self, module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any] | None = None) -> None:
        """A chosen module was called.

        While another thread's block ends, torch may call its hook in this thread, and without ``options``.
        """
        if active(self):
            self._frames.append(_Frame(module, tuple(map(self._held, inputs)), _each(options or {}, self._held)))

    @sees_layouts
    def left(self, module: nn.Module, _: tuple[Any, ...], output: Any) -> Any:
        """A chosen module returns; what it returns, changed where an edit says so."""
        if not active(self):
            return output
        # A call that failed has left its frame behind, above this one's.
        while self._frames and self._frames[-1].module is not module:
            self._frames.pop()
        name, frame = self._names[module], self._frames.pop() if self._frames else None
        first = output[0] if isinstance(output, tuple) else output
        changed = self._changed(name, [])("output", first)
        for points in frame.points if frame is not None else ():
            edited = points.edited if changed is first else (*points.edited, "output")
            kept = self._kept(changed) if isinstance(changed, Tensor) else None
            self._traced._add(name, replace(points, output=kept, edited=edited))
        if changed is first:
            return output
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    def attend(self, owner: object, call: Call, want: Want, inner: Attend) -> Observation:
        """The call's answer as edits change it, with its points kept."""
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
        heads, call = self._kept(heads), call.with_options(dropout=0.0)
        points = Points(
            layer=name,
            problem=self._kept_problem(call.problem()),
            output=None,
            edited=tuple(dict.fromkeys(edited)),
            head_outputs=heads.reshape((1,) * (4 - heads.ndim) + heads.shape),
            inputs=() if frame is None else frame.inputs,
            options={} if frame is None else frame.options,
            squares=None if squares is None else _each(squares, self._kept),
            sequences=sequences_of(call),
        )
        if frame is None:
            self._traced._add(name, points)
        else:
            frame.points.append(points)

    def _kept(self, tensor: Tensor) -> Tensor:
        # A copy: caches and in-place operations write to what a model has computed.
        return tensor.detach().clone() if self._detach else tensor

    def _held(self, value: Any) -> Any:
        # Only what hangs on a graph is cut off: a mask that stands for its table would have to make it.
        return value.detach() if self._detach and isinstance(value, Tensor) and value.requires_grad else value

    def _kept_problem(self, problem: Problem) -> Problem:
        def kept(rule: _Rule) -> _Rule:
            return rule.mapped(self._kept)

        return replace(
            problem,
            query=self._kept(problem.query),
            key=self._kept(problem.key),
            value=self._kept(problem.value),
            mask=None if problem.mask is None else kept(problem.mask),
            scores=tuple(map(kept, problem.scores)),
        )


def _each(values: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: change(value) for name, value in values.items()}
