"""The fused forwards that ``swap`` gives to layers and attentions, once a trial accepts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clearhead.integrations.recast import class_of, original_of
from clearhead.integrations.transformers.attention import weights_wanted
from clearhead.integrations.transformers.calls import Arguments, arguments_of
from clearhead.integrations.transformers.families import AttentionRow
from clearhead.integrations.transformers.layer import attention_output, layer_output
from clearhead.integrations.transformers.match import LayerMatch
from clearhead.integrations.transformers.parts import Formulas

__all__ = ["AttendingForward", "AttentionForward", "LayerForward"]


@dataclass(frozen=True, kw_only=True)
class AttendingForward:
    """The forward of a module that attends.

    Attributes:
        formulas: of its norms, besides torch's.
        length: of the tuple that the original returns, its output first, then None; 0 if it returns a tensor.
        interface: whether the module attends through transformers' attention interface.
    """

    formulas: Formulas = ()
    length: int = 0
    interface: bool = True

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if weights_wanted():
            # The fused operators return no weights.
            return None
        # A parametrized module has a class of its own.
        original = original_of(type(module)) or original_of(class_of(module)) or type(module)
        given = arguments_of(original.forward, args, kwargs)
        output = None if given is None else self.output(module, given)
        return output if output is None or self.length == 0 else (output, *(None,) * (self.length - 1))

    def output(self, module: Any, given: Arguments) -> Tensor | None:
        """The fused output; None if the original code is to compute it."""
        raise NotImplementedError


@dataclass(frozen=True)
class LayerForward(AttendingForward):
    """The forward of a layer that fits ``match``."""

    match: LayerMatch

    def output(self, module: Any, given: Arguments) -> Tensor | None:
        return layer_output(self.match, module, given, formulas=self.formulas, interface=self.interface)


@dataclass(frozen=True)
class AttentionForward(AttendingForward):
    """The forward of an attention module that fits ``row``."""

    row: AttentionRow

    def output(self, module: Any, given: Arguments) -> Tensor | None:
        return attention_output(self.row, module, given, formulas=self.formulas, interface=self.interface)
