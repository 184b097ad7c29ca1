"""A part of a model as one step of autograd: its kernels are written down first and then run, one after the other.

Between two large products Python finds nothing of itself in the caches, and whatever it does takes several times as
long as elsewhere: up to a tenth of a training step of a thousand tokens. Between two small ones it takes longer than
they do. What was written down for one layout of tensors is kept, so that from the third call on only addresses change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from clearhead.backends.guards import alike
from clearhead.backends.native_header import Code
from clearhead.backends.native_prepared import Kept, Stretches, Strides, Written, strides_of
from clearhead.backends.native_projection import check as check_product
from clearhead.backends.native_projection import rows_of
from clearhead.backends.native_work import check
from clearhead.masks import Mask
from clearhead.masks.parts import band_of, parts_of
from clearhead.nn.held import Held, position_of, tensors_of
from clearhead.nn.rule_tensors import NO_RULES, RuleTensors, as_read, with_rules_on
from clearhead.problem import Problem, draw_seed
from clearhead.projection import choices, recorded, unrecorded
from clearhead.shapes import Float
from clearhead.watch import watched

__all__ = ["LearningStep", "Step", "WayBack", "again", "kept_step", "learns", "may_be_step", "play"]


class WayBack(ABC):
    """The calls of one backward."""

    @abstractmethod
    def written(self) -> Written:
        """Results first, in the order of what is needed."""

    @abstractmethod
    def found(self) -> list[Tensor | None]:
        """Results in the order of the inputs, None for one that is not needed, once the calls are made."""

    @abstractmethod
    def contained(self) -> list[Tensor | None]:
        """The same by calls of its own, where NaN or inf may meet a mask."""


class Step(ABC):
    """What calls of one layout under the same masks share: attentions without numbers, and the kernels' calls.

    A call has tokens, ``[batch, len, width]``, of one sequence or of two where a memory is attended to; and tensors,
    weights and biases in pairs.

    Args:
        problems: of hollow tensors, one for each attention.
        training: whether forward keeps what backward needs.
        layout: of calls that may come again, so that the kernels' are kept; None of others.
        drops: probabilities with which numbers are dropped: a seed is drawn for each.
        rules: tensors that the attentions' rules read, and a call's angles, which stand behind the step's own in every
            call.
    """

    #: Tensors that forward writes in front of what backward reads, and that nobody reads later.
    passing: int = 0

    def __init__(
        self, problems: Sequence[Problem], training: bool, layout: Hashable | None, drops: Sequence[float],
        rules: RuleTensors = NO_RULES,
    ) -> None:  # fmt: skip
        self._rule_places, self._of_rules, self._turned = rules.places, 2 * len(rules.tensors), rules.turned
        self.problems, self.training, self.drops = tuple(problems), training, tuple(drops)
        self._draws = any(drops)
        # Each batch of packed sequences has a mask of its own, which differs in where its runs begin and end alone.
        self.edges: tuple[Tensor, ...] = ()
        for problem in self.problems:
            if layout is not None and problem.mask is not None:
                parts = problem.mask_parts
                edges = () if parts.runs is None else parts.edges
                layout = (layout, parts.before, parts.after, problem.query_offset, *(edge.shape for edge in edges))
                # Layers under one mask have one between them.
                there = set(map(id, self.edges))
                self.edges += tuple(edge for edge in edges if id(edge) not in there)
        self._written_into = [own for own in self.problems if own.mask is not None and tuple(own.mask.tensors())]
        self._calls = Stretches(may_recur=False) if layout is None else _CALLS.get(layout) or Stretches(may_recur=True)
        if layout is not None:
            _CALLS.put(layout, self._calls)

    @abstractmethod
    def write_forward(
        self, problems: Sequence[Problem], tokens: Sequence[Float[Tensor, "_rows _width"]],
        tensors: Sequence[Tensor | None], seeds: Sequence[int], held: Sequence[Held | None],
        angles: Float[Tensor, "_rows head_dim"] | None,
    ) -> Written:  # fmt: skip
        """The calls of one forward: they write what is passing, what is kept for backward, and the output, in this
        order; of each attention that reads a cache they use what that holds."""

    def _told_apart(self, tensors: Sequence[Tensor | None]) -> tuple[Sequence[Tensor | None], list[Tensor]]:
        """The step's own tensors, and those that rules read and a call's angles, as they are read."""
        if self._of_rules == 0:
            return tensors, []
        own = len(tensors) - self._of_rules
        return tensors[:own], as_read([part for part in tensors[own:] if part is not None])

    def _angles(self, rules: Sequence[Tensor]) -> Tensor | None:
        """A call's own, where it has some."""
        return rules[-1] if self._turned else None

    def _under(self, rules: Sequence[Tensor]) -> Sequence[Problem]:
        """The attentions, whose rules read these."""
        if not rules:
            return self.problems
        places = zip(self.problems, self._rule_places, strict=True)
        return [with_rules_on(problem, [rules[place] for place in own]) for problem, own in places]

    def rows(self, x: Float[Tensor, "batch len width"]) -> Float[Tensor, "rows width"]:
        """Tokens as the kernels read them."""
        return rows_of(x.reshape(-1, x.shape[-1]))

    def is_current(self) -> bool:
        """Whether the masks' tensors are still what they were: somebody may have written into them."""
        for own in self._written_into:
            size = (own.batch, own.num_heads, own.q_len, own.k_len)
            if own.mask is None or parts_of(own.mask, size, own.query_offset) is not own.mask_parts:
                return False
        return True

    def draw_seeds(self) -> tuple[int, ...]:
        """One for each probability, 0 for what drops nothing."""
        return tuple([draw_seed(drop) for drop in self.drops]) if self._draws else (0,) * len(self.drops)

    def forward(
        self, tokens: Sequence[Float[Tensor, "batch _len _width"]], tensors: Sequence[Tensor | None],
        seeds: Sequence[int], held: Sequence[Held | None] = (), known: Known | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """What backward reads while training, and the output ``[batch, len, out]``; ``held`` of each attention, where
        one reads a cache, and what is ``known`` of a call like one before."""
        rows, position = [self.rows(each) for each in tokens], position_of(held)
        tensors, rules = self._told_apart(tensors)
        reads = [*rows, *[part for part in tensors if part is not None], *rules, *tensors_of(held), *self.edges]
        if known is not None and known.strides is None:
            known.strides = strides_of(reads)

        def write_down() -> Written:
            caches = held or (None,) * len(self.problems)
            written = self.write_forward(self._under(rules), rows, tensors, seeds, caches, self._angles(rules))
            written.inner = self.passing if self.training else len(written.writes) - 1
            return written

        writes, code, done = self._calls.forward.run(
            reads, write_down, seeds, position, None if known is None else known.strides
        )
        check(f"call {done} of a step", code)
        return writes[self.passing :] if self.training else writes[-1:]


class LearningStep(Step):
    """A step that can be gone back through."""

    @abstractmethod
    def write_backward(
        self, problems: Sequence[Problem], arrived: Float[Tensor, "rows out"],
        tokens: Sequence[Float[Tensor, "_rows _width"]], tensors: Sequence[Tensor | None], kept: Sequence[Tensor],
        seeds: Sequence[int], needs: Sequence[bool], angles: Float[Tensor, "_rows head_dim"] | None,
    ) -> WayBack:  # fmt: skip
        """The calls of one backward, from the output's gradient and what forward read and kept; ``needs`` of tokens,
        then of tensors."""

    @abstractmethod
    def by_parts(
        self, problems: Sequence[Problem], tokens: Sequence[Tensor], tensors: Sequence[Tensor | None],
        seeds: Sequence[int], angles: Float[Tensor, "_rows head_dim"] | None = None,
    ) -> Tensor:  # fmt: skip
        """The output by parts that autograd and watchers know."""

    def backward(
        self, grad: Tensor, tokens: Sequence[Tensor], tensors: Sequence[Tensor | None], kept: Sequence[Tensor],
        seeds: Sequence[int], needs: tuple[bool, ...],
    ) -> list[Tensor | None]:  # fmt: skip
        """Gradients of tokens, then of tensors; what is not needed is None."""
        arrived, rows = self.rows(grad), [self.rows(each) for each in tokens]
        tensors, rules = self._told_apart(tensors)
        nothing: list[Tensor | None] = [None] * self._of_rules
        needs = needs[: len(needs) - self._of_rules]
        made: list[WayBack] = []

        def way_back() -> WayBack:
            under = self._under(rules)
            return self.write_backward(under, arrived, rows, tensors, kept, seeds, needs, self._angles(rules))

        def write_down() -> Written:
            made.append(way_back())
            return made[-1].written()

        reads = [arrived, *rows, *[part for part in tensors if part is not None], *rules, *kept, *self.edges]
        writes, code, _ = self._calls.backward(needs, len(rows)).run(reads, write_down, seeds)
        if code == Code.NOT_FINITE:
            # Rare: NaN or inf behind a mask, which takes a look of its own.
            return way_back().contained() + nothing
        check_product(code)
        if made:
            return made[-1].found() + nothing
        found = iter(writes)
        return [next(found) if needed else None for needed in needs] + nothing

    def known_gradients(
        self, grad: Tensor, tokens: Sequence[Tensor], tensors: Sequence[Tensor | None], seeds: Sequence[int],
        needs: Sequence[bool],
    ) -> list[Tensor | None]:  # fmt: skip
        """The same by parts that autograd and watchers know, from what the call read alone."""
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            parts = [
                part.view_as(part) if part is not None and needed else part
                for part, needed in zip((*tokens, *tensors), needs, strict=True)
            ]
            own = [part for part in parts[: len(tokens)] if part is not None]
            layers, rules = self._told_apart(parts[len(tokens) :])
            output = self.by_parts(self._under(rules), own, layers, seeds, self._angles(rules))
            wanted = [part for part, needed in zip(parts, needs, strict=True) if part is not None and needed]
            found = iter(torch.autograd.grad(output, wanted, grad, create_graph=again, allow_unused=True))
        return [next(found) if part is not None and needed else None for part, needed in zip(parts, needs, strict=True)]


_CALLS: Final = Kept[Stretches](64)


class _KernelStep(torch.autograd.Function):
    """A step, its seeds, of how many sequences its tokens are, these and its tensors."""

    @staticmethod
    def forward(ctx: Any, step: LearningStep, seeds: tuple[int, ...], sequences: int, *inputs: Any) -> Tensor:
        *kept, output = step.forward(inputs[:sequences], inputs[sequences:], seeds)
        ctx.step, ctx.seeds, ctx.sequences = step, seeds, sequences
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *kept)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        needs, sequences = ctx.needs_input_grad[3:], ctx.sequences
        count = len(needs)
        if grad is None:
            return (None,) * (3 + count)
        # Asked for once: a checkpoint hands them out a single time.
        saved = ctx.saved_tensors
        tokens, tensors, kept = saved[:sequences], saved[sequences:count], saved[count:]
        if recorded(grad):
            return None, None, None, *ctx.step.known_gradients(grad, tokens, tensors, ctx.seeds, needs)
        return None, None, None, *ctx.step.backward(grad, tokens, tensors, kept, ctx.seeds, needs)


#: ``_KernelStep.apply`` without its look at transformations, of which there are none where a call is known.
_applied: Final = super(torch.autograd.Function, _KernelStep).apply


def play(
    step: Step, tokens: Sequence[Tensor], tensors: Sequence[Tensor | None], held: Sequence[Held | None] = (),
    known: Known | None = None,
) -> Tensor:  # fmt: skip
    """The step's output; of a call that is ``known``, around which nothing is in force."""
    # Only now, so that whoever goes on without the step finds the generator as it was.
    seeds = step.draw_seeds()
    if not step.training:
        return step.forward(tokens, tensors, seeds, held, known)[-1]
    output: Tensor = (_KernelStep.apply if known is None else _applied)(step, seeds, len(tokens), *tokens, *tensors)  # type: ignore[no-untyped-call]
    return output


def may_be_step(*tokens: Tensor) -> bool:
    """Whether nobody compiles or looks at every module, and there is something to do."""
    if torch.compiler.is_compiling() or _has_any_global_hook():
        return False
    return all(each.dim() == 3 and 0 not in each.shape and len(each) == len(tokens[0]) for each in tokens)


def learns(*tensors: Tensor | None) -> bool:
    """Whether a gradient may be wanted."""
    return torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in tensors)


# ---- calls like one before ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Known:
    """A step, what tells calls that are like one that it has served, and how the tensors lie that these read."""

    step: Step
    chosen: Hashable
    alike: Callable[..., bool]
    strides: Strides | None = None


_KEPT: Final = Kept[Step](64)
_KNOWN: Final = Kept[Known](64)


def again(
    tokens: Sequence[Tensor], tensors: Sequence[Tensor | None], masks: Sequence[Mask | None],
    options: Sequence[Hashable], held: Sequence[Held | None] = (),
) -> Tensor | None:  # fmt: skip
    """The output of a call like one before, or None; of arguments that nobody has checked.

    What takes longer than the kernels of a short call, the look at each argument, is one question here: whether all
    tensors are like those of the call before.

    Args:
        tokens: ``[batch, len, width]``, those that attend and, where there is one, the memory.
        tensors: those of the step.
        masks: of its attentions.
        options: all else that tells calls apart.
        held: what each attention reads from a cache, where one does.
    """
    # One of the older nested kind has no shape to ask for.
    if any(type(each) is not Tensor or each.is_nested for each in tokens):
        return None
    given = [*tokens, *[part for part in tensors if part is not None], *tensors_of(held)]
    try:
        known = _KNOWN.get(_asked(tokens, tensors, masks, options, held))
    except TypeError:  # what cannot be hashed
        return None
    if (
        known is None or not known.alike(*given) or watched() or _has_any_global_hook() or not unrecorded()
        or known.chosen != choices(tokens[0].dtype) or not known.step.is_current()
    ):  # fmt: skip
        return None
    return play(known.step, tokens, tensors, held, known)


def kept_step(
    tokens: Sequence[Tensor], tensors: Sequence[Tensor | None], masks: Sequence[Mask | None],
    options: Sequence[Hashable], problems_of: Callable[[], Sequence[Problem] | None],
    step_of: Callable[[Sequence[Problem], bool, Hashable | None], Step], held: Sequence[Held | None] = (), *,
    recurs: bool,
) -> Step | None:  # fmt: skip
    """The step for a call: one of before, or a new one.

    Args:
        tokens: as in ``again``, and so are those that follow.
        tensors: see there.
        masks: see there.
        options: see there.
        problems_of: the attentions without numbers, or None where there is no step.
        step_of: a new step for them; whether it is for training; and for a layout, None for calls that do not come
            again.
        held: as in ``again``.
        recurs: whether a call like this may come again: all tensors lie plainly, and ``options`` say the rest.
    """
    shapes = [None if part is None else part.shape for part in tensors]
    training, dtype, marks = learns(*tokens, *tensors), tokens[0].dtype, tuple(_marks(masks))
    layout = (
        *(each.shape for each in tokens), dtype, *shapes, *options, training, torch.get_num_threads(),
        *(choices(dtype) if recurs else ()), *_marks_of(held, masks, marks),
    )  # fmt: skip
    step = _KEPT.get((marks, layout)) if recurs else None
    if step is None or not step.is_current():
        problems = problems_of()
        if problems is None:
            return None
        # One that had to be placed first is another, and may have copied numbers that somebody writes into later.
        recurs = recurs and all(
            problem.mask is mask and _is_said_by_runs(problem) for problem, mask in zip(problems, masks, strict=True)
        )
        step = step_of(problems, training, layout if recurs else None)
        if recurs:
            _KEPT.put((marks, layout), step)
    if recurs:
        given = [part for part in (*tokens, *tensors, *tensors_of(held)) if part is not None]
        _KNOWN.put(_asked(tokens, tensors, masks, options, held), Known(step, choices(dtype), alike(*given)))
    return step


def _asked(
    tokens: Sequence[Tensor], tensors: Sequence[Tensor | None], masks: Sequence[Mask | None],
    options: Sequence[Hashable], held: Sequence[Held | None],
) -> Hashable:  # fmt: skip
    """What tells calls apart besides their tensors."""
    shapes, missing = [each.shape for each in tokens], tuple([part is None for part in tensors])
    marks, around = _marks(masks), (torch.is_grad_enabled(), torch.get_num_threads())
    # A first layer may read what was made before inference mode, those behind it never do.
    made = [each.is_inference() for each in tokens]
    return *shapes, missing, *marks, *options, *_marks_of(held, masks, marks), *made, *around


def _marks_of(
    held: Sequence[Held | None], masks: Sequence[Mask | None], marks: Sequence[Hashable]
) -> list[Hashable]:  # fmt: skip
    """What tells caches apart: their length too, where a mask, by its mark no band, knows of places."""
    found: list[Hashable] = []
    for own, mask, mark in zip(held, masks, marks, strict=False):
        if own is None:
            found.append(None)
        else:
            found.append(own.marks() if mask is None or type(mark) is tuple else (own.marks(), own.length))
    return found


def _marks(masks: Sequence[Mask | None]) -> list[Hashable]:
    """Names of masks: how far a band reaches; of others an id, which is its own as long as a step holds the mask."""
    found: dict[int, Hashable] = {}
    for mask in masks:
        if id(mask) not in found:
            band = None if mask is None else band_of(mask)
            found[id(mask)] = id(mask) if band is None else band
    return [found[id(mask)] for mask in masks]


def _is_said_by_runs(problem: Problem) -> bool:
    """Whether a mask is a band and runs of keys, which are asked for again: a table, or a user's function, may say
    something else each time."""
    if problem.mask is None:
        return True
    parts = problem.mask_parts
    return not parts.rest and parts.dense is None and parts.blocks is None
