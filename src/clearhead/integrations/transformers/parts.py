"""Parts of transformers' models beside attention: linear layers, activations, dropouts, norms and feedforwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import activations
from transformers.pytorch_utils import Conv1D

from clearhead.choices import is_invariant
from clearhead.integrations.recast import class_of, original_of, stands_for
from clearhead.integrations.torch.parts import SwappedDropout, is_plain
from clearhead.integrations.torch.quantized_weights import is_tensor_subclass
from clearhead.integrations.transformers.families import FeedForwardRow
from clearhead.integrations.transformers.match import at
from clearhead.nn.feedforward import drop_of, name_of
from clearhead.nn.linear import layer_of, looked_at, refuse_hooks, weights_of
from clearhead.nn.norm import norm_of as torchs_norm_of
from clearhead.nn.norm import normed, takes_norm
from clearhead.nn.spec import NormLike
from clearhead.nn.weight_packing import WeightOf
from clearhead.ops.kinds import NormKind
from clearhead.ops.packed_weight import PackedParameter, as_stored
from clearhead.projection import Layer, project, project_activate, project_activate_project

__all__ = [
    "REPLACEMENTS",
    "FeedForwardParts",
    "Formulas",
    "FusedFeedForward",
    "NormForward",
    "TokenwiseForward",
    "activation_of",
    "dropout_of",
    "feedforward_of",
    "linear_of",
    "norm_of",
    "weight_in",
]


@stands_for(Conv1D)
class SwappedConv1D(Conv1D):  # type: ignore[misc]
    """GPT-2's linear layer, whose weight is ``[in, out]``."""

    def forward(self, x: Tensor) -> Tensor:
        if not is_plain(x):
            plain: Tensor = super().forward(x)
            return plain
        return project(x, self.weight.t(), self.bias)


@stands_for(activations.NewGELUActivation)
class SwappedNewGELU(activations.NewGELUActivation):  # type: ignore[misc]
    """The tanh form of GELU (Hendrycks and Gimpel 2016, section 2) in one operation instead of eight."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.gelu(input, approximate="tanh")


REPLACEMENTS: Final[dict[type[nn.Module], type[nn.Module]]] = {
    nn.Dropout: SwappedDropout,
    Conv1D: SwappedConv1D,
    activations.NewGELUActivation: SwappedNewGELU,
}
_GATED: Final = 3
_CONV1DS: Final = (Conv1D, SwappedConv1D)
_ACTIVATIONS: Final[dict[type, str]] = {
    activations.NewGELUActivation: "gelu_tanh",
    SwappedNewGELU: "gelu_tanh",
    activations.SiLUActivation: "silu",
    activations.QuickGELUActivation: "quick_gelu",
}
#: Modules that wrap one of torch's functions.
_HOLDERS: Final = tuple(
    kind for name in ("GELUActivation", "GELUTanh") if (kind := getattr(activations, name, None)) is not None
)


def viewable(parameter: Tensor) -> Tensor:
    """The tensor to make views of: the data without gradients, as torch does not swap a parameter that has views."""
    return parameter if torch.is_grad_enabled() else parameter.data


def linear_of(module: nn.Module) -> Layer | None:
    """Weight ``[out, in]`` and bias of a linear layer; None for any other module. GPT-2's is a transposed view.

    That of a quantised layer that ``swap`` took is its integers.
    """
    if type(module) in _CONV1DS:
        stored = as_stored(module.weight)  # type: ignore[arg-type]
        return viewable(stored).t() if isinstance(stored, Tensor) else stored, module.bias  # type: ignore[return-value]
    subclass = type(module) is nn.Linear and is_tensor_subclass(module.weight)
    if subclass and not isinstance(module.weight, PackedParameter):
        return None
    return weights_of(module) if type(module) is nn.Linear else layer_of(module)


def weight_in(module: nn.Module, parts: int = 1) -> WeightOf:
    """The weight of a linear layer, of whose outputs operators read ``parts`` by themselves."""
    return WeightOf(module, transposed=type(module) in _CONV1DS, parts=parts)


def activation_of(activation: object) -> str | None:
    """The kernels' name of an activation; None if they do not have it."""
    if type(activation) in _HOLDERS:
        function = activation.act  # type: ignore[attr-defined]
        if getattr(function, "func", function) is not functional.gelu:
            return None
        return "gelu_tanh" if getattr(function, "keywords", None) == {"approximate": "tanh"} else "gelu"
    return _ACTIVATIONS.get(type(activation)) or name_of(activation)


def dropout_of(module: nn.Module, path: str | None) -> float | None:
    """The probability with which ``module``'s dropout at ``path``, a module or a number, drops now; None if it is
    unknown."""
    if path is None:
        return 0.0
    dropout = at(module, path)
    if isinstance(dropout, nn.Module):
        return drop_of(dropout)
    parent = at(module, path.rpartition(".")[0])
    return float(dropout) if parent.training else 0.0


class TokenwiseForward:
    """The forward of a module that takes one argument and computes each token by itself."""

    #: Elements of an input below which reading the module's weights takes longer than torch's operations save.
    few: ClassVar[int] = 2**12

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        if len(args) + len(kwargs) != 1:
            return None
        (x,) = (*args, *kwargs.values())
        large = isinstance(x, Tensor) and (x.numel() >= self.few or is_invariant())
        return self.compute(module, x) if large else None

    def compute(self, module: Any, x: Tensor) -> Tensor | None:
        """The module's output of any number of elements; None if the original code is to compute it."""
        raise NotImplementedError


# ---- norms --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NormForward(TokenwiseForward):
    """The forward of a norm whose formula a trial determined."""

    # Of one token too it takes less time than the six operations of transformers' code.
    few: ClassVar[int] = 0
    kind: NormKind
    epsilon: str

    def of(self, module: Any) -> NormLike:
        """The norm's parameters."""
        return (self.kind, float(getattr(module, self.epsilon))), (module.weight, None)

    def compute(self, module: Any, x: Tensor) -> Tensor | None:
        norm = self.of(module)
        return normed(x, norm) if is_plain(x) and takes_norm(x, norm) else None


#: The formulas of norm classes.
Formulas: TypeAlias = tuple[tuple[type[nn.Module], NormForward], ...]


def norm_of(module: nn.Module, x: Tensor, formulas: Formulas) -> NormLike | None:
    """Formula, weight and bias of a norm over the last axis of ``x``: torch's, or of a class with a known formula."""
    kind = original_of(type(module)) or type(module)
    for row_kind, formula in formulas:
        if kind is row_kind:
            return formula.of(module)
    return torchs_norm_of(module, x)


# ---- feedforwards -------------------------------------------------------------------------------------------


class FeedForwardParts(NamedTuple):
    """A feedforward's linear layers, the gate's first, its activation and its dropouts."""

    layers: list[Layer]
    activation: str
    hidden: float
    dropout: float


def feedforward_of(row: FeedForwardRow, module: nn.Module) -> FeedForwardParts | None:
    """What a module that fits ``row`` computes; None if one of its parts is not plain."""
    paths = [path for path in (row.gate, row.expand, row.contract) if path is not None]
    layers = [layer for path in paths if (layer := linear_of(at(module, path))) is not None]
    activation = activation_of(at(module, row.activation))
    hidden, dropout = dropout_of(module, row.hidden), dropout_of(module, row.dropout)
    if len(layers) < len(paths) or activation is None or hidden is None or dropout is None:
        return None
    if row.packed_gate:
        weight, bias = layers[0]
        half, odd = divmod(weight.shape[0], 2)
        if odd:
            return None
        weights = (
            viewable(weight).chunk(2)
            if isinstance(weight, Tensor)
            else [weight.rows(0, half), weight.rows(half, 2 * half)]
        )
        biases = (None, None) if bias is None else viewable(bias).chunk(2)
        layers[:1] = list(zip(weights, biases, strict=True))
    return FeedForwardParts(layers, activation, hidden, dropout)


@dataclass(frozen=True)
class FusedFeedForward(TokenwiseForward):
    """The forward of a feedforward module that fits ``row``."""

    row: FeedForwardRow

    def compute(self, module: Any, x: Tensor) -> Tensor | None:
        row = self.row
        if not is_plain(x):
            return None
        try:
            paths = [path for path in (row.gate, row.expand, row.activation, row.hidden, row.contract) if path]
            parts = feedforward_of(row, module)
            if parts is not None and looked_at(*(at(module, path) for path in paths)):
                refuse_hooks(class_of(module).__name__)
                parts = None
        except AttributeError:
            return None
        if parts is None:
            return None
        layers, name = parts.layers, parts.activation
        if row.contract is None:
            return project_activate(x, *layers[0], activation=name)
        gate = layers[0] if len(layers) == _GATED else None
        output = project_activate_project(x, *layers[-2], *layers[-1], gate=gate, activation=name, dropout=parts.hidden)
        if output is None or row.dropout is None:
            return output
        dropped: Tensor = at(module, row.dropout)(output)
        return dropped
