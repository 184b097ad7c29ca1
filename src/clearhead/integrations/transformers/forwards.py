"""The fused forwards that ``swap`` gives to layers and attentions, once a trial has found that they agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clearhead.integrations.recast import class_of, original_of
from clearhead.integrations.transformers.calls import arguments_of
from clearhead.integrations.transformers.families import AttentionRow
from clearhead.integrations.transformers.layer import attention_output, layer_output
from clearhead.integrations.transformers.match import LayerMatch
from clearhead.integrations.transformers.parts import Formulas

__all__ = ["AttentionForward", "LayerForward"]


@dataclass(frozen=True)
class LayerForward:
    """The forward of a layer that fits ``match``.

    Attributes:
        match: the layer's rows.
        formulas: of its norms, besides torch's.
        length: of the tuple that the original returns, its output first and None behind; 0 if it returns a tensor.
        interface: whether the layer attends through transformers' attention interface.
    """

    match: LayerMatch
    formulas: Formulas = ()
    length: int = 0
    interface: bool = True

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = arguments_of(_original(module), args, kwargs)
        if given is None:
            return None
        output = layer_output(self.match, module, given, formulas=self.formulas, interface=self.interface)
        return _packed(output, self.length)


@dataclass(frozen=True)
class AttentionForward:
    """The forward of an attention module that fits ``row``; attributes as in ``LayerForward``."""

    row: AttentionRow
    formulas: Formulas = ()
    length: int = 2
    interface: bool = True

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = arguments_of(_original(module), args, kwargs)
        if given is None:
            return None
        output = attention_output(self.row, module, given, formulas=self.formulas, interface=self.interface)
        return _packed(output, self.length)


def _original(module: Any) -> Any:
    # A parametrized module has a class of its own.
    original = original_of(type(module)) or original_of(class_of(module)) or type(module)
    return original.forward


def _packed(output: Tensor | None, length: int) -> Any:
    if output is None or length == 0:
        return output
    return (output, *(None for _ in range(length - 1)))
