"""A model on some sequences, computed in two ways: whether the bits differ, and in which module first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.integrations.recast import original_of
from clearhead.nn import DecoderBlock, EncoderBlock
from clearhead.verify.engines import Engine, ModelCall, Piece
from clearhead.verify.law import Broken
from clearhead.verify.laws.invariance import difference

__all__ = ["Outputs", "Trial"]

#: A context in which the model runs.
Setting = Callable[[Engine], AbstractContextManager[object]]


def _nothing(engine: Engine) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass(eq=False)
class Outputs:
    """What some calls gave.

    Attributes:
        results: for each sequence its output, over all calls.
        modules: for each module that was watched, in the order in which they ended, the output of each sequence.
    """

    results: dict[int, Tensor] = field(default_factory=dict)
    modules: dict[str, dict[int, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Trial:
    """A model, sequences of different lengths, and as many of one length.

    Attributes:
        engine: the model and how it is called.
        sequences: of different lengths, and then as many of one length.
        different: the indices of sequences of different lengths.
        equal: the indices of those of one length.
    """

    engine: Engine
    sequences: list[Tensor]
    different: range
    equal: range

    @classmethod
    def of(cls, engine: Engine, lengths: Sequence[int]) -> Trial:
        count = len(lengths)
        # The second longest, so that it is shorter than some and longer than others.
        length = sorted(lengths)[-2:][0]
        drawn = engine.draw([*lengths, *[length] * count])
        return cls(engine, drawn, range(count), range(count, 2 * count))

    @property
    def lengths(self) -> list[int]:
        """The length of each sequence."""
        return [*map(len, self.sequences)]

    def run(self, calls: Sequence[ModelCall], *, watch: bool = False) -> Outputs:
        """Run calls one after the other and collect each sequence's output."""
        found, cache = Outputs(), None
        with _watching(self.engine.model if watch else None) as ended:
            for call in calls:
                ended.clear()
                batch = self.engine.batch(self.sequences, call)
                output, cache = self.engine.forward(batch, call, cache)
                for place, piece in enumerate(call.pieces):
                    _append(found.results, piece.sequence, call.part(output, place))
                    for name, tensor in ended.items():
                        _append(found.modules.setdefault(name, {}), piece.sequence, call.part(tensor, place))
        return found

    def alone(self, sequences: Iterable[int]) -> list[ModelCall]:
        """A call for each sequence."""
        return [ModelCall((Piece(place, 0, self.lengths[place]),)) for place in sequences]

    def compare(
        self, what: str, one: Sequence[ModelCall], other: Sequence[ModelCall], setting: Setting = _nothing
    ) -> None:
        """Raise ``Broken`` unless the sequences of both have the same bits; ``other`` runs in a setting."""

        def both(*, watch: bool) -> tuple[Outputs, Outputs]:
            # Cached calls of several sequences must not share a cache, so each list of calls is one run.
            first = self.run(one, watch=watch)
            with setting(self.engine):
                return first, self.run(other, watch=watch)

        first, second = both(watch=False)
        worst = _largest(first.results, second.results)
        if worst is None:
            return
        error, sequence = worst
        where = _first_module(*both(watch=True))
        length = self.lengths[sequence]
        raise Broken(f"{what}: a sequence of {length} tokens differs by {error:.2g}; {where}")


def _append(results: dict[int, Tensor], sequence: int, part: Tensor | None) -> None:
    if part is None:
        return
    before = results.get(sequence)
    part = part.detach().clone()
    joins = before is not None and before.dim() == part.dim() > 1 and before.shape[1:] == part.shape[1:]
    results[sequence] = torch.cat([before, part]) if before is not None and joins else part


def _largest(one: dict[int, Tensor], other: dict[int, Tensor]) -> tuple[float, int] | None:
    """The largest difference and its sequence; None if all bits are equal."""
    worst: tuple[float, int] | None = None
    for sequence in one.keys() & other.keys():
        if one[sequence].shape != other[sequence].shape:
            continue
        error = difference(one[sequence], other[sequence])
        if error is not None and (worst is None or error > worst[0]):
            worst = error, sequence
    return worst


def _first_module(one: Outputs, other: Outputs) -> str:
    """The first module, in the order in which modules end, whose output differs."""
    for name in one.modules:
        if name in other.modules:
            worst = _largest(one.modules[name], other.modules[name])
            if worst is not None:
                return f"first in {name or 'the model itself'}, by {worst[0]:.2g}"
    return "no module differs while hooks watch them"


@contextmanager
def _watching(model: nn.Module | None) -> Iterator[dict[str, Tensor]]:
    """Collect the first tensor of each module's output, in the order in which modules end."""
    ended: dict[str, Tensor] = {}

    def watcher(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def watch(module: nn.Module, args: Any, output: Any) -> None:
            tensor = _first_tensor(output)
            if tensor is not None and name not in ended:
                ended[name] = tensor.detach()

        return watch

    handles = [module.register_forward_hook(watcher(name)) for name, module in _watched(model)]
    try:
        yield ended
    finally:
        for handle in handles:
            handle.remove()


def _watched(model: nn.Module | None) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model, but for the parts of a layer that one operator computes: a hook would take it apart."""
    if model is None:
        return
    within: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{layer}.") for layer in within):
            continue
        yield name, module
        if isinstance(module, (EncoderBlock, DecoderBlock)) or original_of(type(module)) is not None:
            within.append(name)


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return next((value for value in values if isinstance(value, Tensor)), None)
