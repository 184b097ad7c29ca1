"""FeedForward: two linear layers on each token alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook

from clearhead.arguments import flag, one_of, probability
from clearhead.nn.checks import check_tokens, positive
from clearhead.nn.dropout import Dropout
from clearhead.nn.linear import Linear, hooked
from clearhead.projection import project_activate_project
from clearhead.shapes import Float

__all__ = ["ACTIVATIONS", "FeedForward", "in_one_step", "name_of"]

ACTIVATIONS: Final[dict[str, Callable[[], nn.Module]]] = {"gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU}


class FeedForward(nn.Module):
    """``contract(dropout(activation(expand(x))))``, on each token alone.

    Args:
        embed_dim: width of a token.
        feedforward_dim: width in between; by default 4 times ``embed_dim``.
        activation: ``"gelu"``, ``"relu"`` or ``"silu"``.
        dropout: probability of dropping a channel in between, while training only.
        bias: whether the layers add a bias.

    Raises:
        ShapeError: sizes that are not positive; UnsupportedError: an unknown activation.

    Cost: ``4 * tokens * embed_dim * feedforward_dim`` operations.

    Paper: Vaswani et al. 2017, section 3.3; GELU: Hendrycks and Gimpel 2016.

    >>> import torch
    >>> FeedForward(4)(torch.zeros(2, 3, 4)).shape
    torch.Size([2, 3, 4])
    """

    def __init__(
        self, embed_dim: int, feedforward_dim: int | None = None, *, activation: str = "gelu", dropout: float = 0.0,
        bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        name = "FeedForward"
        self.embed_dim = positive(name, "embed_dim", embed_dim)
        width = 4 * self.embed_dim if feedforward_dim is None else positive(name, "feedforward_dim", feedforward_dim)
        chosen = one_of(name, "activation", activation, ACTIVATIONS, "The usual one is 'gelu'.")
        bias = flag(name, "bias", bias)
        self.expand = Linear(self.embed_dim, width, bias=bias)
        self.activation = ACTIVATIONS[chosen]()
        self.dropout = Dropout(probability(name, "dropout", dropout))
        self.contract = Linear(width, self.embed_dim, bias=bias)

    def forward(self, x: Float[Tensor, "*batch len embed_dim"]) -> Float[Tensor, "*batch len embed_dim"]:
        """Each token through both layers."""
        check_tokens("FeedForward", "x", x, self.embed_dim, self.expand.weight)
        found = in_one_step(x, self.expand, self.activation, self.dropout, self.contract, linear=Linear)
        if found is None:
            found = self.contract(self.dropout(self.activation(self.expand(x))))
        output: Tensor = found
        return output


#: What an activation is called that is one of these functions, or exactly such a module.
_FUNCTIONS: Final[Sequence[tuple[Callable[..., Tensor], str]]] = (
    (functional.relu, "relu"), (torch.relu, "relu"), (functional.gelu, "gelu"), (functional.silu, "silu"),
)  # fmt: skip
_MODULES: Final[Mapping[type[nn.Module], str]] = {nn.ReLU: "relu", nn.SiLU: "silu"}


def in_one_step(
    x: Float[Tensor, "*batch in"],
    expand: nn.Module,
    activation: object,
    dropout: nn.Module,
    contract: nn.Module,
    *,
    linear: type[nn.Module],
    name: str | None = None,
    weight_of: Callable[[nn.Module], Tensor] = attrgetter("weight"),
) -> Tensor | None:
    """``contract(dropout(activation(expand(x))))`` in one go; None where something else stands there, or looks on.

    Args:
        x: ``[*batch, in]``.
        expand: the first layer.
        activation: a module or a function.
        dropout: a module.
        contract: the second layer.
        linear: the class that both layers must be.
        name: what the products call the activation; looked up when left out.
        weight_of: a layer's weight ``[out, in]``.
    """
    name, drop = name or name_of(activation), _drop_of(dropout)
    if name is None or drop is None or type(expand) is not linear or type(contract) is not linear:
        return None
    modules = [part for part in (expand, activation, dropout, contract) if isinstance(part, nn.Module)]
    if torch.compiler.is_compiling() or _has_any_global_hook() or any(map(hooked, modules)):
        return None
    layers = weight_of(expand), _bias_of(expand), weight_of(contract), _bias_of(contract)
    return project_activate_project(x, *layers, activation=name, dropout=drop)


def _bias_of(layer: nn.Module) -> Tensor | None:
    bias = layer.bias
    assert bias is None or isinstance(bias, Tensor)
    return bias


def name_of(activation: object) -> str | None:
    """What the products call an activation, or None for one that they do not know."""
    if type(activation) is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(activation.approximate)
    if isinstance(activation, nn.Module):
        return _MODULES.get(type(activation))
    return next((name for function, name in _FUNCTIONS if function is activation), None)


def _drop_of(dropout: nn.Module) -> float | None:
    """The probability with which a module drops now; None where it is not known, or its numbers are another's."""
    kind = type(dropout).forward
    if kind is nn.Identity.forward or (kind in (nn.Dropout.forward, Dropout.forward) and not dropout.training):
        return 0.0
    p = getattr(dropout, "p", None)
    return float(p) if isinstance(p, float | int) and (kind is Dropout.forward or p == 0.0) else None
