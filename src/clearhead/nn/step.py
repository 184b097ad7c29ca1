"""A part of a model as one step of autograd: its kernels are written down first and then run, one after the other.

Between two large products Python finds nothing of itself in the caches, and whatever it does takes several times as
long as elsewhere: up to a tenth of a training step of a thousand tokens. Between two small ones it takes longer than
they do. What was written down for one layout of tensors is kept, so that from the third call on only addresses change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from clearhead.backends.guards import alike
from clearhead.backends.native_library import Code
from clearhead.backends.native_prepared import Kept, Stretches, Written
from clearhead.backends.native_projection import check as check_product
from clearhead.backends.native_projection import rows_of
from clearhead.backends.native_work import check
from clearhead.masks import Causal, Mask
from clearhead.masks.parts import parts_of
from clearhead.problem import Problem, draw_seed
from clearhead.projection import Layer, choices, recorded, unrecorded
from clearhead.shapes import Float
from clearhead.watch import watched

__all__ = ["Step", "WayBack", "again", "kept_step", "layers_of", "learns", "may_be_step", "play"]


def layers_of(tensors: Sequence[Tensor | None]) -> list[Layer]:
    """Weights with their biases, of tensors that come in pairs."""
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    return [(weight, bias) for weight, bias in pairs if weight is not None]


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
    """What calls of one layout under one mask share: an attention without numbers, and the kernels' calls.

    Args:
        problem: of hollow tensors.
        training: whether forward keeps what backward needs.
        layout: of calls that may come again, so that the kernels' are kept; None of others.
        drops: probabilities with which numbers are dropped, the attention's first: a seed is drawn for each.
    """

    #: Tensors that forward writes in front of what backward reads, and that nobody reads later.
    passing: ClassVar[int] = 0

    def __init__(self, problem: Problem, training: bool, layout: Hashable | None, drops: Sequence[float]) -> None:
        self.problem, self.training, self.drops = problem, training, tuple(drops)
        # Each batch of packed sequences has a mask of its own, which differs in where its runs begin and end alone.
        self.edges: tuple[Tensor, ...] = ()
        if layout is not None and problem.mask is not None:
            parts = problem.mask_parts
            self.edges = () if parts.runs is None else parts.edges
            layout = (layout, parts.before, parts.after, problem.query_offset, *(edge.shape for edge in self.edges))
        self._calls = Stretches(may_recur=False) if layout is None else _CALLS.get(layout) or Stretches(may_recur=True)
        if layout is not None:
            _CALLS.put(layout, self._calls)

    @abstractmethod
    def write_forward(self, rows: Tensor, tensors: Sequence[Tensor | None], seeds: Sequence[int]) -> Written:
        """The calls of one forward: they write what is passing, what is kept for backward, and the output, in this
        order."""

    @abstractmethod
    def write_backward(
        self, arrived: Tensor, rows: Tensor, inputs: Sequence[Tensor | None], kept: Sequence[Tensor],
        seeds: Sequence[int], needs: Sequence[bool],
    ) -> WayBack:  # fmt: skip
        """The calls of one backward, from the output's gradient ``[rows, out]`` and what forward read and kept."""

    @abstractmethod
    def by_parts(self, x: Tensor, tensors: Sequence[Tensor | None], seeds: Sequence[int]) -> Tensor:
        """The output by parts that autograd and watchers know."""

    def rows(self, x: Float[Tensor, "batch len width"]) -> Float[Tensor, "rows width"]:
        """Tokens as the kernels read them."""
        return rows_of(x.reshape(-1, x.shape[-1]))

    def is_current(self) -> bool:
        """Whether the mask's tensors are still what they were: somebody may have written into them."""
        own = self.problem
        if own.mask is None or not tuple(own.mask.tensors()):
            return True
        size = (own.batch, own.num_heads, own.q_len, own.k_len)
        return parts_of(own.mask, size, own.query_offset) is own.mask_parts

    def draw_seeds(self) -> tuple[int, ...]:
        """One for each probability, 0 for what drops nothing."""
        return tuple([draw_seed(drop) for drop in self.drops])

    def forward(
        self, x: Float[Tensor, "batch len in"], tensors: Sequence[Tensor | None], seeds: Sequence[int]
    ) -> list[Tensor]:
        """What backward reads, and the output ``[batch, len, out]``."""
        rows = self.rows(x)
        reads = [rows, *[part for part in tensors if part is not None], *self.edges]
        writes, code, done = self._calls.forward.run(reads, lambda: self.write_forward(rows, tensors, seeds), seeds)
        check(f"call {done} of a step", code)
        return writes[self.passing :]

    def backward(
        self, grad: Tensor, inputs: Sequence[Tensor | None], kept: Sequence[Tensor], seeds: Sequence[int],
        needs: tuple[bool, ...],
    ) -> list[Tensor | None]:  # fmt: skip
        """Gradients of the inputs, ``x`` first; what is not needed is None."""
        x = inputs[0]
        assert x is not None
        arrived, rows = self.rows(grad), self.rows(x)
        made: list[WayBack] = []

        def write_down() -> Written:
            made.append(self.write_backward(arrived, rows, inputs, kept, seeds, needs))
            return made[-1].written()

        parts = [part for part in inputs[1:] if part is not None]
        reads = [arrived, rows, *parts, *kept, *self.edges]
        writes, code, _ = self._calls.backward(needs).run(reads, write_down, seeds)
        if code == Code.NOT_FINITE:
            # Rare: NaN or inf behind a mask, which takes a look of its own.
            return self.write_backward(arrived, rows, inputs, kept, seeds, needs).contained()
        check_product(code)
        if made:
            return made[-1].found()
        found = iter(writes)
        return [next(found) if needed else None for needed in needs]

    def known_gradients(
        self, grad: Tensor, inputs: Sequence[Tensor | None], seeds: Sequence[int], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """The same by parts that autograd and watchers know, from the inputs alone."""
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            parts = [
                part.view_as(part) if part is not None and needed else part
                for part, needed in zip(inputs, needs, strict=True)
            ]
            x, *tensors = parts
            assert x is not None
            output = self.by_parts(x, tensors, seeds)
            wanted = [part for part, needed in zip(parts, needs, strict=True) if part is not None and needed]
            found = iter(torch.autograd.grad(output, wanted, grad, create_graph=again, allow_unused=True))
        return [next(found) if part is not None and needed else None for part, needed in zip(parts, needs, strict=True)]


_CALLS: Final = Kept[Stretches](64)


class _KernelStep(torch.autograd.Function):
    """A step, its seeds, ``x`` and its tensors."""

    @staticmethod
    def forward(ctx: Any, step: Step, seeds: tuple[int, ...], x: Tensor, *tensors: Tensor | None) -> Tensor:
        *kept, output = step.forward(x, tensors, seeds)
        ctx.step, ctx.seeds = step, seeds
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *tensors, *kept)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        count = len(needs)
        if grad is None:
            return (None,) * (2 + count)
        # Asked for once: a checkpoint hands them out a single time.
        saved = ctx.saved_tensors
        inputs, kept = saved[:count], saved[count:]
        if recorded(grad):
            return None, None, *ctx.step.known_gradients(grad, inputs, ctx.seeds, needs)
        return None, None, *ctx.step.backward(grad, inputs, kept, ctx.seeds, needs)


#: ``_KernelStep.apply`` without its look at transformations, of which there are none where a call is known.
_applied: Final = super(torch.autograd.Function, _KernelStep).apply


def play(step: Step, x: Tensor, tensors: Sequence[Tensor | None], *, known: bool = False) -> Tensor:
    """The step's output; ``known`` where nothing is in force around the call."""
    # Only now, so that whoever goes on without the step finds the generator as it was.
    seeds = step.draw_seeds()
    if not step.training:
        return step.forward(x, tensors, seeds)[-1]
    output: Tensor = (_applied if known else _KernelStep.apply)(step, seeds, x, *tensors)  # type: ignore[no-untyped-call]
    return output


def may_be_step(x: Tensor) -> bool:
    """Whether nobody compiles or looks at every module, and there is something to do."""
    return not (torch.compiler.is_compiling() or _has_any_global_hook()) and x.dim() == 3 and 0 not in x.shape


def learns(*tensors: Tensor | None) -> bool:
    """Whether a gradient may be wanted."""
    return torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in tensors)


# ---- calls like one before ----------------------------------------------------------------------------------


class _Known(NamedTuple):
    """A step, and what tells calls that are like one that it has served."""

    step: Step
    chosen: Hashable
    alike: Callable[..., bool]


_KEPT: Final = Kept[Step](64)
_KNOWN: Final = Kept[_Known](64)


def again(x: object, tensors: Sequence[Tensor | None], mask: Mask | None, options: Sequence[Hashable]) -> Tensor | None:
    """The output of a call like one before, or None; of arguments that nobody has checked.

    What takes longer than the kernels of a short call, the look at each argument, is one question here: whether all
    tensors are like those of the call before.

    Args:
        x: ``[batch, len, in]``.
        tensors: those of the step.
        mask: of its attention.
        options: all else that tells calls apart.
    """
    if type(x) is not Tensor:
        return None
    given = [x, *[part for part in tensors if part is not None]]
    try:
        known = _KNOWN.get(_asked(x, tensors, mask, options))
    except TypeError:  # what cannot be hashed
        return None
    if (
        known is None or not known.alike(*given) or watched() or _has_any_global_hook() or not unrecorded()
        or known.chosen != choices(x.dtype) or not known.step.is_current()
    ):  # fmt: skip
        return None
    return play(known.step, x, tensors, known=True)


def kept_step(
    x: Tensor, tensors: Sequence[Tensor | None], mask: Mask | None, options: Sequence[Hashable],
    problem_of: Callable[[], Problem | None], step_of: Callable[[Problem, bool, Hashable | None], Step], *,
    recurs: bool,
) -> Step | None:  # fmt: skip
    """The step for a call: one of before, or a new one.

    Args:
        x: as in ``again``, and so are those that follow.
        tensors: see there.
        mask: see there.
        options: see there.
        problem_of: the attention without numbers, or None where there is no step.
        step_of: a new step for it; whether it is for training; and for a layout, None for calls that do not come again.
        recurs: whether a call like this may come again: all tensors lie plainly, and ``options`` say the rest.
    """
    shapes = [None if part is None else part.shape for part in tensors]
    training = learns(x, *tensors)
    layout = (
        x.shape, x.dtype, *shapes, *options, training, torch.get_num_threads(), *(choices(x.dtype) if recurs else ()),
    )  # fmt: skip
    step = _KEPT.get((_mark(mask), layout)) if recurs else None
    if step is None or not step.is_current():
        problem = problem_of()
        if problem is None:
            return None
        # One that had to be placed first is another, and may have copied numbers that somebody writes into later.
        recurs = recurs and problem.mask is mask and _is_said_by_runs(problem)
        step = step_of(problem, training, layout if recurs else None)
        if recurs:
            _KEPT.put((_mark(mask), layout), step)
    if recurs:
        given = [part for part in (x, *tensors) if part is not None]
        _KNOWN.put(_asked(x, tensors, mask, options), _Known(step, choices(x.dtype), alike(*given)))
    return step


def _asked(x: Tensor, tensors: Sequence[Tensor | None], mask: Mask | None, options: Sequence[Hashable]) -> Hashable:
    """What tells calls apart besides their tensors."""
    missing = tuple([part is None for part in tensors])
    return x.shape, missing, _mark(mask), *options, torch.is_grad_enabled(), torch.get_num_threads()


def _mark(mask: Mask | None) -> Hashable:
    """A mask's name: its class where that says all, or its id, which is its own as long as a step holds the mask."""
    return Causal if type(mask) is Causal else id(mask)


def _is_said_by_runs(problem: Problem) -> bool:
    """Whether a mask is a band and runs of keys, which are asked for again: a table, or a user's function, may say
    something else each time."""
    if problem.mask is None:
        return True
    parts = problem.mask_parts
    return not parts.rest and parts.dense is None and parts.blocks is None
