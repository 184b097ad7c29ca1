"""The kernels' calls of a whole transformer layer, and the step that they make."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from ctypes import Structure
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.backends.native_dropout import LEVELS, Drop, dropped
from clearhead.backends.native_library import Verb
from clearhead.backends.native_memory import new_tensor
from clearhead.backends.native_norm import Norm, NormBackward, NormForward, NormKind
from clearhead.backends.native_prepared import Written
from clearhead.backends.native_projection import Gate, run_calls
from clearhead.nn.attention_step import AttentionBackward, AttentionForward, attended_by_parts
from clearhead.nn.norm import normed_by_torch
from clearhead.nn.step import Step, WayBack, layers_of
from clearhead.problem import Problem
from clearhead.projection import ACTIVATIONS, Activation, FeedForwardBackward, FeedForwardForward
from clearhead.shapes import Float

__all__ = ["LayerKind", "LayerStep"]


@dataclass(frozen=True)
class LayerKind:
    """What a layer is besides its tensors and its attention.

    Attributes:
        norm_first: whether each part reads what is normed, and not the sum with it.
        norms: kind and epsilon of both.
        activation: of the feedforward, by name.
        levels: of ``LEVELS`` numbers how many are dropped: behind the attention, within the feedforward, behind it.
    """

    norm_first: bool
    norms: tuple[tuple[NormKind, float], tuple[NormKind, float]]
    activation: str
    levels: tuple[int, int, int]


#: Tensors of the feedforward and of the norms, behind the attention's.
_FEEDFORWARD: Final = slice(-8, -4)
_NORMS: Final = slice(-4, None)


class LayerStep(Step):
    """A layer: a weight and a bias for each of the attention's layers, the feedforward's two, and both norms.

    With d for dropout: before the norms ``y = x + d(attention(norm(x)))`` and ``y + d(feedforward(norm(y)))``; behind
    them ``y = norm(x + d(attention(x)))`` and ``norm(y + d(feedforward(y)))``.
    """

    # What attention and feedforward give is read by the sum with it alone.
    passing: ClassVar[int] = 2

    def __init__(self, problem: Problem, training: bool, layout: Hashable | None, kind: LayerKind) -> None:
        super().__init__(problem, training, layout, [problem.dropout, *(level / LEVELS for level in kind.levels)])
        self.kind = kind
        self.activation: Activation = ACTIVATIONS[kind.activation]

    def rows(self, x: Float[Tensor, "batch len width"]) -> Float[Tensor, "rows width"]:
        return super().rows(x).contiguous()

    def norms_of(self, tensors: Sequence[Tensor | None]) -> list[Norm]:
        """Both, with their weights."""
        own = tensors[_NORMS]
        return [Norm(*self.kind.norms[place], own[2 * place], own[2 * place + 1]) for place in (0, 1)]

    def write_forward(self, rows: Tensor, tensors: Sequence[Tensor | None], seeds: Sequence[int]) -> Written:
        kind, keep = self.kind, self.training
        first, second = self.norms_of(tensors)
        after, hidden, last = kind.levels
        output = new_tensor(rows, (self.problem.batch, self.problem.q_len, rows.shape[1]))
        flat = output.view(rows.shape)

        def attended(of: Tensor) -> AttentionForward:
            return AttentionForward(self.problem, of, layers_of(tensors[: _FEEDFORWARD.start]), seeds[0], keep)

        def fed(of: Tensor) -> FeedForwardForward:
            layers = layers_of(tensors[_FEEDFORWARD])
            return FeedForwardForward(of, layers, self.activation, hidden, seeds[2], keep)

        if kind.norm_first:
            one = NormForward(rows, first, keep_moments=keep)
            attention = attended(one.output)
            two = NormForward(
                attention.output.view(rows.shape), second, added=rows, levels=after, seed=seeds[1], keep_sum=True,
                keep_moments=keep,
            )  # fmt: skip
            feedforward = fed(two.output)
            end = Drop(feedforward.output, last, seeds[3], two.sum, flat)
            calls = [one.call, *attention.calls, two.call, *feedforward.calls, end.call]
            between = [one.output, two.output]
            alive: tuple[object, ...] = (one, attention, two, feedforward, end)
        else:
            attention = attended(rows)
            one = NormForward(
                attention.output.view(rows.shape), first, added=rows, levels=after, seed=seeds[1], keep_sum=keep,
                keep_moments=keep,
            )  # fmt: skip
            feedforward = fed(one.output)
            two = NormForward(
                feedforward.output, second, added=one.output, levels=last, seed=seeds[3], keep_sum=keep,
                keep_moments=keep, output=flat,
            )  # fmt: skip
            calls = [*attention.calls, one.call, *feedforward.calls, two.call]
            between = [one.output]
            alive = (attention, one, feedforward, two)
        passing = [attention.output, feedforward.output]
        kept = [*feedforward.kept, *one.written, *two.written, *between, *attention.kept]
        return Written(calls, [*passing, *kept, output], attention.stays, alive)

    def write_backward(
        self, arrived: Tensor, rows: Tensor, inputs: Sequence[Tensor | None], kept: Sequence[Tensor],
        seeds: Sequence[int], needs: Sequence[bool],
    ) -> WayBack:  # fmt: skip
        return _LayerWayBack(self, arrived, rows, inputs[1:], kept, seeds, needs)

    def by_parts(self, x: Tensor, tensors: Sequence[Tensor | None], seeds: Sequence[int]) -> Tensor:
        kind = self.kind
        first, second = self.norms_of(tensors)
        after, hidden, last = kind.levels
        expand, contract = layers_of(tensors[_FEEDFORWARD])

        def around(x: Tensor, y: Tensor, levels: int, seed: int) -> Tensor:
            return x + _kept(y, levels, seed)

        def attended(y: Tensor) -> Tensor:
            return attended_by_parts(self.problem, y, layers_of(tensors[: _FEEDFORWARD.start]), seeds[0])

        def fed(y: Tensor) -> Tensor:
            return F.linear(_kept(self.activation.formula(F.linear(y, *expand)), hidden, seeds[2]), *contract)

        if kind.norm_first:
            x = around(x, attended(normed_by_torch(x, first)), after, seeds[1])
            return around(x, fed(normed_by_torch(x, second)), last, seeds[3])
        x = normed_by_torch(around(x, attended(x), after, seeds[1]), first)
        return normed_by_torch(around(x, fed(x), last, seeds[3]), second)


class _LayerWayBack(WayBack):
    """What is not needed is left out from the front: a layer's first parts, where they are frozen, are not gone back
    through."""

    def __init__(
        self, step: LayerStep, arrived: Tensor, rows: Tensor, tensors: Sequence[Tensor | None], kept: Sequence[Tensor],
        seeds: Sequence[int], needs: Sequence[bool],
    ) -> None:  # fmt: skip
        self._step, self._rows, self._seeds, self._needs = step, rows, seeds, needs
        self._layers = layers_of(tensors[: _FEEDFORWARD.start]), layers_of(tensors[_FEEDFORWARD])
        self._norms = step.norms_of(tensors)
        hidden = 2 if step.activation.gate is Gate.SLOPE else 1
        self._of_hidden, self._between, self._heads = kept[:hidden], kept[hidden : hidden + 5], kept[hidden + 5 :]
        self._attention: AttentionBackward | None = None
        self._one: NormBackward | None = None
        self._two: NormBackward | None = None
        self._before, self._after = list[tuple[Verb, Structure]](), list[tuple[Verb, Structure]]()
        self._passing, self._of_x = list[Tensor](), list[Tensor]()
        self._held = list[object]()
        if step.kind.norm_first:
            self._through_norms_first(arrived)
        else:
            self._through_norms_last(arrived)

    def _through_norms_first(self, arrived: Tensor) -> None:
        needs, (after, _, last) = self._needs, self._step.kind.levels
        first_moments, summed, moments, first_output, output = self._between
        into_first = needs[0] or any(needs[-4:-2])
        into_attention = into_first or any(needs[1:-8])
        of_feedforward = arrived
        if last:
            drop = Drop(arrived, last, self._seeds[3], None)
            self._before.append(drop.call)
            self._passing.append(drop.output)
            self._held.append(drop)
            of_feedforward = drop.output
        feedforward = self._fed(of_feedforward, output, into_attention or any(needs[-2:]))
        if not feedforward.of_x:
            return
        self._two = NormBackward(
            feedforward.of_x[0], summed, moments, self._norms[1], at_sum=arrived, levels=after, seed=self._seeds[1],
            needs=(needs[-2], needs[-1]),
        )  # fmt: skip
        self._before.append(self._two.call)
        if not into_attention:
            return
        of_x = self._attended(self._two.of_input, first_output, into_first)
        if of_x is None:
            return
        self._of_x = [new_tensor(self._rows, (self._step.problem.batch, self._step.problem.q_len, of_x.shape[1]))]
        self._one = NormBackward(
            of_x, self._rows, first_moments, self._norms[0], at_sum=self._two.of_sum, needs=(needs[-4], needs[-3]),
            of_sum=self._of_x[0].view(of_x.shape),
        )  # fmt: skip
        self._after.append(self._one.call)

    def _through_norms_last(self, arrived: Tensor) -> None:
        needs, (after, _, last) = self._needs, self._step.kind.levels
        first_summed, first_moments, summed, moments, first_output = self._between
        into_attention = any(needs[:-8])
        into_first = into_attention or any(needs[-4:-2])
        self._two = NormBackward(
            arrived, summed, moments, self._norms[1], levels=last, seed=self._seeds[3], needs=(needs[-2], needs[-1])
        )
        self._before.append(self._two.call)
        feedforward = self._fed(self._two.of_input, first_output, into_first)
        if not feedforward.of_x:
            return
        self._one = NormBackward(
            self._two.of_sum, first_summed, first_moments, self._norms[0], more=feedforward.of_x[0], levels=after,
            seed=self._seeds[1], needs=(needs[-4], needs[-3]),
        )  # fmt: skip
        self._before.append(self._one.call)
        if not into_attention:
            return
        of_x = self._attended(self._one.of_input, self._rows, needs[0])
        if of_x is None:
            return
        self._of_x = [new_tensor(self._rows, (self._step.problem.batch, self._step.problem.q_len, of_x.shape[1]))]
        added = Drop(of_x, 0, 0, self._one.of_sum, self._of_x[0].view(of_x.shape))
        self._after.append(added.call)
        self._held.append(added)

    def _fed(self, arrived: Tensor, rows: Tensor, needs_rows: bool) -> FeedForwardBackward:
        self._feedforward = FeedForwardBackward(
            arrived, rows, self._layers[1], self._of_hidden, self._step.activation, self._step.kind.levels[1],
            (needs_rows, *self._needs[_FEEDFORWARD]),
        )  # fmt: skip
        self._before += self._feedforward.calls
        return self._feedforward

    def _attended(self, arrived: Tensor, rows: Tensor, needs_rows: bool) -> Float[Tensor, "rows width"] | None:
        needs = (needs_rows, *self._needs[1 : _FEEDFORWARD.start])
        self._attention = AttentionBackward(
            self._step.problem, arrived, rows, self._layers[0], self._heads, self._seeds[0], needs
        )
        return self._attention.of_x[0].view(rows.shape) if self._attention.of_x else None

    def written(self) -> Written:
        attention, norms = self._attention, [norm for norm in (self._one, self._two) if norm is not None]
        calls, stays = ([], []) if attention is None else (attention.calls, attention.stays)
        own = self._of_x if self._needs[0] else []
        results = [*own, *([] if attention is None else attention.of_layers), *self._feedforward.of_layers]
        results += [part for norm in norms for part in norm.of_norm if part is not None]
        passing = [*self._passing, *([] if own else self._of_x), *self._feedforward.of_x, *self._feedforward.between]
        passing += [part for norm in norms for part in norm.between if not self._is_of_x(part)]
        passing += [] if attention is None else [*attention.of_x, *attention.between]
        return Written([*self._before, *calls, *self._after], [*results, *passing], stays, self)

    def _is_of_x(self, part: Tensor) -> bool:
        return bool(self._of_x) and part.data_ptr() == self._of_x[0].data_ptr()

    def found(self) -> list[Tensor | None]:
        attention, needs = self._attention, self._needs
        nothing: list[Tensor | None] = [None, None]
        of_attention = [None] * (len(needs) - 9) if attention is None else attention.found()[1:]
        of_norms = [[*norm.of_norm] if norm is not None else nothing for norm in (self._one, self._two)]
        of_x = self._of_x[0] if needs[0] else None
        return [of_x, *of_attention, *self._feedforward.found()[1:], *of_norms[0], *of_norms[1]]

    def contained(self) -> list[Tensor | None]:
        run_calls(self._before)
        if self._attention is not None:
            self._attention.run_contained()
        run_calls(self._after)
        return self.found()


def _kept(x: Tensor, levels: int, seed: int) -> Tensor:
    """What dropout keeps, as a factor that can be differentiated through."""
    return x * dropped(torch.ones(x.shape, dtype=x.dtype), levels, seed) if levels else x
