"""The inputs, problem and outputs of one attention module in one run of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.arguments import repr_of, whole_number
from clearhead.errors import ClearheadError, ShapeError, UnsupportedError
from clearhead.nn.attention import MultiHeadAttention
from clearhead.observe.trace import trace
from clearhead.problem import Problem

__all__ = ["Captured", "attention_modules", "capture", "find_layer"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Captured:
    """One call of an attention module: its inputs, its problem, the concatenated head outputs and its output."""

    module: MultiHeadAttention
    inputs: tuple[Any, ...]
    options: Mapping[str, Any]
    problem: Problem
    heads: Tensor
    output: Tensor


def attention_modules(model: nn.Module) -> dict[str, MultiHeadAttention]:
    """Every ``MultiHeadAttention`` of a model by its dotted name, in the order of registration."""
    return {name: part for name, part in model.named_modules() if isinstance(part, MultiHeadAttention)}


def find_layer(function: str, model: nn.Module, layer: int | str | None) -> str:
    """The name of the attention module that ``layer`` selects by number or name; the first one for None.

    Raises:
        ShapeError: there is no such layer; the text lists those that exist.
        UnsupportedError: the model contains no attention module of clearhead.
    """
    names = list(attention_modules(model))
    if not names:
        raise UnsupportedError.about(
            function,
            "model",
            must="contain a ch.nn.MultiHeadAttention",
            got=type(model).__name__,
            then="Convert torch's modules with MultiHeadAttention.from_torch; of a swapped model pass the traced "
            "query, key and value.",
        )
    if isinstance(layer, str) and layer in names:
        return layer
    place = 0 if layer is None else whole_number(layer)
    if place is not None and 0 <= place < len(names):
        return names[place]
    listed = ", ".join(f"{place} ({name})" if name else str(place) for place, name in enumerate(names))
    raise ShapeError.about(function, "layer", must=f"be one of {listed}", got=repr_of(layer), then="Pass its number.")


def capture(
    model: nn.Module, module: MultiHeadAttention, inputs: Sequence[Any], options: Mapping[str, Any]
) -> Captured:
    """Run ``model(*inputs, **options)`` once in evaluation mode without gradients, and record the call of ``module``.

    Raises:
        UnsupportedError: the model never called the module, or the model itself failed.
    """
    with _evaluating(model), torch.no_grad(), trace(module) as traced:
        try:
            model(*inputs, **options)
        except ClearheadError:
            raise
        except Exception as failure:
            raise UnsupportedError.about(
                "explain",
                "inputs",
                must=f"be what {type(model).__name__} takes",
                got=f"{type(failure).__name__}: {str(failure)[:160]}",
                then="Call the model on them first.",
            ) from failure
        if not traced:
            raise UnsupportedError.about(
                "explain",
                "layer",
                must="be used by the model's forward",
                got="a module that was not called",
                then="Choose another layer.",
            )
    points = traced[0]
    assert points.output is not None
    heads = points.head_outputs.transpose(1, 2).flatten(-2)
    heads = heads if points.output.ndim == 3 else heads[0]
    return Captured(
        module=module,
        inputs=points.inputs,
        options=points.options,
        problem=points.problem,
        heads=heads,
        output=points.output,
    )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put every part of the model in evaluation mode, and restore each part's mode at the end."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
