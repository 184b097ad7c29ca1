"""Linear: torch's linear layer on the faster GEMM; and several layers that read the same input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor, nn

from clearhead.choices import refuse_if_invariant
from clearhead.invariance import eager_if_invariant
from clearhead.ops.packed_weight import as_stored
from clearhead.projection import Layer, check_variable, project, project_each
from clearhead.shapes import Float
from clearhead.torch_private import is_hooked, modules_are_hooked, parameters_of, submodules_of

__all__ = [
    "Linear",
    "layer_of",
    "linear_each",
    "looked_at",
    "reads_layers",
    "refuse_hooks",
    "weight_at",
    "weights_of",
]

_Reader: TypeAlias = Callable[[Any], Layer | None]
_READERS: Final[dict[type[nn.Module], _Reader]] = {}


class Linear(nn.Linear):
    """``torch.nn.Linear`` whose GEMM is ``clearhead.projection.project``: same parameters, same results.

    ``x @ weight^T + bias``

    Args:
        in_features: width of what comes in.
        out_features: width of what goes out.
        bias: whether a bias is added.
        device: of the parameters; torch's default.
        dtype: of the parameters; torch's default.

    Raises:
        UnsupportedError: ``CLEARHEAD_PROJECTION`` names a GEMM that this machine lacks.

    Cost: ``2 * rows * in_features * out_features`` operations.

    >>> import torch
    >>> Linear(3, 5)(torch.zeros(2, 3)).shape
    torch.Size([2, 5])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # Checked here, so that a misspelled variable raises where the model is built.
        check_variable()
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)

    @eager_if_invariant
    def forward(self, input: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        """``input @ weight^T + bias``."""
        return project(input, self.weight, self.bias)


def linear_each(
    layers: Sequence[nn.Module], input: Float[Tensor, "*batch in"]
) -> tuple[Float[Tensor, "*batch out"], ...]:
    """``layer(input)`` for each layer; where they are plain, backward sums their input gradients in one GEMM.

    >>> [part.shape for part in linear_each([Linear(3, 5), Linear(3, 2)], torch.zeros(4, 3))]
    [torch.Size([4, 5]), torch.Size([4, 2])]
    """
    plain = [layer for layer in layers if type(layer) is Linear]
    if len(plain) < len(layers) or looked_at(*plain):
        return tuple(layer(input) for layer in layers)
    return project_each(input, [layer.weight for layer in plain], [layer.bias for layer in plain])


def weight_at(module: nn.Module, *path: str) -> Tensor:
    """The weight of the layer at a path of submodules, from the modules' tables: attributes take ten times as long."""
    for name in path:
        inner = submodules_of(module).get(name)
        module = getattr(module, name) if inner is None else inner
    weight: Tensor | None = parameters_of(module).get("weight")
    return cast("Tensor", module.weight) if weight is None else weight


def weights_of(layer: nn.Linear) -> Layer:
    """Weight and bias, read from the module's table of parameters."""
    parameters = parameters_of(layer)
    weight = parameters.get("weight")
    if weight is None or "bias" not in parameters:
        return layer.weight, layer.bias
    return as_stored(weight), parameters["bias"]


def reads_layers(kind: type[nn.Module], read: _Reader) -> None:
    """Let layers of a class, of exactly this one, be parts of fused operators."""
    _READERS[kind] = read


reads_layers(Linear, weights_of)


def layer_of(module: nn.Module) -> Layer | None:
    """Weight and bias of a linear layer that fused operators read; None for any other module."""
    read = _READERS.get(type(module))
    return None if read is None else read(module)


def refuse_hooks(function: str) -> None:
    """Raise under ``set_invariant(True)``: a hook sees a result that fused operators never round."""
    then = "Observe with ch.trace, remove the hook, or call ch.set_invariant(False)."
    refuse_if_invariant(function, "a part", got="a hook, for which torch computes it", then=then)


def looked_at(*parts: object) -> bool:
    """Whether a hook sees calls of one of the modules among these, or a compiler traces them."""
    modules = [part for part in parts if isinstance(part, nn.Module)]
    return torch.compiler.is_compiling() or modules_are_hooked() or any(map(is_hooked, modules))
