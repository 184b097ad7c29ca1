"""The kernels' calls of a whole transformer layer, and the step that they make."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from ctypes import Structure
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.backends.native_dropout import LEVELS, Drop, dropped
from clearhead.backends.native_header import Verb
from clearhead.backends.native_memory import new_tensor
from clearhead.backends.native_norm import Norm, NormBackward, NormForward, NormKind
from clearhead.backends.native_prepared import Counter, Written
from clearhead.backends.native_projection import run_calls
from clearhead.nn.attention_step import AttentionBackward, AttentionForward, AttentionKind, attended_by_parts, taken
from clearhead.nn.held import Held
from clearhead.nn.norm import normed_by_torch
from clearhead.nn.rule_tensors import NO_RULES, RuleTensors, turning
from clearhead.nn.step import LearningStep, WayBack
from clearhead.positions import Rotary
from clearhead.problem import Problem
from clearhead.projection import (
    ACTIVATIONS,
    Activation,
    FeedForwardBackward,
    FeedForwardForward,
    Layer,
    count_kept,
    layers_of,
)
from clearhead.shapes import Float

__all__ = ["LayerKind", "LayerStep"]


@dataclass(frozen=True)
class LayerKind:
    """What a layer is besides its tensors and its attentions.

    Its sublayers are an attention to the layer's own tokens, maybe one to a memory, and the feedforward.

    Attributes:
        norm_first: whether each sublayer reads what is normed, and not the sum with it.
        norms: kind and epsilon of each sublayer's norm.
        activation: of the feedforward, by name.
        after: of ``LEVELS`` numbers how many are dropped behind each sublayer.
        hidden: the same within the feedforward.
        attentions: of each what it is besides its problem and its tensors.
        gated: whether the feedforward has a gate, whose numbers are activated in place of those that it multiplies.
        behind: kind and epsilon of the norm of what each sublayer gives, where there are some; not while training.
    """

    norm_first: bool
    norms: tuple[tuple[NormKind, float], ...]
    activation: str
    after: tuple[int, ...]
    hidden: int
    attentions: tuple[AttentionKind, ...]
    gated: bool = False
    behind: tuple[tuple[NormKind, float], ...] = ()


#: A weight and a bias.
_PAIR: Final = 2


class LayerStep(LearningStep):
    """A layer: a weight and a bias for each of its attentions' layers, the feedforward's, and each norm.

    With d for dropout, one sublayer after the other: ``x + d(sublayer(norm(x)))``, or ``norm(x + d(sublayer(x)))``.
    What a sublayer gives may be normed itself.
    """

    def __init__(
        self, problems: Sequence[Problem], training: bool, layout: Hashable | None, kind: LayerKind,
        rules: RuleTensors = NO_RULES,
    ) -> None:  # fmt: skip
        # Seeds come in pairs: within a sublayer, and behind it.
        within = [*(problem.dropout for problem in problems), kind.hidden / LEVELS]
        behind = [level / LEVELS for level in kind.after]
        assert not (training and kind.behind)
        super().__init__(
            problems, training, layout, [drop for pair in zip(within, behind, strict=True) for drop in pair], rules
        )
        self.kind, self.count = kind, len(within)
        # What a sublayer gives is read by the sum with it alone, and slopes of a gate in front of its way out.
        self.passing = self.count + (1 if kind.gated and training else 0)
        self.activation: Activation = ACTIVATIONS[kind.activation]
        counts = [
            *(own.pairs for own in kind.attentions),
            3 if kind.gated else 2,
            *[1] * (self.count + len(kind.behind)),
        ]
        sizes = [_PAIR * count for count in counts]
        #: Where the tensors of each sublayer lie, behind them those of its norm, and of the norm of what it gives.
        self.places = [slice(*ends) for ends in pairwise([0, *accumulate(sizes)])]

    def rows(self, x: Float[Tensor, "batch len width"]) -> Float[Tensor, "rows width"]:
        return super().rows(x).contiguous()

    def layers(self, tensors: Sequence[Tensor | None]) -> list[list[Layer]]:
        """Those of each sublayer."""
        *attentions, feedforward = self.places[: self.count]
        kinds = zip(self.kind.attentions, attentions, strict=True)
        return [*(own.told_apart(tensors[place])[0] for own, place in kinds), layers_of(tensors[feedforward])]

    def head_norms(self, place: int, tensors: Sequence[Tensor | None]) -> list[Norm]:
        """Those of an attention."""
        return self.kind.attentions[place].told_apart(tensors[self.places[place]])[1]

    def rotary(self, place: int, angles: Tensor | None) -> Rotary | Tensor | None:
        """What turns queries and keys of an attention in a call."""
        return turning(self.kind.attentions[place].rotary, angles)

    def norms(self, tensors: Sequence[Tensor | None]) -> list[Norm]:
        """Each sublayer's, with its weights."""
        return _norms(self.kind.norms, self.places[self.count : 2 * self.count], tensors)

    def norms_behind(self, tensors: Sequence[Tensor | None]) -> list[Norm]:
        """Those of what each sublayer gives."""
        return _norms(self.kind.behind, self.places[2 * self.count :], tensors)

    def write_forward(
        self, problems: Sequence[Problem], tokens: Sequence[Tensor], tensors: Sequence[Tensor | None],
        seeds: Sequence[int], held: Sequence[Held | None], angles: Tensor | None,
    ) -> Written:  # fmt: skip
        own = _LayerForward(self, problems, tokens, tensors, seeds, held, angles)
        return Written(own.calls, [*own.passing, *own.kept, own.output], own.stays, own, own.counters)

    def write_backward(
        self, problems: Sequence[Problem], arrived: Tensor, tokens: Sequence[Tensor],
        tensors: Sequence[Tensor | None], kept: Sequence[Tensor], seeds: Sequence[int], needs: Sequence[bool],
        angles: Tensor | None,
    ) -> WayBack:  # fmt: skip
        return _LayerWayBack(self, problems, arrived, tokens, tensors, kept, seeds, needs, angles)

    def by_parts(
        self, problems: Sequence[Problem], tokens: Sequence[Tensor], tensors: Sequence[Tensor | None],
        seeds: Sequence[int], angles: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        kind, layers, x = self.kind, self.layers(tensors), tokens[0]

        def sublayer(place: int, x: Tensor) -> Tensor:
            if place < len(problems):
                read, rotary = _read_by(place, x, tokens), self.rotary(place, angles)
                return attended_by_parts(problems[place], read, layers[place], seeds[2 * place], rotary)
            first, *between, contract = layers[place]
            hidden = _kept(self.activation.formula(F.linear(x, *first)), kind.hidden, seeds[2 * place])
            for expand in between:
                hidden = hidden * F.linear(x, *expand)
            return F.linear(hidden, *contract)

        for place, (norm, levels) in enumerate(zip(self.norms(tensors), kind.after, strict=True)):
            given = sublayer(place, normed_by_torch(x, norm) if kind.norm_first else x)
            x = x + _kept(given, levels, seeds[2 * place + 1])
            x = x if kind.norm_first else normed_by_torch(x, norm)
        return x


def _norms(
    kinds: Sequence[tuple[NormKind, float]], places: Sequence[slice], tensors: Sequence[Tensor | None]
) -> list[Norm]:
    return [Norm(*kind, *tensors[place]) for kind, place in zip(kinds, places, strict=True)]


def _read_by(place: int, x: Tensor, tokens: Sequence[Tensor]) -> list[Tensor]:
    """What an attention reads: the layer's own tokens, as they have come so far, or those and the memory."""
    return [x, *tokens[1:]] if place else [x]


class _LayerForward:
    """A layer written down.

    Attributes:
        calls: in order.
        counters: of their fields, those that hold a position.
        output: ``[batch, len, width]``.
        passing: what each sublayer gives.
        kept: of each sublayer what it keeps, then of its norm the sum, where it is another tensor than what the layer
            reads; the moments; and what is normed, where it is not the layer's output.
        stays: tensors that the calls read and that stay where they are.
    """

    def __init__(
        self, step: LayerStep, problems: Sequence[Problem], tokens: Sequence[Tensor],
        tensors: Sequence[Tensor | None], seeds: Sequence[int], held: Sequence[Held | None], angles: Tensor | None,
    ) -> None:  # fmt: skip
        self._problems, self._angles, self._tensors = problems, angles, tensors
        self._step, self._tokens, self._seeds, self._layers = step, tokens, seeds, step.layers(tensors)
        self._held, self._behind, self.counters = held, step.norms_behind(tensors), list[Counter]()
        rows, (first, *_) = tokens[0], problems
        self.output = new_tensor(rows, (first.batch, first.q_len, rows.shape[1]))
        self.calls, self.passing, self.kept = list[tuple[Verb, Structure]](), list[Tensor](), list[Tensor]()
        self.stays, self._alive = list[Tensor](), list[object]()
        if step.kind.norm_first:
            self._norms_first(step.norms(tensors))
        else:
            self._norms_last(step.norms(tensors))

    def _norms_first(self, norms: Sequence[Norm]) -> None:
        step, seeds, stream, given = self._step, self._seeds, self._tokens[0], None
        for place, norm in enumerate(norms):
            if given is None:
                own = NormForward(stream, norm, keep_moments=step.training)
            else:
                own = NormForward(
                    given, norm, added=stream, levels=step.kind.after[place - 1], seed=seeds[2 * place - 1],
                    keep_sum=True, keep_moments=step.training,
                )  # fmt: skip
            stream = stream if own.sum is None else own.sum
            self._add(own.call, own)
            given = self._sublayer(place, own.output)
            self.kept += [*own.written, own.output]
        assert given is not None
        end = Drop(given, step.kind.after[-1], seeds[-1], stream, self.output.view(stream.shape))
        self._add(end.call, end)

    def _norms_last(self, norms: Sequence[Norm]) -> None:
        step, stream = self._step, self._tokens[0]
        for place, norm in enumerate(norms):
            last = place == step.count - 1
            own = NormForward(
                self._sublayer(place, stream), norm, added=stream, levels=step.kind.after[place],
                seed=self._seeds[2 * place + 1], keep_sum=step.training, keep_moments=step.training,
                output=self.output.view(stream.shape) if last else None,
            )  # fmt: skip
            stream = own.output
            self._add(own.call, own)
            self.kept += own.written if last else [*own.written, own.output]

    def _sublayer(self, place: int, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        step, layers, seed = self._step, self._layers[place], self._seeds[2 * place]
        own: AttentionForward | FeedForwardForward
        if place < len(self._problems):
            read, held = _read_by(place, x, self._tokens), self._held[place]
            rotary = step.rotary(place, self._angles)
            norms = step.head_norms(place, self._tensors)
            own = AttentionForward(self._problems[place], read, layers, seed, step.training, held, rotary, norms)
            self.stays += own.stays
            self.counters += own.counters
        else:
            own = FeedForwardForward(x, layers, step.activation, step.kind.hidden, seed, step.training)
            self.passing += own.passing
        self.calls += own.calls
        self.kept += own.kept
        self.passing.append(own.output)
        self._alive.append(own)
        given: Tensor = own.output.view(x.shape)
        if not self._behind:
            return given
        norm = NormForward(given, self._behind[place])
        self._add(norm.call, norm)
        self.passing.append(norm.output)
        return norm.output

    def _add(self, call: tuple[Verb, Structure], own: object) -> None:
        self.calls.append(call)
        self._alive.append(own)


class _Kept(NamedTuple):
    """What forward kept of a sublayer and of its norm; None for a norm's output that is the layer's."""

    of_part: list[Tensor]
    summed: Tensor
    moments: Tensor
    normed: Tensor | None


class _LayerWayBack(WayBack):
    """What is not needed is left out from the front: a layer's first parts, where they are frozen, are not gone back
    through."""

    def __init__(
        self, step: LayerStep, problems: Sequence[Problem], arrived: Tensor, tokens: Sequence[Tensor],
        tensors: Sequence[Tensor | None], kept: Sequence[Tensor], seeds: Sequence[int], needs: Sequence[bool],
        angles: Tensor | None,
    ) -> None:  # fmt: skip
        self._problems, self._angles = problems, angles
        self._step, self._tokens, self._seeds, self._needs = step, tokens, seeds, needs
        self._layers, self._norms = step.layers(tensors), step.norms(tensors)
        self._of_tokens, own = needs[: len(tokens)], needs[len(tokens) :]
        self._of_layers, self._of_norms = (
            [own[place] for place in part]
            for part in (step.places[: step.count], step.places[step.count : 2 * step.count])
        )
        self._kept = self._told_apart(kept)
        self._parts = list[AttentionBackward | FeedForwardBackward | None]([None] * step.count)
        self._gone = list[NormBackward | None]([None] * step.count)
        self._works = list[AttentionBackward | list[tuple[Verb, Structure]]]()
        self._of_x: Tensor | None = None
        self._between, self._held = list[Tensor](), list[object]()
        if step.kind.norm_first:
            self._through_norms_first(arrived)
        else:
            self._through_norms_last(arrived)

    def _told_apart(self, kept: Sequence[Tensor]) -> list[_Kept]:
        step, left, found = self._step, deque(kept), list[_Kept]()
        for place, layers in enumerate(self._layers):
            if place < len(self._problems):
                of_part = taken(left, layers, len(_read_by(place, self._tokens[0], self._tokens)))
            else:
                of_part = [left.popleft() for _ in range(count_kept(step.activation, step.kind.gated))]
            summed = self._tokens[0] if step.kind.norm_first and place == 0 else left.popleft()
            found.append(_Kept(of_part, summed, left.popleft(), left.popleft() if left else None))
        return found

    def _wanted(self, sublayers: int, norms: int) -> bool:
        """Whether a gradient is needed of what comes before so many sublayers and norms, or of one of them."""
        memory = sublayers >= len(self._problems) > 1 and self._of_tokens[-1]
        parts = (*self._of_layers[:sublayers], *self._of_norms[:norms])
        return self._of_tokens[0] or memory or any(need for own in parts for need in own)

    def _through_norms_first(self, arrived: Tensor) -> None:
        step, seeds, of_part = self._step, self._seeds, arrived
        if step.kind.after[-1]:
            drop = Drop(arrived, step.kind.after[-1], seeds[-1], None)
            self._add(drop.call, drop, [drop.output])
            of_part = drop.output
        for place in reversed(range(step.count)):
            kept = self._kept[place]
            assert kept.normed is not None
            of_normed = self._through(place, of_part, kept.normed, self._wanted(place, place + 1))
            if of_normed is None:
                return
            levels, seed = (step.kind.after[place - 1], seeds[2 * place - 1]) if place else (0, 0)
            own = self._through_norm(
                place, of_normed, levels, seed, at_sum=arrived, of_sum=None if place else self._of_rows()
            )
            if not self._wanted(place, place):
                return
            arrived, of_part = own.of_sum, own.of_input

    def _through_norms_last(self, arrived: Tensor) -> None:
        step = self._step
        more: Tensor | None = None
        for place in reversed(range(step.count)):
            norm = self._through_norm(place, arrived, step.kind.after[place], self._seeds[2 * place + 1], more=more)
            if not self._wanted(place + 1, place):
                return
            read = self._kept[place - 1].normed if place else self._tokens[0]
            assert read is not None
            arrived, more = norm.of_sum, self._through(place, norm.of_input, read, self._wanted(place, place))
            if more is None:
                return
        assert more is not None
        added = Drop(more, 0, 0, arrived, self._of_rows())
        self._add(added.call, added, [])

    def _of_rows(self) -> Float[Tensor, "rows width"]:
        """Room for the gradient of the layer's tokens."""
        rows, (first, *_) = self._tokens[0], self._problems
        self._of_x = new_tensor(rows, (first.batch, first.q_len, rows.shape[1]))
        return self._of_x.view(rows.shape)

    def _through_norm(
        self, place: int, arrived: Tensor, levels: int, seed: int, *, more: Tensor | None = None,
        at_sum: Tensor | None = None, of_sum: Tensor | None = None,
    ) -> NormBackward:  # fmt: skip
        (weight, bias), kept = self._of_norms[place], self._kept[place]
        own = NormBackward(
            arrived, kept.summed, kept.moments, self._norms[place], more=more, at_sum=at_sum, levels=levels, seed=seed,
            needs=(weight, bias), of_sum=of_sum,
        )  # fmt: skip
        self._gone[place] = own
        self._add(own.call, own, own.between)
        return own

    def _through(
        self, place: int, arrived: Tensor, rows: Float[Tensor, "rows width"], needs_rows: bool
    ) -> Float[Tensor, "rows width"] | None:
        """The gradient of what a sublayer read, where it is needed."""
        step, kept = self._step, self._kept[place].of_part
        if place == len(self._problems):
            needs = (needs_rows, *self._of_layers[place])
            fed = FeedForwardBackward(
                arrived, rows, self._layers[place], kept, step.activation, step.kind.hidden, needs
            )
            self._parts[place] = fed
            self._works.append(fed.calls)
            self._between += [*fed.of_x, *fed.between]
            return fed.of_x[0] if fed.of_x else None
        read = _read_by(place, rows, self._tokens)
        needs = (needs_rows, *self._of_tokens[1 : len(read)], *self._of_layers[place])
        own = AttentionBackward(
            self._problems[place], arrived, read, self._layers[place], kept, self._seeds[2 * place], needs,
            step.rotary(place, self._angles),
        )  # fmt: skip
        self._parts[place] = own
        self._works.append(own)
        of_x = own.of_tokens[0]
        self._between += own.between if of_x is None else [of_x, *own.between]
        return None if of_x is None else of_x.view(rows.shape)

    def _add(self, call: tuple[Verb, Structure], own: object, between: Sequence[Tensor]) -> None:
        self._works.append([call])
        self._held.append(own)
        self._between += between

    def _of_memory(self) -> list[Tensor | None]:
        """The memory's gradient, of a layer that has one."""
        attended = self._parts[len(self._problems) - 1] if len(self._tokens) > 1 else None
        if isinstance(attended, AttentionBackward):
            return attended.of_tokens[1:]
        return [None] * (len(self._tokens) - 1)

    def written(self) -> Written:
        parts = [part for part in self._parts if part is not None]
        calls = [call for work in self._works for call in (work if isinstance(work, list) else work.calls)]
        stays = [own for part in parts if isinstance(part, AttentionBackward) for own in part.stays]
        of_tokens = [self._of_x if self._of_tokens[0] else None, *self._of_memory()]
        results = [part for part in of_tokens if part is not None]
        results += [own for part in parts for own in part.of_layers]
        results += [own for norm in self._gone if norm is not None for own in norm.of_norm if own is not None]
        # What lies in a result is not written once more.
        there = {own.data_ptr() for own in results}
        return Written(calls, [*results, *(own for own in self._between if own.data_ptr() not in there)], stays, self)

    def found(self) -> list[Tensor | None]:
        nothing: tuple[None, None] = (None, None)
        found = [self._of_x if self._of_tokens[0] else None, *self._of_memory()]
        for place, part in enumerate(self._parts):
            read = 1 if place in (0, self._step.count - 1) else len(self._tokens)
            found += [None] * len(self._of_layers[place]) if part is None else part.found()[read:]
        for norm in self._gone:
            found += nothing if norm is None else norm.of_norm
        return found

    def contained(self) -> list[Tensor | None]:
        for work in self._works:
            if isinstance(work, AttentionBackward):
                work.run_contained()
            else:
                run_calls(work)
        return self.found()


def _kept(x: Tensor, levels: int, seed: int) -> Tensor:
    """What dropout keeps, as a factor that can be differentiated through."""
    return x * dropped(torch.ones(x.shape, dtype=x.dtype), levels, seed) if levels else x
