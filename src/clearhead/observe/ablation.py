"""Head ablation: how a model's output changes without one of its heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.arguments import repr_of
from clearhead.errors import UnsupportedError
from clearhead.nn.checks import check_model
from clearhead.nn.generation import evaluating
from clearhead.observe.layers import Layers
from clearhead.observe.trace import trace
from clearhead.shapes import Float

__all__ = ["head_effects"]


def head_effects(
    model: nn.Module,
    *inputs: Any,
    measure: Callable[[Any], Tensor | float] | None = None,
    layers: Layers = None,
    **options: Any,
) -> dict[str, Float[Tensor, " heads"]]:
    """Measure the effect of switching off each head alone, by setting the head's output to 0.

    Args:
        model: a module, called as ``model(*inputs, **options)`` in evaluation mode and without gradients.
        inputs: positional arguments of the model.
        measure: a function from the model's output to a number, such as a loss; the effect is then ``measure(output
            without the head) - measure(output)``. By default the effect is ``|| y' - y || / || y ||``, the relative
            change of the output.
        layers: which attention layers, by number, name or glob such as ``"encoder.*"``, or several; by default all.
        options: keyword arguments of the model.

    Returns:
        A dictionary from each layer's name to its effects, float64 ``[heads]``.

    Raises:
        UnsupportedError: the model has no attention that can be observed, or returns no tensor to compare.
        ShapeError: no such layer; the text lists those that exist.

    Cost: one forward pass per head, and one more.

    Paper: Michel et al. 2019, "Are sixteen heads really better than one?", section 3.2.

    >>> import torch, clearhead as ch
    >>> model = ch.nn.SequenceClassifier(10, embed_dim=8, num_heads=2, num_layers=1, num_classes=3)
    >>> effects = head_effects(model, torch.tensor([[1, 2, 3]]))
    >>> {name: list(effect.shape) for name, effect in effects.items()}
    {'encoder.blocks.0.attention': [2]}
    """
    check_model("head_effects", model)
    if measure is not None and not callable(measure):
        raise UnsupportedError.about(
            "head_effects",
            "measure",
            must="be a function of what the model returns",
            got=repr_of(measure),
            then="Pass one that gives a number.",
        )
    with evaluating(model):
        with trace(model, layers=layers) as traced:
            whole = model(*inputs, **options)
        heads = {name: points.problem.num_heads for name, points in traced.items()}
        of = _moved(whole) if measure is None else _difference(measure, whole)
        effects: dict[str, Tensor] = {}
        with trace(model, layers=layers, record=False) as traced:
            for name, count in heads.items():
                changes = []
                for head in range(count):
                    off = traced.switch_off(head, layers=name)
                    changes.append(of(model(*inputs, **options)))
                    off.undo()
                effects[name] = torch.tensor(changes, dtype=torch.float64)
        return effects


def _difference(measure: Callable[[Any], Tensor | float], whole: Any) -> Callable[[Any], float]:
    before = _measured(measure(whole))
    return lambda output: _measured(measure(output)) - before


def _measured(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError) as failure:
        raise UnsupportedError.about(
            "head_effects", "measure", must="return a number", got=repr_of(value), then="Reduce it: output.mean()."
        ) from failure


def _moved(whole: Any) -> Callable[[Any], float]:
    before = _tensor(whole)
    size = float(before.norm())

    def moved(output: Any) -> float:
        distance = float((_tensor(output) - before).norm())
        return distance / size if size > 0.0 else distance

    return moved


def _tensor(output: Any) -> Tensor:
    """The first floating point tensor of what a model returns."""
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else (output,)
    for part in parts:
        if isinstance(part, Tensor) and part.is_floating_point():
            return part.double()
    raise UnsupportedError.about(
        "head_effects", "model", must="return a tensor", got=type(output).__name__, then="Pass measure= to read it."
    )
