"""FeedForward: two linear layers on each token alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook

from clearhead.arguments import flag, one_of, probability
from clearhead.nn.checks import check_tokens, positive
from clearhead.nn.dropout import Dropout
from clearhead.nn.linear import Linear, hooked
from clearhead.projection import project_relu_project
from clearhead.shapes import Float

__all__ = ["ACTIVATIONS", "FeedForward", "rectified"]

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
        found = rectified(x, self.expand, self.activation, self.dropout, self.contract, linear=Linear)
        if found is None:
            found = self.contract(self.dropout(self.activation(self.expand(x))))
        output: Tensor = found
        return output


def rectified(
    x: Tensor,
    expand: nn.Linear,
    activation: object,
    dropout: nn.Module,
    contract: nn.Linear,
    *,
    linear: type[nn.Linear],
) -> Tensor | None:
    """``contract(relu(expand(x)))`` in one go; None where something else stands there, drops, or looks on.

    ``linear`` is the class that both layers must be, ``activation`` a module or a function.
    """
    relu = activation is functional.relu or activation is torch.relu or type(activation) is nn.ReLU
    known = type(dropout).forward in (nn.Dropout.forward, Dropout.forward, nn.Identity.forward)
    drops = dropout.training and getattr(dropout, "p", 0.0) > 0.0
    if not relu or not known or drops or type(expand) is not linear or type(contract) is not linear:
        return None
    modules = [part for part in (expand, activation, dropout, contract) if isinstance(part, nn.Module)]
    if torch.compiler.is_compiling() or _has_any_global_hook() or any(map(hooked, modules)):
        return None
    return project_relu_project(x, expand.weight, expand.bias, contract.weight, contract.bias)
