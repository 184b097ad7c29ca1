"""FeedForward: two linear layers on each token alone, or three where one is a gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from clearhead.arguments import flag, one_of, probability
from clearhead.invariance import eager_if_invariant
from clearhead.nn.checks import check_tokens, positive
from clearhead.nn.dropout import Dropout
from clearhead.nn.jagged import JaggedCall, takes_jagged
from clearhead.nn.linear import Linear, layer_of, looked_at, refuse_hooks, weight_at
from clearhead.projection import Layer, project_activate_project
from clearhead.shapes import Float
from clearhead.torch_private import submodules_of

__all__ = ["ACTIVATIONS", "FeedForward", "drop_of", "in_one_step", "name_of"]

ACTIVATIONS: Final[dict[str, Callable[[], nn.Module]]] = {"gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU}


class FeedForward(nn.Module):
    """``contract(dropout(activation(expand(x))))``, on each token alone; gated,
    ``contract(dropout(activation(gate(x)) * expand(x)))``.

    Args:
        embed_dim: width of a token.
        feedforward_dim: width in between; by default 4 times ``embed_dim``.
        activation: ``"gelu"``, ``"relu"`` or ``"silu"``.
        dropout: probability of dropping a channel in between, while training only.
        bias: whether the layers add a bias.
        gated: whether a third layer, ``gate``, opens and shuts each channel; with ``"silu"`` this is SwiGLU. At two
            thirds of the width it has as many weights as one without.

    Raises:
        ShapeError: sizes that are not positive; UnsupportedError: an unknown activation.

    Cost: ``4 * tokens * embed_dim * feedforward_dim`` operations, gated 6 times in place of 4.

    Paper: Vaswani et al. 2017, section 3.3; GELU: Hendrycks and Gimpel 2016; gates: Shazeer 2020, "GLU variants improve
    transformer", section 2.

    >>> import torch
    >>> FeedForward(4)(torch.zeros(2, 3, 4)).shape
    torch.Size([2, 3, 4])
    """

    def __init__(
        self,
        embed_dim: int,
        feedforward_dim: int | None = None,
        *,
        activation: str = "gelu",
        dropout: float = 0.0,
        bias: bool = True,
        gated: bool = False,
    ) -> None:
        super().__init__()
        name = "FeedForward"
        self.embed_dim = positive(name, "embed_dim", embed_dim)
        width = 4 * self.embed_dim if feedforward_dim is None else positive(name, "feedforward_dim", feedforward_dim)
        chosen = one_of(name, "activation", activation, ACTIVATIONS, "The usual one is 'gelu'.")
        bias = flag(name, "bias", bias)
        self.gate = Linear(self.embed_dim, width, bias=bias) if flag(name, "gated", gated) else None
        self.expand = Linear(self.embed_dim, width, bias=bias)
        self.activation = ACTIVATIONS[chosen]()
        self.dropout = Dropout(probability(name, "dropout", dropout))
        self.contract = Linear(width, self.embed_dim, bias=bias)

    @eager_if_invariant
    @takes_jagged(JaggedCall())
    def forward(self, x: Float[Tensor, "*batch len embed_dim"]) -> Float[Tensor, "*batch len embed_dim"]:
        """Each token, which may be one of a jagged tensor, through the layers."""
        check_tokens("FeedForward", "x", x, self.embed_dim, weight_at(self, "expand"))
        result = in_one_step(x, self.expand, self.activation, self.dropout, self.contract, gate=self.gate)
        if result is None:
            result = self.contract(self.dropout(self._hidden(x)))
        output: Tensor = result
        return output

    def _hidden(self, x: Tensor) -> Tensor:
        hidden: Tensor
        if self.gate is None:
            hidden = self.activation(self.expand(x))
        else:
            hidden = self.activation(self.gate(x)) * self.expand(x)
        return hidden

    def plain_layers(self) -> tuple[list[Layer], str, float] | None:
        """The layers, the gate in front where there is one, the activation's name and the probability of dropping,
        where all there is to them is that."""
        submodules = submodules_of(self)
        modules = [submodules[name] for name in ("gate", "expand", "contract") if submodules.get(name) is not None]
        activation, dropout = submodules["activation"], submodules["dropout"]
        layers = [layer for module in modules if (layer := layer_of(module)) is not None]
        drop, called = drop_of(dropout), name_of(activation)
        if len(layers) < len(modules) or called is None or drop is None:
            return None
        return layers, called, drop


#: Names of activations, by function and by module class.
_FUNCTIONS: Final[Sequence[tuple[Callable[..., Tensor], str]]] = (
    (functional.relu, "relu"),
    (torch.relu, "relu"),
    (functional.gelu, "gelu"),
    (functional.silu, "silu"),
)
_MODULES: Final[Mapping[type[nn.Module], str]] = {nn.ReLU: "relu", nn.SiLU: "silu"}


def name_of(activation: object) -> str | None:
    """The kernels' name of an activation; None if they do not have it."""
    if type(activation) is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(activation.approximate)
    if isinstance(activation, nn.Module):
        return _MODULES.get(type(activation))
    return next((name for function, name in _FUNCTIONS if function is activation), None)


def in_one_step(
    x: Float[Tensor, "*batch in"],
    expand: nn.Module,
    activation: object,
    dropout: nn.Module,
    contract: nn.Module,
    *,
    gate: nn.Module | None = None,
    name: Callable[[object], str | None] = name_of,
) -> Float[Tensor, "*batch out"] | None:
    """``contract(dropout(activation(expand(x))))`` fused, or ``FeedForward``'s formula with a gate; None where a part
    is of another class, or hooked.

    Args:
        x: ``[*batch, in]``.
        expand: the layer that expands.
        activation: a module or a function.
        dropout: a module.
        contract: the last layer.
        gate: the layer whose output is activated in place of that of ``expand``, where there is one.
        name: the kernels' name of an activation, or None.
    """
    first, second, called, drop = layer_of(expand), layer_of(contract), name(activation), drop_of(dropout)
    opened = None if gate is None else layer_of(gate)
    if first is None or second is None or called is None or drop is None or (opened is None) != (gate is None):
        return None
    if looked_at(expand, activation, dropout, contract) or (gate is not None and looked_at(gate)):
        refuse_hooks("FeedForward")
        return None
    return project_activate_project(x, *first, *second, gate=opened, activation=called, dropout=drop)


def drop_of(dropout: nn.Module) -> float | None:
    """The probability with which a module drops elements now; None if it is unknown, torch draws the
    elements, or they are a part of a larger tensor."""
    kind = type(dropout).forward
    if kind is nn.Identity.forward:
        return 0.0
    if not isinstance(dropout, nn.Dropout) or kind not in (nn.Dropout.forward, Dropout.forward):
        return None
    p = float(dropout.p) if dropout.training else 0.0
    if p > 0.0 and isinstance(dropout, Dropout) and dropout.placed is not None:
        return None
    return p if kind is Dropout.forward or p == 0.0 else None
