"""Score rules inside a module: their tensors become the module's parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, cast

import torch
from torch import Tensor, nn

from clearhead.record import Record
from clearhead.scores import Alibi, DenseBias, RelativeBias, ScoreRule, Sink, SoftCap, as_rules
from clearhead.torch_private import base_of

__all__ = ["RuleHolder", "RuleList"]


#: The axis of heads in the one tensor of a rule; of a rule without tensors any.
_HEAD_AXES: Final[Mapping[type[ScoreRule], int]] = {Alibi: 0, RelativeBias: 0, Sink: 0, DenseBias: 1, SoftCap: 0}


class RuleHolder(nn.Module):
    """A score rule as a module: its ``nn.Parameter`` tensors are parameters, its other tensors buffers.

    ``rule()`` returns the rule on the current tensors, after training steps, ``.to()`` or a loaded state.
    Parameters and modules that a ``ScoreFunction`` closes over are registered too; as the function refers to them, a
    deep copy of the module uses the originals.
    """

    def __init__(self, rule: ScoreRule) -> None:
        super().__init__()
        self._names: list[str] = []
        self._shapes: list[torch.Size] = []
        for name, tensor in _named_tensors(rule):
            self._hold(name, tensor)
            self._names.append(name)
            self._shapes.append(tensor.shape)
        # The rule without its tensors, so that none is stored twice.
        self._form = rule.mapped(lambda tensor: torch.empty(0))
        learned = {id(parameter) for parameter in self.parameters()}
        closed_over = [each for each in rule.parameters() if isinstance(each, nn.Parameter) and id(each) not in learned]
        for place, parameter in enumerate(closed_over if not rule.tensors() else ()):
            self.register_parameter(f"closed_over_{place}", parameter)

    def _hold(self, name: str, tensor: Tensor) -> None:
        # A rule may have reshaped its parameter (DenseBias adds axes); the parameter itself is registered.
        source = tensor if isinstance(tensor, nn.Parameter) else base_of(tensor)
        if isinstance(source, nn.Parameter) and source.numel() == tensor.numel():
            self.register_parameter(name, source)
        else:
            self.register_buffer(name, tensor)

    def rule(self) -> ScoreRule:
        """The rule on the module's current tensors."""
        tensors = [getattr(self, name) for name in self._names]
        # The tensor itself where the shape is the same: a stored rule then reads its later values.
        values = iter(
            [
                tensor if tensor.shape == shape else tensor.reshape(shape)
                for tensor, shape in zip(tensors, self._shapes, strict=True)
            ]
        )
        return self._form.mapped(lambda tensor: next(values))

    def head_axes(self) -> dict[str, int] | None:
        """For each tensor with one entry per head, the axis of heads; None for a rule whose tensors are unknown."""
        rule = self.rule()
        if type(rule) not in _HEAD_AXES or not self._names:
            return {} if type(rule) in _HEAD_AXES else None
        (name,) = self._names
        tensor, axis = getattr(self, name), _HEAD_AXES[type(rule)]
        # DenseBias adds axes in front of those of its parameter.
        axis += tensor.ndim - len(self._shapes[0])
        return {name: axis} if axis >= 0 and tensor.shape[axis] > 1 else {}

    def divide_heads(self, ranks: int) -> None:
        """Expect a rank's part of each tensor with one entry per head."""
        for place, name in enumerate(self._names):
            if name in (self.head_axes() or {}):
                shape, axis = [*self._shapes[place]], _HEAD_AXES[type(self.rule())]
                shape[axis] //= ranks
                self._shapes[place] = torch.Size(shape)

    def extra_repr(self) -> str:
        return repr(self.rule())


def _named_tensors(record: Record, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of a record and the records within it, in the order of ``Record.tensors``."""
    for name in record.fields:
        value = getattr(record, name)
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif isinstance(value, Record):
            yield from _named_tensors(value, f"{prefix}{name}_")


class RuleList(nn.ModuleList):
    """The score rules of an attention module, in order.

    Attributes:
        relative: whether every rule depends on ``q_pos - k_pos`` alone, and so means the same in a packed batch.
    """

    def __init__(self, function: str, scores: ScoreRule | Iterable[ScoreRule] | None) -> None:
        rules = as_rules(function, scores)
        super().__init__(RuleHolder(rule) for rule in rules)
        self.relative = all(rule.relative for rule in rules)

    def rules(self) -> tuple[ScoreRule, ...]:
        """The rules on the module's current tensors."""
        return tuple(cast(RuleHolder, holder).rule() for holder in self)
