"""How far the quantised layers of a model are from those of the model that was quantised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import Any, Final

import torch
from torch import Tensor, nn

from clearhead.errors import UnsupportedError
from clearhead.integrations.torch.quantized import described, is_quantized, quantized_weight
from clearhead.integrations.torch.quantized_weights import Unknown
from clearhead.nn.generation import evaluating
from clearhead.verify.process import undisturbed

__all__ = ["LayerError", "LayerErrors", "layer_errors"]

#: Rows of random inputs for each layer.
_ROWS: Final = 64


@dataclass(frozen=True)
class LayerError:
    """One quantised layer.

    Attributes:
        path: its name in ``model.named_modules()``.
        kind: what its weight is, in words.
        error: ``|quantised output - output| / |output|`` over all elements, of the same inputs.
    """

    path: str
    kind: str
    error: float


@dataclass(frozen=True)
class LayerErrors:
    """The error of each quantised layer; ``str`` of it is a table, the largest error first.

    Attributes:
        layers: one for each layer that was called, in the order of the model.
        output: the same measure of the model's output; None without inputs.
    """

    layers: tuple[LayerError, ...]
    output: float | None = None

    @property
    def worst(self) -> LayerError:
        """The layer with the largest error."""
        return max(self.layers, key=lambda layer: layer.error)

    def __str__(self) -> str:
        width = max(len(layer.path) for layer in self.layers)
        rows = sorted(self.layers, key=lambda layer: -layer.error)
        lines = [f"{layer.error:.1e}  {layer.path:<{width}}  {layer.kind}" for layer in rows]
        return "\n".join(lines if self.output is None else [*lines, f"{self.output:.1e}  the model's output"])


def layer_errors(model: nn.Module, reference: nn.Module, inputs: Any = None) -> LayerErrors:
    """Compare each quantised linear layer of a model with the layer of the same name in ``reference``.

    Args:
        model: with linear layers that torchao or torch.ao quantised, swapped or not.
        reference: the model before it was quantised.
        inputs: arguments of a call of ``reference``, a tensor, a sequence or a mapping of keywords. Its layers' inputs
            are the inputs of both layers then; random ones otherwise.

    Raises:
        UnsupportedError: no layer is quantised, ``reference`` lacks it, or ``inputs`` reach none.
    """
    pairs = {path: (layer, _layer_of(reference, path)) for path, layer in model.named_modules() if is_quantized(layer)}
    if not pairs:
        must, then = "have quantised linear layers", "Quantise it with torchao.quantize_."
        raise UnsupportedError.about("verify_model", "model", must=must, got="none", then=then)
    sums = {path: _Difference() for path in pairs}
    output: float | None = None
    with torch.no_grad(), undisturbed(), evaluating(model), evaluating(reference):
        if inputs is None:
            for path, (layer, exact) in pairs.items():
                x = torch.randn(_ROWS, exact.weight.shape[1], dtype=exact.weight.dtype, device=exact.weight.device)
                sums[path].add(_called(layer, x), exact(x))
        else:
            with _compared(pairs, sums):
                expected = _called_with(reference, inputs)
            output = _of_outputs(_called_with(model, inputs), expected)
    called = {path: layer for path, (layer, _) in pairs.items() if sums[path].calls}
    if not called:
        must, then = "reach a quantised layer", "Pass what the model is called with, or no inputs."
        raise UnsupportedError.about("verify_model", "inputs", must=must, got="a call that reaches none", then=then)
    layers = (LayerError(path, _kind(layer), sums[path].relative) for path, layer in called.items())
    return LayerErrors(tuple(layers), output)


@dataclass
class _Difference:
    """Sums of squares of differences, and of what they are relative to."""

    difference: float = field(default=0.0)
    size: float = field(default=0.0)
    calls: int = field(default=0)

    def add(self, result: Tensor, exact: Tensor) -> None:
        """Add the elements of one output."""
        self.calls += 1
        self.difference += (result.double() - exact.double()).square().sum().item()
        self.size += exact.double().square().sum().item()

    @property
    def relative(self) -> float:
        """The relative difference."""
        if self.size == 0.0:
            return inf if self.difference else 0.0
        return sqrt(self.difference / self.size)


def _layer_of(reference: nn.Module, path: str) -> Any:
    try:
        layer = reference.get_submodule(path)
    except AttributeError:
        layer = None
    if not isinstance(layer, nn.Linear) or is_quantized(layer):
        got = f"{type(layer).__name__} at {path!r}" if layer is not None else f"nothing at {path!r}"
        must, then = "have a float linear layer for each quantised one", "Pass the model before it was quantised."
        raise UnsupportedError.about("verify_model", "reference", must=must, got=got, then=then)
    return layer


def _kind(layer: nn.Module) -> str:
    try:
        return described(quantized_weight(layer))
    except Unknown as unknown:
        return str(unknown)


def _called(layer: Any, x: Tensor) -> Tensor:
    """A quantised layer's output of an input in its own dtype."""
    dtype = layer.weight.dtype if isinstance(layer.weight, Tensor) else torch.float32
    output: Tensor = layer(x.to(dtype))
    return output


@contextmanager
def _compared(pairs: Mapping[str, tuple[Any, Any]], sums: Mapping[str, _Difference]) -> Iterator[None]:
    """Context: every call of one of the reference's layers is one of the quantised layer too."""

    def compare(path: str) -> Callable[..., None]:
        return lambda _layer, args, output: sums[path].add(_called(pairs[path][0], args[0]), output)

    with ExitStack() as stack:
        for path, (_, exact) in pairs.items():
            stack.callback(exact.register_forward_hook(compare(path)).remove)
        yield


def _called_with(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, Sequence) else model(inputs)


def _of_outputs(result: Any, exact: Any) -> float | None:
    """The relative difference of the first tensors of two results."""
    total = _Difference()
    for one, other in zip(_tensors(result), _tensors(exact), strict=False):
        if one.is_floating_point() and one.shape == other.shape:
            total.add(one, other)
            return total.relative
    return None


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (Mapping, Sequence)) and not isinstance(result, str):
        for part in result.values() if isinstance(result, Mapping) else result:
            yield from _tensors(part)
