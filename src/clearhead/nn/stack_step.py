"""The kernels' calls of transformer layers one after the other, without gradients, and the step that they make."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from ctypes import Structure

from torch import Tensor

from clearhead.backends.native_header import Verb
from clearhead.backends.native_prepared import Counter, Written, put_elsewhere
from clearhead.nn.held import Held
from clearhead.nn.layer_step import LayerKind, LayerStep
from clearhead.nn.rule_tensors import RuleTensors
from clearhead.nn.step import Step
from clearhead.problem import Problem
from clearhead.shapes import Float

__all__ = ["StackStep"]


class StackStep(Step):
    """Layers: what one gives, the next one reads.

    Tokens are those of the first, and the memory of all; tensors, attentions and what these read from caches are those
    of each layer, one layer's behind the other's.
    """

    def __init__(
        self, problems: Sequence[Problem], training: bool, layout: Hashable | None, kinds: Sequence[LayerKind],
        rules: RuleTensors,
    ) -> None:  # fmt: skip
        assert not training
        self._layers = list[LayerStep]()
        #: Where each layer's attentions, and its tensors, lie.
        self._places = list[tuple[slice, slice]]()
        problem, tensor = 0, 0
        for kind in kinds:
            own = slice(problem, problem + len(kind.attentions))
            layer = LayerStep(problems[own], False, None, kind)
            self._layers.append(layer)
            self._places.append((own, slice(tensor, tensor + layer.places[-1].stop)))
            problem, tensor = own.stop, tensor + layer.places[-1].stop
        super().__init__(problems, False, layout, [drop for layer in self._layers for drop in layer.drops], rules)

    def rows(self, x: Float[Tensor, "batch len width"]) -> Float[Tensor, "rows width"]:
        return self._layers[0].rows(x)

    def write_forward(
        self, problems: Sequence[Problem], tokens: Sequence[Tensor], tensors: Sequence[Tensor | None],
        seeds: Sequence[int], held: Sequence[Held | None], angles: Tensor | None,
    ) -> Written:  # fmt: skip
        calls, counters = list[tuple[Verb, Structure]](), list[Counter]()
        inner, outputs, stays, alive = list[Tensor](), list[Tensor](), list[Tensor](), list[object]()
        left = iter(seeds)
        for layer, (attentions, own) in zip(self._layers, self._places, strict=True):
            of_layer = [next(left) for _ in layer.drops]
            written = layer.write_forward(
                problems[attentions], tokens, tensors[own], of_layer, held[attentions], angles
            )
            *between, output = written.writes
            # What a layer has passed on within itself is free for the next one.
            if _are_like(between, inner):
                put_elsewhere(written.calls, between, inner)
            else:
                inner += between
            if len(outputs) > 1 and layer is not self._layers[-1]:
                put_elsewhere(written.calls, [output], outputs[-2:-1])
                output = outputs[-2]
            outputs.append(output)
            calls += written.calls
            counters += written.counters
            stays += written.stays
            alive.append(written.alive)
            tokens = [layer.rows(output), *tokens[1:]]
        return Written(calls, [*inner, *outputs[:2], *outputs[2:][-1:]], stays, alive, counters)


def _are_like(tensors: Sequence[Tensor], rooms: Sequence[Tensor]) -> bool:
    """Whether tensors would fit into rooms, one by one."""
    return [(own.shape, own.stride(), own.dtype) for own in tensors] == [
        (own.shape, own.stride(), own.dtype) for own in rooms
    ]
