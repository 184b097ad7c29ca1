"""The fused forwards that ``swap`` gives to layers and attentions, once a trial accepts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from clearhead.choices import is_invariant, refuse_if_invariant
from clearhead.integrations.recast import class_of, fast_of, original_of
from clearhead.integrations.transformers.attention import weights_wanted
from clearhead.integrations.transformers.calls import Arguments, arguments_of
from clearhead.integrations.transformers.families import AttentionRow
from clearhead.integrations.transformers.layer import attention_output, layer_output
from clearhead.integrations.transformers.match import LayerMatch, at
from clearhead.integrations.transformers.parts import Formulas, FusedFeedForward, NormForward

__all__ = ["AttendingForward", "AttentionForward", "LayerForward"]

_UNFUSED: Final = "one for its own code: a part is hooked, weights are wanted, or its mask or cache is of another kind"


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
        # A parametrized module has a class of its own.
        original = original_of(type(module)) or original_of(class_of(module)) or type(module)
        # The fused operators return no weights.
        given = None if weights_wanted() else arguments_of(original.forward, args, kwargs)
        output = None if given is None else self.output(module, given)
        if output is None and is_invariant() and not self.keeps_bits(module):
            then = "Observe with ch.trace, use a DynamicCache, or call ch.set_invariant(False)."
            refuse_if_invariant(original.__name__, "the call", got=_UNFUSED, then=then)
        return output if output is None or self.length == 0 else (output, *(None,) * (self.length - 1))

    def keeps_bits(self, module: Any) -> bool:
        """Whether the original code gives the fused operator's bits."""
        raise NotImplementedError

    def output(self, module: Any, given: Arguments) -> Tensor | None:
        """The fused output; None if the original code is to compute it."""
        raise NotImplementedError


@dataclass(frozen=True)
class LayerForward(AttendingForward):
    """The forward of a layer that fits ``match``."""

    match: LayerMatch

    def output(self, module: Any, given: Arguments) -> Tensor | None:
        return layer_output(self.match, module, given, formulas=self.formulas, interface=self.interface)

    def keeps_bits(self, module: Any) -> bool:
        """Whether each part is one of ours: torch's norms, activations and rotations add and round in other orders."""
        row = self.match.row
        if not isinstance(row.feedforward, str):
            return False
        kinds = [(row.attentions, AttentionForward), ((*row.norms, *row.output_norms), NormForward)]
        kinds.append(((row.feedforward,), FusedFeedForward))
        try:
            return all(isinstance(fast_of(at(module, path)), kind) for paths, kind in kinds for path in paths)
        except AttributeError:
            return False


@dataclass(frozen=True)
class AttentionForward(AttendingForward):
    """The forward of an attention module that fits ``row``."""

    row: AttentionRow

    def output(self, module: Any, given: Arguments) -> Tensor | None:
        return attention_output(self.row, module, given, formulas=self.formulas, interface=self.interface)

    def keeps_bits(self, module: Any) -> bool:
        """Torch rounds more often than the kernels where it rotates queries and keys."""
        return False
